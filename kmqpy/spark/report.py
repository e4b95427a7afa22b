"""The report of a task to the driver: which of its messages were handled. Pure: no I/O.

A report is text in a column of its own, in a row that no sink sees. Spark hands the reports of the tasks
whose results count to the driver, as an observed metric, when the sink has the micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kmqpy.errors import DecodeError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Op, Runs
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.places import Offsets, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of the messages of some Arrow batches.

    done  were handed on and may be acknowledged, once the sink has them
    left  must not be acknowledged, although another evaluation may have handed them on: they are redelivered
    next  by partition: the offset after the last message, the markers offset after the last start
    """

    done: Offsets = field(default_factory=dict)
    left: Offsets = field(default_factory=dict)
    next: Mapping[int, Place] = field(default_factory=dict)

    def __str__(self) -> str:
        fields = {"done": _encoded(self.done), "left": _encoded(self.left), "next": list(self.next.items())}
        return json.dumps({name: value for name, value in fields.items() if value}, separators=(",", ":"))


def merged(texts: Iterable[str]) -> Report:
    """All reports of one micro-batch as one; raises DecodeError."""
    done: dict[int, OffsetRuns] = {}
    left: dict[int, OffsetRuns] = {}
    next_: dict[int, Place] = {}
    for text in texts:
        try:
            fields: dict[str, Any] = json.loads(text)
            for name, found in (("done", done), ("left", left)):
                for partition, runs in map(_decoded, fields.get(name, ())):
                    found.setdefault(partition, OffsetRuns()).add_runs(runs)
            for partition, (offset, at) in fields.get("next", ()):
                next_[partition] = max(next_.get(partition, (0, 0)), (offset, at))
        except (ValueError, TypeError) as error:
            raise DecodeError(f"report of a task: {error}") from None
    for partition in done.keys() & left.keys():
        done[partition] -= left[partition]
    return Report(
        done={partition: _sequence(offsets) for partition, offsets in done.items()},
        left={partition: list(offsets) for partition, offsets in left.items()},
        next=next_,
    )


def _sequence(offsets: OffsetRuns) -> Sequence[int]:
    runs = list(offsets.runs())
    return range(runs[0][0], sum(runs[0])) if len(runs) == 1 else list(offsets)


def _encoded(offsets: Offsets) -> list[str]:
    # As end markers have them: a run or a bitmap, whichever is shorter.
    found = []
    for partition, ones in offsets.items():
        for marker in codec.ranges(partition, Op.END, ones):
            key, value, _ = codec.encode(marker)
            found.append((key + value).hex())
    return found


def _decoded(text: str) -> tuple[int, Runs]:
    data = bytes.fromhex(text)
    marker = codec.decode(data[:12], data[12:])
    return marker.partition, marker.runs
