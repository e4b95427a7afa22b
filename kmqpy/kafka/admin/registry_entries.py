"""The entries of the registry (queues, trackers, stored offsets), and their JSON in znodes. Pure: no I/O.

Znodes may be damaged, made by hand or restored from a backup (rule R25 of docs/rules.md). So the functions
that decode their data check it, and raise ConfigError or return a substitute.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from kmqpy.core.int64 import INT64_MAX
from kmqpy.core.settings import json_object
from kmqpy.errors import ConfigError
from kmqpy.kafka.markers import snapshot
from kmqpy.kafka.markers.entry import SnapshotRow
from kmqpy.kafka.markers.finished import NONE_FINISHED, StoredFinished
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts
from kmqpy.kafka.markers.named_copies import NamedCopy
from kmqpy.kafka.settings import QueueSettings

T = TypeVar("T")

log = logging.getLogger(__name__)

_MAX_SHOWN_DATA = 100  # characters of a znode's data that a log or an error shows
_MAX_SHOWN_ERROR = 300  # characters of an error that quotes a znode's data


@dataclass(frozen=True)
class RegisteredQueue:
    """The registry's entry of a queue; `deleting` is True while the queue is being deleted."""

    settings: QueueSettings
    partitions: int
    deleting: bool = False


@dataclass(frozen=True)
class TrackerInfo:
    """A running tracker, as its znode describes it.

    started_ms  when the tracker started, in ms since 1970
    queues      the names of the queues that the tracker serves; None: all queues
    kafka_ok    whether the tracker reaches Kafka
    """

    id: str
    host: str
    started_ms: int
    queues: frozenset[str] | None
    kafka_ok: bool

    def to_json(self) -> bytes:
        """The data of the tracker's znode."""
        queues = None if self.queues is None else sorted(self.queues)
        return _dumps(
            {"host": self.host, "started_ms": self.started_ms, "queues": queues, "kafka_ok": self.kafka_ok}
        )


