"""The queue registry in ZooKeeper: which queues there are, who tracks them, and how far.

    <root>/queues/<queue>                        QueueSettings as JSON; "deleting": true while removed
    <root>/queues/<queue>/partitions/<p>         made by register() only, never by trackers
    <root>/queues/<queue>/partitions/<p>/leader  ephemeral; the tracker's id
    <root>/queues/<queue>/partitions/<p>/offset  StoredOffset as JSON; versioned writes
    <root>/trackers/<id>                         ephemeral; TrackerInfo as JSON

Every call waits for a bounded time and raises Unavailable when ZooKeeper is away.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError

from kmqpy import snapshot
from kmqpy.clock import SYSTEM_CLOCK, Clock
from kmqpy.config import QueueSettings, build
from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.inflight import Row
from kmqpy.zookeeper import connect, failure, gather, unavailable

__all__ = [
    "Paths",
    "RegisteredQueue",
    "Registry",
    "StoredOffset",
    "TrackerInfo",
    "connect",
]

K = TypeVar("K")
T = TypeVar("T")

log = logging.getLogger(__name__)

ATTEMPTS = 10  # of a compare-and-set that others keep disturbing
POLL_S = 0.05


@dataclass(frozen=True)
class RegisteredQueue:
    """A queue as it stands in the registry."""

    settings: QueueSettings
    partitions: int
    deleting: bool = False


@dataclass(frozen=True)
class TrackerInfo:
    """A living tracker: `queues` None means all of them; `kafka_ok` whether it reaches Kafka."""

    id: str
    host: str
    started_ms: int
    queues: frozenset[str] | None
    kafka_ok: bool

    def to_json(self) -> bytes:
        """The data of the tracker's znode."""
        queues = None if self.queues is None else sorted(self.queues)
        return _dumps(
            {
                "host": self.host,
                "started_ms": self.started_ms,
                "queues": queues,
                "kafka_ok": self.kafka_ok,
            }
        )


@dataclass(frozen=True)
class StoredOffset:
    """Where the next owner of a partition starts to read its markers.

    offset          markers offset of the oldest message in flight (the safe offset)
    topic_id        identity of the markers topic that the offset belongs to
    now_ms          the partition's now at that offset, ms since 1970
    missed_markers  markers below the offset were never read, so takes may be among them (rule R2)
    in_flight       a snapshot: messages in flight that were taken before the offset; without one, the
                    offset stands at or before the oldest take
    """

    offset: int
    topic_id: str
    now_ms: int
    missed_markers: bool = False
    in_flight: tuple[Row, ...] = ()

    def to_json(self) -> bytes:
        """The data of the offset znode."""
        values = {
            "offset": self.offset,
            "topic_id": self.topic_id,
            "now_ms": self.now_ms,
            "missed_markers": self.missed_markers,
        }
        if self.in_flight:
            values["in_flight"] = snapshot.pack(self.in_flight)
        return _dumps(values)


class Paths:
    """The znodes under `root`."""

    def __init__(self, root: str) -> None:
        self.queues = f"{root}/queues"
        self.trackers = f"{root}/trackers"

    def queue(self, name: str) -> str:
        """Settings."""
        return f"{self.queues}/{name}"

    def partitions(self, name: str) -> str:
        """The parent of all partitions."""
        return f"{self.queues}/{name}/partitions"

    def partition(self, name: str, partition: int) -> str:
        """The parent of leader and offset."""
        return f"{self.queues}/{name}/partitions/{partition}"

    def leader(self, name: str, partition: int) -> str:
        """Who tracks the partition."""
        return f"{self.queues}/{name}/partitions/{partition}/leader"

    def offset(self, name: str, partition: int) -> str:
        """The safe markers offset."""
        return f"{self.queues}/{name}/partitions/{partition}/offset"

    def tracker(self, tracker_id: str) -> str:
        """A member."""
        return f"{self.trackers}/{tracker_id}"


def encode_queue(settings: QueueSettings, *, deleting: bool = False) -> bytes:
    """The data of a queue's znode."""
    if not deleting:
        return settings.to_json()
    return _dumps({**asdict(settings), "deleting": True})


def decode_queue(name: str, data: bytes) -> tuple[QueueSettings, bool]:
    """Settings and deletion mark of queue `name`; raises ConfigError."""
    values = _object(data, f"queue {name!r}")
    deleting = values.pop("deleting", False) is True
    settings = build(QueueSettings, values)
    if settings.name != name:
        raise ConfigError(f"queue {name!r}: its settings are those of {settings.name!r}")
    return settings, deleting


def decode_tracker(tracker_id: str, data: bytes) -> TrackerInfo:
    """The tracker of a member znode; unknown keys are a newer version's. Raises ConfigError."""
    what = f"tracker {tracker_id!r}"
    values = _object(data, what)
    queues = values.get("queues")
    if queues is not None and not (
        isinstance(queues, list) and all(isinstance(queue, str) for queue in queues)
    ):
        raise ConfigError(f"{what}: queues: {queues!r} is not a list of names")
    return TrackerInfo(
        id=tracker_id,
        host=_typed(values, "host", str, what),
        started_ms=_typed(values, "started_ms", int, what),
        queues=None if queues is None else frozenset(queues),
        kafka_ok=_typed(values, "kafka_ok", bool, what),
    )


