"""How executors take messages: none without a start marker, and none with too little of its lease."""

from types import SimpleNamespace

import pytest

from kmqpy.core.clock import SystemClock
from kmqpy.errors import Unavailable
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.markers.codec import Marker, Op, tick
from kmqpy.kafka.markers.log_cuts import Cut, LogCuts
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import taker as spark_taker
from kmqpy.spark.taker import TakenBefore, Taker

LEASE_MS = 30_000


class Clock(SystemClock):
    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeStarts:
    """Start markers take `each_s`, and fail from one of `failed` on, in turn."""

    def __init__(self, clock, each_s=0.1, failed=()):
        self._clock, self._each_s, self._failed = clock, each_s, list(failed)
        self.started = []

    def start(self, takes, delays, *_):
        self.started.append((takes, delays))
        return self

    def wait_until_confirmed(self):
        self._clock.now += self._each_s
        failed = self._failed.pop(0) if self._failed else {}
        return SimpleNamespace(last_at={0: 40 + len(self.started)}, failed=failed)


@pytest.fixture
def taker_with(monkeypatch):
    def make(**how):
        clock = Clock()
        starts = FakeStarts(clock, **how)
        monkeypatch.setattr(spark_taker, "SYSTEM_CLOCK", clock)
        monkeypatch.setattr(spark_taker, "MarkerWriter", lambda *_, **__: SimpleNamespace(starts=starts))
        return Taker(QueueSettings(name="q"), KafkaConnection()), starts

    return make


def test_start_markers_that_failed_are_written_again_and_no_others(taker_with):
    taker, starts = taker_with(failed=[{0: 12}, {0: 13}])
    delays = {(0, 11): 500, (0, 14): 500}
    assert taker.take({0: [10, 12, 13], 1: [7]}, delays, LEASE_MS) == {0: 44}
    left = {(0, 14): 500}
    assert starts.started == [({0: [10, 12, 13], 1: [7]}, delays), ({0: [12, 13]}, left), ({0: [13]}, left)]


def test_start_markers_that_take_most_of_the_lease_hand_out_nothing(taker_with):
    assert taker_with(each_s=14)[0].take({0: [10]}, {}, LEASE_MS) == {0: 42}
    with pytest.raises(Unavailable, match="took most of the lease of 30000 ms; nothing was handed out"):
        taker_with(each_s=16)[0].take({0: [10]}, {}, LEASE_MS)


def test_start_markers_that_can_not_be_written_fail_the_task(taker_with):
    with pytest.raises(Unavailable, match="start markers can't be written; nothing was handed out"):
        taker_with(failed=[{0: 10}] * 1_000)[0].take({0: [10]}, {}, LEASE_MS)


def test_tasks_share_a_reader_of_markers_and_ask_for_their_partition_alone(taker_with, monkeypatch):
    made, scans, asked = [], [], []
    topics = SimpleNamespace(check=lambda _: SimpleNamespace(ids=None))

    class Reader:
        def __init__(self, *_):
            made.append(self)

        def scan(self, starts, _):
            scans.append(starts)

    def committed(_connection, _queue, partitions, _ids):
        asked.append(list(partitions))
        return {7: Commit(500, 60)}

    monkeypatch.setattr(spark_taker, "RepeatedReader", Reader)
    monkeypatch.setattr(spark_taker, "Topics", lambda _: topics)
    monkeypatch.setattr(spark_taker, "group_commits", committed)
    taker, _ = taker_with()
    taker.taken_before(7, 500)
    taker.remember({7: (600, 70)})
    taker.taken_before(7, 600)
    taker.taken_before(7, 550)  # once more, after a failure
    assert (len(made), scans, asked) == (1, [{7: 60}, {7: 70}, {7: 60}], [[7], [7]])


def test_what_markers_say_of_messages_that_were_cut_away_is_forgotten():
    """Offsets 10 to 12 are given once more: 10 was acknowledged before, a client takes the new 11."""
    cuts = LogCuts.parse("2<3@10")
    number = cuts.number_of(11)
    log = [Marker(0, offset, Op.TAKE, LEASE_MS) for offset in (8, 9, 10, 11, 12)]
    log += [Marker(0, 9, Op.END), Marker(0, 10, Op.END), tick(0, cuts)]
    log += [Marker(0, number, Op.TAKE, LEASE_MS), tick(0, cuts), Marker(0, number, Op.END)]
    found = TakenBefore(8)
    for at, marker in enumerate(log):
        named = found.by_offset(marker)
        assert named is not None
        found.note(named, at, 1_000)
    assert found.taken(range(8, 13)) == [8, 9, 11]
    assert found.sort_out(range(8, 13)).finished == {9, 11}
    assert (found.highest, [entry.offset for entry in found.state]) == (11, [8])
    found.note(tick(0, cuts.with_cut(Cut(7, 9, 6))), len(log), 1_000)
    assert found.by_offset(Marker(0, number, Op.END)) is None
    assert (found.taken(range(8, 13)), found.highest) == ([8], 8)
