import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict

import pytest
from fake_queue import FakeQueue
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SystemClock
from kmqpy.errors import Closed, ConfigError, Fenced, KmqError, Unavailable
from kmqpy.queue import Queue
from kmqpy.telemetry.base import Telemetry
from kmqpy.testing import memory_storage
from kmqpy.worker.asyncio import AsyncQueue
from kmqpy.worker.failures import Failures as FailureReports
from kmqpy.worker.keyed_fifo import KeyedFifo
from kmqpy.worker.lease_keeper import LeaseKeeper, call_for_all
from kmqpy.worker.outcome import Reject, Retry, described
from kmqpy.worker.worker import Worker

EXACT = Backoff(0.5, 2, 4, jitter=0)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("kmqpy.worker.worker._RECEIVE_WAIT_S", 0.02)


class JumpingClock(SystemClock):
    ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead


class Failures(Telemetry):
    def __init__(self):
        self.what: list[str] = []

    def failed(self, queue, what, count=1):
        self.what.append(what)


def until(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_fake_speaks_the_protocol():
    queue: Queue = FakeQueue()
    assert queue.name == "fake"


class TestLanes:
    @given(st.lists(st.one_of(st.none(), st.sampled_from([b"a", b"b", b"c"]))), st.randoms())
    def test_one_of_a_key_at_a_time_in_order_and_none_is_forgotten(self, keys, chance):
        lanes: KeyedFifo[tuple[bytes | None, int]] = KeyedFifo()
        todo = list(enumerate(keys))
        running: list[tuple[bytes | None, int]] = []
        started: list[tuple[bytes | None, int]] = []
        while todo or running or len(started) < len(keys):
            if todo and chance.random() < 0.5:
                number, key = todo.pop(0)
                lanes.add(key, (key, number))
            elif running and chance.random() < 0.5:
                lanes.done(running.pop(chance.randrange(len(running)))[0])
            elif (item := lanes.start()) is not None:
                running.append(item)
                started.append(item)
            busy = [key for key, _ in running if key is not None]
            assert len(busy) == len(set(busy))
        assert sorted(number for _, number in started) == list(range(len(keys)))
        for key in (b"a", b"b", b"c"):
            order = [number for one, number in started if one == key]
            assert order == sorted(order)

    def test_an_item_of_another_key_is_not_held_up(self):
        lanes: KeyedFifo[int] = KeyedFifo()
        for key, item in ((b"a", 1), (b"a", 2), (b"b", 3)):
            lanes.add(key, item)
        assert (lanes.start(), lanes.start(), lanes.start()) == (1, 3, None)
        lanes.done(b"a")
        assert lanes.start() == 2

    def test_clear_returns_what_was_not_started(self):
        lanes: KeyedFifo[int] = KeyedFifo()
        for key, item in ((b"a", 1), (b"a", 2), (b"b", 3), (b"b", 4), (None, 5)):
            lanes.add(key, item)
        assert lanes.start() == 1
        assert sorted(lanes.clear()) == [2, 3, 4, 5]
        lanes.done(b"a")
        lanes.add(b"a", 6)
        lanes.add(b"b", 7)
        assert (lanes.start(), lanes.start(), lanes.start()) == (6, 7, None)


class TestBackoff:
    def test_it_grows_up_to_its_maximum(self):
        assert [EXACT.delay(attempts) for attempts in (1, 2, 3, 4, 5, 10**6)] == [0.5, 1, 2, 4, 4, 4]

    @given(st.integers(1, 100), st.floats(0, 1))
    def test_jitter_stays_around_it_and_below_the_maximum(self, attempts, jitter):
        plain = EXACT.delay(attempts)
        delay = Backoff(0.5, 2, 4, jitter).delay(attempts)
        assert plain * (1 - jitter) <= delay <= min(4, plain * (1 + jitter))

    @pytest.mark.parametrize(
        "bad", [{"first": -1}, {"maximum": -1}, {"factor": 0.5}, {"factor": float("nan")}, {"jitter": 2}]
    )
    def test_bad_numbers_are_refused_by_name(self, bad):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Backoff(**bad)


class TestOutcomes:
    def test_a_message_is_acknowledged_when_the_handler_returns(self):
        queue = FakeQueue("a", "b", "c")
        with Worker(queue, lambda message: None):
            queue.wait_until_finished(3)
        assert sorted(queue.of("ack")) == ["r1", "r2", "r3"]
        assert queue.taken == {}

    def test_an_error_gives_it_back_with_growing_delay_and_the_reason(self):
        queue = FakeQueue()
        for attempts in (1, 2, 3):
            queue.put("x", attempts=attempts)

        def handler(message):
            raise ValueError("line one\n  line two")

        with Worker(queue, handler, concurrency=1, backoff=EXACT):
            queue.wait_until_finished(3)
        assert queue.arguments("nack") == [
            {"delay": delay, "count": True, "reason": "ValueError: line one line two"}
            for delay in (0.5, 1, 2)
        ]

    def test_reject_makes_a_dead_letter(self):
        queue = FakeQueue("x")

        def handler(message):
            raise Reject("no such customer")

        with Worker(queue, handler):
            queue.wait_until_finished(1)
        assert queue.arguments("dead_letter") == [{"reason": "no such customer"}]

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (Retry(), {"delay": 0.5, "count": True, "reason": None}),
            (Retry(7, count=False), {"delay": 7, "count": False, "reason": None}),
            (Retry(0, reason="busy"), {"delay": 0, "count": True, "reason": "busy"}),
        ],
    )
    def test_retry_says_when_and_whether_it_counts(self, error, expected):
        queue = FakeQueue("x")

        def handler(message):
            raise error

        with Worker(queue, handler, backoff=EXACT):
            queue.wait_until_finished(1)
        assert queue.arguments("nack") == [expected]

    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
    def test_an_error_that_would_end_the_thread_does_not_end_the_worker(self, kind):
        queue = FakeQueue("bad", "good", "good")

        def handler(message):
            if message.body == b"bad":
                raise kind("x")

        with Worker(queue, handler, concurrency=1):
            queue.wait_until_finished(3)
        assert queue.of("nack") == ["r1"]
        assert queue.of("ack") == ["r2", "r3"]

    def test_an_error_of_the_workers_own_ends_no_thread(self):
        class Broken(Backoff):
            def delay(self, attempts):
                raise SystemExit

        queue = FakeQueue("bad", "good")
        failures = Failures()

        def handler(message):
            if message.body == b"bad":
                raise ValueError

        with Worker(queue, handler, concurrency=1, backoff=Broken(), telemetry=failures):
            queue.wait_until_finished(1)
        assert queue.of("ack") == ["r2"]
        assert failures.what == ["worker thread"]

    def test_an_acknowledgement_that_fails_costs_only_itself(self):
        queue = FakeQueue("a", "b")
        failures = Failures()

        def broken():
            queue.before_ack = lambda: None
            queue.taken.pop("r1")  # refused, alone or in a batch

        queue.before_ack = broken
        with Worker(queue, lambda message: None, concurrency=1, telemetry=failures):
            queue.wait_until_finished(1)
        assert queue.of("ack") == ["r2"]
        assert failures.what == ["settle"]

    def test_messages_that_end_while_an_acknowledgement_is_under_way_are_acknowledged_together(self):
        queue = FakeQueue(*["x"] * 20)
        sizes, begun, gate = [], threading.Event(), threading.Event()
        ack = queue.ack

        def slow(*messages, wait=False):
            sizes.append(len(messages))
            begun.set()
            assert gate.wait(60)
            ack(*messages)

        queue.ack = slow
        handled = []
        with Worker(queue, handled.append, concurrency=2, prefetch=18):
            assert begun.wait(60)
            until(lambda: len(handled) == 20)
            gate.set()
        assert len(queue.of("ack")) == 20
        assert len(sizes) <= 2 + 1  # two batches, and a message that was just being put

    @pytest.mark.parametrize(("error", "calls"), [(Unavailable("away"), 1), (KmqError("bad"), 1 + 2 + 2)])
    def test_a_batch_that_is_refused_is_tried_in_halves_but_not_while_nobody_answers(self, error, calls):
        made = []

        def refuse(messages):
            made.append(len(messages))
            raise error

        keeper = LeaseKeeper(FakeQueue(), 30, SystemClock(), FailureReports("fake", Telemetry()))
        queue = FakeQueue("a", "b", "c")
        held = keeper.hold(queue.receive(), lambda _: None)
        assert call_for_all(refuse, held) == dict.fromkeys(held, error)
        assert len(made) == calls

    def test_telemetry_that_fails_costs_no_message(self):
        class Broken(Telemetry):
            def processing(self, message):
                raise RuntimeError("telemetry")

            def failed(self, queue, what, count=1):
                raise RuntimeError("telemetry")

        queue = FakeQueue("a")
        with Worker(queue, lambda message: None, telemetry=Broken()):
            queue.wait_until_finished(1)
        assert queue.of("nack") == ["r1"]

    def test_reasons_are_short_and_need_no_text(self):
        class Silent(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        assert described(Silent()) == "Silent"
        assert described(ValueError()) == "ValueError"
        assert described(ValueError("x" * 1000)) == "ValueError: " + "x" * 187 + "…"
        assert described(ValueError("\ud800")) == "ValueError: ?"


class TestTaking:
    def test_no_more_is_taken_than_can_start_soon(self):
        queue = FakeQueue(*["x"] * 50)
        gate = threading.Event()
        with Worker(queue, lambda message: gate.wait(5), concurrency=2, prefetch=3) as worker:
            queue.wait_for(lambda: queue.in_flight() == 5)
            time.sleep(0.1)
            assert queue.in_flight() == 5
            gate.set()
            queue.wait_until_finished(50)
        assert worker.stopping
        assert queue.most_taken == 5

    def test_nothing_is_taken_ahead_without_prefetch(self):
        queue = FakeQueue(*["x"] * 20)
        with Worker(queue, lambda message: None, concurrency=3, prefetch=0):
            queue.wait_until_finished(20)
        assert queue.most_taken <= 3

    def test_handlers_run_at_the_same_time(self):
        together = threading.Barrier(4, timeout=5)
        queue = FakeQueue(*["x"] * 4)
        with Worker(queue, lambda message: together.wait(), concurrency=4):
            queue.wait_until_finished(4)
        assert len(queue.of("ack")) == 4

    def test_errors_of_receive_are_got_over(self):
        queue = FakeQueue("x")
        failures = Failures()
        errors = [Unavailable("away"), RuntimeError("from the library"), KmqError("odd")]

        def broken():
            if errors:
                raise errors.pop()

        queue.before_receive = broken
        with Worker(queue, lambda message: None, telemetry=failures):
            queue.wait_until_finished(1)
        assert failures.what == ["receive"] * 3

    def test_while_receive_fails_it_is_not_called_all_the_time(self):
        queue = FakeQueue()
        calls = []

        def broken():
            calls.append(time.monotonic())
            raise Unavailable("away")

        queue.before_receive = broken
        with Worker(queue, lambda message: None):
            time.sleep(0.3)
        assert 1 <= len(calls) < 20

    @pytest.mark.parametrize(
        "error", [ConfigError("lease: too long"), Closed("closed"), Fenced("by another")]
    )
    def test_run_raises_what_no_waiting_mends(self, error):
        queue = FakeQueue("x")

        def broken():
            raise error

        queue.before_receive = broken
        worker = Worker(queue, lambda message: None)
        with pytest.raises(type(error)):
            worker.run()
        assert worker.failure is error


class TestOrdering:
    def test_messages_of_a_key_are_handled_one_at_a_time_in_order(self):
        queue = FakeQueue()
        chance = random.Random(4)
        for number in range(120):
            queue.put(str(number), key=chance.choice("abcde"))
        seen = defaultdict(list)
        running = defaultdict(int)
        overlaps = []
        lock = threading.Lock()

        def handler(message):
            with lock:
                running[message.key] += 1
                overlaps.append(running[message.key] > 1)
                seen[message.key].append(int(message.body))
            time.sleep(0.001)
            with lock:
                running[message.key] -= 1

        with Worker(queue, handler, concurrency=8, ordering="key"):
            queue.wait_until_finished(120)
        assert not any(overlaps)
        assert all(numbers == sorted(numbers) for numbers in seen.values())
        assert sum(map(len, seen.values())) == 120

    def test_a_slow_key_does_not_hold_up_the_others(self):
        queue = FakeQueue()
        for number in range(10):
            queue.put(f"slow {number}", key="slow")
        for number in range(10):
            queue.put(f"quick {number}", key=f"quick {number}")
        gate = threading.Event()

        def handler(message):
            if message.key == b"slow":
                assert gate.wait(5)

        with Worker(queue, handler, concurrency=2, ordering="key"):
            queue.wait_until_finished(10)
            assert len(queue.of("ack")) == 10
            gate.set()
            queue.wait_until_finished(20)

    def test_a_failed_message_lets_the_next_of_its_key_go_on(self):
        queue = FakeQueue()
        for body in ("bad", "good"):
            queue.put(body, key="k")

        def handler(message):
            if message.body == b"bad":
                raise ValueError

        with Worker(queue, handler, ordering="key"):
            queue.wait_until_finished(2)
        assert (queue.of("nack"), queue.of("ack")) == (["r1"], ["r2"])


class TestLeases:
    def test_the_lease_is_extended_while_the_handler_runs_and_never_after(self):
        queue = FakeQueue("x")
        gate = threading.Event()
        with Worker(queue, lambda message: gate.wait(5), lease=0.15):
            queue.wait_for(lambda: len(queue.of("extend")) >= 3)
            gate.set()
            queue.wait_until_finished(1)
            time.sleep(0.2)
        ops = [op for op, _, _ in queue.calls]
        assert ops == ["extend"] * (len(ops) - 1) + ["ack"]
        assert queue.arguments("extend")[0] == {"lease": 0.15}

    def test_it_is_extended_at_about_a_third(self):
        queue = FakeQueue("x")
        gate = threading.Event()
        with Worker(queue, lambda message: gate.wait(5), lease=1.5):
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
            assert extending.wait(5)

        with Worker(queue, handler, lease=0.6):
            queue.wait_until_finished(1)
        gate.set()
        assert [op for op, _, _ in queue.calls] == ["extend", "ack"]

    def test_a_message_that_ended_before_its_extension_began_is_left_alone(self):
        queue = FakeQueue("x")
        (message,) = queue.receive()
        clock = JumpingClock()
        keeper = LeaseKeeper(queue, 0.6, clock, FailureReports("fake", Telemetry()))
        held = keeper.hold([message], lambda _: None)
        assert keeper.finish(held) == held
        assert keeper.finish(held) == []
        clock.ahead = 0.5
        keeper.extend_due()
        assert queue.calls == []

    def test_all_leases_that_are_due_are_extended_in_one_call(self):
        queue, clock, calls = FakeQueue(*["x"] * 400), JumpingClock(), []
        queue.before_extend = lambda: calls.append(1)
        keeper = LeaseKeeper(queue, 30, clock, FailureReports("fake", Telemetry()))
        keeper.hold(queue.receive(400), lambda _: None)
        keeper.extend_due()
        assert calls == []
        clock.ahead = 11
        keeper.extend_due()
        assert (len(calls), len(queue.of("extend"))) == (1, 400)

    def test_a_bad_message_does_not_cost_the_extension_of_others(self):
        queue, clock, failures = FakeQueue(*"abc"), JumpingClock(), Failures()
        extend = queue.extend

        def picky(*messages, lease, wait=False):
            if any(message.receipt == "r2" for message in messages):
                raise KmqError("bad")
            extend(*messages, lease=lease)

        queue.extend = picky
        keeper = LeaseKeeper(queue, 30, clock, FailureReports("fake", failures))
        keeper.hold(queue.receive(), lambda _: None)
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

        keeper = LeaseKeeper(queue, 30, SystemClock(), FailureReports("fake", Telemetry()))
        held = keeper.hold(queue.receive(400), lambda _: None)
        assert [one.message.receipt for one in call_for_all(picky, held)] == ["r123"]
        assert len(calls) < 20

    def test_what_waits_is_extended_too(self):
        queue = FakeQueue("a", "b")
        gate = threading.Event()
        with Worker(queue, lambda message: gate.wait(5), concurrency=1, prefetch=1, lease=0.6):
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
            gate.wait(5)

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
            gate.wait(5)

        options = {"concurrency": 1, "prefetch": 1, "lease": 0.6, "telemetry": failures, "clock": clock}
        with Worker(queue, handler, **options):
            assert begun.wait(5)
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
        server = threading.Thread(target=worker._serve, daemon=True)
        server.start()
        settler = threading.Thread(target=worker._settler.run, daemon=True)
        settler.start()
        taker.join(2)
        noticed = not taker.is_alive()
        worker.stop()
        server.join(5)
        worker._settler.close()
        settler.join(5)
        assert noticed


class TestStopping:
    def test_what_has_not_begun_is_given_back_at_once_and_does_not_count(self):
        queue = FakeQueue(*["x"] * 5)
        begun, gate = threading.Event(), threading.Event()

        def handler(message):
            begun.set()
            assert gate.wait(5)

        worker = Worker(queue, handler, concurrency=1, prefetch=4)
        worker.start()
        assert begun.wait(5)
        queue.wait_for(lambda: queue.in_flight() == 5)
        stopper = threading.Thread(target=worker.stop)
        stopper.start()
        queue.wait_until_finished(4)
        assert queue.arguments("nack") == [{"delay": 0, "count": False, "reason": None}] * 4
        assert queue.of("ack") == []
        gate.set()
        stopper.join(5)
        assert queue.of("ack") == ["r1"]
        assert queue.taken == {}

    def test_handlers_that_do_not_end_in_time_lose_their_message_uncounted(self):
        queue = FakeQueue("x")
        begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

        def handler(message):
            begun.set()
            gate.wait(5)
            ended.set()

        failures = Failures()
        worker = Worker(queue, handler, drain_timeout=0.1, telemetry=failures)
        worker.start()
        assert begun.wait(5)
        worker.stop()
        assert queue.arguments("nack") == [{"delay": 0, "count": False, "reason": None}]
        gate.set()
        assert ended.wait(5)
        time.sleep(0.05)
        assert queue.of("ack") == []
        assert failures.what == []  # the late end was not even tried

    def test_messages_that_arrive_during_the_stop_are_given_back(self):
        queue = FakeQueue()
        worker = Worker(queue, lambda message: None)
        arrived = threading.Event()

        def late():
            if not arrived.is_set():
                arrived.set()
                worker.stop(wait=False)
                queue.put("x")

        queue.before_receive = late
        worker.start()
        worker.stop()
        assert queue.arguments("nack") == [{"delay": 0, "count": False, "reason": None}]

    def test_a_receive_that_hangs_holds_up_nothing_and_its_messages_are_given_back(self, monkeypatch):
        monkeypatch.setattr("kmqpy.worker.worker._TAKER_GRACE_S", 0.1)
        queue = FakeQueue("a", "b")
        gate, hangs, go_on = threading.Event(), threading.Event(), threading.Event()

        def handler(message):
            gate.wait(5)

        def hanging():
            if queue.in_flight() == 2 and not hangs.is_set():
                hangs.set()
                go_on.wait(5)
                queue.put("late")

        queue.before_receive = hanging
        worker = Worker(queue, handler, concurrency=1, prefetch=2, drain_timeout=0.1)
        worker.start()
        assert hangs.wait(5)
        stopping = threading.Thread(target=worker.stop)
        stopping.start()
        queue.wait_until_finished(1)
        assert queue.of("nack") == ["r2"]
        stopping.join(5)
        go_on.set()
        queue.wait_until_finished(3)
        assert queue.of("nack") == ["r2", "r1", "r3"]
        gate.set()

    def test_a_handler_may_stop_the_worker(self):
        queue = FakeQueue("x", "x")
        worker = Worker(queue, lambda message: worker.stop(), concurrency=1, prefetch=0)
        worker.run()
        assert queue.of("ack") == ["r1"]

    def test_stop_twice_start_twice_and_stop_without_start(self):
        queue = FakeQueue()
        worker = Worker(queue, lambda message: None)
        worker.start()
        with pytest.raises(KmqError, match="before"):
            worker.start()
        worker.stop()
        worker.stop()
        Worker(queue, lambda message: None).stop()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_run_drains_at_a_signal_and_restores_the_handlers(self, number):
        queue = FakeQueue("x")
        before = signal.getsignal(number)

        def handler(message):
            os.kill(os.getpid(), number)
            time.sleep(0.2)

        Worker(queue, handler).run()
        assert queue.of("ack") == ["r1"]
        assert signal.getsignal(number) is before

    def test_an_own_handler_of_signals_may_stop_it_again_during_the_drain(self):
        """In a process of its own: where it waits for itself, no signal but SIGKILL ends it."""
        done = subprocess.run(
            [sys.executable, __file__], check=False, timeout=60, capture_output=True, text=True
        )
        assert (done.stdout, done.returncode) == ("ended\n", 0), done.stderr

    def test_a_signal_may_stop_it_while_it_starts(self, monkeypatch):
        worker = Worker(FakeQueue(), lambda message: None, handle_signals=False)
        start = worker._finisher.start

        def stop_first():
            worker.stop()
            start()

        monkeypatch.setattr(worker._finisher, "start", stop_first)
        running = threading.Thread(target=worker.run, daemon=True)
        running.start()
        running.join(60)
        assert not running.is_alive()

    def test_run_leaves_signals_alone_when_told_to(self):
        noted = []
        before = signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))

        def handler(message):
            os.kill(os.getpid(), signal.SIGTERM)
            worker.stop(wait=False)

        try:
            worker = Worker(FakeQueue("x"), handler, handle_signals=False)
            worker.run()
        finally:
            signal.signal(signal.SIGTERM, before)
        assert noted == [signal.SIGTERM]

    def test_stop_in_the_middle_of_start(self, monkeypatch):
        worker = Worker(FakeQueue("x"), lambda message: None)
        gate, start = threading.Event(), worker._finisher.start
        monkeypatch.setattr(worker._finisher, "start", lambda: gate.wait(5) and start())
        starting = threading.Thread(target=worker.start)
        starting.start()
        while not worker._taker.is_alive():
            time.sleep(0.001)
        stopping = threading.Thread(target=worker.stop)  # what a thread raises fails the test
        stopping.start()
        stopping.join(0.05)
        gate.set()
        stopping.join(5)
        starting.join(5)
        assert not stopping.is_alive()
        assert not starting.is_alive()

    def test_run_outside_the_main_thread_leaves_signals_alone(self):
        queue = FakeQueue("x")
        before = signal.getsignal(signal.SIGTERM)
        worker = Worker(queue, lambda message: None)
        thread = threading.Thread(target=worker.run)
        thread.start()
        queue.wait_until_finished(1)
        assert signal.getsignal(signal.SIGTERM) is before
        worker.stop()
        thread.join(5)
        assert not thread.is_alive()


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


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"ordering": "fifo"}, "ordering"),
        ({"prefetch": -1}, "prefetch"),
        ({"lease": 0}, "lease"),
        ({"lease": -1}, "lease"),
        ({"lease": 0.099}, "lease: 99 ms is shorter than the least"),
        ({"drain_timeout": "1s"}, "drain_timeout"),
        ({"concurrency": "4"}, "concurrency"),
        ({"concurrency": 2.5}, "concurrency"),
        ({"prefetch": "x"}, "prefetch"),
        ({"prefetch": 1.5}, "prefetch"),
        ({"handler": None}, "handler"),
    ],
)
def test_bad_arguments_are_refused_by_name(bad, named):
    with pytest.raises(ConfigError, match=named):
        Worker(FakeQueue(), **({"handler": lambda message: None} | bad))