@dataclass(frozen=True)
class StoredOffset:
    """What a tracker stores of a partition, so that the next tracker need not read all its markers.

    offset          the safe offset: the markers offset from which the next tracker reads. All messages in
                    flight were taken there or after, except those in `in_flight`
    markers_id      the id of the markers topic that `offset` belongs to
    now_ms          the partition's now (the largest timestamp read so far) when the marker at `offset`
                    was read, ms since 1970
    missed_markers  True: some markers below `offset` were never read, so start markers may be among them
                    (rule R2 of docs/rules.md)
    in_flight       a snapshot: the messages in flight that were taken before `offset`
    finished        finished messages that clients may still take late (rule R30), as of `offset` or a later
                    markers offset; older versions neither store nor need them
    queue_id        the id of the queue topic that the markers are about; empty where it is not known, as in
                    the data of older versions
    cuts            the cuts of the queue partition's log that ticks before `offset` told (rule R39)
    taken_end       the offset after the highest message that was taken, or after the highest copy: after the
                    one that was last known to be there in the lower leader epoch
    queue_epoch     this epoch; -1: both are not known, as in the data of older versions
    told_below      Kafka told this epoch after the takes before this markers offset were written
    takes_epoch     the highest leader epoch of the messages that clients take, as the ticks told that were
                    read before the store; -1: not known
    markers_read    the offset after the last marker that was read before the store
    markers_epoch   the latest leader epoch of the markers partition when it had that marker; -1: both are
                    not known, as in the data of older versions
    copy            the highest copy that the markers name which were read before the store; None: they name
                    none, or the data are of an older version
    """

    offset: int
    markers_id: str
    now_ms: int
    missed_markers: bool = False
    in_flight: tuple[SnapshotRow, ...] = ()
    queue_id: str = ""
    finished: StoredFinished = NONE_FINISHED
    cuts: LogCuts = NO_CUTS
    taken_end: int = 0
    queue_epoch: int = -1
    told_below: int = 0
    takes_epoch: int = -1
    markers_read: int = 0
    markers_epoch: int = -1
    copy: NamedCopy | None = None

    def within(self, epoch: int) -> StoredOffset:
        """Return what can be true of a log with this latest leader epoch; -1: Kafka names none."""
        named = [self.queue_epoch, self.takes_epoch, *(cut.epoch for cut in self.cuts.cuts)]
        if self.copy is not None:
            named.append(self.copy.epoch)
        if epoch < 0 or max(named) <= epoch:
            return self
        cuts = self.cuts.up_to(epoch)
        return replace(self, cuts=cuts, taken_end=0, queue_epoch=-1, told_below=0, takes_epoch=-1, copy=None)

    def is_of_earlier_queue(self, queue_id: str, markers_id: str) -> bool:
        """True if the offset is one of this markers topic, stored for an earlier queue topic (rule R24)."""
        return self.markers_id == markers_id and self.queue_id not in ("", queue_id)

    def to_json(self) -> bytes:
        """The data of the offset znode."""
        values: dict[str, Any] = {
            "offset": self.offset,
            "topic_id": self.markers_id,
            "now_ms": self.now_ms,
            "missed_markers": self.missed_markers,
        }
        if self.in_flight:
            values["in_flight"] = snapshot.pack(self.in_flight)
        if self.queue_id:
            values["queue_id"] = self.queue_id
        if self.finished != NONE_FINISHED:
            values["finished"] = self.finished.to_json()
        if self.cuts:
            values["cuts"] = str(self.cuts)
        if self.queue_epoch >= 0:
            values |= {
                "taken_end": self.taken_end,
                "queue_epoch": self.queue_epoch,
                "told_below": self.told_below,
            }
        if self.takes_epoch >= 0:
            values["takes_epoch"] = self.takes_epoch
        if self.markers_epoch >= 0:
            values |= {"markers_read": self.markers_read, "markers_epoch": self.markers_epoch}
        if self.copy is not None:
            values["copy"] = [self.copy.number, self.copy.epoch, self.copy.claim_id.hex()]
        return _dumps(values)


def encode_queue(settings: QueueSettings, *, deleting: bool = False) -> bytes:
    """Return the data of the znode of a queue, or of a lane, which also names its queue."""
    more: dict[str, Any] = {}
    if settings.lane_of is not None:
        more = {"lane_of": settings.lane_of, "main_markers_topic": settings.main_markers_topic}
    if deleting:
        more["deleting"] = True
    return _dumps({**json.loads(settings.to_json()), **more}) if more else settings.to_json()


def decode_queue(name: str, data: bytes) -> tuple[QueueSettings, bool]:
    """Return the settings of queue or lane `name`, and whether it is marked as deleting.

    Raises ConfigError.
    """
    values = json_object(data, f"queue {name!r}")
    if "name" not in values:
        raise ConfigError(f"queue {name!r}: its settings have no name")
    deleting = values.pop("deleting", False) is True
    lane_of, main_markers = values.pop("lane_of", None), values.pop("main_markers_topic", "")
    try:
        settings = QueueSettings.stored(values)
        if lane_of is not None:
            settings = settings.as_lane_of(lane_of, str(main_markers))
    except ConfigError as error:  # its text quotes data of up to 1 MB, and goes to logs
        raise ConfigError(printable(f"queue {name!r}: {error}", _MAX_SHOWN_ERROR)) from None
    if settings.name != name:
        raise ConfigError(f"queue {name!r}: its settings are those of {settings.name!r}")
    return settings, deleting


def readable_part(name: str, data: bytes) -> QueueSettings:
    """Return the settings of queue `name`, with the default for each that can't be read. Raises nothing."""
    try:
        values = json_object(data, name)
    except ConfigError:
        values = {}
    settings = QueueSettings.stored({"name": name})
    for key in sorted(values.keys() - {"name"}):
        with contextlib.suppress(ConfigError):
            settings = QueueSettings.stored({**asdict(settings), key: values[key]})
    return settings


