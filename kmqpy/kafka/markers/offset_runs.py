"""A set of offsets that takes little memory if many offsets are close together. Pure: no I/O.

Methods with `runs` in their names take or return runs of offsets, (first, count). The set stores blocks of
bits, not runs.

Each block of 1,024 offsets that has a member is one integer with a bit for each offset. One million offsets
in a row, added one by one in any order, take 0.2 MB. Full blocks that are added as a run take even less: they
refer to the same int object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_BLOCK = 1024
_FULL = (1 << _BLOCK) - 1


class OffsetRuns:
    """A set of offsets. Not for use by several threads while one of them changes it.

    add(), discard() and `in` look at one block. Methods that take runs look at the blocks of these runs.
    """

    __slots__ = ("_blocks",)

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._blocks: dict[int, int] = {}  # by block: bit i stands for block * _BLOCK + i; never 0
        self.add_runs(runs)

    def add(self, offset: int) -> None:
        block, bit = divmod(offset, _BLOCK)
        self._blocks[block] = self._blocks.get(block, 0) | 1 << bit

    def add_runs(self, runs: Iterable[tuple[int, int]]) -> None:
        """Add the offsets of runs (first, count); the runs may be in any order, and overlap."""
        blocks = self._blocks
        for first, count in runs:
            if count == 1:  # the most frequent case by far
                self.add(first)
                continue
            for block, mask in block_masks(((first, count),), _BLOCK):
                # All full blocks refer to the same int object; that saves memory.
                blocks[block] = _FULL if mask == _FULL else blocks.get(block, 0) | mask

    def add_bits(self, first: int, bits: int) -> None:
        """Add the offset `first` + i for each bit i of `bits`, a non-negative integer."""
        block, low = divmod(first, _BLOCK)
        if bits.bit_length() + low <= _BLOCK:
            if bits:
                self._blocks[block] = self._blocks.get(block, 0) | bits << low
            return
        data = (bits << low).to_bytes((bits.bit_length() + low + 7) // 8, "little")
        for at in range(0, len(data), _BLOCK // 8):
            if mask := int.from_bytes(data[at : at + _BLOCK // 8], "little"):
                self._blocks[block] = self._blocks.get(block, 0) | mask
            block += 1

    def discard(self, offset: int) -> None:
        """Remove one offset, if it is in the set."""
        block, bit = divmod(offset, _BLOCK)
        self._keep(block, ~(1 << bit))

    def discard_runs(self, runs: Iterable[tuple[int, int]]) -> None:
        """Remove the offsets of runs (first, count) that are in the set."""
        for block, mask in block_masks(runs, _BLOCK):
            self._keep(block, ~mask)

    def discard_below(self, floor: int) -> None:
        lowest, bit = divmod(floor, _BLOCK)
        for block in [block for block in self._blocks if block < lowest]:
            del self._blocks[block]
        self._keep(lowest, -1 << bit)

    def discard_from(self, floor: int) -> None:
        lowest, bit = divmod(floor, _BLOCK)
        for block in [block for block in self._blocks if block > lowest]:
            del self._blocks[block]
        self._keep(lowest, (1 << bit) - 1)

    def update(self, other: OffsetRuns) -> None:
        for block, mask in other._blocks.items():
            self._blocks[block] = self._blocks.get(block, 0) | mask

    def __and__(self, other: OffsetRuns) -> OffsetRuns:
        """The offsets that are in both sets."""
        both = OffsetRuns()
        for block in self._blocks.keys() & other._blocks.keys():
            if mask := self._blocks[block] & other._blocks[block]:
                both._blocks[block] = mask
        return both

    def __sub__(self, other: OffsetRuns) -> OffsetRuns:
        rest = OffsetRuns()
        for block, mask in self._blocks.items():
            if left := mask & ~other._blocks.get(block, 0):
                rest._blocks[block] = left
        return rest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffsetRuns) and self._blocks == other._blocks

    __hash__ = None  # type: ignore[assignment]  # a set changes

    def __contains__(self, offset: int) -> bool:
        block, bit = divmod(offset, _BLOCK)
        return bool(self._blocks.get(block, 0) >> bit & 1)

    def __len__(self) -> int:
        """The number of offsets; looks at every block."""
        return sum(map(int.bit_count, self._blocks.values()))

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __iter__(self) -> Iterator[int]:
        """The offsets, the lowest first."""
        for first, count in self.runs():
            yield from range(first, first + count)

    def runs(self) -> Iterator[tuple[int, int]]:
        """The offsets as runs (first, count) of maximal length, the lowest first."""
        first = count = 0
        for block in sorted(self._blocks):
            mask, at = self._blocks[block], block * _BLOCK
            while mask:
                zeros = (mask & -mask).bit_length() - 1
                mask >>= zeros
                ones = (~mask & (mask + 1)).bit_length() - 1
                mask >>= ones
                at += zeros
                if count and at == first + count:
                    count += ones
                else:
                    if count:
                        yield first, count
                    first, count = at, ones
                at += ones
        if count:
            yield first, count

    def bits(self) -> tuple[int, int]:
        """The lowest offset, and a number whose bit i stands for the lowest offset + i. Not of an empty set.

        The number has as many bits as there are offsets from the lowest to the highest.
        """
        lowest, size = min(self._blocks), _BLOCK // 8
        data = bytearray((max(self._blocks) - lowest + 1) * size)
        for block, mask in self._blocks.items():
            at = (block - lowest) * size
            data[at : at + size] = mask.to_bytes(size, "little")
        first = self.first
        return first, int.from_bytes(data, "little") >> (first - lowest * _BLOCK)

    @property
    def block_count(self) -> int:
        """The number of blocks of 1,024 offsets that have a member: a measure of the memory."""
        return len(self._blocks)

    @property
    def first(self) -> int:
        """The lowest offset. Not of an empty set."""
        block = min(self._blocks)
        mask = self._blocks[block]
        return block * _BLOCK + (mask & -mask).bit_length() - 1

    @property
    def highest(self) -> int:
        """The highest offset. Not of an empty set."""
        block = max(self._blocks)
        return block * _BLOCK + self._blocks[block].bit_length() - 1

    def count_from(self, floor: int) -> int:
        """The number of offsets that are `floor` or above."""
        lowest, bit = divmod(floor, _BLOCK)
        above = sum(mask.bit_count() for block, mask in self._blocks.items() if block > lowest)
        return above + (self._blocks.get(lowest, 0) >> bit).bit_count()

    def first_missing(self, floor: int) -> int:
        """The lowest offset from `floor` on that is not in the set."""
        block, bit = divmod(floor, _BLOCK)
        while True:
            mask = self._blocks.get(block, 0) >> bit
            ones = (~mask & (mask + 1)).bit_length() - 1
            if bit + ones < _BLOCK:
                return block * _BLOCK + bit + ones
            block, bit = block + 1, 0

    def _keep(self, block: int, mask: int) -> None:
        """Remove the offsets of `block` whose bits in `mask` are 0."""
        if kept := self._blocks.get(block, 0) & mask:
            self._blocks[block] = kept
        else:
            self._blocks.pop(block, None)


def block_masks(runs: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The blocks of `size` offsets that runs (first, count) touch, each with the bits of their offsets."""
    current = bits = 0
    for first, count in runs:
        end = first + count
        while first < end:
            block, low = divmod(first, size)
            if block != current:
                if bits:
                    yield current, bits
                current, bits = block, 0
            length = min(size - low, end - first)
            bits |= ((1 << length) - 1) << low
            first += length
    if bits:
        yield current, bits