def test_a_coroutine_function_is_sent_to_its_own_worker():
    async def handler(message):
        """Nothing."""

    with pytest.raises(ConfigError, match="AsyncWorker"):
        Worker(FakeQueue(), handler)


def test_a_message_whose_handler_returns_an_awaitable_is_not_acknowledged():
    """Which shows only when it is called: a lambda, or an object with `async def __call__`."""

    async def handle(body):
        """Nothing."""

    queue = FakeQueue("x")
    with pytest.raises(ConfigError, match="AsyncWorker"):
        Worker(queue, lambda message: handle(message.body)).run()
    assert queue.of("ack") == []
    assert queue.arguments("nack") == [{"delay": 0, "count": False, "reason": None}]


def test_a_lease_longer_than_the_queue_allows_is_refused_at_once():
    queue = FakeQueue()
    queue.max_lease = 10.0
    Worker(queue, print, lease=10)
    with pytest.raises(ConfigError, match=r"lease: 10.001 s is longer than max_hold .* 10.0 s"):
        Worker(queue, print, lease=10.001)


def test_a_retry_with_a_bad_delay_is_tried_again_after_the_back_off():
    queue = FakeQueue("x")

    def handler(message):
        raise Retry([])

    with Worker(queue, handler, backoff=EXACT):
        queue.wait_until_finished(1)
    (how,) = queue.arguments("nack")
    assert how["delay"] == 0.5
    assert how["reason"].startswith("ConfigError: delay: [] is neither")


