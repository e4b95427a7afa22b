"""What a turn of a partition came to; pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.markers import snapshot


@dataclass
class Report:
    """What a turn of a partition came to; one row for the driver.

    owned      whether the driver led the partition; if not, nothing was done
    active     whether everything was read, so that redelivery is on time
    offset … in_flight_rows
               the safe offset and what belongs to it, as StoredOffset has them
    counters   as the metrics of their names
    lateness   seconds from due to committed, of each copy
    problem    why it is not as it should be; empty when it is
    """

    partition: int
    owned: bool = False
    active: bool = False
    topic_id: str = ""
    offset: int = -1
    now_ms: int = 0
    missed_markers: bool = False
    in_flight_rows: str = ""
    in_flight: int = 0
    oldest_s: float = 0.0
    markers: int = 0
    undecodable_markers: int = 0
    unsupported_markers: int = 0
    undecodable_counts: int = 0
    redelivered: int = 0
    dead_lettered: int = 0
    late_acks: int = 0
    lost_to_retention: int = 0
    markers_lost: int = 0
    failures: int = 0
    ticks: int = 0
    takeovers: int = 0
    lateness: list[float] = field(default_factory=list)
    problem: str = ""

    def values(self) -> dict[str, Any]:
        """By column."""
        return asdict(self)

    @property
    def stored(self) -> StoredOffset | None:
        """What to store in ZooKeeper; None when the state was not complete."""
        if not self.active or self.offset < 0:
            return None
        rows = tuple(snapshot.unpack(self.in_flight_rows))
        return StoredOffset(self.offset, self.topic_id, self.now_ms, self.missed_markers, rows)
