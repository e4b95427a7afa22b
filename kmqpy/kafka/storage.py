"""KafkaStorage, the administrator of queues on Kafka. open_storage() opens `kafka:` URLs."""

from __future__ import annotations

import builtins
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Unpack
from weakref import WeakSet

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.closeable import Closeable
from kmqpy.core.forks import ForkGuard
from kmqpy.core.settings import build, convert, nearest, refuse_unknown
from kmqpy.errors import Closed, ConfigError, NotSupported, QueueNotFound
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Finding
from kmqpy.kafka.admin.foreign_topics import refuse_foreign_topics
from kmqpy.kafka.admin.stats import InFlightMessage, QueueStats
from kmqpy.kafka.client.client_options import ClientOptions, split_options
from kmqpy.kafka.kmq_client import CAPABILITIES, KmqClient
from kmqpy.kafka.settings import (
    KafkaConnection,
    QueueSettings,
    build_connections,
    connection_layers,
    is_topic_name,
)
from kmqpy.kafka.settings_mirror import SettingsMirror
from kmqpy.kafka.shared_connections import SharedConnections
from kmqpy.kafka.topics import TopicInfo
from kmqpy.queue import Capabilities, Codec, QueueDescription, QueueUrl, Storage
from kmqpy.telemetry.base import Telemetry
from kmqpy.zookeeper.settings import NO_ZOOKEEPER, ZooKeeperConnection

_log = logging.getLogger(__name__)

_QUEUE_FIELDS = tuple(field.name for field in dataclasses.fields(QueueSettings) if field.name != "name")
_FIXED_ON_KAFKA = {
    "requeue_to": ("back", "front"),
    "order": ("any", "fifo", "group"),
    "redelivery": ("automatic", "manual"),
    "delivery": ("at-least-once", "at-most-once"),
    "on_dead_letter": ("continue", "hold"),
    "dedup_until": ("window", "acknowledged"),
    "dedup_by": ("id", "body"),
    "fair": (False, ...),
    "fair_by": ("in_flight", "noise"),
    "max_in_flight_per_group": (None, ...),
}
"""Settings of queues on other storages: the only value of each on Kafka, and then the values that other
storages know, which Kafka refuses as NotSupported; `...`: all others. See _check_fixed()."""
_TOPIC_SETTINGS = {"partitions": int | None, "replication": int | None, "retention_ms": int | None}
"""Settings of the topics of a new queue, with their types."""
_NEW_QUEUE_SETTINGS = (*_QUEUE_FIELDS, *_FIXED_ON_KAFKA, *_TOPIC_SETTINGS, "adopt")
_MAX_NAME_LENGTH = 200
"""The most characters in the name of a new queue. Kafka allows 249, but the queue's other topics need longer
names."""
_IDLE_TIMEOUT_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaQueueDescription(QueueDescription):
    """Describes a queue on Kafka.

    Attributes:
        topics: The existing topics among these four, with the Kafka settings that matter: queue topic,
            markers topic, dead-letter topic, markers topic of the dead letters.
        trackers: By partition: the id of the tracker that has the partition.
        counts: The counts of the queue and of each partition.
    """

    topics: tuple[TopicInfo, ...]
    trackers: Mapping[int, str]
    counts: QueueStats


