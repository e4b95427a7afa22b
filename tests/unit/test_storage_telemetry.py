"""Metrics and spans of queues in storages, and of workers over them: the same as on Kafka."""

import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from kmqpy.core.clock import SystemClock
from kmqpy.storages.memory import MemoryEngine
from kmqpy.storages.stored_storage import StoredStorage
from kmqpy.telemetry.opentelemetry import TracingTelemetry
from kmqpy.telemetry.prometheus import PrometheusTelemetry
from kmqpy.worker.outcome import Reject, Retry
from kmqpy.worker.worker import Worker


def opened(telemetry, **settings):
    clock = SystemClock()
    storage = StoredStorage(MemoryEngine(clock), clock=clock, telemetry=telemetry)
    storage.create("jobs", **settings)
    return storage.open("jobs")


def drained(queue, deadline_s=60):
    deadline = time.monotonic() + deadline_s
    while queue.size() or queue.in_flight():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def handle(message):
    match message.body:
        case b"reject":
            raise Reject
        case b"retry" if message.attempts == 1:
            raise Retry(0)
        case b"slow":
            time.sleep(0.5)


def test_every_operation_is_counted_through_a_worker():
    registry = CollectorRegistry()
    telemetry = PrometheusTelemetry(registry)
    with opened(telemetry) as queue:
        queue.send("ok")
        queue.send_many(["reject", "retry", "slow"])
        with Worker(queue, handle, telemetry=telemetry, lease=0.6, prefetch=0):
            drained(queue)

    def value(name, **labels):
        return registry.get_sample_value(f"kmq_{name}", {"queue": "jobs", **labels})

    counted = {name: value(f"client_{name}_total") for name in ("sent", "received", "acked", "nacked")}
    assert counted == {"sent": 4, "received": 5, "acked": 3, "nacked": 1}
    assert value("client_dead_lettered_total") == 1
    assert value("client_extended_total") >= 1
    assert value("client_in_flight") == 0
    assert value("worker_handler_seconds_count", outcome="ok") == 3
    assert value("worker_handler_seconds_count", outcome="error") == 2


def test_what_a_late_receipt_did_not_do_is_counted():
    registry = CollectorRegistry()
    with opened(PrometheusTelemetry(registry)) as queue:
        queue.send("x")
        message = queue.receive()[0]
        queue.ack(message)
        queue.ack(message)
    labels = {"queue": "jobs", "what": "late ack"}
    assert registry.get_sample_value("kmq_client_failures_total", labels) == 1


@pytest.mark.parametrize("count", [1, 3])
def test_a_message_is_one_trace_from_its_send_to_its_acknowledgement(count):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = TracingTelemetry(provider, system="memory")
    with opened(telemetry) as queue:
        queue.send_many(["x"] * count)
        with Worker(queue, handle, telemetry=telemetry, concurrency=1):
            drained(queue)
    spans = exporter.get_finished_spans()
    provider.shutdown()
    by_name = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
        assert span.attributes["messaging.system"] == "memory"
    sends = {span.context.span_id: span for span in by_name["send jobs"]}
    processes = {span.context.span_id: span for span in by_name["process jobs"]}
    assert len(sends) == len(processes) == count
    assert {span.parent.span_id for span in processes.values()} == set(sends)
    for ack in by_name["ack jobs"]:
        assert ack.parent.span_id in processes
    assert (
        sum(span.attributes.get("messaging.batch.message_count", 1) for span in by_name["ack jobs"]) == count
    )
    assert {link.context.span_id for span in by_name["receive jobs"] for link in span.links} == set(sends)