def decode_offset(name: str, partition: int, data: bytes) -> StoredOffset | None:
    """The stored offset of a partition; None, with a warning, when it can't be read."""
    what = f"offset of {name!r}/{partition}"
    try:
        values = _object(data, what)
        return StoredOffset(
            offset=_typed(values, "offset", int, what),
            topic_id=_typed(values, "topic_id", str, what),
            now_ms=_typed(values, "now_ms", int, what),
            missed_markers=values.get("missed_markers") is True,
            in_flight=tuple(snapshot.unpack(_typed({"in_flight": "", **values}, "in_flight", str, what))),
        )
    except (ConfigError, ValueError) as error:
        log.warning(
            "stored offset can't be read, treated as absent: %s",
            error,
            extra={"queue": name, "partition": partition},
        )
        return None


def partition_numbers(children: Iterable[str]) -> int:
    """How many partitions the children of a `partitions` znode make up."""
    return sum(child.isdecimal() for child in children)


class Registry:
    """The registry under `root`, over a started client; `timeout` s bounds each answer."""

    def __init__(
        self,
        zk: KazooClient,
        root: str = "/kmq",
        *,
        timeout: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._zk = zk
        self._paths = Paths(root)
        self._timeout = timeout
        self._clock = clock

    def register(self, settings: QueueSettings, partitions: int) -> None:
        """Add a queue, or replace its settings and let it grow; all of it or nothing.

        Raises ConfigError when it would shrink, TopicError while it is being removed.
        """
        if partitions < 1:
            raise ConfigError(f"partitions: {partitions!r} must be at least 1")
        name = settings.name
        with unavailable(self._zk):
            self._wait(self._zk.ensure_path_async(self._paths.queues))
            for _ in range(ATTEMPTS):
                data, children = self._raw(name)
                existing = partition_numbers(children or ())
                transaction = self._zk.transaction()
                if data is None:
                    transaction.create(self._paths.queue(name), encode_queue(settings))
                    transaction.create(self._paths.partitions(name))
                else:
                    self._check_change(name, data[0], existing, partitions)
                    version = data[1].version
                    transaction.set_data(self._paths.queue(name), encode_queue(settings), version)
                for partition in range(existing, partitions):
                    transaction.create(self._paths.partition(name, partition))
                if self._commit(transaction):
                    log.info("queue registered", extra={"queue": name, "partitions": partitions})
                    return
        raise Unavailable(f"queue {name!r} is changed by others all the time; try again")

    def get(self, name: str) -> RegisteredQueue:
        """Raise QueueNotFound when there is none, ConfigError when its settings can't be read."""
        with unavailable(self._zk):
            data, children = self._raw(name)
        if data is None or children is None:
            raise QueueNotFound(f"queue {name!r} is not registered")
        settings, deleting = decode_queue(name, data[0])
        return RegisteredQueue(settings, partition_numbers(children), deleting)

    def queues(self) -> list[RegisteredQueue]:
        """Every queue, by name; one whose settings can't be read is logged and left out."""
        found = []
        for name in self._children(self._paths.queues):
            try:
                found.append(self.get(name))
            except QueueNotFound:
                continue  # removed meanwhile
            except ConfigError as error:
                log.error("queue settings can't be read: %s", error, extra={"queue": name})
        return found

    def trackers(self) -> list[TrackerInfo]:
        """Every living tracker, by id."""
        ids = self._children(self._paths.trackers)
        found = []
        for tracker_id, data in self._data(ids, self._paths.tracker):
            try:
                found.append(decode_tracker(tracker_id, data))
            except ConfigError as error:
                log.error("tracker can't be read: %s", error, extra={"tracker": tracker_id})
        return found

    def owners(self, name: str) -> dict[int, str]:
        """The tracker's id of each partition that has a leader; raises QueueNotFound."""
        numbers = range(self.get(name).partitions)
        leaders = self._data(numbers, lambda partition: self._paths.leader(name, partition))
        return {partition: data.decode(errors="replace") for partition, data in leaders}

    def offsets(self, name: str) -> dict[int, StoredOffset]:
        """The safe markers offset of each partition that has one; raises QueueNotFound."""
        numbers = range(self.get(name).partitions)
        stored = self._data(numbers, lambda partition: self._paths.offset(name, partition))
        decoded = ((partition, decode_offset(name, partition, data)) for partition, data in stored)
        return {partition: offset for partition, offset in decoded if offset is not None}

    def remove(
        self, name: str, timeout: float = 30.0, *, released: Callable[[], None] = lambda: None
    ) -> None:
        """Mark the queue as deleting, wait until its trackers let go, then remove it.

        `released` is called in between, when no tracker has the queue and none can take it any more.

        Raises QueueNotFound, or after `timeout` s Unavailable, saying who holds which partition, or what
        `released` raises; the mark stays then, and a second call goes on.
        """
        deadline = self._clock.monotonic() + timeout
        self._mark_deleting(name)
        while holders := self._delete(name, released):
            if self._clock.monotonic() >= deadline:
                raise Unavailable(
                    f"queue {name!r} is marked as deleting, but after {timeout:g} s still held: "
                    f"{', '.join(holders)}; run the removal again once they let go"
                )
            self._clock.sleep(POLL_S)
        log.info("queue removed", extra={"queue": name})

    def _mark_deleting(self, name: str) -> None:
        with unavailable(self._zk):
            for _ in range(ATTEMPTS):
                data, _children = self._raw(name)
                if data is None:
                    raise QueueNotFound(f"queue {name!r} is not registered")
                try:
                    settings, deleting = decode_queue(name, data[0])
                except ConfigError:
                    settings, deleting = QueueSettings(name=name), False
                if deleting:
                    return
                transaction = self._zk.transaction()
                marked = encode_queue(settings, deleting=True)
                transaction.set_data(self._paths.queue(name), marked, data[1].version)
                if self._commit(transaction):
                    return
        raise Unavailable(f"queue {name!r} is changed by others all the time; try again")

    def _delete(self, name: str, released: Callable[[], None]) -> list[str]:
        """Remove all znodes in one transaction; who or what prevents it, empty when done."""
        with unavailable(self._zk):
            numbers = self._wait_or_none(self._zk.get_children_async(self._paths.partitions(name))) or ()
            paths = [f"{self._paths.partitions(name)}/{number}" for number in numbers]
            below = gather([self._zk.get_children_async(path) for path in paths], self._timeout)
        held = [int(n) for n, names in zip(numbers, below, strict=True) if "leader" in (names or ())]
        if held:
            leaders = dict(self._data(held, lambda number: self._paths.leader(name, number)))
            return [
                f"partition {number} by {leaders[number].decode(errors='replace')}"
                for number in sorted(leaders)
            ] or ["by trackers that are just letting go"]
        released()
        with unavailable(self._zk):
            transaction = self._zk.transaction()
            for path, names in zip(paths, below, strict=True):
                for child in names or ():
                    transaction.delete(f"{path}/{child}")
                transaction.delete(path)
            transaction.delete(self._paths.partitions(name))
            transaction.delete(self._paths.queue(name))
            done = self._commit(transaction)
            gone = self._wait(self._zk.exists_async(self._paths.queue(name))) is None
        return [] if done or gone else ["its znodes are just being changed"]

    @staticmethod
    def _check_change(name: str, data: bytes, existing: int, wanted: int) -> None:
        if wanted < existing:
            raise ConfigError(f"partitions: queue {name!r} has {existing} and can't shrink to {wanted}")
        try:
            _settings, deleting = decode_queue(name, data)
        except ConfigError:
            return  # unreadable settings are replaced by good ones
        if deleting:
            raise TopicError(f"queue {name!r} is being removed; finish that before it is made anew")

    def _commit(self, transaction: Any) -> bool:
        """Whether it went through; False when others were faster. Other errors are raised."""
        error = failure(self._wait(transaction.commit_async()))
        if error is None:
            return True
        if isinstance(error, BadVersionError | NodeExistsError | NoNodeError | NotEmptyError):
            return False
        raise error

    def _raw(self, name: str) -> tuple[tuple[bytes, Any] | None, list[str] | None]:
        """(data, stat) of a queue and the children of its `partitions`; None where missing."""
        data, children = gather(
            [
                self._zk.get_async(self._paths.queue(name)),
                self._zk.get_children_async(self._paths.partitions(name)),
            ],
            self._timeout,
        )
        return data, children

    def _children(self, path: str) -> list[str]:
        with unavailable(self._zk):
            return sorted(self._wait_or_none(self._zk.get_children_async(path)) or ())

    def _data(self, keys: Iterable[K], path: Callable[[K], str]) -> list[tuple[K, bytes]]:
        keys = list(keys)
        with unavailable(self._zk):
            found = gather([self._zk.get_async(path(key)) for key in keys], self._timeout)
        return [(key, value[0]) for key, value in zip(keys, found, strict=True) if value]

    def _wait(self, result: Any) -> Any:
        return result.get(timeout=self._timeout)

    def _wait_or_none(self, result: Any) -> Any:
        return gather([result], self._timeout)[0]


def _dumps(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True).encode()


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{what}: expected a JSON object, found {type(values).__name__}")
    return values


def _typed(values: Mapping[str, Any], key: str, kind: type[T], what: str) -> T:
    value = values.get(key)
    if type(value) is not kind:
        raise ConfigError(f"{what}: {key}: {value!r} is not of type {kind.__name__}")
    return value