class KafkaStorage(Closeable):
    """Makes, changes, opens, checks and deletes the queues of one Kafka and ZooKeeper root, see Storage.

    The queues share a producer and an administrator. Each queue is a consumer group, so each has a client of
    its own. A queue opens its client when the first message is received or finished. The storage closes a
    client that was not used for `idle_timeout_ms` and has no message in flight; the next use opens another.

    Args:
        connection: Where Kafka is.
        zookeeper: Without ZooKeeper, one can only open and describe existing queues, with the settings in the
            topic kmq.queues or the defaults.
        idle_timeout_ms: 0: a client is closed only with its queue.
        options: Arguments of KmqClient, for the clients of all queues.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection = NO_ZOOKEEPER,
        *,
        idle_timeout_ms: int = _IDLE_TIMEOUT_MS,
        **options: Unpack[ClientOptions],
    ) -> None:
        _, limits = split_options(options)
        if isinstance(idle_timeout_ms, bool) or not isinstance(idle_timeout_ms, int) or idle_timeout_ms < 0:
            raise ConfigError(f"idle_timeout_ms: {idle_timeout_ms!r} must be a whole number, at least 0")
        self._connection = connection
        self._idle_s = idle_timeout_ms / 1000
        self._options = options
        self._guard = ForkGuard("the storage")
        self._shared = SharedConnections(
            connection, zookeeper, clock=options.get("clock", SYSTEM_CLOCK), limits=limits
        )
        self._lock = threading.RLock()
        self._queues: WeakSet[KmqClient] = WeakSet()
        self._closed = threading.Event()
        self._is_of_one_queue = False
        self._idle_closer: threading.Thread | None = None

    @property
    def capabilities(self) -> Capabilities:
        """See Storage.capabilities."""
        return CAPABILITIES

    def create(self, name: str, **settings: Any) -> None:
        """See Storage.create. Makes the queue's topics and registers the queue.

        The queue takes over existing topics that never had a record and that no queue of
        another root uses, or any with `adopt=True`.

        Args:
            name: The queue's name.
            settings: Fields of QueueSettings, and `partitions`, `replication` and `retention_ms` of the
                topics. Settings of other storages (`order` and the like) are accepted with the value that
                they have on Kafka.

        Raises:
            ConfigError: For an invalid setting, and for topics that it may not take over.
        """
        self._check_open()
        _check_name(name)
        if len(name) > _MAX_NAME_LENGTH:
            raise ConfigError(f"queue: {name!r} is longer than {_MAX_NAME_LENGTH} characters")
        refuse_unknown(settings, _NEW_QUEUE_SETTINGS)
        for key in settings.keys() & _FIXED_ON_KAFKA.keys():
            _check_fixed(key, settings[key])
        made = build(QueueSettings, {"name": name}, _select(settings, _QUEUE_FIELDS))
        topics = {
            key: convert(key, settings[key], hint) for key, hint in _TOPIC_SETTINGS.items() if key in settings
        }
        retention_ms = topics.pop("retention_ms", None)
        adopt = convert("adopt", settings.get("adopt", False), bool)
        with self._use_admin() as admin:
            if admin.is_registered(name):
                raise ConfigError(
                    f"queue: there is a queue {name!r} already; open it, or change its settings with: "
                    f"kmq queue alter {name}"
                )
            if not adopt:
                refuse_foreign_topics(made, self._shared.topics(), SettingsMirror(self._connection))
            admin.create_queue(
                made, retention=None if retention_ms is None else retention_ms / 1000, **topics
            )

    def alter(
        self, name: str, *, partitions: int | None = None, retention_ms: int | None = None, **changes: Any
    ) -> None:
        """See Storage.alter. Changes `markers`, `late_acks` and lanes, too, partitions, and the retention.

        Trackers apply the settings at once, clients when they are made. Keys move to other partitions when
        some are added. Takes a quarter of a minute or more for lanes that are to go: until they are empty.

        Args:
            name: The queue's name.
            partitions: How many from now on; not fewer.
            retention_ms: Of the queue's topics, in ms.
            changes: New values of fields of QueueSettings.

        Raises:
            ConfigError: For fewer partitions, and for a retention that is not longer than the longest lease
                or delay.
            TopicError: The queue is being deleted.
            Unavailable: Lanes that are to go don't get empty within a minute; another call then goes on.
        """
        _check_name(name)
        partitions, retention_ms = (
            convert(key, value, _TOPIC_SETTINGS[key])
            for key, value in (("partitions", partitions), ("retention_ms", retention_ms))
        )
        retention = None if retention_ms is None else retention_ms / 1000
        with self._use_admin(name) as admin:
            admin.alter_queue(name, partitions=partitions, retention=retention, **changes)
            if {"retry_lane", "priorities"} & changes.keys():
                admin.remove_lanes(name)

    def list(self) -> builtins.list[str]:
        """See Storage.list: the registered queues, without those that are being deleted."""
        with self._use_admin() as admin:
            return sorted(one.settings.name for one in admin.list_queues() if not one.deleting)

    def describe(self, name: str) -> KafkaQueueDescription:
        """See Storage.describe; the generation is the id of the queue's topic.

        Args:
            name: The queue's name.
        """
        _check_name(name)
        with self._use_admin(name) as admin:
            found = admin.describe_queue(name)
            counted = admin.stats(name)
        delayed = counted.delayed + counted.released
        return KafkaQueueDescription(
            name=name,
            generation=next((one.topic_id for one in found.topics if one.name == name), ""),
            settings={
                **dataclasses.asdict(found.settings),
                **{key: value for key, (value, *_) in _FIXED_ON_KAFKA.items() if value},
                "partitions": found.partitions,
            },
            ready=counted.depth - counted.delayed,
            delayed=delayed,
            in_flight=counted.in_flight - counted.released,
            dead=counted.dead_letters,
            topics=found.topics,
            trackers=found.owners,
            counts=counted,
        )

    def stats(self, name: str) -> QueueStats:
        """Return counts of the queue and of each partition, and which tracker has the partition.

        Args:
            name: The queue's name.
        """
        with self._use_admin(name) as admin:
            return admin.stats(name)

    def in_flight(self, name: str, limit: int | None = 1_000) -> builtins.list[InFlightMessage]:
        """Return messages in flight, delayed ones included.

        In flight is a message that was taken and is not finished. Messages that were taken first come first.

        Args:
            name: The queue's name.
            limit: The most to return; None: all.
        """
        with self._use_admin(name) as admin:
            return admin.in_flight(name, limit)

    def doctor(self, name: str | None = None) -> builtins.list[Finding]:
        """Return findings about one queue, or about all.

        For each queue, errors come first; a queue with which nothing is wrong has one finding, `ok`.

        Args:
            name: The queue's name; None: every queue, and what belongs to none.
        """
        with self._use_admin() as admin:
            return admin.doctor(name)

    def delete(self, name: str) -> None:
        """See Storage.delete. Waits until trackers have let go of the queue.

        Args:
            name: The queue's name.

        Raises:
            Unavailable: They have not let go in time.
        """
        _check_name(name)
        with self._use_admin(name) as admin:
            for queue in self._opened_queues():
                if queue.name == name:
                    queue.leave_group()
            admin.delete_queue(name)

    def open(self, name: str, *, codec: Codec | None = None) -> KmqClient:
        """See Storage.open."""
        _check_name(name)
        with self._use_admin(name) as admin:
            return self._open_queue(admin.settings(name), codec=codec)

    def open_url(self, url: QueueUrl) -> KmqClient:
        """See Storage.open_url. With `create=true`, makes a missing queue with the settings in the url.

        Closing the queue closes the storage, and so does collecting it, after a while.
        """
        self._is_of_one_queue = True
        given = _select(url.settings, _QUEUE_FIELDS)
        settings = build(QueueSettings, {"name": url.queue}, given)
        for key in url.settings.keys() & _FIXED_ON_KAFKA.keys():
            _check_fixed(key, url.settings[key])
        try:
            return self._open_queue(settings, on_close=self.close)
        except QueueNotFound:
            if not convert("create", url.settings.get("create", False), bool):
                raise
        self.create(url.queue, **_select(url.settings, _NEW_QUEUE_SETTINGS))
        return self._open_queue(settings, on_close=self.close)

    def close(self) -> None:
        """See Storage.close. Does nothing in a child process; see KmqClient.close() for signal handlers."""
        if self._guard.inherited:
            return
        with self._lock:
            if self._closed.is_set():
                return
            queues = self._opened_queues()
            for queue in queues:
                queue.refuse_in_call()
            self._closed.set()
        with ExitStack() as all_of_them:  # closes the others, too, if one of them raises
            all_of_them.callback(self._shared.close)
            if self._idle_closer is not None and self._idle_closer is not threading.current_thread():
                all_of_them.callback(self._idle_closer.join)
            for queue in queues:
                all_of_them.callback(queue.close)

    def _open_queue(
        self,
        queue: str | QueueSettings,
        *,
        codec: Codec | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> KmqClient:
        self._check_open()
        opened = KmqClient(
            queue, self._connection, shared=self._shared, codec=codec, on_close=on_close, **self._options
        )
        with self._lock:
            self._check_open()
            self._queues.add(opened)
            if self._idle_closer is None and self._idle_s:
                self._idle_closer = threading.Thread(
                    target=self._close_idle_clients, name="kmq-storage", daemon=True
                )
                self._idle_closer.start()
        return opened

    def _close_idle_clients(self) -> None:
        """Close the clients of idle queues until the storage is closed; runs in a thread."""
        while not self._closed.wait(self._idle_s / 4):
            self._close_idle_ones()  # its variables end with it: a thread that waits must keep no queue alive

    def _close_idle_ones(self) -> None:
        queues = self._opened_queues()
        if self._is_of_one_queue and not queues:  # it was collected
            self.close()
        for queue in queues:
            try:
                queue.leave_group_if_idle(self._idle_s)
            except Exception:  # the thread must go on, for the other queues
                _log.exception("closing what is idle failed", extra={"queue": queue.name})

    def _opened_queues(self) -> builtins.list[KmqClient]:
        with self._lock:
            return [*self._queues]

    @contextmanager
    def _use_admin(self, name: str | None = None) -> Iterator[Admin]:
        """Yield the Admin; where there is no queue `name`, the error suggests the most similar one."""
        self._check_open()
        with self._shared.admin() as admin:
            self._check_open()
            try:
                yield admin
            except QueueNotFound:
                if name is None:
                    raise
                names = admin.queue_names() if self._shared.zookeeper.hosts else []
                raise QueueNotFound(f"queue: there is no queue {name!r}{nearest(name, names)}") from None

    def _check_open(self) -> None:
        self._guard.raise_if_inherited()
        if self._closed.is_set():
            raise Closed("the storage is closed")


def open_storage(url: QueueUrl, telemetry: Telemetry | None = None) -> Storage:
    """Open the storage of a kafka: url.

    The url may set `zookeeper`, `root`, `timeout_ms` (of sends, too), `idle_timeout_ms`, the options
    `max_in_flight`, `holder`, and `instance_id` of KmqClient, and settings of librdkafka (names with a dot).
    The url of a queue may also set fields of QueueSettings, and `create=true` with the settings of
    KafkaStorage.create.
    Connection settings that the url leaves open come from the config file and the environment, as in
    KafkaConnection.from_environment(), but ZooKeeper has no default address.

    Args:
        url: What parse_url() returned.
        telemetry: Told of every event of the queues; default: none.
    """
    own = url.settings
    connection, zookeeper = build_connections(
        {"zookeeper": NO_ZOOKEEPER.hosts}, *connection_layers(), connection_in(url)
    )
    options = ClientOptions(telemetry=telemetry)
    if "timeout_ms" in own:
        options["delivery_timeout"] = connection.timeout_s
    if "max_in_flight" in own:
        options["max_in_flight"] = convert("max_in_flight", own["max_in_flight"], int)
    if "holder" in own:
        options["holder"] = own["holder"]
    if "instance_id" in own:
        options["instance_id"] = own["instance_id"]
    idle_ms = convert("idle_timeout_ms", own.get("idle_timeout_ms", _IDLE_TIMEOUT_MS), int)
    return KafkaStorage(connection, zookeeper, idle_timeout_ms=idle_ms, **options)


def connection_in(url: QueueUrl) -> dict[str, Any]:
    """The settings of connections in a kafka: url, for build_connections(); raises ConfigError."""
    if url.user is not None:
        raise ConfigError("queue url: a kafka: url has no user; use sasl.username and sasl.password")
    if not url.address or "@" in url.address:
        raise ConfigError("queue url: write it like kafka://host:9092,host2:9092?queue=name")
    if url.path not in ("", "/"):
        raise ConfigError("queue url: a kafka: url has no path")
    kafka = {name: value for name, value in url.settings.items() if "." in name}
    of_queues = (*_NEW_QUEUE_SETTINGS, "create") if url.queue else ()
    url.refuse_unknown([*_CONNECTION_SETTINGS, *_CLIENT_SETTINGS, "idle_timeout_ms", *of_queues, *kafka])
    return {"bootstrap": url.address, "kafka": kafka, **_select(url.settings, _CONNECTION_SETTINGS)}


_CONNECTION_SETTINGS = ("zookeeper", "root", "timeout_ms")
_CLIENT_SETTINGS = ("max_in_flight", "holder", "instance_id")


def _select(settings: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: settings[name] for name in names if name in settings}


def _check_fixed(key: str, value: Any) -> None:
    here, *others = _FIXED_ON_KAFKA[key]
    if others == [...]:
        if value not in (here, (), []):
            raise NotSupported(f"{key}: Kafka can't do {value!r}; leave it out")
        return
    value = convert(key, value, str)
    if value in others:
        raise NotSupported(f"{key}: Kafka can't do {value!r}; there it is always {here!r}")
    if value != here:
        raise ConfigError(f"{key}: {value!r} is none of {', '.join(map(repr, (here, *others)))}")


def _check_name(name: object) -> None:
    if not is_topic_name(name):
        raise ConfigError(f"queue: invalid name {name!r}: on Kafka use 1 to 249 of a-z A-Z 0-9 . _ -")
