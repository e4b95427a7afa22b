"""Worker and aio on a real Kafka, with a tracker."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from support import until

from kmqpy.core.backoff import Backoff
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.telemetry.opentelemetry import TracingTelemetry
from kmqpy.telemetry.prometheus import PrometheusTelemetry
from kmqpy.worker.asyncio import AsyncQueue, AsyncWorker
from kmqpy.worker.outcome import Reject, Retry
from kmqpy.worker.worker import Worker

QUICK = Backoff(0.1, 2, 0.4, 0)


@pytest.fixture
def live(make_queue):
    found = make_queue(2, max_redeliveries=2)
    found.tracker()
    return found


@pytest.fixture
def queue(live):
    with KmqClient(live.settings, live.connection) as opened:
        yield opened


class Seen:
    """What handlers were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.lock = threading.Lock()

    def note(self, message) -> str:
        with self.lock:
            self.calls.append((message.body.decode(), message.attempts))
        return message.body.decode()

    def done(self, count: int):
        return lambda: len(self.calls) >= count


def test_every_outcome_reaches_its_end(live, queue):
    seen = Seen()

    def handler(message):
        match seen.note(message):
            case "poison":
                raise ValueError("always")
            case "reject":
                raise Reject("no such customer")
            case "flaky" if message.attempts == 1:
                raise Retry(0.2)
            case "busy" if seen.calls.count(("busy", 1)) < 3:
                raise Retry(0, count=False)

    queue.send_many(["good"] * 50 + ["poison", "reject", "flaky", "busy"])
    registry = CollectorRegistry()
    with Worker(queue, handler, lease=5, backoff=QUICK, telemetry=PrometheusTelemetry(registry)):
        until(lambda: len(live.dead_letters()) == 2 and seen.done(50 + 3 + 1 + 2 + 3)(), what=seen.calls)
    assert Counter(seen.calls) == {
        ("good", 1): 50,
        ("poison", 1): 1,
        ("poison", 2): 1,
        ("poison", 3): 1,
        ("reject", 1): 1,
        ("flaky", 1): 1,
        ("flaky", 2): 1,
        ("busy", 1): 3,
    }
    until(lambda: (queue.size(), queue.in_flight()) == (0, 0))
    reasons = {
        record.value(): dict(record.headers())["kmq-dead-letter-reason"] for record in live.dead_letters()
    }
    assert reasons == {
        b"poison": b"nack: ValueError: always",
        b"reject": b"rejected: no such customer",
    }
    assert (
        registry.get_sample_value("kmq_worker_handler_seconds_count", {"queue": live.name, "outcome": "ok"})
        == 52
    )


def test_a_handler_longer_than_its_lease_keeps_its_message(queue):
    seen = Seen()

    def handler(message):
        seen.note(message)
        time.sleep(3)

    queue.send("slow")
    with Worker(queue, handler, lease=1.5):
        until(seen.done(1))
        until(lambda: queue.in_flight() == 0)
    assert seen.calls == [("slow", 1)]
    assert queue.size() == 0


def test_ordering_by_key_keeps_the_order_of_each(queue):
    numbers: dict[bytes, list[int]] = {}
    running: set[bytes] = set()
    together = []
    lock = threading.Lock()

    def handler(message):
        with lock:
            together.append(message.key in running)
            running.add(message.key)
            numbers.setdefault(message.key, []).append(int(message.body))
        time.sleep(0.002)
        with lock:
            running.discard(message.key)

    for key in ("a", "b", "c"):
        queue.send_many([str(number) for number in range(40)], key=key)
    with Worker(queue, handler, concurrency=6, ordering="key", lease=10):
        until(lambda: sum(map(len, numbers.values())) == 120)
    assert not any(together)
    assert all(found == list(range(40)) for found in numbers.values())


def test_a_stopped_worker_gives_back_what_it_has_not_begun(live, queue):
    gate = threading.Event()
    queue.send_many(["x"] * 20)
    worker = Worker(
        queue, lambda message: gate.wait(60), concurrency=1, prefetch=9, lease=60, drain_timeout=5
    )
    worker.start()
    until(lambda: queue.in_flight() > 1)  # up to ten; more is asked for when half of the room is free
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    until(lambda: worker.stopping)
    gate.set()
    stopping.join(60)
    with KmqClient(live.settings, live.connection) as other:
        queue.close()
        seen = Seen()
        with Worker(other, seen.note, lease=5):
            until(seen.done(19))
    # Not one of them was an attempt, although some were taken before.
    assert Counter(seen.calls) == {("x", 1): 19}


