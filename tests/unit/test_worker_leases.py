"""Leases that a worker extends, and those that it loses."""

import threading
import time

import pytest
from fake_queue import FakeQueue
from worker_support import Failures, JumpingClock

from kmqpy.core.clock import SystemClock
from kmqpy.errors import ConfigError, KmqError, Unavailable
from kmqpy.telemetry.base import Telemetry
from kmqpy.worker.failure_log import FailureLog
from kmqpy.worker.lease_keeper import LeaseKeeper, call_for_all
from kmqpy.worker.outcome import Retry
from kmqpy.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("short_waits")


class TestLeases:
    def test_the_lease_is_extended_while_the_handler_runs_and_never_after(self):
        queue = FakeQueue("x")
        gate = threading.Event()
        with Worker(queue, lambda message: gate.wait(60), lease=0.6):
            queue.wait_for(lambda: len(queue.of("extend")) >= 3)
            gate.set()
            queue.wait_until_finished(1)
            time.sleep(0.3)
        ops = [op for op, _, _ in queue.calls]
        assert ops == ["extend"] * (len(ops) - 1) + ["ack"]
        assert queue.arguments("extend")[0] == {"lease": 0.6}

    def test_it_is_extended_at_about_a_third(self):
        queue = FakeQueue("x")
        gate = threading.Event()
        with Worker(queue, lambda message: gate.wait(60), lease=1.5):
            time.sleep(1.2)
            gate.set()
            queue.wait_until_finished(1)
        assert 1 <= len(queue.of("extend")) <= 2

    def test_a_quick_handler_costs_no_extension(self):
        queue = FakeQueue(*["x"] * 100)
        with Worker(queue, lambda message: None, lease=5):
            queue.wait_until_finished(100)
        assert queue.of("extend") == []

    def test_no_extension_follows_the_end_of_its_message(self):
        """The handler ends while an extension is under way: the end waits for it."""
        queue = FakeQueue("x")
        extending, gate = threading.Event(), threading.Event()

        def slow():
            extending.set()
            time.sleep(0.1)

        queue.before_extend = slow

        def handler(message):
            assert extending.wait(60)

        with Worker(queue, handler, lease=0.6):
            queue.wait_until_finished(1)
        gate.set()
        assert [op for op, _, _ in queue.calls] == ["extend", "ack"]

    def test_a_message_that_ended_before_its_extension_began_is_left_alone(self):
        queue = FakeQueue("x")
        (message,) = queue.receive()
        clock = JumpingClock()
        keeper = LeaseKeeper(queue, 0.6, clock, FailureLog("fake", Telemetry()))
        held = keeper.add([message], lambda _: None)
        assert keeper.finish(held) == held
        assert keeper.finish(held) == []
        clock.ahead = 0.5
        keeper.extend_due()
        assert queue.calls == []

    def test_all_leases_that_are_due_are_extended_in_one_call(self):
        queue, clock, calls = FakeQueue(*["x"] * 400), JumpingClock(), []
        queue.before_extend = lambda: calls.append(1)
        keeper = LeaseKeeper(queue, 30, clock, FailureLog("fake", Telemetry()))
        keeper.add(queue.receive(400), lambda _: None)
        keeper.extend_due()
        assert calls == []
        clock.ahead = 11
        keeper.extend_due()
        assert (len(calls), len(queue.of("extend"))) == (1, 400)

    def test_a_bad_message_does_not_cost_the_extension_of_others(self):
        queue, clock, failures = FakeQueue(*"abc"), JumpingClock(), Failures()
        extend = queue.extend

        def picky(*messages, lease, confirmed=False):
            if any(message.receipt == "r2" for message in messages):
                raise KmqError("bad")
            return extend(*messages, lease=lease)

        queue.extend = picky
        keeper = LeaseKeeper(queue, 30, clock, FailureLog("fake", failures))
        keeper.add(queue.receive(), lambda _: None)
        clock.ahead = 11
        keeper.extend_due()
        assert sorted(queue.of("extend")) == ["r1", "r3"]
        assert failures.what == ["extend"]

    def test_a_bad_message_among_hundreds_costs_a_few_calls(self):
        queue, calls = FakeQueue(*["x"] * 400), []

        def picky(messages):
            calls.append(len(messages))
            if any(message.receipt == "r123" for message in messages):
                raise KmqError("bad")

        keeper = LeaseKeeper(queue, 30, SystemClock(), FailureLog("fake", Telemetry()))
        held = keeper.add(queue.receive(400), lambda _: None)
        assert [one.message.receipt for one in call_for_all(picky, held)] == ["r123"]
        assert len(calls) < 20

    def test_what_waits_is_extended_too(self):
        queue = FakeQueue("a", "b")
        gate = threading.Event()
        with Worker(queue, lambda message: gate.wait(60), concurrency=1, prefetch=1, lease=0.6):
            queue.wait_for(lambda: {"r1", "r2"} <= set(queue.of("extend")))
            gate.set()
            queue.wait_until_finished(2)

    def test_a_message_whose_lease_was_lost_is_not_handled(self):
        queue = FakeQueue("a", "b")
        failures = Failures()
        handled = []
        gate = threading.Event()

        def broken():
            raise Unavailable("away")

        queue.before_extend = broken

        def handler(message):
            handled.append(message.body)
            gate.wait(60)

        with Worker(queue, handler, concurrency=1, prefetch=1, lease=0.8, telemetry=failures):
            queue.wait_for(lambda: queue.in_flight() == 2)
            time.sleep(0.5)
            gate.set()
            queue.wait_until_finished(1)
            time.sleep(0.05)
        assert handled == [b"a"]
        assert "extend" in failures.what
        assert "stale leases" in failures.what
        (*_, (op, receipt, how)) = queue.calls
        assert (op, receipt, how["count"]) == ("nack", "r2", False)  # given back: it was no attempt

    def test_a_message_whose_lease_ended_while_the_process_stood_still_is_not_handled(self):
        queue = FakeQueue("a", "b")
        failures, clock = Failures(), JumpingClock()
        handled = []
        begun, gate = threading.Event(), threading.Event()

        def handler(message):
            handled.append(message.body)
            begun.set()
            gate.wait(60)

        options = {"concurrency": 1, "prefetch": 1, "lease": 0.6, "telemetry": failures, "clock": clock}
        with Worker(queue, handler, **options):
            assert begun.wait(60)
            clock.ahead = 1.0
            queue.wait_for(lambda: {"r1", "r2"} <= set(queue.of("extend")))
            gate.set()
            queue.wait_until_finished(1)
            time.sleep(0.05)
        assert handled == [b"a"]
        assert failures.what == ["stale leases"]

    def test_a_lease_that_ended_makes_room_for_the_next_message(self):
        clock = JumpingClock()
        queue = FakeQueue("a")
        worker = Worker(queue, print, concurrency=1, prefetch=0, clock=clock)
        worker._accept(queue.receive())
        taker = threading.Thread(target=worker._wait_for_room, daemon=True)
        taker.start()
        while not worker._changed._waiters:
            time.sleep(0.001)
        clock.ahead = 60.0
        server = threading.Thread(target=worker._run_handlers, daemon=True)
        server.start()
        writer = threading.Thread(target=worker._outcomes.run, daemon=True)
        writer.start()
        taker.join(60)
        noticed = not taker.is_alive()
        worker.stop()
        server.join(60)
        worker._outcomes.close()
        writer.join(60)
        assert noticed


