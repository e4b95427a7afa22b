"""Signals, draining and the end of a worker."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from fake_queue import FakeQueue
from worker_support import Failures, until

from kmqpy.errors import KmqError
from kmqpy.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("short_waits")


class TestStopping:
    def test_what_has_not_begun_is_given_back_at_once_and_does_not_count(self):
        queue = FakeQueue(*["x"] * 5)
        begun, gate = threading.Event(), threading.Event()

        def handler(message):
            begun.set()
            assert gate.wait(60)

        worker = Worker(queue, handler, concurrency=1, prefetch=4)
        worker.start()
        assert begun.wait(60)
        queue.wait_for(lambda: queue.in_flight() == 5)
        stopper = threading.Thread(target=worker.stop)
        stopper.start()
        queue.wait_until_finished(4)
        assert queue.arguments("nack") == [{"delay": 0, "count": False, "reason": None}] * 4
        assert queue.of("ack") == []
        gate.set()
        stopper.join(60)
        assert queue.of("ack") == ["r1"]
        assert queue.taken == {}

    def test_handlers_that_do_not_end_in_time_lose_their_message_uncounted(self):
        queue = FakeQueue("x")
        begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

        def handler(message):
            begun.set()
            gate.wait(60)
            ended.set()

        failures = Failures()
        worker = Worker(queue, handler, drain_timeout=0.1, telemetry=failures)
        worker.start()
        assert begun.wait(60)
        worker.stop()
        assert queue.arguments("nack") == [{"delay": 0, "count": False, "reason": None}]
        gate.set()
        assert ended.wait(60)
        time.sleep(0.05)
        assert queue.of("ack") == []
        assert failures.what == []  # the late end was not even tried

    def test_a_message_that_the_drain_gave_back_is_counted_as_finished_once(self):
        class InFlight(Failures):
            def __init__(self):
                super().__init__()
                self.counts = []

            def in_flight(self, queue, count):
                self.counts.append(count)

        begun, gate, telemetry = threading.Event(), threading.Event(), InFlight()

        def handler(message):
            begun.set()
            gate.wait(60)

        worker = Worker(FakeQueue("x"), handler, drain_timeout=0.1, telemetry=telemetry)
        worker.start()
        assert begun.wait(60)
        worker.stop()
        before = len(telemetry.counts)
        gate.set()
        until(lambda: len(telemetry.counts) > before)
        assert (max(telemetry.counts), min(telemetry.counts)) == (1, 0)

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
        monkeypatch.setattr("kmqpy.worker.worker._GRACE_S", 0.2)
        queue = FakeQueue("a", "b")
        gate, hangs, go_on = threading.Event(), threading.Event(), threading.Event()

        def handler(message):
            gate.wait(60)

        def hanging():
            if queue.in_flight() == 2 and not hangs.is_set():
                hangs.set()
                go_on.wait(60)
                queue.put("late")

        queue.before_receive = hanging
        worker = Worker(queue, handler, concurrency=1, prefetch=2, drain_timeout=0.1)
        worker.start()
        assert hangs.wait(60)
        stopping = threading.Thread(target=worker.stop)
        stopping.start()
        queue.wait_until_finished(1)
        assert queue.of("nack") == ["r2"]
        stopping.join(60)
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
        monkeypatch.setattr(worker._finisher, "start", lambda: gate.wait(60) and start())
        starting = threading.Thread(target=worker.start)
        starting.start()
        while not worker._taker.is_alive():
            time.sleep(0.001)
        stopping = threading.Thread(target=worker.stop)  # what a thread raises fails the test
        stopping.start()
        stopping.join(0.05)
        gate.set()
        stopping.join(60)
        starting.join(60)
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
        thread.join(60)
        assert not thread.is_alive()


def test_the_log_names_the_signal(caplog):
    def handler(message):
        os.kill(os.getpid(), signal.SIGTERM)

    with caplog.at_level("INFO", "kmqpy.worker"):
        Worker(FakeQueue("x"), handler).run()
    assert [record.signal for record in caplog.records if hasattr(record, "signal")] == ["SIGTERM"]


@pytest.mark.parametrize("thread", ["_outcomes", "_leases"])
def test_an_unexpected_error_in_a_thread_ends_the_worker(monkeypatch, thread):
    worker = Worker(FakeQueue("x"), lambda message: None, handle_signals=False, drain_timeout=0.1, lease=0.3)
    method = "_write" if thread == "_outcomes" else "extend_due"
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
