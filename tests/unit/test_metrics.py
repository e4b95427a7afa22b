import pytest
from fake_queue import FakeQueue
from prometheus_client import CollectorRegistry, generate_latest

from kmqpy.telemetry.base import Combined, Telemetry
from kmqpy.telemetry.prometheus import PrometheusTelemetry, QueueGauges
from kmqpy.testing import memory_storage
from kmqpy.worker.worker import Worker
from tracker.health.metrics import TrackerMetrics


class Ticking:
    """A clock that goes on by `step` seconds with every look at it."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now

    def wall_ms(self) -> int:
        return 0

    def sleep(self, seconds: float) -> None:
        """Nothing."""


@pytest.fixture
def registry():
    return CollectorRegistry()


def value(registry, name, **labels):
    return registry.get_sample_value(f"kmq_{name}", {"queue": "jobs", **labels})


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("send", "sent"),
        ("ack", "acked"),
        ("nack", "nacked"),
        ("extend", "extended"),
        ("dead-letter", "dead_lettered"),
    ],
)
def test_operations_are_counted_by_queue(registry, op, name):
    telemetry = PrometheusTelemetry(registry)
    telemetry.finished("jobs", op, 3)
    telemetry.finished("jobs", op)
    telemetry.finished("other", op)
    assert value(registry, f"client_{name}_total") == 4


def test_received_in_flight_and_failures(registry):
    telemetry = PrometheusTelemetry(registry)
    queue = FakeQueue("a", "b")
    telemetry.received("jobs", queue.receive())
    telemetry.in_flight("jobs", 7)
    telemetry.in_flight("jobs", 2)
    telemetry.failed("jobs", "commit", 5)
    assert value(registry, "client_received_total") == 2
    assert value(registry, "client_in_flight") == 2
    assert value(registry, "client_failures_total", what="commit") == 5


def test_an_operation_of_a_newer_version_is_no_error(registry):
    PrometheusTelemetry(registry).finished("jobs", "fly")


def test_seconds_of_handlers_by_outcome(registry):
    queue = FakeQueue("good", "bad")

    def handler(message):
        if message.body == b"bad":
            raise ValueError

    telemetry = PrometheusTelemetry(registry, Ticking(0.05))
    with Worker(queue, handler, telemetry=telemetry, concurrency=1):
        queue.wait_until_finished(2)
    for outcome in ("ok", "error"):
        labels = {"queue": "fake", "outcome": outcome}
        assert registry.get_sample_value("kmq_worker_handler_seconds_count", labels) == 1
        assert registry.get_sample_value("kmq_worker_handler_seconds_sum", labels) == pytest.approx(0.05)


def test_the_page_holds_every_metric(registry):
    PrometheusTelemetry(registry)
    page = generate_latest(registry).decode()
    for name in ("sent", "received", "acked", "nacked", "extended", "dead_lettered", "failures"):
        assert f"# TYPE kmq_client_{name}_total counter" in page
    assert "# TYPE kmq_client_in_flight gauge" in page
    assert "# TYPE kmq_worker_handler_seconds histogram" in page


def test_it_is_told_beside_others(registry):
    class Headers(Telemetry):
        def sending(self, queue, headers):
            from contextlib import nullcontext

            return nullcontext((*headers, ("x", b"1")))

    both = Combined(PrometheusTelemetry(registry), Headers())
    with both.sending("jobs", ()) as headers:
        assert headers == (("x", b"1"),)
    both.finished("jobs", "send")
    assert value(registry, "client_sent_total") == 1


def test_a_tracker_shows_nothing_more_of_a_queue_that_was_removed():
    metrics = TrackerMetrics()
    for queue in ("kept", "removed"):
        metrics.begin(queue)
        metrics.in_flight.labels(queue, "0").set(3)
        metrics.owned.labels(queue).set(1)
        metrics.lateness.labels(queue).observe(0.1)
    metrics.keep_only({"kept", "not yet begun"})
    shown = generate_latest(metrics.registry).decode()
    assert 'queue="removed"' not in shown
    assert metrics.registry.get_sample_value("kmq_in_flight", {"queue": "kept", "partition": "0"}) == 3
    assert metrics.registry.get_sample_value("kmq_redelivered_total", {"queue": "kept"}) == 0


def test_what_queues_hold_and_which_groups_stand_still(registry):
    with memory_storage() as storage:
        QueueGauges(storage, registry=registry)
        storage.create("jobs", order="group", on_dead_letter="hold")
        storage.create("others")
        with storage.open("jobs") as queue:
            for group in ("a", "a", "b"):
                queue.send("x", group=group)
            queue.dead_letter(queue.receive(1), confirmed=True)
        counts = {
            state: value(registry, "queue_messages", state=state) for state in ("ready", "in flight", "dead")
        }
        assert counts == {"ready": 2, "in flight": 0, "dead": 1}
        assert value(registry, "queue_held_groups") == 1
        assert registry.get_sample_value("kmq_queue_messages", {"queue": "others", "state": "ready"}) == 0
        assert registry.get_sample_value("kmq_queue_held_groups", {"queue": "others"}) is None
    assert value(registry, "queue_held_groups") is None  # the storage is closed, and the page still there