class Leases(FakeQueue):
    """Notes the leases that are asked for."""

    asked: float | None = None

    def receive(self, max_messages=100, *, wait=1.0, lease=None):
        self.asked = lease
        return super().receive(max_messages, wait=wait, lease=lease)


@pytest.mark.parametrize(("of_queue", "said", "asked"), [(None, None, 30), (10, None, 10), (10, 5, 5)])
def test_leases_are_those_of_the_queue_unless_said(of_queue, said, asked):
    queue = Leases("x")
    if of_queue:
        queue.default_lease = of_queue
    with Worker(queue, lambda message: None, lease=said):
        queue.wait_until_finished(1)
    assert queue.asked == asked


def test_a_lease_longer_than_the_queue_allows_is_refused_at_once():
    queue = FakeQueue()
    queue.max_lease = 10.0
    Worker(queue, print, lease=10)
    with pytest.raises(ConfigError, match=r"lease: 10.001 s is longer than max_lease .* 10.0 s"):
        Worker(queue, print, lease=10.001)


class TestLost:
    """Messages that extend() names: they are no longer the worker's."""

    @pytest.mark.parametrize("fails", [False, True])
    def test_a_lost_message_is_extended_no_more_and_at_most_acknowledged(self, fails):
        queue, failures, lost = FakeQueue("a", "b"), Failures(), []
        queue.lost = {"r1"}
        gate = threading.Event()

        def handler(message):
            assert gate.wait(60)
            if fails and message.receipt == "r1":
                raise Retry(delay=0)

        options = {"concurrency": 2, "lease": 0.6, "telemetry": failures, "on_lost": lost.append}
        with Worker(queue, handler, **options):
            queue.wait_for(lambda: len(queue.of("extend")) >= 6)
            gate.set()
            queue.wait_for(lambda: len(queue.of("ack")) == 2 - fails)
        assert queue.of("extend").count("r1") == 1
        assert [message.receipt for message in lost] == ["r1"]
        assert failures.what == ["lost"]
        assert (sorted(queue.of("ack")), queue.of("nack")) == (["r2"] if fails else ["r1", "r2"], [])

    def test_a_message_that_is_lost_before_its_turn_is_not_handled(self):
        queue, handled = FakeQueue(*"abc"), []
        queue.lost = {"r2"}
        gate = threading.Event()

        def handler(message):
            handled.append(message.body)
            assert gate.wait(60)

        with Worker(queue, handler, concurrency=1, prefetch=2, lease=1.5):
            queue.wait_for(lambda: {"r1", "r2", "r3"} <= set(queue.of("extend")))
            gate.set()
            queue.wait_for(lambda: len(queue.of("ack")) == 2)
        assert handled == [b"a", b"c"]
        assert (queue.of("ack"), queue.of("nack")) == (["r1", "r3"], [])

    def test_a_callback_that_fails_is_counted_and_called_for_the_others(self):
        queue, failures, lost = FakeQueue("a", "b"), Failures(), []
        queue.lost = {"r1", "r2"}
        gate = threading.Event()

        def on_lost(message):
            lost.append(message.receipt)
            raise ValueError("a bug")

        options = {"concurrency": 2, "lease": 0.6, "telemetry": failures, "on_lost": on_lost}
        with Worker(queue, lambda message: gate.wait(60), **options):
            queue.wait_for(lambda: len(queue.of("extend")) >= 2)
            gate.set()
            queue.wait_for(lambda: len(queue.of("ack")) == 2)
        assert sorted(lost) == ["r1", "r2"]
        assert failures.what.count("worker thread") == 2
        with pytest.raises(ConfigError, match="on_lost"):
            Worker(queue, print, on_lost="print")
