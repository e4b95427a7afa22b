"""Workers with a rate and a breaker, also with handlers that are tasks, on queues in memory."""

import asyncio
import threading
import time

import pytest
from worker_support import Failures, until

from kmqpy import Reject, Retry, storage_for
from kmqpy.core.backoff import Backoff
from kmqpy.errors import ConfigError
from kmqpy.message import OutgoingMessage
from kmqpy.telemetry.base import Telemetry
from kmqpy.worker.asyncio import AsyncWorker
from kmqpy.worker.pace import Breaker
from kmqpy.worker.worker import Worker

AWAY = Breaker(failures=4, on=ConnectionError, pause=0.05, max_pause=0.1)


@pytest.fixture
def make_queue():
    storage = storage_for("memory:")

    def make(**settings):
        name = f"q{time.monotonic_ns()}"
        storage.create(name, **settings)
        return storage.open(name)

    with storage:
        yield make


class Working:
    """A worker of either kind that runs in a thread, until the `with` block ends."""

    def __init__(self, kind, queue, handler, **options):
        self._asynchronous = kind == "tasks"
        if self._asynchronous:

            async def handle(message):
                return handler(message)

            self.worker = AsyncWorker(queue, handle, **options)
        else:
            self.worker = Worker(queue, handler, handle_signals=False, **options)
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        if self._asynchronous:
            asyncio.run(self.worker.run())
        else:
            self.worker.run()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.worker.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("kind", ["threads", "tasks"])
