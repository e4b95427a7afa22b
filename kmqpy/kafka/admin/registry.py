"""`Registry` reads and writes the registry: the znodes of queues and trackers in ZooKeeper.

    <root>/queues/<queue>                        QueueSettings as JSON; "deleting": true while it is removed
    <root>/queues/<lane>                         of a further lane: "lane_of" names the queue; all else is as
                                                 for a queue, and register() writes it together with that
    <root>/queues/<queue>/partitions/<p>         only register() creates it
    <root>/queues/<queue>/partitions/<p>/leader  ephemeral; the tracker's id
    <root>/queues/<queue>/partitions/<p>/offset  StoredOffset as JSON, written by versioned writes
    <root>/trackers/<id>                         ephemeral; TrackerInfo as JSON
    <root>/jobs/<id>                             ephemeral; a driver whose job runs trackers on Spark

Every call waits for a bounded time and raises Unavailable when ZooKeeper does not answer.

Znodes may be damaged, made by hand or restored from a backup (rule R25 of docs/rules.md). So the registry
checks the data of znodes. A leader or tracker znode that is not ephemeral belongs to no live tracker: the
registry ignores it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from kazoo.client import KazooClient

from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.kafka.admin.registry_entries import (
    RegisteredQueue,
    StoredOffset,
    TrackerInfo,
    decode_offset,
    decode_queue,
    decode_tracker,
    encode_queue,
    partitions_of,
    readable_part,
    shown,
)
from kmqpy.kafka.admin.registry_removal import mark_deleting, remove_queue
from kmqpy.kafka.admin.registry_requests import MAX_TRIES, RegistryRequests
from kmqpy.kafka.admin.unusable_znodes import UnusableZnodes
from kmqpy.kafka.settings import QueueSettings, is_topic_name, queue_of
from kmqpy.zookeeper.session import session_of, unavailable

log = logging.getLogger(__name__)


class Registry(UnusableZnodes):
    """Reads and writes the registry under `root`, through a started client.

    `timeout` (seconds) bounds the wait for each answer.
    """

    def __init__(self, zk: KazooClient, root: str = "/kmq", *, timeout: float = 10.0) -> None:
        self._requests = RegistryRequests(zk, root, timeout)

    def register(
        self, settings: QueueSettings, partitions: int, *, before: QueueSettings | None = None
    ) -> bool:
        """Add a queue with its partitions, or replace its settings and add partitions, in one transaction.

        Also adds its lanes, each with as many partitions; lanes that are there and not in `settings` stay.

        Returns False, and changes nothing, if `before` is given and the settings are not these any more.

        Raises ConfigError for fewer partitions than are registered, TopicError while the queue is being
        removed.
        """
        if partitions < 1:
            raise ConfigError(f"partitions: {partitions!r} must be at least 1")
        name = settings.name
        with unavailable(self._requests.zk):
            self._requests.wait(self._requests.zk.ensure_path_async(self._requests.paths.queues))
            for _ in range(MAX_TRIES):
                data, children = self._requests.raw(name)
                if before is not None and (data is None or decode_queue(name, data[0])[0] != before):
                    return False
                there = frozenset(children or ())
                transaction = self._requests.zk.transaction()
                if data is None:
                    transaction.create(self._requests.paths.queue(name), encode_queue(settings))
                else:
                    _check_change(name, data[0], partitions_of(there)[0], partitions)
                    version = data[1].version
                    transaction.set_data(self._requests.paths.queue(name), encode_queue(settings), version)
                if children is None:
                    transaction.create(self._requests.paths.partitions(name))
                for partition in range(partitions):
                    if str(partition) not in there:
                        transaction.create(self._requests.paths.partition(name, partition))
                for lane in settings.lanes()[:-1]:
                    self._add_lane(transaction, lane, partitions)
                if self._requests.commit(transaction):
                    log.info("queue registered", extra={"queue": name, "partitions": partitions})
                    return True
        raise Unavailable(f"queue {name!r} is changed by others all the time; try again")

    def _add_lane(self, transaction: Any, lane: QueueSettings, partitions: int) -> None:
        """Add to the transaction what a lane lacks; raises ConfigError if a queue has its name."""
        data, children = self._requests.raw(lane.name)
        if data is None:
            transaction.create(self._requests.paths.queue(lane.name), encode_queue(lane))
        else:
            _check_is_lane(lane, data[0])
            transaction.set_data(self._requests.paths.queue(lane.name), encode_queue(lane), data[1].version)
        if children is None:
            transaction.create(self._requests.paths.partitions(lane.name))
        for partition in range(partitions):
            if str(partition) not in (children or ()):
                transaction.create(self._requests.paths.partition(lane.name, partition))

    def get(self, name: str) -> RegisteredQueue:
        """Return the entry of a queue.

        Raises QueueNotFound if there is none, ConfigError if its settings can't be read.
        """
        with unavailable(self._requests.zk):
            data, children = self._requests.raw(name)
        if data is None:
            raise QueueNotFound(f"queue {name!r} is not registered")
        return _decoded(name, data, children)

    def queues(self) -> list[RegisteredQueue]:
        """Return the queues, without lanes, in the order of their names; logs and skips unreadable ones."""
        found = []
        names = self.names()
        with unavailable(self._requests.zk):
            entries = self._requests.all_raw(names)
        for name, (data, children) in zip(names, entries, strict=True):
            if data is None:
                continue  # removed meanwhile
            try:
                one = _decoded(name, data, children)
                if one.settings.lane_of is None:
                    found.append(one)
            except ConfigError as error:
                log.error("queue settings can't be read: %s", error, extra={"queue": name})
        return found

    def lanes(self, name: str) -> list[QueueSettings]:
        """Return the settings of the further lanes of queue `name`, also of those that its settings lack."""
        data = self._requests.data(
            [one for one in self.names() if is_topic_name(one) and queue_of(one) == name != one],
            self._requests.paths.queue,
        )
        found = []
        for one, content, _ in data:
            with suppress(ConfigError):
                settings, _ = decode_queue(one, content)
                found += [settings] if settings.lane_of == name else []
        return found

    def every_queue(self) -> tuple[list[QueueSettings], list[str]]:
        """Return the settings of every queue, and the names of queues whose settings can't be read entirely.

        Lanes are left out: the settings of their queues tell of them. Where that is so, each unreadable
        setting has its default. Reads all queues at once.
        """
        found, damaged = [], []
        for name, data, _ in self._requests.data(
            filter(is_topic_name, self.names()), self._requests.paths.queue
        ):
            try:
                found.append(decode_queue(name, data)[0])
            except ConfigError:
                found.append(readable_part(name, data))
                damaged.append(name)
        return [one for one in found if one.lane_of is None], damaged

    def has_root(self) -> bool:
        """True if the root znode exists."""
        with unavailable(self._requests.zk):
            return self._requests.wait(self._requests.zk.exists_async(self._requests.paths.root)) is not None

    def names(self) -> list[str]:
        """Return the names of all znodes of queues and lanes, readable or not, sorted."""
        return self._requests.children(self._requests.paths.queues)

    def queue_names(self) -> list[str]:
        """Return the names of queues only, without lanes; see names()."""
        return [one for one in self.names() if is_topic_name(one) and queue_of(one) == one]

    def trackers(self) -> list[TrackerInfo]:
        """Return the running trackers in the order of their ids; logs and leaves out unreadable ones."""
        ids = self._requests.children(self._requests.paths.trackers)
        found = []
        for tracker_id, data, stat in self._requests.data(ids, self._requests.paths.tracker):
            if session_of(stat) is None:
                continue
            try:
                found.append(decode_tracker(tracker_id, data))
            except ConfigError as error:
                log.error("tracker can't be read: %s", error, extra={"tracker": tracker_id})
        return found

    def owners(self, name: str) -> dict[int, str]:
        """Return the id of the tracker that has the partition, by partition; raises QueueNotFound."""
        numbers = range(self.get(name).partitions)
        leaders = self._requests.data(numbers, lambda partition: self._requests.paths.leader(name, partition))
        return {partition: shown(data) for partition, data, stat in leaders if session_of(stat) is not None}

    def offsets(self, name: str) -> dict[int, StoredOffset]:
        """Return the stored offset by partition, for partitions with a readable one; raises QueueNotFound."""
        numbers = range(self.get(name).partitions)
        stored = self._requests.data(numbers, lambda partition: self._requests.paths.offset(name, partition))
        decoded = (
            (partition, decode_offset(self._requests.paths.offset(name, partition), data))
            for partition, data, _ in stored
        )
        return {partition: offset for partition, offset in decoded if offset is not None}

    def mark_deleting(self, name: str) -> None:
        """Mark a queue as deleting: nobody alters it any more; raises QueueNotFound."""
        mark_deleting(self._requests, name)

    def remove(
        self, name: str, timeout: float = 30.0, *, on_released: Callable[[], None] = lambda: None
    ) -> None:
        remove_queue(self._requests, name, timeout, on_released)


def _decoded(name: str, data: tuple[bytes, Any], children: Iterable[str] | None) -> RegisteredQueue:
    """The entry of a queue, of what RegistryRequests.raw() returns; raises ConfigError."""
    settings, deleting = decode_queue(name, data[0])
    return RegisteredQueue(settings, partitions_of(children or ())[0], deleting)


def _check_is_lane(lane: QueueSettings, data: bytes) -> None:
    """Raise ConfigError if this is the data of a queue that has the name of the lane.

    Raises TopicError while the lane is being removed: whoever does that may delete its topics at any moment.
    """
    try:
        there, deleting = decode_queue(lane.name, data)
    except ConfigError:
        return  # unreadable settings are replaced by good ones
    if there.lane_of != lane.lane_of:
        raise ConfigError(
            f"queue {lane.lane_of!r}: its lane would have the name of queue {lane.name!r}; delete that first"
        )
    if deleting:
        raise TopicError(f"lane {lane.name!r} is being removed; let that finish, then add it again")


def _check_change(name: str, data: bytes, existing: int, wanted: int) -> None:
    """Raise ConfigError for fewer partitions than there are, TopicError while the queue is being removed."""
    if wanted < existing:
        raise ConfigError(f"partitions: queue {name!r} has {existing} and can't shrink to {wanted}")
    try:
        _settings, deleting = decode_queue(name, data)
    except ConfigError:
        return  # unreadable settings are replaced by good ones
    if deleting:
        raise TopicError(f"queue {name!r} is being removed; finish that before it is recreated")
