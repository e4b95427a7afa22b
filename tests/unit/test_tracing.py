import asyncio
import subprocess
import sys

import pytest
from confluent_kafka import Message as Record
from fake_queue import FakeQueue
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as names
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import SpanKind, StatusCode

from kmqpy.errors import Unavailable
from kmqpy.kafka.client.record_message import KafkaMessage, ReceiveContext
from kmqpy.kafka.settings import QueueSettings
from kmqpy.message import last_header
from kmqpy.queue import queue_for
from kmqpy.storages.memory import MemoryEngine
from kmqpy.storages.stored_storage import StoredStorage
from kmqpy.telemetry.opentelemetry import SCHEMA_URL, TracingTelemetry
from kmqpy.testing import ManualClock
from kmqpy.worker.asyncio import AsyncQueue
from kmqpy.worker.worker import Worker

SECRET = b"the-payload"


class Exported:
    def __init__(self) -> None:
        self.memory = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.telemetry = TracingTelemetry(self.provider)

    def one(self, name):
        (span,) = [span for span in self.memory.get_finished_spans() if span.name == name]
        return span


@pytest.fixture
def spans():
    exported = Exported()
    yield exported
    exported.provider.shutdown()


def sent_headers(spans, headers=()):
    with spans.telemetry.sending("jobs", headers) as sent:
        return sent


def test_send_injects_its_context(spans):
    headers = sent_headers(spans, (("a", b"1"),))
    span = spans.one("send jobs")
    traceparent = last_header(headers, "traceparent").decode()
    context = span.get_span_context()
    assert traceparent.startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
    assert headers[0] == ("a", b"1")
    assert span.kind is SpanKind.PRODUCER
    assert dict(span.attributes) == {
        names.MESSAGING_SYSTEM: "kafka",
        names.MESSAGING_DESTINATION_NAME: "jobs",
        names.MESSAGING_OPERATION_NAME: "send",
        names.MESSAGING_OPERATION_TYPE: "send",
    }
    assert span.instrumentation_scope.schema_url == SCHEMA_URL == Schemas.V1_44_0.value


def test_send_is_a_child_of_the_callers_span(spans):
    with spans.provider.get_tracer("app").start_as_current_span("request") as request:
        sent_headers(spans)
    assert spans.one("send jobs").parent.span_id == request.get_span_context().span_id


def test_a_context_that_the_message_has_already_is_kept(spans):
    headers = sent_headers(spans)
    with spans.telemetry.sending("other", headers) as again:
        assert again == headers
    first, second = spans.one("send jobs"), spans.one("send other")
    assert second.links[0].context.span_id == first.get_span_context().span_id
    assert second.kind is SpanKind.CLIENT  # PRODUCER is the span whose context the message has


def test_a_send_that_fails_says_so_without_the_text(spans):
    with pytest.raises(ValueError, match="payload"), spans.telemetry.sending("jobs", ()):
        raise ValueError(SECRET.decode())
    span = spans.one("send jobs")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "ValueError"
    assert SECRET.decode() not in span.to_json()


def test_a_message_of_kafka_says_where_it_lies(spans):
    record = Record(topic="jobs", partition=3, offset=17, value=b"body", timestamp=(2, 1))
    context = ReceiveContext(QueueSettings(name="jobs"), "an-id", 5_000, spans.telemetry)
    with spans.telemetry.processing(KafkaMessage(record, context)):
        pass
    found = spans.one("process jobs").attributes
    assert found[names.MESSAGING_DESTINATION_PARTITION_ID] == "3"
    assert found["messaging.kafka.offset"] == 17


def test_receive_is_linked_to_every_send(spans):
    queue = FakeQueue()
    for name in ("a", "b"):
        with spans.telemetry.sending(name, ()) as headers:
            queue.send(SECRET, headers=headers)
    queue.send("without a context")
    spans.telemetry.received("jobs", queue.receive())
    span = spans.one("receive jobs")
    assert span.kind is SpanKind.CLIENT
    linked = [link.context.span_id for link in span.links]
    assert linked == [spans.one(f"send {name}").get_span_context().span_id for name in ("a", "b")]
    assert span.attributes[names.MESSAGING_BATCH_MESSAGE_COUNT] == 3
    assert span.attributes[names.MESSAGING_OPERATION_TYPE] == "receive"


