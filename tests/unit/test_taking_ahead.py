"""How many messages a worker takes ahead of its handlers."""

import threading

import pytest
from fake_queue import FakeQueue
from worker_support import JumpingClock, until

from kmqpy.core.clock import SystemClock
from kmqpy.telemetry.base import Telemetry
from kmqpy.worker.failure_log import FailureLog
from kmqpy.worker.lease_keeper import LeaseKeeper
from kmqpy.worker.outcome import ACKNOWLEDGE
from kmqpy.worker.outcome_writer import OutcomeWriter
from kmqpy.worker.taking_ahead import TakingAhead
from kmqpy.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("short_waits")


def taken(count: int, *, size: int = 1, attempts: int = 1):
    queue, body = FakeQueue(), bytes(size)
    for _ in range(count):
        queue.put(body, attempts=attempts)
    return queue.receive(count)


class TestNumber:
    @pytest.mark.parametrize(
        ("handled", "within_s", "expected"),
        [
            (8, 1.0, 8),  # a second each, in 8 threads
            (8, 1 / 16, 8),  # those that were running already
            (500, 1 / 16, 400),
            (16_000, 2.0, 400),
            (1_000_000, 1.0, 1_000),
        ],
    )
    def test_it_is_what_was_handled_in_a_twentieth_of_a_second(self, handled, within_s, expected):
        ahead = TakingAhead(8, 30.0, 0.0, grows=True)
        assert ahead.number(handled, within_s) == expected

    def test_a_moment_says_nothing(self):
        ahead = TakingAhead(8, 30.0, 0.0, grows=True)
        assert ahead.number(40, 1 / 1024) == 8
        assert ahead.number(500, 1 / 16) == 400
        assert ahead.number(500, 1 / 16 + 1 / 1024) == 400

    def test_it_shrinks_when_handlers_get_slow(self):
        ahead = TakingAhead(8, 30.0, 0.0, grows=True)
        assert ahead.number(500, 1 / 16) == 400
        assert ahead.number(508, 1 + 1 / 16) == 8

    def test_of_a_short_lease_it_uses_up_no_more_than_a_twentieth(self):
        ahead = TakingAhead(1, 0.1, 0.0, grows=True)
        assert ahead.number(100, 1 / 64) == 32

    @pytest.mark.parametrize(("limit", "expected"), [(12, 12), (-4, 8), (5_000, 1_000)])
    def test_it_grows_up_to_the_limit(self, limit, expected):
        ahead = TakingAhead(8, 30.0, 0.0, grows=True, limit=limit)
        ahead.note(taken(20))
        assert ahead.number(10_000, 1 / 16) == expected

    def test_a_number_that_was_asked_for_stays(self):
        ahead = TakingAhead(8, 30.0, 0.0, grows=False)
        ahead.note(taken(20, size=4 << 20))
        assert ahead.number(1_000, 1.0) == 8

    @pytest.mark.parametrize(
        ("messages", "expected"),
        [
            (taken(20, size=100), 400),
            (taken(20, size=1 << 20), 16),
            (taken(20, size=4 << 20), 8),
            (taken(20, attempts=2), 8),
            (taken(8) + taken(12, attempts=2), 8),
            (taken(12) + taken(8, attempts=2), 400),
        ],
        ids=["small", "1 MB", "4 MB", "come again", "most come again", "few come again"],
    )
    def test_of_large_messages_and_of_those_that_come_again_few_are_held(self, messages, expected):
        ahead = TakingAhead(8, 30.0, 0.0, grows=True)
        ahead.number(500, 1 / 16)
        ahead.note(messages)
        assert ahead.number(500, 1 / 16) == expected
        assert ahead.number(1_000, 2 / 16) == expected
        for _ in range(6):
            assert not ahead.note(taken(20))
        assert ahead.number(1_500, 3 / 16) == 400

    def test_after_those_that_come_again_it_grows_by_degrees(self):
        ahead, handled = TakingAhead(8, 30.0, 0.0, grows=True), 0
        numbers = []
        for number, attempts in enumerate([1, 2, 1, 1, 1, 2, 1], 1):
            handled += 500
            assert ahead.note(taken(20, attempts=attempts)) == (attempts == 2)
            numbers.append(ahead.number(handled, number / 16))
        assert numbers == [400, 8, 16, 32, 64, 8, 16]


def test_a_worker_with_quick_handlers_takes_hundreds_at_once():
    queue, left = FakeQueue(*["x"] * 6_000), threading.Semaphore(0)
    with Worker(queue, lambda message: left.release(), concurrency=1):
        for _ in range(6_000):
            assert left.acquire(timeout=60)
    assert queue.largest_receive > 50
    assert queue.taken == {}


