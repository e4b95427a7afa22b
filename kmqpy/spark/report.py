"""The report of a task to the driver: which of its messages were handled. Pure: no I/O.

A report is text in a column of its own, in a row that no sink sees. Spark hands the reports of the tasks
whose results count to the driver, as an observed metric, when the sink has the micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kmqpy.errors import DecodeError
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.places import Place

REPORTS = "reports"
"""The metric that Spark collects the reports of a micro-batch in."""

_MAX_HEX_PER_RUN = 64
"""A bitmap is read many times as fast as runs are, but may not be much longer."""

PartitionOffsets = Mapping[int, OffsetRuns]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The outcome of the messages of some Arrow batches, by partition.

    done  were handed on and may be acknowledged, once the sink has them
    left  must not be acknowledged, although another evaluation may have handed them on: they are redelivered
    next  the offset after the last message, the markers offset after the last start
    """

    done: PartitionOffsets = field(default_factory=dict)
    left: PartitionOffsets = field(default_factory=dict)
    next: Mapping[int, Place] = field(default_factory=dict)

    def __str__(self) -> str:
        fields = {"done": _encoded(self.done), "left": _encoded(self.left), "next": list(self.next.items())}
        return json.dumps({name: value for name, value in fields.items() if value}, separators=(",", ":"))


def merged(texts: Iterable[str]) -> BatchReport:
    """All reports of one micro-batch as one; raises DecodeError."""
    done: dict[int, OffsetRuns] = {}
    left: dict[int, OffsetRuns] = {}
    next_: dict[int, Place] = {}
    for text in texts:
        try:
            fields: dict[str, Any] = json.loads(text)
            for name, found in (("done", done), ("left", left)):
                for partition, *encoded in fields.get(name, ()):
                    offsets = found.setdefault(partition, OffsetRuns())
                    if len(encoded) == 1:
                        offsets.add_runs(encoded[0])
                    else:
                        offsets.add_bits(encoded[0], int(encoded[1], 16))
            for partition, (offset, at) in fields.get("next", ()):
                next_[partition] = max(next_.get(partition, (0, 0)), (offset, at))
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise DecodeError(f"report of a task: {error}") from None
    for partition in done.keys() & left.keys():
        done[partition] -= left[partition]
    return BatchReport(done=done, left=left, next=next_)


def _encoded(found: PartitionOffsets) -> list[list[Any]]:
    """Encode each partition as runs (first, count), or as the first offset and a bitmap in hex."""
    entries: list[list[Any]] = []
    for partition, offsets in found.items():
        runs = list(offsets.runs())
        if len(runs) > 1 and (sum(runs[-1]) - runs[0][0]) // 4 <= _MAX_HEX_PER_RUN * len(runs):
            first, bits = offsets.bits()
            entries.append([partition, first, f"{bits:x}"])
        elif runs:
            entries.append([partition, runs])
    return entries