def decode_tracker(tracker_id: str, data: bytes) -> TrackerInfo:
    """Decode the data of a tracker's znode; ignores keys that it does not know. Raises ConfigError."""
    what = f"tracker {tracker_id!r}"
    values = json_object(data, what)
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
    """Decode the data of an offset znode; raises ConfigError."""
    try:
        values = json_object(data, "stored offset")
        return StoredOffset(
            offset=_number(values, "offset", "stored offset"),
            markers_id=_typed(values, "topic_id", str, "stored offset"),
            now_ms=_number(values, "now_ms", "stored offset"),
            missed_markers=values.get("missed_markers") is True,
            in_flight=tuple(snapshot.unpack(_typed({"in_flight": "", **values}, "in_flight", str, "it"))),
            queue_id=_typed({"queue_id": "", **values}, "queue_id", str, "stored offset"),
            finished=StoredFinished.from_json(values.get("finished", {"windows": [], "runs": []})),
            cuts=LogCuts.parse(_typed({"cuts": "", **values}, "cuts", str, "stored offset")),
            taken_end=_number({"taken_end": 0, **values}, "taken_end", "stored offset"),
            told_below=_number({"told_below": 0, **values}, "told_below", "stored offset"),
            queue_epoch=_epoch(values, "queue_epoch"),
            takes_epoch=_epoch(values, "takes_epoch"),
            markers_read=_number({"markers_read": 0, **values}, "markers_read", "stored offset"),
            markers_epoch=_epoch(values, "markers_epoch"),
            copy=_copy(values.get("copy")),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _copy(value: Any) -> NamedCopy | None:
    match value:
        case None:
            return None
        case [int(number), int(epoch), str(claim_id)] if 0 <= number <= INT64_MAX and 0 <= epoch <= INT64_MAX:
            return NamedCopy(number, epoch, bytes.fromhex(claim_id))
    raise ValueError(f"stored offset: copy: {value!r:.100} is not [number, epoch, claim id]")


def _epoch(values: dict[str, Any], key: str) -> int:
    return _number(values, key, "stored offset") if key in values else -1


def decode_offset(path: str, data: bytes) -> StoredOffset | None:
    """Decode the data of the offset znode `path`; logs a warning and returns None if it can't be read."""
    try:
        return parse_offset(data)
    except ConfigError as error:
        log.warning("%s can't be read, treated as absent: %s", path, error)
        return None


def partitions_of(children: Iterable[str]) -> tuple[int, list[int]]:
    """Return how many partitions a queue has, and the numbers of those whose znodes are missing.

    `children` are the names below the queue's `partitions` znode. The count is the highest number + 1 for
    which at least half of the numbers up to it exist. So a missing znode hides no other partition, and a
    single high number that was made by hand does not add thousands.
    """
    numbers = sorted(int(child) for child in children if _is_number(child))
    count = max((n + 1 for i, n in enumerate(numbers, 1) if n < 2 * i), default=0)
    return count, sorted(set(range(count)).difference(numbers))


def _is_number(child: str) -> bool:
    """True if `child` is the number of a partition in the form that kmqpy writes."""
    return child.isascii() and child.isdecimal() and len(child) < 10 and str(int(child)) == child


def _dumps(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True).encode()


def _typed(values: Mapping[str, Any], key: str, kind: type[T], what: str) -> T:
    """Return a value of exactly this type, if text then printable text; raises ConfigError."""
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


def shown(data: bytes) -> str:
    """Return foreign data for a log or an error: shortened, and printable on a line."""
    return printable(data[: 4 * _MAX_SHOWN_DATA].decode(errors="replace"), _MAX_SHOWN_DATA)


def printable(text: str, limit: int) -> str:
    """Return the first `limit` characters, with ? for each that can't be printed on a line."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])
