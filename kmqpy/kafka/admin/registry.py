"""The queue registry in ZooKeeper: which queues there are, who tracks them, and how far.

    <root>/queues/<queue>                        QueueSettings as JSON; "deleting": true while removed
    <root>/queues/<queue>/partitions/<p>         made by register() only
    <root>/queues/<queue>/partitions/<p>/leader  ephemeral; the tracker's id
    <root>/queues/<queue>/partitions/<p>/offset  StoredOffset as JSON; versioned writes
    <root>/trackers/<id>                         ephemeral; TrackerInfo as JSON
    <root>/jobs/<id>                             ephemeral; a driver whose job runs trackers on Spark

Every call waits for a bounded time and raises Unavailable when ZooKeeper is away.

Znodes may be damaged, made by hand or restored from a backup (rule R25): what is read is checked, and leader
and tracker znodes that belong to no session, which are copies, are ignored.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.kafka.markers import snapshot
from kmqpy.kafka.markers.codec import INT64_MAX
from kmqpy.kafka.markers.entry import SnapshotRow
from kmqpy.kafka.settings import QueueSettings, is_topic_name
from kmqpy.zookeeper.session import connect, failure, gather, session_of, unavailable

__all__ = [
    "Leftover",
    "RegisteredQueue",
    "Registry",
    "StoredOffset",
    "TrackerInfo",
    "ZnodePaths",
    "connect",
]

K = TypeVar("K")
T = TypeVar("T")

log = logging.getLogger(__name__)

ATTEMPTS = 10  # of a compare-and-set that others keep disturbing
POLL_S = 0.05
TOGETHER = 1_000  # znodes deleted in one ZooKeeper transaction: the server takes 1 MB
SHOWN_CHARACTERS = 100  # of data that others wrote
SHOWN_OF_ERROR = 300  # of an error about it


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
    queue_id        identity of the queue topic that the markers are of; empty where it is not known, as in
                    what older versions stored
    """

    offset: int
    topic_id: str
    now_ms: int
    missed_markers: bool = False
    in_flight: tuple[SnapshotRow, ...] = ()
    queue_id: str = ""

    def is_of_earlier_queue(self, queue_id: str, topic_id: str) -> bool:
        """Whether it is of this markers topic, but of another queue topic, made before (rule R24)."""
        return self.topic_id == topic_id and self.queue_id not in ("", queue_id)

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
        if self.queue_id:
            values["queue_id"] = self.queue_id
        return _dumps(values)


@dataclass(frozen=True)
class Leftover:
    """An unusable znode: made by hand, restored from a backup, or damaged.

    why           what is wrong with it
    czxid, mzxid  the ZooKeeper transactions that created and last changed it
    """

    path: str
    why: str
    czxid: int
    mzxid: int


class ZnodePaths:
    """The znodes under `root`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.queues = f"{root}/queues"
        self.trackers = f"{root}/trackers"
        self.jobs = f"{root}/jobs"

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

    def job(self, job_id: str) -> str:
        """A job that runs trackers on Spark."""
        return f"{self.jobs}/{job_id}"


def encode_queue(settings: QueueSettings, *, deleting: bool = False) -> bytes:
    """The data of a queue's znode."""
    if not deleting:
        return settings.to_json()
    return _dumps({**asdict(settings), "deleting": True})


def decode_queue(name: str, data: bytes) -> tuple[QueueSettings, bool]:
    """Settings and deletion mark of queue `name`; raises ConfigError."""
    values = _object(data, f"queue {name!r}")
    deleting = values.pop("deleting", False) is True
    try:
        settings = QueueSettings.stored(values)
    except ConfigError as error:  # it quotes what stands there, of up to 1 MB, for logs and terminals
        raise ConfigError(_printable(str(error), SHOWN_OF_ERROR)) from None
    if settings.name != name:
        raise ConfigError(f"queue {name!r}: its settings are those of {settings.name!r}")
    return settings, deleting


def readable_part(name: str, data: bytes) -> QueueSettings:
    """The settings of queue `name` as far as they can be read, defaults for the rest; raises nothing."""
    try:
        values = _object(data, name)
    except ConfigError:
        values = {}
    settings = QueueSettings(name=name)
    for key in sorted(values.keys() - {"name"}):
        with contextlib.suppress(ConfigError):
            settings = QueueSettings.stored({**asdict(settings), key: values[key]})
    return settings


