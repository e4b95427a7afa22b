"""Who looks for cut logs, doubts, and searches for lost copies. Background jobs are run by hand."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from kmqpy.errors import Unavailable
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers.codec import Marker, Op, assignment_tick, tick
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import NO_CUTS, Cut, LogCuts
from kmqpy.kafka.markers.named_copies import NamedCopy
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.cut_keeper import CutKeeper
from tracker.partition.owned_partition import OwnedPartition
from tracker.reading.existence_check import ExistenceCheck
from tracker.redelivery.redeliverer import Redeliverer
from tracker.redelivery.tick_writer import Tick
from tracker.settings import TrackerSettings

ONE = NO_CUTS.with_cut(Cut(3, 10, 2))
TWO = ONE.with_cut(Cut(5, 1000, 4))


class World:
    """A partition, its keeper, a clock, and the jobs that nobody has run yet."""

    def __init__(self, end: LogEnd, known_end: LogEnd | None = None) -> None:
        queue = QueueSettings(name="q")
        redeliverer = Redeliverer(KafkaConnection(), queue, 0, TrackerSettings())
        self.part = OwnedPartition(("q", 0), 1, queue, redeliverer)
        self.part.start_reading(InFlight(), now=0.0)
        self.part.topic_ids = ("a", "b")
        self.now = 0.0
        self.jobs = []
        self.context = MagicMock(
            connection=None,
            clock=SimpleNamespace(monotonic=lambda: self.now),
            metrics=MagicMock(),
            partitions={self.part.key: self.part},
            jobs=SimpleNamespace(run=lambda _pool, job, then: self.jobs.append((job, then))),
            problems=MagicMock(about=lambda _key: {}),
            supervisor=SimpleNamespace(surviving=lambda _part: nullcontext()),
        )
        self.ticks = MagicMock()
        self.keeper = CutKeeper(self.context, self.ticks)
        self.part.catch_up_to(Tick(0, 0, 0.0), end, known_end=known_end)

    def read(self, *markers: Marker) -> None:
        """Apply markers, as the tracker's loop does."""
        state = self.part.state
        for marker in markers:
            state.apply(marker, state.position, state.position + 1)
            for cut_away in state.cut_away:
                self.keeper.cut_away(self.part, cut_away)
            state.cut_away.clear()

    def finish(self, found: object) -> None:
        """End the oldest job with this result."""
        self.jobs.pop(0)[1](found)

    def searched(self) -> list[tuple[LogCuts, int]]:
        """With which cuts, and from where on, jobs search for lost copies now."""
        return [(job.args[3], job.args[4].start) for job, _ in self.jobs]


def test_r39_a_doubt_ends_after_ten_seconds_for_what_is_taken_later_too():
    """Clients that write no ticks take on after an election; a tick of another kind of client is old."""
    world = World(LogEnd(1000, 4))
    world.read(assignment_tick(0, 0, epoch=2))
    redelivers = []
    for second in range(60):
        world.now = float(second)
        world.read(Marker(0, 100 + 2 * second, Op.TAKE, 300_000))
        world.keeper.end_told(world.part, LogEnd(1000, 4))
        if world.jobs:
            world.read(Marker(0, 101 + 2 * second, Op.TAKE, 300_000))  # while the job runs
            world.finish(Cut(4, 50, 2))
        redelivers.append(world.part.log.epoch == 4)
    assert redelivers.index(True) <= 13
    assert all(redelivers[13:])
    assert world.part.problem_texts() == []
    world.read(assignment_tick(0, 0, epoch=4))
    assert world.part.last_taken is not None, "from the next tick on, epochs are known again"


@pytest.mark.parametrize("told", [True, False])
def test_r39_a_doubt_that_is_over_is_no_problem_any_more(told):
    world = World(LogEnd(1000, 4))
    world.read(assignment_tick(0, 0, epoch=2), Marker(0, 100, Op.TAKE, 300_000))
    world.keeper.end_told(world.part, LogEnd(1000, 4))
    world.finish(Cut(4, 50, 2))
    assert "perhaps cut back" in world.part.problem_texts()[0]
    if told:
        world.read(assignment_tick(0, 50, epoch=4, cuts=NO_CUTS.with_cut(Cut(4, 50, 2))))
    else:
        world.part.is_intact(world.part.last_taken, 4)
    assert not [text for text in world.part.problem_texts() if "perhaps" in text]


def test_r39_who_takes_with_the_new_epoch_and_tells_no_cut_ends_the_doubt():
    world = World(LogEnd(1000, 4), known_end=LogEnd(1000, 4))
    world.read(assignment_tick(0, 0, epoch=2), Marker(0, 100, Op.TAKE, 300_000))
    world.keeper.end_told(world.part, LogEnd(1000, 4))
    world.finish(Cut(4, 50, 2))
    assert world.part.may_be_cut
    world.read(assignment_tick(0, 101, epoch=4), Marker(0, 101, Op.TAKE, 300_000))
    world.keeper.end_told(world.part, LogEnd(1000, 4))
    assert not world.jobs
    assert not world.part.may_be_cut