def test_a_retry_with_a_delay_that_has_no_hash_is_a_retry_and_the_worker_goes_on():
    class Seconds(float):
        __hash__ = None

    queue = FakeQueue("x", "y")

    def handler(message):
        if message.body == b"x":
            raise Retry(Seconds(7))

    with Worker(queue, handler, concurrency=1):
        queue.wait_until_finished(2)
    (how,) = queue.arguments("nack")
    assert how["delay"] == 7


def test_the_log_names_the_signal(caplog):
    def handler(message):
        os.kill(os.getpid(), signal.SIGTERM)

    with caplog.at_level("INFO", "kmqpy.worker"):
        Worker(FakeQueue("x"), handler).run()
    assert [record.signal for record in caplog.records if hasattr(record, "signal")] == ["SIGTERM"]


class TestAtMostOnce:
    """On a queue that forgets messages when they are taken."""

    @pytest.fixture
    def queue(self):
        with memory_storage(SystemClock()) as storage:
            storage.create("q", ephemeral=False, redeliver_after_ms=200)
            yield storage.open("q")

    def test_nothing_is_extended_given_back_or_tried_again(self, queue, caplog):
        telemetry = Failures()
        queue.send_many(["bad", "rejected", "retried", "slow", "good"])
        handled = []

        def handler(message):
            match message.body:
                case b"bad":
                    raise ValueError("no")
                case b"rejected":
                    raise Reject
                case b"retried":
                    raise Retry
                case b"slow":
                    time.sleep(0.3)  # longer than the lease
            handled.append(message.body)

        with Worker(queue, handler, telemetry=telemetry):
            until(lambda: len(handled) == 2)
        assert (telemetry.what, queue.size(), queue.in_flight()) == ([], 0, 0)
        assert sum("lost" in record.getMessage() for record in caplog.records) == 3

    def test_what_was_taken_is_handled_before_the_worker_stops(self, queue):
        queue.send_many([str(number) for number in range(50)])
        handled, begun, gate = [], threading.Event(), threading.Event()

        def handler(message):
            begun.set()
            gate.wait(60)
            handled.append(message.body)

        worker = Worker(queue, handler, concurrency=2, prefetch=10)
        worker.start()
        assert begun.wait(60)
        until(lambda: queue.size() <= 38)
        worker.stop(wait=False)
        gate.set()
        worker.stop()
        assert len(handled) == 50 - queue.size() >= 12

    def test_nothing_is_taken_ahead_unless_said(self, queue):
        queue.send_many(["x"] * 10)
        gate = threading.Event()
        worker = Worker(queue, lambda message: gate.wait(60), concurrency=3)
        worker.start()
        until(lambda: queue.size() == 7)
        time.sleep(0.1)
        assert queue.size() == 7
        gate.set()
        worker.stop()


