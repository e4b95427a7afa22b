"""The report of a task to the driver: which messages the driver may acknowledge. Pure: no I/O.

A task adds its report as text, in a row and a column that no sink sees. When the sink has committed the
micro-batch, Spark hands the driver the reports of all tasks whose results count, as an observed metric.
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
"""The field of the observed metric with the reports of a micro-batch."""

_MAX_HEX_PER_RUN = 64
"""Offsets in several runs are written as a bitmap, which is read much faster, unless the bitmap has more hex
digits than this for each run."""

PartitionOffsets = Mapping[int, OffsetRuns]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The outcome of the messages of some Arrow batches, by partition.

    done  messages that were handed on, and may be acknowledged once the sink has their rows
    left  messages that must not be acknowledged, even if another evaluation of the micro-batch has handed
          them on: they will be redelivered
    next  the offset after the last message, and from which markers offset who begins there must read
    """

    done: PartitionOffsets = field(default_factory=dict)
    left: PartitionOffsets = field(default_factory=dict)
    next: Mapping[int, Place] = field(default_factory=dict)

    def __str__(self) -> str:
        fields = {"done": _encoded(self.done), "left": _encoded(self.left), "next": list(self.next.items())}
        return json.dumps({name: value for name, value in fields.items() if value}, separators=(",", ":"))


def merged(texts: Iterable[str]) -> BatchReport:
    """All reports of one micro-batch as one, in which `left` overrules `done`; raises DecodeError."""
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