def test_r39_a_log_is_looked_at_until_that_has_worked_though_no_marker_comes():
    world = World(LogEnd(12, 1), known_end=LogEnd(12, 1))
    world.read(Marker(0, 11, Op.TAKE, 300_000))
    existence = ExistenceCheck(world.context, MagicMock(), MagicMock(), world.keeper)

    def ask(then: object) -> bool:
        """Whether Kafka is asked, and tells of an election, and the job that looks ends so."""
        world.now += 10
        existence.ask(world.now)
        if is_asked := bool(world.jobs):
            world.finish({world.part.key: LogEnd(1000, 5)})
            world.finish(then)
        return is_asked

    assert ask(Unavailable("Kafka is away"))
    assert ask(None), "the look failed, and nobody took or acknowledged anything"
    assert not ask(None)


def test_r39_a_doubt_ends_though_no_marker_comes():
    world = World(LogEnd(1000, 4), known_end=LogEnd(1000, 4))
    world.read(assignment_tick(0, 0, epoch=2), Marker(0, 100, Op.TAKE, 300_000))
    existence = ExistenceCheck(world.context, MagicMock(), MagicMock(), world.keeper)
    doubts = []
    for _ in range(9):
        world.now += 2
        existence.ask(world.now)
        if world.jobs:
            world.finish({world.part.key: LogEnd(1000, 4)})
        if world.jobs:
            world.finish(Cut(4, 50, 2))
        doubts.append("perhaps cut back" in "".join(world.part.problem_texts()))
    assert doubts[0]
    assert not doubts[-1]


def test_r39_what_a_told_cut_has_taken_away_proves_no_other_cut():
    """A tick is read while a job looks for a record: it finds that the log was cut even lower since."""
    world = World(LogEnd(1000, 5), known_end=LogEnd(12, 2))
    world.keeper.end_told(world.part, LogEnd(1000, 5))
    look = world.jobs.pop()[1]
    world.read(tick(0, ONE))
    world.jobs.clear()
    look(Cut(5, 9, 2))
    assert world.ticks.post_tick.call_count == 0
    world.keeper.end_told(world.part, LogEnd(1000, 5))
    world.finish(Cut(5, 9, 3))
    assert world.ticks.post_tick.call_count == 1, "of what stood behind that cut, another look tells"


def test_r39_of_two_cuts_each_has_its_search():
    """The ticks of both are read at once: by a tracker that takes over."""
    world = World(LogEnd(1000, 5))
    world.read(tick(0, ONE), tick(0, TWO))
    assert world.searched() == [(ONE, 10)]
    world.finish(0)
    assert world.searched() == [(TWO, 10)], "a cut was told meanwhile"
    world.finish(1)
    assert world.searched() == [(TWO, 1000)]
    assert world.part.searches, "the offset is not stored before the last one has ended"
    world.finish(1)
    assert (world.searched(), world.part.searches) == ([], [])


def test_r39_claims_are_unsure_before_it_is_known_whether_the_last_copy_was_aborted():
    """Else a successor would believe them, and look no more; see seed 970256 in tests/simulation."""
    world = World(LogEnd(20, 1), known_end=LogEnd(5, 0))
    world.part.state.copies.restore(NamedCopy(3, 0))
    world.keeper.end_told(world.part, LogEnd(20, 1))
    world.finish(None)
    assert world.searched() == [(NO_CUTS, 4)]
    world.finish(Unavailable("a transaction before the cut is open; try again"))
    assert "a transaction before the cut is open" in world.part.problem_texts()[0]
    assert not world.part.log.whole
    world.finish(1)
    assert (world.part.log.whole, world.part.problem_texts()) == (True, [])


def test_r39_where_no_copy_is_known_nobody_searches():
    world = World(LogEnd(20, 1), known_end=LogEnd(5, 0))
    world.keeper.end_told(world.part, LogEnd(20, 1))
    world.finish(None)
    assert (world.searched(), world.part.log.epoch) == ([], 1)


def test_r39_a_search_that_fails_is_tried_again_and_others_wait():
    world = World(LogEnd(1000, 5), known_end=LogEnd(8, 4))
    world.part.state.copies.restore(NamedCopy(6, 4))
    world.read(tick(0, ONE))
    for epoch in (5, 6):
        world.now += 10
        world.keeper.end_told(world.part, LogEnd(1000, epoch))
        world.jobs.pop()[1](None)
    world.finish(Unavailable("Kafka is away"))
    assert world.searched() == [(ONE, 10)]
    world.finish(0)
    assert world.searched() == [(ONE, 7)], "one of this kind waits"
    world.finish(0)
    assert (world.part.log.epoch, world.searched()) == (6, [])


def test_r39_a_search_of_a_partition_that_is_read_anew_comes_to_nothing():
    world = World(LogEnd(1000, 5))
    world.read(tick(0, ONE))
    world.part.start_reading(InFlight(), now=1.0)
    world.finish(1)
    assert world.searched() == []
