"""How many messages a worker takes, and in which order it handles them."""

import random
import threading
import time
from collections import defaultdict

import pytest
from fake_queue import FakeQueue
from worker_support import Failures

from kmqpy.errors import Closed, ConfigError, Fenced, KmqError, Unavailable
from kmqpy.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("short_waits")


class TestTaking:
    def test_no_more_is_taken_than_can_start_soon(self):
        queue = FakeQueue(*["x"] * 50)
        gate = threading.Event()
        with Worker(queue, lambda message: gate.wait(60), concurrency=2, prefetch=3) as worker:
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
        together = threading.Barrier(4, timeout=60)
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
                assert gate.wait(60)

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
