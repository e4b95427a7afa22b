"""A set of offsets kept as runs: it is what a plain set would be, and its cost follows the runs."""

import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kmqpy.kafka.markers import codec, offset_runs
from kmqpy.kafka.markers.offset_runs import OffsetRuns

# Around the borders of blocks, and with blocks in between that are full or empty.
OFFSETS = st.integers(-2, 4) | st.integers(1020, 1030) | st.integers(3060, 3080) | st.integers(-1030, 5000)
RUNS = st.lists(st.tuples(OFFSETS, st.integers(0, 3) | st.sampled_from([1023, 1024, 2050])), max_size=4)


def offsets_of(runs):
    return {offset for first, count in runs for offset in range(first, first + count)}


class Against(RuleBasedStateMachine):
    """What a plain set does, an OffsetRuns does."""

    def __init__(self):
        super().__init__()
        self.runs = OffsetRuns()
        self.plain = set()

    @rule(offset=OFFSETS)
    def add(self, offset):
        self.runs.add(offset)
        self.plain.add(offset)

    @rule(runs=RUNS)
    def add_runs(self, runs):
        self.runs.add_runs(runs)
        self.plain |= offsets_of(runs)

    @rule(offset=OFFSETS)
    def discard(self, offset):
        self.runs.discard(offset)
        self.plain.discard(offset)

    @rule(runs=RUNS)
    def discard_runs(self, runs):
        self.runs.discard_runs(runs)
        self.plain -= offsets_of(runs)

    @rule(floor=OFFSETS)
    def discard_below(self, floor):
        self.runs.discard_below(floor)
        self.plain = {offset for offset in self.plain if offset >= floor}

    @rule(first=OFFSETS, bits=st.integers(0, 2**40) | st.just(2**2050 - 1))
    def add_bits(self, first, bits):
        self.runs.add_bits(first, bits)
        self.plain |= {first + i for i in range(bits.bit_length()) if bits >> i & 1}

    @precondition(lambda self: self.plain)
    @invariant()
    def bits_stand_for_the_same(self):
        first, bits = self.runs.bits()
        assert first == self.runs.first == min(self.plain)
        assert bits == sum(1 << offset - first for offset in self.plain)

    @rule(runs=RUNS)
    def update(self, runs):
        self.runs.update(OffsetRuns(runs))
        self.plain |= offsets_of(runs)

    @rule(runs=RUNS)
    def replace_by_common_ones(self, runs):
        self.runs = self.runs & OffsetRuns(runs)
        self.plain &= offsets_of(runs)

    @rule(runs=RUNS)
    def replace_by_difference(self, runs):
        self.runs = self.runs - OffsetRuns(runs)
        self.plain -= offsets_of(runs)

    @precondition(lambda self: self.plain)
    @rule()
    def highest(self):
        assert self.runs.highest == max(self.plain)

    @rule(floor=OFFSETS)
    def count(self, floor):
        assert self.runs.count_from(floor) == sum(offset >= floor for offset in self.plain)

    @rule(floor=OFFSETS)
    def first_missing(self, floor):
        missing = self.runs.first_missing(floor)
        while floor in self.plain:
            floor += 1
        assert missing == floor

    @rule(offset=OFFSETS)
    def has(self, offset):
        assert (offset in self.runs) == (offset in self.plain)

    @invariant()
    def equal(self):
        ascending = sorted(self.plain)
        assert list(self.runs) == ascending
        assert tuple(self.runs.runs()) == codec.runs_of(ascending)
        assert len(self.runs) == len(self.plain)
        assert bool(self.runs) == bool(self.plain)
        assert self.runs == OffsetRuns(self.runs.runs())


TestAgainstAPlainSet = Against.TestCase
TestAgainstAPlainSet.settings = settings(max_examples=50, stateful_step_count=20)


@given(RUNS)
def test_the_order_in_which_runs_are_added_does_not_matter(runs):
    assert OffsetRuns(runs) == OffsetRuns(reversed(runs)) == OffsetRuns(sorted(runs))


@given(st.lists(OFFSETS))
def test_single_offsets_and_runs_of_one_are_the_same(offsets):
    singly = OffsetRuns()
    for offset in offsets:
        singly.add(offset)
    assert singly == OffsetRuns((offset, 1) for offset in offsets)
    assert singly != OffsetRuns([(9_000, 1)])


def test_a_long_run_is_kept_as_references_to_one_number():
    found = OffsetRuns((index << 17, 1 << 16) for index in range(100))
    assert len(found) == 100 << 16
    assert {id(mask) for mask in found._blocks.values()} == {id(offset_runs._FULL)}
    # 6,400 blocks; a set of the offsets would take 400 MB.
    assert sys.getsizeof(found._blocks) < 1_000_000
