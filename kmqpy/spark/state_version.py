"""A version of a state table: how far the topics were read, and which files have its rows. Pure: no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kmqpy.errors import DecodeError
from kmqpy.kafka.markers.log_cuts import LogCuts

FORMAT = 2
"""The number of the JSON format; files with another one are refused."""

BLOCK_BITS = 16
"""A block, a file, has the rows of at most 2**16 neighbouring offsets: an update rewrites whole files."""

Block = tuple[int, int]
"""A partition, and the number of a block in it: offset // 2**BLOCK_BITS."""

Positions = Mapping[int, int]
"""An offset, or a time in ms, for each partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVersion:
    """A version of a state table: the next update begins where this one has stopped reading.

    number     1 for the first version of a folder
    topic_ids  the ids of the queue's topics, under "queue", "markers", and "dead_letters" if that exists
    read       the next offset to read of each partition, under the same words
    now_ms     each partition's now, the largest timestamp of its markers; no entry without a marker
    low        the first offset of each partition of the queue topic; Kafka has deleted messages below
    committed  the group's committed offsets in the queue topic
    cuts       the cuts of each log of the queue topic that was cut back; see LogCuts
    blocks     for each block, the folder in `rows` (see state_folder.py) with the rows of that block
    """

    number: int
    queue: str
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    read: Mapping[str, Positions] = field(default_factory=dict)
    now_ms: Positions = field(default_factory=dict)
    low: Positions = field(default_factory=dict)
    committed: Positions = field(default_factory=dict)
    blocks: Mapping[Block, str] = field(default_factory=dict)
    cuts: Mapping[int, LogCuts] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The content of the version's file."""
        fields = {
            "format": FORMAT,
            "number": self.number,
            "queue": self.queue,
            "topic_ids": dict(self.topic_ids),
            "read": {name: sorted(found.items()) for name, found in self.read.items()},
            "now_ms": sorted(self.now_ms.items()),
            "low": sorted(self.low.items()),
            "committed": sorted(self.committed.items()),
            "blocks": [[*block, folder] for block, folder in sorted(self.blocks.items())],
            "cuts": [(partition, str(cuts)) for partition, cuts in sorted(self.cuts.items())],
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> StateVersion:
        """The version in the content of a file; raises DecodeError."""
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields["format"] != FORMAT:
                raise DecodeError(f"format {fields['format']!r}, of another kmqpy; this one knows {FORMAT}")
            return cls(
                number=int(fields["number"]),
                queue=str(fields["queue"]),
                topic_ids={str(name): str(one) for name, one in fields["topic_ids"].items()},
                read={str(name): _positions(found) for name, found in fields["read"].items()},
                now_ms=_positions(fields["now_ms"]),
                low=_positions(fields["low"]),
                committed=_positions(fields["committed"]),
                blocks={(int(p), int(block)): str(folder) for p, block, folder in fields["blocks"]},
                cuts={int(p): LogCuts.parse(cuts) for p, cuts in fields.get("cuts", ())},
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DecodeError(f"not a version of a state table: {error!r}") from None


def blocks_between(partition: int, first: int, end: int) -> Iterable[Block]:
    """The blocks with the offsets from `first` on and below `end`."""
    if first >= end:
        return []
    return [(partition, block) for block in range(first >> BLOCK_BITS, ((end - 1) >> BLOCK_BITS) + 1)]


def _positions(found: Any) -> dict[int, int]:
    return {int(partition): int(position) for partition, position in found}
