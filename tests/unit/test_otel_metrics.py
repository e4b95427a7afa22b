"""OpenTelemetry metrics of queues and workers, as the SDK exports them: the same over every storage."""

import time

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kmqpy.errors import ReceiptError
from kmqpy.queue.opening import storage_for
from kmqpy.telemetry.opentelemetry_metrics import MetricsTelemetry
from kmqpy.worker.outcome import Reject
from kmqpy.worker.worker import Worker


class Exported:
    def __init__(self, system="kafka"):
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)
        self.telemetry = MetricsTelemetry(self.provider, system=system)

    def metrics(self):
        (resource,) = self.reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}

    def points(self, name):
        """By operation and error: the value of a counter, the count of a histogram."""
        return {
            (
                point.attributes.get("messaging.operation.name"),
                point.attributes.get("error.type"),
            ): point.count if hasattr(point, "count") else point.value
            for point in self.metrics()[name].data.data_points
        }


@pytest.fixture
def exported():
    one = Exported()
    yield one
    one.provider.shutdown()


@pytest.fixture(params=["memory", "sqlite"])
def storage_url(request, tmp_path):
    return {"memory": "memory://otel-metrics", "sqlite": f"sqlite:///{tmp_path}/queues.db"}[request.param]


def handle(message):
    if message.body == b"reject":
        raise Reject


def test_a_worker_and_its_queue_are_counted_and_timed(exported, storage_url):
    with storage_for(storage_url, telemetry=exported.telemetry) as storage:
        storage.create("jobs")
        queue = storage.open("jobs")
        queue.send("ok")
        queue.send_many(["ok", "reject"])
        with Worker(queue, handle, telemetry=exported.telemetry, prefetch=0):
            deadline = time.monotonic() + 60
            while queue.size() or queue.in_flight():
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert exported.points("messaging.client.sent.messages") == {("send", None): 3}
    assert exported.points("messaging.client.operation.duration") == {("send", None): 3}
    assert exported.points("messaging.client.consumed.messages") == {("receive", None): 3}
    assert exported.points("messaging.process.duration") == {("process", None): 2, ("process", "Reject"): 1}
    assert exported.points("kmq.client.finished.messages") == {("ack", None): 2, ("dead-letter", None): 1}


def test_opted_in_every_call_is_timed(monkeypatch, storage_url):
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "messaging")
    exported = Exported()
    with storage_for(storage_url, telemetry=exported.telemetry) as storage:
        storage.create("timed")
        queue = storage.open("timed")
        queue.send_many(["a", "b", "c"])
        first, second, third = queue.receive()
        queue.extend(first, second, lease=5)
        queue.ack(first, second)
        queue.nack(third, count=False)
        queue.dead_letter(queue.receive())
        with pytest.raises(ReceiptError):
            queue.ack("no receipt")
    assert exported.points("messaging.client.operation.duration") == {
        ("send", None): 3,
        ("receive", None): 2,
        ("extend", None): 1,
        ("ack", None): 1,
        ("ack", "ReceiptError"): 1,
        ("nack", None): 1,
        ("dead-letter", None): 1,
    }
    exported.provider.shutdown()


def test_durations_are_seconds_in_the_buckets_of_the_conventions(exported):
    with exported.telemetry.sending("jobs", ()):
        pass
    metric = exported.metrics()["messaging.client.operation.duration"]
    (point,) = metric.data.data_points
    assert metric.unit == "s"
    assert point.explicit_bounds[0] == 0.005
    assert point.explicit_bounds[-1] == 10
    assert dict(point.attributes) == {
        "messaging.system": "kafka",
        "messaging.destination.name": "jobs",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
    }


def test_a_failed_send_is_counted_with_the_class_of_its_error(exported):
    with pytest.raises(ValueError, match="secret"), exported.telemetry.sending("jobs", ()):
        raise ValueError("secret")
    assert exported.points("messaging.client.sent.messages") == {("send", "ValueError"): 1}
    assert exported.points("messaging.client.operation.duration") == {("send", "ValueError"): 1}


def test_failures_and_messages_in_flight(exported):
    exported.telemetry.failed("jobs", "late ack", 2)
    exported.telemetry.in_flight("jobs", 7)
    assert exported.points("kmq.client.failures") == {(None, None): 2}
    assert exported.points("kmq.client.in_flight") == {(None, None): 7}


def test_without_a_provider_nothing_is_needed():
    telemetry = MetricsTelemetry()
    with telemetry.sending("jobs", (("a", b"1"),)) as headers:
        assert headers == (("a", b"1"),)
    telemetry.in_flight("jobs", 1)