class TestPace:
    def test_no_more_handlers_start_than_the_rate_says(self, make_queue, kind):
        queue, began = make_queue(), []
        queue.send_many(["x"] * 200)
        with Working(kind, queue, lambda message: began.append(time.monotonic()), rate="50/s", concurrency=8):
            until(lambda: len(began) >= 40)
        passed_s = began[39] - began[0]
        assert passed_s >= (40 - 1 - 50 * 0.05) / 50
        assert queue.size() + len(began) == 200
        assert queue.in_flight() == 0

    def test_with_a_low_rate_others_get_the_rest(self, make_queue, kind):
        queue, began = make_queue(), []
        queue.send_many(["x"] * 30)
        with Working(kind, queue, began.append, rate="1/min", concurrency=8):
            until(lambda: began)
            time.sleep(0.3)
            assert len(began) == 1
            assert queue.size() >= 28

    def test_while_the_backend_is_away_no_attempts_are_used_up(self, make_queue, kind):
        queue, away, seen, handled, failures = make_queue(max_redeliveries=3), True, [], [], Failures()
        queue.send_many([f"{number}" for number in range(100)])

        def handler(message):
            seen.append(message)
            if away:
                raise ConnectionError("refused")
            handled.append(message)

        options = {"breaker": AWAY, "concurrency": 4, "telemetry": failures, "backoff": None}
        with Working(kind, queue, handler, **options):
            until(lambda: failures.what)
            before = len(seen)
            time.sleep(0.6)
            tried = len(seen) - before
            assert tried <= 10, "a try per 0.1 s, and those that were running"
            away = False
            until(lambda: len(handled) == 100)
        assert queue.dead_letters.list() == []
        assert failures.what.count("breaker") == 1
        again = [message.attempts for message in handled if message.attempts > 1]
        assert len(again) <= 8
        assert max(again, default=1) == 2

    @pytest.mark.parametrize("asked", ["breaker", "backoff", "Retry"])
    def test_no_message_is_held_back_for_longer_than_its_queue_allows(self, make_queue, kind, asked):
        """Refused, a nack left the message to its lease: it came late, and had used up an attempt."""
        queue, seen = make_queue(max_delay_ms=50, max_redeliveries=None), []
        queue.send("x")

        def handler(message):
            seen.append(message)
            if len(seen) < 4:
                raise Retry(60, count=False) if asked == "Retry" else ConnectionError

        options = {"breaker": AWAY} if asked == "breaker" else {"backoff": Backoff(first=60)}
        if asked == "breaker":
            queue.send_many(["x"] * 3)  # these open it
        with Working(kind, queue, handler, lease=30, **options):
            until(lambda: queue.size() == queue.in_flight() == 0, timeout=15)

    @pytest.mark.parametrize("order", ["fifo", "group"])
    def test_what_always_fails_does_not_keep_the_others_away(self, make_queue, kind, order):
        queue, handled = make_queue(order=order), []
        queue.send_many([OutgoingMessage("bad", group=f"bad-{number}") for number in range(6)])
        queue.send_many([OutgoingMessage("good", group=f"{number % 5}") for number in range(60)])

        def handler(message):
            if message.body == b"bad":
                raise ConnectionError
            handled.append(message)

        with Working(kind, queue, handler, breaker=AWAY, concurrency=4):
            until(lambda: len(handled) == 60)

    @pytest.mark.parametrize("order", [pytest.param("fifo", marks=pytest.mark.breadth), "group"])
    def test_a_single_message_is_tried_again_soon(self, make_queue, kind, order):
        queue, tried, away = make_queue(order=order), [], True
        queue.send("x", group="g")

        def handler(message):
            tried.append(message.attempts)
            if away:
                raise ConnectionError

        breaker = Breaker(failures=1, pause=0.05, max_pause=0.5)
        with Working(kind, queue, handler, breaker=breaker, backoff=Backoff(first=0)):
            until(lambda: len(tried) >= 4, timeout=15)
            away = False
            until(lambda: queue.size() == queue.in_flight() == 0, timeout=10)
        assert {*tried[1:]} == {2}

    def test_rejects_retries_and_other_errors_do_not_open_it(self, make_queue, kind):
        queue, seen, failures = make_queue(max_redeliveries=0), [], Failures()
        queue.send_many([f"{number}" for number in range(60)])

        def handler(message):
            seen.append(message)
            raise [Reject("bad"), Retry(0, count=False) if len(seen) < 60 else Reject("bad"), ValueError()][
                len(seen) % 3
            ]

        breaker = Breaker(failures=3, on=(ConnectionError, Reject, Retry))
        with Working(kind, queue, handler, breaker=breaker, telemetry=failures):
            until(lambda: len(queue.dead_letters.list()) == 60)
        assert "breaker" not in failures.what

    def test_it_can_be_stopped_while_it_is_open(self, make_queue, kind):
        queue, seen = make_queue(), []

        def handler(message):
            seen.append(message)
            raise ConnectionError

        queue.send_many(["x"] * 50)
        breaker = Breaker(failures=4, pause=100, max_pause=100)
        with Working(kind, queue, handler, breaker=breaker, drain_timeout=1):
            until(lambda: len(seen) >= 4)
            began = time.monotonic()
        assert time.monotonic() - began < 5
        assert queue.in_flight() == 0

    def test_at_most_once_messages_wait_and_are_handled_at_the_end(self, make_queue, kind):
        queue, seen = make_queue(delivery="at-most-once"), []
        queue.send_many(["x"] * 20)
        with Working(kind, queue, seen.append, rate="1/h", concurrency=3):
            until(lambda: seen)
        assert len(seen) + queue.size() == 20

    def test_by_key(self, make_queue, kind):
        queue, away, handled = make_queue(), True, []
        for number in range(40):
            queue.send(f"{number}", key=f"k{number % 5}")

        def handler(message):
            if away:
                raise ConnectionError
            handled.append(message)

        failures = Failures()
        with Working(kind, queue, handler, breaker=AWAY, ordering="key", telemetry=failures):
            until(lambda: "breaker" in failures.what)
            away = False
            until(lambda: len(handled) == 40)


@pytest.mark.parametrize("kind", ["threads", "tasks"])
@pytest.mark.parametrize(("rate", "late"), [("50/s", 6), ("10000/s", 0)])
def test_handlers_that_the_rate_holds_back_are_counted(make_queue, kind, rate, late):
    queue, counted, handled = make_queue(), [], []

    class Counting(Telemetry):
        def finished(self, queue, op, count=1):
            counted.extend([op] * count)

    queue.send_many(map(str, range(8)))
    with Working(kind, queue, handled.append, rate=rate, concurrency=3, telemetry=Counting()):
        until(lambda: len(handled) == 8 and not queue.in_flight())
    assert counted.count("hold-back") == pytest.approx(late, abs=1)


def test_wrong_arguments_are_refused(make_queue):
    queue = make_queue()
    with pytest.raises(ConfigError, match=r"^rate: 0"):
        Worker(queue, print, rate=0)
    with pytest.raises(ConfigError, match=r"^breaker: 5"):
        Worker(queue, print, breaker=5)
