"""Clients that never reach Kafka again, although Kafka answers others (librdkafka's issue 5301)."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from confluent_kafka import KafkaError, KafkaException
from fake_kafka import FakeKafka

from kmqpy.core.clock import SYSTEM_CLOCK, SystemClock, wait_until
from kmqpy.errors import MessageError, Unavailable
from kmqpy.kafka import cut_off, librdkafka, topic_identity
from kmqpy.kafka.client.client_options import SendLimits
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.client.sender import QueueSender, new_producer
from kmqpy.kafka.client.start_markers import StartMarkerWriter
from kmqpy.kafka.cut_off import CutOffCheck, RenewedProducer
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_identity import TopicIds, TopicWatch
from kmqpy.kafka.topics import Topics
from tracker.background import BackgroundJobs, Pool
from tracker.cut_off_keeper import CutOffKeeper
from tracker.reading import markers_consumer
from tracker.reading.markers_consumer import MarkersConsumer
from tracker.redelivery import tick_writer
from tracker.redelivery.tick_writer import TickWriter

NEVER_AGAIN = {"metadata.recovery.strategy": "none"}
"""A client with this setting is cut off for sure once it knows a wrong port only."""


class Clock(SystemClock):
    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def kafka() -> Iterator[FakeKafka]:
    with FakeKafka() as broker:
        yield broker


def test_topics_are_found_again_after_kafka_has_named_no_broker(kafka):
    """The fault itself. It strikes one client in three, so this tries until it does."""
    for _ in range(60):
        topics = Topics(kafka.connection(), 1.0)
        assert topics.brokers() == 1
        kafka.names_broker = False
        with suppress(KafkaException):
            librdkafka.look_up(topics._admin, 1.0)
        kafka.names_broker = True
        try:
            assert topics.brokers() == 1
        except Unavailable:
            assert topics.brokers() == 1
            return


@pytest.mark.parametrize("call", [Topics.brokers, lambda topics: topics.describe(["t", "u"])])
def test_a_client_that_was_replaced_is_gone_at_once(kafka, call):
    """Not with the next garbage collection, which may be late, and in a thread of librdkafka."""
    kafka.close()
    topics = Topics(kafka.connection(), 0.2)
    gc.disable()
    try:
        former = weakref.ref(topics._admin)
        with suppress(Unavailable):
            call(topics)
        assert former() is None
    finally:
        gc.enable()


def test_what_a_failed_job_of_a_tracker_has_used_is_gone_at_once(kafka):
    kafka.close()
    topics = Topics(kafka.connection(), 0.2)
    former = weakref.ref(topics._admin)
    jobs, ended = BackgroundJobs(1, SimpleNamespace()), []
    gc.disable()
    try:
        jobs.run(Pool.HOUSEKEEPING, topics.brokers, lambda result: ended.append(type(result)))
        assert wait_until(lambda: jobs.take_results() or ended, 20.0)
        jobs.close()
        assert (ended, former()) == ([Unavailable], None)
    finally:
        gc.enable()


def test_a_watch_of_topics_learns_the_ids_again(kafka, monkeypatch):
    monkeypatch.setattr(topic_identity, "_ANSWER_TIMEOUT_S", 0.5)
    connection = kafka.connection(**NEVER_AGAIN)
    admin = librdkafka.new_admin(connection)
    watch = TopicWatch(connection, QueueSettings(name="t"), TopicIds("old", "old"), admin=admin)
    assert _knows_soon(watch, within_s=10.0)
    _cut_off(kafka, admin)
    assert _knows_soon(watch, within_s=10.0)
    assert watch._admin is not admin


def _knows_soon(watch: TopicWatch, within_s: float = 1.0) -> bool:
    asked = time.monotonic()

    def knows() -> bool:
        watch.look()
        return watch.knows_since(asked)

    return wait_until(knows, within_s)


def _cut_off(broker, client):
    """Have the broker lead this client astray, and no other."""
    client.list_topics("t", 5.0)
    broker.lead_astray()
    assert wait_until(lambda: not _is_answered(client), 20.0)
    broker.named_port = broker.port


def _is_answered(client):
    try:
        client.list_topics("t", 1.0)
    except KafkaException:
        return False
    return True


def test_a_consumer_is_cut_off_once_others_were_answered_for_a_while(kafka, monkeypatch):
    monkeypatch.setattr(cut_off, "_ANSWER_TIMEOUT_S", 0.6)
    clock = Clock()
    connection = kafka.connection(**NEVER_AGAIN)
    check = CutOffCheck(connection, "t", clock)
    astray = librdkafka.new_consumer(connection, {})
    _cut_off(kafka, astray)
    well = librdkafka.new_consumer(connection, {})
    try:
        found = []
        for _ in range(4):
            assert not check.is_due()
            clock.seconds += 5.0
            assert check.is_due()
            found.append(check.find([well, astray]))
        assert found == [[], [], [], [astray]]
        kafka.close()  # nobody is answered
        for _ in range(2):
            clock.seconds += 60
            assert check.find([well, astray]) == []
    finally:
        well.close()


def test_a_tick_writer_takes_another_producer_after_a_tick_that_was_not_written(kafka, monkeypatch):
    monkeypatch.setitem(tick_writer._PRODUCER_SETTINGS, "message.timeout.ms", 200)
    ticks = TickWriter(kafka.connection())
    first = ticks._producers.current()
    with pytest.raises(Unavailable):
        ticks.send_tick("t", 0, 3.0)
    assert ticks._producers.current() is not first


def test_what_a_tick_that_was_not_written_refers_to_is_freed(kafka, monkeypatch):
    """Also if its producer was replaced meanwhile, since an earlier tick was not written either."""

    class Written:
        def __call__(self, _tick):
            pass

    monkeypatch.setitem(tick_writer._PRODUCER_SETTINGS, "message.timeout.ms", 400)
    ticks = TickWriter(kafka.connection())
    producer = ticks._producers.current()
    ticks.post_tick("t", 0, Written())
    time.sleep(0.3)
    later = Written()
    ticks.post_tick("t", 0, later)
    gone = weakref.ref(later)
    del later
    while ticks._producers.current() is producer:
        producer.poll(0.01)
    del producer
    assert wait_until(lambda: ticks.poll() or gone() is None, 5.0)


def test_late_failures_of_a_former_producer_replace_no_other(kafka):
    producers = RenewedProducer(lambda: librdkafka.new_producer(kafka.connection(), {}))
    first, error = producers.current(), KafkaError(KafkaError._MSG_TIMED_OUT)
    producers.note_failure(first, error)
    second = producers.current()
    producers.note_failure(first, error)
    assert first is not second is producers.current()


def test_a_sender_takes_another_producer_after_a_message_that_was_not_sent(kafka):
    shared = new_producer(kafka.connection(), SendLimits(200))
    sender = QueueSender(QueueSettings(name="t"), kafka.connection(), lambda _: shared)
    first = shared.current()
    with pytest.raises(Unavailable):
        sender.send_many(["x"])
    assert shared.current() is not first
    with pytest.raises(MessageError):
        sender.send_many(["x" * 2_000_000])
    assert shared.current() is shared.current()


def test_a_sender_takes_another_producer_after_no_report_in_time(kafka):
    shared = new_producer(kafka.connection(), SendLimits(60_000))
    sender = QueueSender(QueueSettings(name="t"), kafka.connection(), lambda _: shared, SendLimits(10))
    first = shared.current()
    with pytest.raises(Unavailable):
        sender.send_many(["x"])
    assert shared.current() is not first


def test_producers_of_start_markers_that_are_cut_off_are_gone_once_replaced(kafka):
    def new_producer(**settings):
        return librdkafka.new_producer(kafka.connection(), {"message.timeout.ms": 60_000, **settings})

    writer = StartMarkerWriter("t", new_producer, SYSTEM_CLOCK, ranges=False, closing=threading.Event())
    batch = writer.start({0: range(1_000)}, {}, 1_000, None, timeout_s=0.1)
    assert batch.wait_until_confirmed().failed == {0: 0}
    assert not writer.outcome_known(0)  # a tick is on its way
    cut_off = writer.producers_in_use()
    gone = [weakref.ref(one) for one in cut_off]
    del batch
    writer.replace(cut_off)
    del cut_off
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_marker_writer_takes_another_producer_after_markers_that_were_not_written(kafka):
    writer = MarkerWriter(
        kafka.connection(), QueueSettings(name="q", markers_topic="t"), delivery_timeout_ms=200
    )
    first = writer._producer
    writer.end(0, [1])
    assert wait_until(lambda: writer._producer is not first, 20.0)
    writer.abandon()


def test_a_tracker_asks_only_with_consumers_that_got_nothing():
    clock, asked = Clock(), []
    markers, ends = (SimpleNamespace(consumer=name, is_silent=lambda: False) for name in ("markers", "ends"))
    jobs = SimpleNamespace(run=lambda _pool, find, _found: asked.append(find.args))
    context = MagicMock(jobs=jobs, connection=None, clock=clock)
    keeper = CutOffKeeper(context, SimpleNamespace(markers=markers, ends=ends))
    clock.seconds = 60
    keeper.check_silent_consumers()
    assert asked == []
    markers.is_silent = lambda: True
    keeper.check_silent_consumers()
    assert asked == [(["markers"],)]


def test_markers_are_silent_when_nothing_comes_of_partitions_that_are_read(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(markers_consumer, "SYSTEM_CLOCK", clock)
    monkeypatch.setattr(librdkafka, "new_consumer", lambda *_: FakeConsumer())
    consumer = MarkersConsumer(None)
    part = SimpleNamespace(
        queue=SimpleNamespace(markers_topic="markers"), number=0, state=SimpleNamespace(position=0)
    )
    clock.seconds = 60
    assert not consumer.is_silent()  # nothing is to come
    consumer.start(part)
    assert not consumer.is_silent()
    clock.seconds = 66
    assert consumer.is_silent()
    consumer.consumer.records = [SimpleNamespace(topic=str, partition=int)]
    consumer.fetch(0)
    assert not consumer.is_silent()


class FakeConsumer:
    def __init__(self) -> None:
        self.records: list[object] = []

    def incremental_assign(self, places: object) -> None: ...

    def consume(self, count: int, wait_s: float) -> list[object]:
        records, self.records = self.records[:count], self.records[count:]
        return records