@pytest.mark.parametrize("thing", ["kafka://localhost/?queue=jobs", None, {}])
def test_a_thing_that_is_no_queue_is_refused(thing):
    for make in (lambda: Worker(thing, print), lambda: AsyncQueue(thing)):
        with pytest.raises(ConfigError, match=f"queue: {type(thing).__name__} is not a Queue"):
            make()


@pytest.mark.parametrize("thread", ["_settler", "_leases"])
def test_an_unexpected_error_in_a_thread_ends_the_worker(monkeypatch, thread):
    worker = Worker(FakeQueue("x"), lambda message: None, handle_signals=False, drain_timeout=0.1, lease=0.3)
    method = "_settle" if thread == "_settler" else "extend_due"
    called = []

    def fail(*_):
        if not called:  # at the drain it works again
            called.append(method)
            raise RuntimeError("not foreseen")

    monkeypatch.setattr(getattr(worker, thread), method, fail)
    with pytest.raises(KmqError, match=r"thread of the worker failed: RuntimeError: not foreseen") as raised:
        worker.run()
    assert isinstance(raised.value.__cause__, RuntimeError)


def _stop_at_each_signal():
    """Runs a worker that two signals stop, the second during the drain."""
    handling, stopped_twice = threading.Event(), threading.Event()
    stops = []

    def handler(message):
        handling.set()
        stopped_twice.wait(30)

    def send_signals():
        handling.wait(30)
        for _ in range(2):
            before = len(stops)
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: len(stops) > before)  # noqa: B023 - called at once
        time.sleep(0.1)  # for the second to get stuck
        stopped_twice.set()

    worker = Worker(FakeQueue("x"), handler, handle_signals=False)

    def stop(*_):
        stops.append(1)
        worker.stop()

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=send_signals, daemon=True).start()
    worker.run()
    print("ended")


if __name__ == "__main__":
    _stop_at_each_signal()