def test_process_is_a_child_of_the_send_and_settles_inside(spans):
    queue = FakeQueue()
    queue.send(SECRET, key="the-key", headers=sent_headers(spans))
    inside = []

    def handler(message):
        inside.append(trace.get_current_span().get_span_context())

    ack = queue.ack

    def told(*messages, confirmed=False):
        ack(*messages)
        spans.telemetry.finished("jobs", "ack", len(messages))

    queue.ack = told
    with Worker(queue, handler, telemetry=spans.telemetry):
        queue.wait_until_finished(1)
    send, process, settle = (spans.one(name) for name in ("send jobs", "process fake", "ack jobs"))
    assert process.kind is SpanKind.CONSUMER
    assert process.parent.span_id == send.get_span_context().span_id
    assert process.get_span_context().trace_id == send.get_span_context().trace_id
    assert process.links[0].context.span_id == send.get_span_context().span_id
    assert inside == [process.get_span_context()]
    assert settle.kind is SpanKind.CLIENT
    assert settle.parent.span_id == process.get_span_context().span_id
    assert settle.attributes[names.MESSAGING_OPERATION_TYPE] == "settle"
    assert dict(process.attributes) == {
        names.MESSAGING_SYSTEM: "kafka",
        names.MESSAGING_DESTINATION_NAME: "fake",
        names.MESSAGING_OPERATION_NAME: "process",
        names.MESSAGING_OPERATION_TYPE: "process",
        names.MESSAGING_MESSAGE_ID: "m1",
        names.MESSAGING_MESSAGE_BODY_SIZE: len(SECRET),
        "kmq.attempts": 1,
    }
    for span in spans.memory.get_finished_spans():
        assert SECRET.decode() not in span.to_json()
        assert "the-key" not in span.to_json()


def test_a_handler_has_the_baggage_of_the_send_beside_its_own(spans):
    queue = FakeQueue()
    token = context.attach(baggage.set_baggage("tenant", "ann"))
    queue.send(SECRET, headers=sent_headers(spans))
    context.detach(token)
    token = context.attach(baggage.set_baggage("worker", "7"))
    (message,) = queue.receive()
    with spans.telemetry.processing(message):
        assert baggage.get_all() == {"tenant": "ann", "worker": "7"}
    assert baggage.get_all() == {"worker": "7"}
    context.detach(token)


def test_process_without_a_context_begins_a_trace(spans):
    (message,) = FakeQueue("x").receive()
    with spans.telemetry.processing(message):
        pass
    span = spans.one("process fake")
    assert span.parent is None
    assert span.links == ()


@pytest.mark.parametrize("junk", ["", "garbage", "00-0-0-00", "\udcff"])
def test_an_unreadable_context_is_no_error(spans, junk):
    queue = FakeQueue()
    queue.send("x", headers=[("traceparent", junk.encode(errors="surrogateescape"))])
    (message,) = queue.receive()
    with spans.telemetry.processing(message):
        pass
    assert spans.one("process fake").parent is None


def test_the_error_of_a_handler_stands_in_its_span(spans):
    queue = FakeQueue("x")

    def handler(message):
        raise ValueError(SECRET.decode())

    with Worker(queue, handler, telemetry=spans.telemetry):
        queue.wait_until_finished(1)
    span = spans.one("process fake")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "ValueError"
    assert SECRET.decode() not in span.to_json()


def test_extensions_and_sends_that_are_confirmed_make_no_span_of_their_own(spans):
    spans.telemetry.finished("jobs", "extend")
    spans.telemetry.finished("jobs", "send")
    assert spans.memory.get_finished_spans() == ()


def test_without_the_extra_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from kmqpy.errors import MissingExtra\n"
        "try:\n import kmqpy.telemetry.opentelemetry\nexcept MissingExtra as error:\n print(error)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.startswith(
        'kmqpy.telemetry.opentelemetry needs an extra; run: pip install "kmqpy[otel]"'
    )


@pytest.mark.parametrize(("dead_letter", "name"), [(False, "redeliver jobs"), (True, "dead-letter jobs")])
def test_a_trackers_copy_is_a_child_of_the_send(spans, dead_letter, name):
    headers = sent_headers(spans)
    spans.telemetry.moved("jobs", headers, dead_letter=dead_letter)
    moved = spans.one(name)
    sent = spans.one("send jobs")
    assert moved.parent.span_id == sent.context.span_id
    assert moved.kind is SpanKind.CLIENT
    assert moved.context.trace_id == sent.context.trace_id