PROGRAM = textwrap.dedent(
    """
    import sys, time
    from kmqpy.queue import queue_for
    from kmqpy import Worker

    def handler(message):
        print("begun", flush=True)
        time.sleep(0.5)
        print("ended", flush=True)

    with queue_for(sys.argv[1]) as queue:
        Worker(queue, handler, concurrency=1, prefetch=4, lease=60).run()
    print("drained", flush=True)
    """
)


def test_a_worker_process_drains_at_sigterm(live, queue):
    queue.send_many(["x"] * 8)
    url = f"kafka://{live.connection.bootstrap}?queue={live.name}"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            os.kill(process.pid, signal.SIGTERM)
            assert process.stdout.read().splitlines()[-2:] == ["ended", "drained"]
            assert process.wait(60) == 0
        finally:
            process.kill()
    seen = Seen()
    with Worker(queue, seen.note, lease=5):
        until(seen.done(6))
        time.sleep(0.5)
    assert len(seen.calls) in (6, 7)  # one or two were handled; nothing waits for its lease of a minute
    assert {attempts for _, attempts in seen.calls} == {1}


def test_an_async_worker_handles_each_and_retries(queue):
    async def main():
        seen = Counter()

        async def handler(message):
            await asyncio.sleep(0.01)
            seen[message.body, message.attempts] += 1
            if message.body == b"5" and message.attempts == 1:
                raise ValueError

        calls = AsyncQueue(queue)
        await calls.send_many([str(number) for number in range(100)])
        worker = AsyncWorker(queue, handler, concurrency=16, lease=5, backoff=QUICK)
        running = asyncio.ensure_future(worker.run())
        async with asyncio.timeout(60):
            while sum(seen.values()) < 101:
                await asyncio.sleep(0.02)
        worker.stop()
        await running
        left = await calls.call(queue.in_flight)
        await calls.close()
        return seen, left

    seen, left = asyncio.run(main())
    assert set(seen.values()) == {1}
    assert seen[b"5", 2] == 1
    assert left == 0


def test_a_cancelled_receive_loses_no_message(live, queue):
    async def main():
        found = []
        async with AsyncQueue(queue) as calls:
            await calls.receive(wait=1)
            for _ in range(20):
                receiving = asyncio.ensure_future(calls.receive(1, wait=5, lease=60))
                await calls.send("x")
                receiving.cancel()
                try:
                    found += await receiving
                except asyncio.CancelledError:
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(60):
                while len(found) < 20:
                    found += await calls.receive(wait=0.5, lease=60)
            await calls.ack(*found, confirmed=True)
        return found

    found = asyncio.run(main())
    assert len(found) == 20
    assert {message.attempts for message in found} == {1}


def test_one_trace_from_the_send_over_a_redelivery_to_the_acknowledgement(live):
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    telemetry = TracingTelemetry(provider)

    def handler(message):
        if message.attempts == 1:
            raise Retry(0)

    async def request(calls):
        with provider.get_tracer("app").start_as_current_span("request"):
            await calls.send("x")

    with KmqClient(live.settings, live.connection, telemetry=telemetry) as queue:
        asyncio.run(request(AsyncQueue(queue)))
        with Worker(queue, handler, lease=5, telemetry=telemetry):
            until(lambda: any(span.name.startswith("ack") for span in memory.get_finished_spans()))
    spans = memory.get_finished_spans()
    (sent,) = [span for span in spans if span.name == f"send {live.name}"]
    assert [span.context.span_id for span in spans if span.name == "request"] == [sent.parent.span_id]
    processed = [span for span in spans if span.name == f"process {live.name}"]
    assert [span.attributes["kmq.attempts"] for span in processed] == [1, 2]
    assert {span.parent.span_id for span in processed} == {sent.context.span_id}
    received = [span for span in spans if span.name == f"receive {live.name}"]
    assert [span.links[0].context.span_id for span in received] == [sent.context.span_id] * 2
    settled = [span for span in spans if span.name.split()[0] in ("nack", "ack")]
    assert [(span.name.split()[0], span.parent.span_id) for span in settled] == [
        ("nack", processed[0].context.span_id),
        ("ack", processed[1].context.span_id),
    ]
    provider.shutdown()