def decode_tracker(tracker_id: str, data: bytes) -> TrackerInfo:
    """The tracker of a member znode; unknown keys are a newer version's. Raises ConfigError."""
    what = f"tracker {tracker_id!r}"
    values = _object(data, what)
    queues = values.get("queues")
    if queues is not None and not (
        isinstance(queues, list) and all(isinstance(queue, str) for queue in queues)
    ):
        raise ConfigError(f"{what}: queues: {queues!r:.100} is not a list of names")
    return TrackerInfo(
        id=tracker_id,
        host=_typed(values, "host", str, what),
        started_ms=_number(values, "started_ms", what),
        queues=None if queues is None else frozenset(queues),
        kafka_ok=_typed(values, "kafka_ok", bool, what),
    )


def parse_offset(data: bytes) -> StoredOffset:
    """The data of an offset znode; raises ConfigError."""
    try:
        values = _object(data, "stored offset")
        return StoredOffset(
            offset=_number(values, "offset", "stored offset"),
            topic_id=_typed(values, "topic_id", str, "stored offset"),
            now_ms=_number(values, "now_ms", "stored offset"),
            missed_markers=values.get("missed_markers") is True,
            in_flight=tuple(snapshot.unpack(_typed({"in_flight": "", **values}, "in_flight", str, "it"))),
            queue_id=_typed({"queue_id": "", **values}, "queue_id", str, "stored offset"),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def decode_offset(path: str, data: bytes) -> StoredOffset | None:
    """The stored offset in the data of znode `path`; None, with a warning, when it can't be read."""
    try:
        return parse_offset(data)
    except ConfigError as error:
        log.warning("%s can't be read, treated as absent: %s", path, error)
        return None


def partitions_of(children: Iterable[str]) -> tuple[int, list[int]]:
    """How many partitions a queue has by the children of its `partitions` znode, and which are missing.

    The count is the highest number + 1 for which at least half of the numbers up to it exist: so a missing
    znode hides no other partition, and a single high number made by hand does not add thousands.
    """
    numbers = sorted(int(child) for child in children if _is_number(child))
    count = max((n + 1 for i, n in enumerate(numbers, 1) if n < 2 * i), default=0)
    return count, sorted(set(range(count)).difference(numbers))


def _is_number(child: str) -> bool:
    """Whether `child` is a partition's number in the form that kmqpy writes."""
    return child.isascii() and child.isdecimal() and len(child) < 10 and str(int(child)) == child


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
        self._paths = ZnodePaths(root)
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
                there = frozenset(children or ())
                transaction = self._zk.transaction()
                if data is None:
                    transaction.create(self._paths.queue(name), encode_queue(settings))
                else:
                    self._check_change(name, data[0], partitions_of(there)[0], partitions)
                    version = data[1].version
                    transaction.set_data(self._paths.queue(name), encode_queue(settings), version)
                if children is None:
                    transaction.create(self._paths.partitions(name))
                for partition in range(partitions):
                    if str(partition) not in there:
                        transaction.create(self._paths.partition(name, partition))
                if self._commit(transaction):
                    log.info("queue registered", extra={"queue": name, "partitions": partitions})
                    return
        raise Unavailable(f"queue {name!r} is changed by others all the time; try again")

    def get(self, name: str) -> RegisteredQueue:
        """Raise QueueNotFound when there is none, ConfigError when its settings can't be read."""
        with unavailable(self._zk):
            data, children = self._raw(name)
        if data is None:
            raise QueueNotFound(f"queue {name!r} is not registered")
        settings, deleting = decode_queue(name, data[0])
        return RegisteredQueue(settings, partitions_of(children or ())[0], deleting)

    def queues(self) -> list[RegisteredQueue]:
        """Every queue, by name; one whose settings can't be read is logged and left out."""
        found = []
        for name in self.names():
            try:
                found.append(self.get(name))
            except QueueNotFound:
                continue  # removed meanwhile
            except ConfigError as error:
                log.error("queue settings can't be read: %s", error, extra={"queue": name})
        return found

    def every_queue(self) -> tuple[list[QueueSettings], list[str]]:
        """The settings of every queue, and the names of those of which not everything can be read.

        Read at once, however many there are; what can't be read has its default.
        """
        found, damaged = [], []
        for name, data, _ in self._data(filter(is_topic_name, self.names()), self._paths.queue):
            try:
                found.append(decode_queue(name, data)[0])
            except ConfigError:
                found.append(readable_part(name, data))
                damaged.append(name)
        return found, damaged

    def has_root(self) -> bool:
        """Whether the root is there."""
        with unavailable(self._zk):
            return self._wait(self._zk.exists_async(self._paths.root)) is not None

    def names(self) -> list[str]:
        """The names of all queue znodes, readable or not."""
        return self._children(self._paths.queues)

    def trackers(self) -> list[TrackerInfo]:
        """Every living tracker, by id."""
        ids = self._children(self._paths.trackers)
        found = []
        for tracker_id, data, stat in self._data(ids, self._paths.tracker):
            if session_of(stat) is None:
                continue
            try:
                found.append(decode_tracker(tracker_id, data))
            except ConfigError as error:
                log.error("tracker can't be read: %s", error, extra={"tracker": tracker_id})
        return found

    def owners(self, name: str) -> dict[int, str]:
        """The tracker's id of each partition that has a leader; raises QueueNotFound."""
        numbers = range(self.get(name).partitions)
        leaders = self._data(numbers, lambda partition: self._paths.leader(name, partition))
        return {partition: _shown(data) for partition, data, stat in leaders if session_of(stat) is not None}

    def offsets(self, name: str) -> dict[int, StoredOffset]:
        """The safe markers offset of each partition that has one; raises QueueNotFound."""
        numbers = range(self.get(name).partitions)
        stored = self._data(numbers, lambda partition: self._paths.offset(name, partition))
        decoded = (
            (partition, decode_offset(self._paths.offset(name, partition), data))
            for partition, data, _ in stored
        )
        return {partition: offset for partition, offset in decoded if offset is not None}

    def leftovers(self, name: str) -> list[Leftover]:
        """The unusable znodes of a queue, deepest first; they are harmless."""
        top, partitions = self._paths.queue(name), self._paths.partitions(name)
        with unavailable(self._zk):
            stats = self._tree(top)
        count, _ = partitions_of(path.rpartition("/")[2] for path in stats if _parent(path) == partitions)
        why = dict.fromkeys(stats, "not made by kmqpy")
        for fine in (top, partitions, *(self._paths.partition(name, number) for number in range(count))):
            why.pop(fine, None)
        numbers = [number for number in range(count) if self._paths.partition(name, number) in stats]
        for number in numbers:
            leader = self._paths.leader(name, number)
            if leader in stats and session_of(stats[leader]) is not None:
                del why[leader]
            elif leader in stats:
                why[leader] = "a leader without a session: no tracker made it"
            why.pop(self._paths.offset(name, number), None)
        for number, data, stat in self._data(numbers, lambda number: self._paths.offset(name, number)):
            try:
                parse_offset(data)
            except ConfigError as error:
                path = self._paths.offset(name, number)
                why[path], stats[path] = f"can't be read: {error}", stat
        return [_leftover(path, why[path], stats[path]) for path in reversed(stats) if path in why]

    def stray_leftovers(self) -> list[Leftover]:
        """Unusable znodes outside of queues: of trackers, and those whose name no queue can have."""
        with unavailable(self._zk):
            stats = self._tree(self._paths.trackers)
            stats.pop(self._paths.trackers, None)
            for tracker in [path for path, stat in stats.items() if session_of(stat) is not None]:
                del stats[tracker]
            why = dict.fromkeys(stats, "a tracker without a session: none runs there")
            for name in self.names():
                if not is_topic_name(name):
                    below = self._tree(self._paths.queue(name))
                    stats |= below
                    why |= dict.fromkeys(below, "no queue can have this name")
        return [_leftover(path, why[path], stats[path]) for path in reversed(stats)]

    def clear(self, leftovers: Iterable[Leftover]) -> list[Leftover]:
        """Remove those that have not changed since they were found, in this order; returns them."""
        removed = []
        with unavailable(self._zk):
            for one in leftovers:
                stat = self._wait(self._zk.exists_async(one.path))
                if stat is None or (stat.czxid, stat.mzxid) != (one.czxid, one.mzxid):
                    continue
                with contextlib.suppress(BadVersionError, NoNodeError, NotEmptyError):
                    self._wait(self._zk.delete_async(one.path, stat.version))
                    removed.append(one)
        return removed

    def remove(
        self, name: str, timeout: float = 30.0, *, released: Callable[[], None] = lambda: None
    ) -> None:
        """Mark the queue as deleting, wait until its trackers let go, then remove it.

        `released` is called in between, when no tracker has the queue and none can take it any more.

        Raises QueueNotFound, or after `timeout` s Unavailable, saying who holds which partition, or what
        `released` raises; the mark stays then, and a second call goes on.
        """
        deadline = self._clock.monotonic() + timeout
        marked = self._mark_deleting(name)
        while holders := self._delete(name, marked, released):
            if self._clock.monotonic() >= deadline:
                raise Unavailable(
                    f"queue {name!r} is marked as deleting, but after {timeout:g} s still held: "
                    f"{', '.join(holders)}; run the removal again once they let go"
                )
            self._clock.sleep(POLL_S)
        log.info("queue removed", extra={"queue": name})

    def _mark_deleting(self, name: str) -> int:
        """Mark the queue; returns the czxid of its znode, which no queue made later under the name has."""
        with unavailable(self._zk):
            for _ in range(ATTEMPTS):
                data, _children = self._raw(name)
                if data is None:
                    raise QueueNotFound(f"queue {name!r} is not registered")
                try:
                    settings, deleting = decode_queue(name, data[0])
                except ConfigError:
                    settings, deleting = readable_part(name, data[0]), False
                czxid: int = data[1].czxid
                if deleting:
                    return czxid
                transaction = self._zk.transaction()
                marked = encode_queue(settings, deleting=True)
                transaction.set_data(self._paths.queue(name), marked, data[1].version)
                if self._commit(transaction):
                    return czxid
        raise Unavailable(f"queue {name!r} is changed by others all the time; try again")

    def _delete(self, name: str, marked: int, released: Callable[[], None]) -> list[str]:
        """Remove the queue's znodes, whoever made them; returns who or what prevents it, empty when done.

        Does nothing where the znode is not the one that was marked: another call has removed that.
        """
        top, partitions = self._paths.queue(name), self._paths.partitions(name)
        with unavailable(self._zk):
            stats = self._tree(top)
        if top not in stats or stats[top].czxid != marked:
            return []
        held = [
            path.split("/")[-2]
            for path, stat in stats.items()
            if session_of(stat) is not None
            and path.endswith("/leader")
            and _parent(_parent(path)) == partitions
        ]
        if held:
            leaders = self._data(held, lambda number: f"{partitions}/{number}/leader")
            leaders.sort(key=lambda found: (len(found[0]), found[0]))
            return [f"partition {number} by {_shown(data)}" for number, data, _ in leaders] or [
                "by trackers that are just letting go"
            ]
        released()
        with unavailable(self._zk):
            paths = list(reversed(self._tree(top)))
            # Marked as deleting, no tracker takes it over meanwhile; the queue's own znode goes last.
            done = all(self._delete_together(paths[i : i + TOGETHER]) for i in range(0, len(paths), TOGETHER))
            gone = done or self._wait(self._zk.exists_async(top)) is None
        return [] if gone else ["its znodes are just being changed"]

    def _delete_together(self, paths: Iterable[str]) -> bool:
        transaction = self._zk.transaction()
        for path in paths:
            transaction.delete(path)
        return self._commit(transaction)

    def _tree(self, top: str) -> dict[str, Any]:
        """The stat of the znode `top` and of all below it, parents first; empty when there is none."""
        stats: dict[str, Any] = {}
        level = [top]
        while level:
            found = gather([self._zk.exists_async(path) for path in level], self._timeout)
            there = {path: stat for path, stat in zip(level, found, strict=True) if stat is not None}
            stats |= there
            parents = [path for path, stat in there.items() if stat.numChildren]
            children = gather([self._zk.get_children_async(path) for path in parents], self._timeout)
            level = [
                f"{path}/{child}"
                for path, names in zip(parents, children, strict=True)
                for child in sorted(names or ())
            ]
        return stats

    @staticmethod
    def _check_change(name: str, data: bytes, existing: int, wanted: int) -> None:
        if wanted < existing:
            raise ConfigError(f"partitions: queue {name!r} has {existing} and can't shrink to {wanted}")
        try:
            _settings, deleting = decode_queue(name, data)
        except ConfigError:
            return  # unreadable settings are replaced by good ones
        if deleting:
            raise TopicError(f"queue {name!r} is being removed; finish that before it is recreated")

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

    def _data(self, keys: Iterable[K], path: Callable[[K], str]) -> list[tuple[K, bytes, Any]]:
        """Key, data and stat of the znodes that exist."""
        keys = list(keys)
        with unavailable(self._zk):
            found = gather([self._zk.get_async(path(key)) for key in keys], self._timeout)
        return [(key, *value) for key, value in zip(keys, found, strict=True) if value]

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
        raise ConfigError(f"{what}: {key}: {value!r:.100} is not of type {kind.__name__}")
    if isinstance(value, str) and not value.isprintable():
        raise ConfigError(f"{what}: {key}: {value!r:.100} can't be printed")
    return value


def _number(values: Mapping[str, Any], key: str, what: str) -> int:
    value = _typed(values, key, int, what)
    if not 0 <= value <= INT64_MAX:
        raise ConfigError(f"{what}: {key}: {value!r:.100} is not from 0 to 2**63 - 1")
    return value


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _leftover(path: str, why: str, stat: Any) -> Leftover:
    return Leftover(path, why, stat.czxid, stat.mzxid)


def _shown(data: bytes) -> str:
    """Data that others wrote, shortened and with only what can be printed on a line."""
    return _printable(data[: 4 * SHOWN_CHARACTERS].decode(errors="replace"), SHOWN_CHARACTERS)


def _printable(text: str, limit: int) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:limit])