class TestLinger:
    def test_outcomes_wait_for_others_only_while_there_are_messages_enough(self):
        ahead = TakingAhead(8, 30.0, 0.0, grows=True)
        assert ahead.linger_s(8) == 0
        ahead.number(500, 1 / 16)
        assert ahead.linger_s(80) == pytest.approx(0.005)
        assert ahead.linger_s(79) == 0  # as where `max_in_flight` allows no more
        ahead.number(508, 1 + 1 / 16)
        assert ahead.linger_s(80) == 0

    @pytest.mark.parametrize(("count", "linger_s"), [(50, 0.01), (120, 60.0)], ids=["short", "enough"])
    def test_those_that_come_meanwhile_are_written_together(self, count, linger_s):
        queue = FakeQueue(*["x"] * count)
        failures = FailureLog("fake", Telemetry())
        keeper = LeaseKeeper(queue, 30, SystemClock(), failures)
        held = keeper.add(queue.receive(count), lambda _: None)
        sizes = []

        def linger():
            writer.put([(one, ACKNOWLEDGE) for one in held[1:]])
            return linger_s

        writer = OutcomeWriter(queue, keeper, failures, lambda batch: sizes.append(len(batch)), linger)
        running = threading.Thread(target=writer.run, daemon=True)
        running.start()
        writer.put([(held[0], ACKNOWLEDGE)])
        until(lambda: sizes)
        writer.close()
        running.join(30)
        assert sizes == [count]

    def test_close_does_not_wait_for_others(self):
        queue = FakeQueue("x")
        failures = FailureLog("fake", Telemetry())
        keeper = LeaseKeeper(queue, 30, SystemClock(), failures)
        lingers = threading.Event()
        writer = OutcomeWriter(queue, keeper, failures, lambda _: None, lambda: lingers.set() or 60.0)
        running = threading.Thread(target=writer.run, daemon=True)
        running.start()
        writer.put([(one, ACKNOWLEDGE) for one in keeper.add(queue.receive(), lambda _: None)])
        assert lingers.wait(60)
        writer.close()
        running.join(30)
        assert queue.of("ack") == ["r1"]


def test_no_more_are_asked_for_than_may_be_in_flight():
    queue, left = FakeQueue(*["x"] * 3_000), threading.Semaphore(0)
    queue.max_in_flight = 12
    with Worker(queue, lambda message: left.release(), concurrency=1):
        for _ in range(3_000):
            assert left.acquire(timeout=60)
    assert queue.largest_receive <= 12


def test_what_was_taken_for_quick_handlers_is_given_back_when_they_are_slow(monkeypatch):
    monkeypatch.setattr(TakingAhead, "number", lambda *_: 50)
    queue, clock, gate = FakeQueue(*["x"] * 52), JumpingClock(), threading.Event()
    with Worker(queue, lambda message: gate.wait(60), concurrency=2, lease=3, clock=clock):
        until(lambda: queue.in_flight() == 52)
        clock.ahead = 1.2  # they have waited for longer than a second, and less than half of their lease
        queue.wait_until_finished(48)
        assert queue.of("nack") == [f"r{number}" for number in range(52, 4, -1)]
        assert all(how["count"] is False for how in queue.arguments("nack"))
        gate.set()
    assert queue.taken == {}


def test_of_many_messages_that_come_again_all_but_a_few_are_given_back(monkeypatch):
    """One of them may kill the process, which would cost the others an attempt, too."""
    monkeypatch.setattr("kmqpy.worker.worker._MAX_WAIT_S", 60.0)  # else slow handlers are the reason
    monkeypatch.setattr(TakingAhead, "number", lambda *_: 50)
    queue, gate = FakeQueue(), threading.Event()
    for _ in range(52):
        queue.put("x", attempts=2)
    with Worker(queue, lambda message: gate.wait(60), concurrency=2):
        queue.wait_until_finished(48)
        assert sorted(queue.taken) == ["r1", "r2", "r3", "r4"]
        assert all(how["count"] is False for how in queue.arguments("nack"))
        gate.set()


def test_a_number_of_messages_that_was_asked_for_is_kept_even_by_slow_handlers():
    queue, clock, gate = FakeQueue(*["x"] * 52), JumpingClock(), threading.Event()
    with Worker(queue, lambda message: gate.wait(60), concurrency=2, prefetch=50, lease=3, clock=clock):
        until(lambda: queue.in_flight() == 52)
        clock.ahead = 1.2
        queue.wait_for(lambda: len(set(queue.of("extend"))) == 52)
        assert queue.of("nack") == []
        gate.set()