@pytest.fixture
def timed(monkeypatch):
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http, messaging/dup")
    exported = Exported()
    yield exported
    exported.provider.shutdown()


class Slow(MemoryEngine):
    """Each answer takes 2 s of a clock that only it moves."""

    def __init__(self, clock):
        super().__init__(clock)
        self.clock = clock

    def take(self, *args, **how):
        self.clock.advance(2)
        return super().take(*args, **how)

    def finish(self, *args, **how):
        self.clock.advance(3)
        return super().finish(*args, **how)

    def bury(self, *args, **how):
        raise Unavailable("secret")


def slow_queue(telemetry):
    clock = ManualClock()
    storage = StoredStorage(Slow(clock), clock=clock, telemetry=telemetry)
    storage.create("jobs")
    return storage.open("jobs"), clock


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_opted_in_receive_and_settle_last_as_long_as_the_calls(timed):
    queue, clock = slow_queue(timed.telemetry)
    timed.telemetry._watch._clock = clock
    queue.send("x")
    (message,) = queue.receive()
    queue.ack(message)
    assert seconds(timed.one("receive jobs")) == 2
    assert seconds(timed.one("ack jobs")) == 3
    assert timed.one("ack jobs").start_time >= timed.one("receive jobs").end_time


def test_opted_in_a_call_that_raises_has_a_span(timed):
    queue, _ = slow_queue(timed.telemetry)
    queue.send("x")
    with pytest.raises(Unavailable):
        queue.dead_letter(queue.receive())
    span = timed.one("dead-letter jobs")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "Unavailable"
    assert "secret" not in span.to_json()


def test_opted_in_a_receive_of_nothing_has_no_span(timed):
    queue, _ = slow_queue(timed.telemetry)
    assert queue.receive(wait=0) == []
    assert timed.memory.get_finished_spans() == ()


def test_by_default_receive_and_settle_have_no_duration(spans):
    queue, _ = slow_queue(spans.telemetry)
    queue.send("x")
    queue.ack(queue.receive())
    assert seconds(spans.one("receive jobs")) < 1
    assert seconds(spans.one("ack jobs")) < 1


def test_what_coroutines_do_belongs_to_their_traces(spans):
    request = spans.provider.get_tracer("app").start_as_current_span

    async def send(queue, number):
        with request(f"request {number}"):
            await queue.send(SECRET)

    async def all_at_once(queue):
        await asyncio.gather(*(send(queue, number) for number in range(20)))  # a thread sends them in batches
        with request("consumer"):
            await queue.send_many([SECRET])
            messages = await queue.receive(21)
            await queue.ack(*messages)

    async def go():
        async with AsyncQueue(queue_for("memory:?queue=aio&create=true", telemetry=spans.telemetry)) as queue:
            await all_at_once(queue)

    asyncio.run(go())
    by_id = {span.context.span_id: span for span in spans.memory.get_finished_spans()}
    parents = sorted(
        (span.name, by_id[span.parent.span_id].name) for span in by_id.values() if span.name.endswith(" aio")
    )
    assert parents == sorted(
        [("send aio", f"request {number}") for number in range(20)]
        + [(f"{op} aio", "consumer") for op in ("send", "receive", "ack")]
    )


def test_a_message_that_is_refused_takes_nobody_elses_trace(spans):
    async def send(queue, number):
        with spans.provider.get_tracer("app").start_as_current_span(f"request {number}"):
            return await queue.send(SECRET, delay=1e9 if number % 3 == 0 else 0)

    async def go():
        async with AsyncQueue(
            queue_for("memory:?queue=aio2&create=true", telemetry=spans.telemetry)
        ) as queue:
            return await asyncio.gather(
                *(send(queue, number) for number in range(20)), return_exceptions=True
            )

    results = asyncio.run(go())
    by_id = {span.context.span_id: span for span in spans.memory.get_finished_spans()}
    sent = [span for span in by_id.values() if span.name == "send aio2"]
    assert sorted(by_id[span.parent.span_id].name for span in sent) == sorted(
        f"request {number}" for number, result in enumerate(results) if isinstance(result, str)
    )
    assert len(sent) == 13
