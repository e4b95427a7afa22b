"""The entries of the registry and their JSON. Pure: no I/O.

Znodes may be damaged, made by hand or restored from a backup (rule R25): what is read is checked.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError
from kmqpy.kafka.markers import snapshot
from kmqpy.kafka.markers.entry import SnapshotRow
from kmqpy.kafka.markers.finished import NONE_FINISHED, StoredFinished
from kmqpy.kafka.settings import QueueSettings

T = TypeVar("T")

log = logging.getLogger(__name__)

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
    markers_id      identity of the markers topic that the offset belongs to
    now_ms          the partition's now at that offset, ms since 1970
    missed_markers  markers below the offset were never read, so takes may be among them (rule R2)
    in_flight       a snapshot: messages in flight that were taken before the offset; without one, the
                    offset stands at or before the oldest take
    finished        finished messages that may be taken late (rule R30), as of a markers offset from
                    `offset` on; older versions neither store nor need it
    queue_id        identity of the queue topic that the markers are of; empty where it is not known, as in
                    what older versions stored
    """

    offset: int
    markers_id: str
    now_ms: int
    missed_markers: bool = False
    in_flight: tuple[SnapshotRow, ...] = ()
    queue_id: str = ""
    finished: StoredFinished = NONE_FINISHED

    def is_of_earlier_queue(self, queue_id: str, markers_id: str) -> bool:
        """True if it is of this markers topic, but of an earlier queue topic (rule R24)."""
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
        return _dumps(values)


def encode_queue(settings: QueueSettings, *, deleting: bool = False) -> bytes:
    """The data of a queue's znode."""
    if not deleting:
        return settings.to_json()
    return _dumps({**asdict(settings), "deleting": True})


def decode_queue(name: str, data: bytes) -> tuple[QueueSettings, bool]:
    """Settings and deletion mark of queue `name`; raises ConfigError."""
    values = _object(data, f"queue {name!r}")
    if "name" not in values:
        raise ConfigError(f"queue {name!r}: its settings have no name")
    deleting = values.pop("deleting", False) is True
    try:
        settings = QueueSettings.stored(values)
    except ConfigError as error:  # it quotes what stands there, of up to 1 MB, for logs and terminals
        raise ConfigError(printable(f"queue {name!r}: {error}", SHOWN_OF_ERROR)) from None
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
            markers_id=_typed(values, "topic_id", str, "stored offset"),
            now_ms=_number(values, "now_ms", "stored offset"),
            missed_markers=values.get("missed_markers") is True,
            in_flight=tuple(snapshot.unpack(_typed({"in_flight": "", **values}, "in_flight", str, "it"))),
            queue_id=_typed({"queue_id": "", **values}, "queue_id", str, "stored offset"),
            finished=StoredFinished.from_json(values.get("finished", {"windows": [], "runs": []})),
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
    """True if `child` is the number of a partition in the form that kmqpy writes."""
    return child.isascii() and child.isdecimal() and len(child) < 10 and str(int(child)) == child


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


def shown(data: bytes) -> str:
    """Data that others wrote, shortened and with only what can be printed on a line."""
    return printable(data[: 4 * SHOWN_CHARACTERS].decode(errors="replace"), SHOWN_CHARACTERS)


def printable(text: str, limit: int) -> str:
    """The first `limit` characters, with ? for those that can't be printed on a line."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])
