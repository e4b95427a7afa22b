"""What becomes of a message, and which arguments a worker refuses."""

import threading
import time

import pytest
from fake_queue import FakeQueue
from worker_support import EXACT, Failures, until

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, SystemClock
from kmqpy.errors import ConfigError, KmqError, Unavailable
from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue
from kmqpy.telemetry.base import Telemetry
from kmqpy.testing import memory_storage
from kmqpy.worker.asyncio import AsyncQueue
from kmqpy.worker.failure_log import FailureLog
from kmqpy.worker.lease_keeper import LeaseKeeper, call_for_all
from kmqpy.worker.outcome import Reject, Retry, described, failed_outcome
from kmqpy.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("short_waits")


def test_the_fake_speaks_the_protocol():
    queue: Queue = FakeQueue()
    assert queue.name == "fake"


class TestOutcomes:
    def test_a_message_is_acknowledged_when_the_handler_returns(self):
        queue = FakeQueue("a", "b", "c")
        with Worker(queue, lambda message: None):
            queue.wait_until_finished(3)
        assert sorted(queue.of("ack")) == ["r1", "r2", "r3"]
        assert queue.taken == {}

    def test_an_error_gives_it_back_with_growing_delay_and_the_reason(self, caplog):
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
        told = {record.getMessage() for record in caplog.records}
        assert told == {"handler failed; the message is given back"}  # after the last attempt, too

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

    def test_an_acknowledgement_that_fails_costs_only_itself(self, caplog):
        queue = FakeQueue("a", "b")
        failures = Failures()

        def broken():
            queue.before_ack = lambda: None
            queue.taken.pop("r1")  # refused, alone or in a batch

        queue.before_ack = broken
        with Worker(queue, lambda message: None, concurrency=1, telemetry=failures):
            queue.wait_until_finished(1)
        assert queue.of("ack") == ["r2"]
        assert failures.what == ["finish"]
        assert "when their leases end: ReceiptError: " in caplog.text  # however the program formats its log

    def test_messages_that_end_while_an_acknowledgement_is_under_way_are_acknowledged_together(self):
        queue = FakeQueue(*["x"] * 20)
        sizes, begun, gate = [], threading.Event(), threading.Event()
        ack = queue.ack

        def slow(*messages, confirmed=False):
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

        keeper = LeaseKeeper(FakeQueue(), 30, SystemClock(), FailureLog("fake", Telemetry()))
        queue = FakeQueue("a", "b", "c")
        held = keeper.add(queue.receive(), lambda _: None)
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


def test_messages_of_a_group_are_handled_in_order_by_however_many_threads():
    handled: list[tuple[str, int]] = []

    def handle(message):
        number = int(message.body)
        if number == 2 and message.attempts == 1:
            raise ValueError("once")
        handled.append((message.group, number))

    with memory_storage(SYSTEM_CLOCK) as storage:
        storage.create("jobs", order="group", retry_delays=["10ms"])
        queue = storage.open("jobs")
        for number in range(5):
            queue.send_many([OutgoingMessage(str(number), group=group) for group in "abc"])
        with Worker(queue, handle, concurrency=4):
            until(lambda: len(handled) == 15)
    for group in "abc":
        assert [number for name, number in handled if name == group] == [0, 1, 2, 3, 4]


def test_a_retry_that_does_not_count_waits_also_where_the_queue_delays_retries():
    assert failed_outcome(Retry(), 1, None).delay is None
    assert 0.5 < failed_outcome(Retry(count=False), 1, None).delay < 2
    assert failed_outcome(Retry(0, count=False), 1, None).delay == 0


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


class TestAtMostOnce:
    """On a queue that forgets messages when they are taken."""

    @pytest.fixture
    def queue(self):
        with memory_storage(SystemClock()) as storage:
            storage.create("q", delivery="at-most-once", lease_ms=200)
            yield storage.open("q")

    def test_only_retry_and_reject_keep_a_message_that_failed(self, queue, caplog):
        telemetry = Failures()
        queue.send_many(["bad", "rejected", "retried", "slow", "good"])
        handled = []

        def handler(message):
            match message.body:
                case b"bad":
                    raise ValueError("no")
                case b"rejected":
                    raise Reject("why")
                case b"retried" if message.attempts < 3:
                    raise Retry(delay=0)
                case b"slow":
                    time.sleep(0.3)  # longer than the lease
            handled.append((message.body, message.attempts))

        with Worker(queue, handler, telemetry=telemetry):
            until(lambda: len(handled) == 3)
        assert sorted(handled) == [(b"good", 1), (b"retried", 3), (b"slow", 1)]
        assert (telemetry.what, queue.size(), queue.in_flight()) == ([], 0, 0)
        assert [(one.id, one.reason) for one in queue.dead_letters.list()] == [("2", "rejected: why")]
        assert sum("lost" in record.getMessage() for record in caplog.records) == 1

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
