"""A client over a writer and a group member that need no Kafka; above all iteration over it."""

import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
from confluent_kafka import Message as Record
from fake_kafka import FakeKafka

from kmqpy.errors import Closed, ConfigError, Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.client import receiver, topics_in_use
from kmqpy.kafka.client.consumer import QueueConsumer
from kmqpy.kafka.client.start_markers import StartOutcome
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.records import offsets_of_records
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds

IDS = TopicIds("Q", "M")


class FakeWatch:
    def __init__(self, *_):
        pass

    def look(self):
        return IDS

    def knows_since(self, moment):
        return True


class FakeTopics:
    admin = None

    def __init__(self, connection):
        pass

    def check(self, queue):
        return SimpleNamespace(ids=IDS, markers=SimpleNamespace(partitions=1))


class FakeWriter:
    is_away = False

    def __init__(self, *_, **__):
        self.queued = []
        self.closed = False

    def get_ready(self):
        pass

    def outcome_known(self, partition):
        return True

    @property
    def starts(self):
        return self

    def start(self, takes, *_):
        return SimpleNamespace(wait_until_confirmed=lambda _: StartOutcome(dict.fromkeys(takes, 0), {}))

    def put_one(self, marker):
        if self.closed:
            raise Unavailable("the writer is closed")
        self.queued.append(marker)

    def give_back(self, places):
        for place in places:
            self.put_one(Marker(*place, Op.NACK, counts=False))

    def put(self, items, **_):
        for item in items:
            self.put_one(item)

    def close(self, timeout_s, waited_s):
        self.closed = True

    def given_back(self):
        assert all(marker.op is Op.NACK and not marker.counts for marker in self.queued)
        return [marker.offset for marker in self.queued]


class FakeMember:
    """Gives a batch of so many messages, once."""

    size = 0
    cuts: ClassVar = {}
    consumer = None
    partitions = ()

    def __init__(self, *_, **__):
        self._coming = [Record(topic="q", value=b"", partition=0, offset=at) for at in range(self.size)]

    def poll(self, max_records, wait_s):
        records, self._coming = self._coming, []
        if not records:
            threading.Event().wait(wait_s)
        return records, offsets_of_records(records)

    def pop_orphaned_starts(self):
        return []

    def goes_back_in(self, _last_at):
        return []

    def apply_start_outcome(self, *_):
        pass

    def start_over(self, *_, **__):
        pass

    maintain = keep_alive = close = start_over


def failures_of_housekeeping(caplog):
    """What was logged since the test began."""
    return [record.exc_info[1] for record in caplog.get_records("call") if "housekeeper" in record.name]


@pytest.fixture
def client(monkeypatch, caplog):
    monkeypatch.setattr(topics_in_use, "Topics", FakeTopics)
    monkeypatch.setattr(topics_in_use, "TopicWatch", FakeWatch)
    monkeypatch.setattr(topics_in_use, "MarkerWriter", FakeWriter)
    monkeypatch.setattr(receiver, "GroupMember", FakeMember)
    monkeypatch.setattr(FakeMember, "size", 5)
    made = QueueConsumer(QueueSettings(name="q"), KafkaConnection())
    yield made
    made.close()
    assert failures_of_housekeeping(caplog) == []


@pytest.mark.parametrize(
    ("ids", "handed_out"), [(IDS, 5), (TopicIds("Q", "another"), 5), (TopicIds("another", "another"), 0)]
)
def test_r24_nothing_is_handed_out_when_start_markers_lead_to_the_news_that_the_queue_is_another(
    client, monkeypatch, ids, handed_out
):
    def goes_back_in(*_):
        monkeypatch.setattr(FakeWatch, "look", lambda _: ids)
        return [0]

    monkeypatch.setattr(FakeMember, "goes_back_in", goes_back_in)
    monkeypatch.setattr(FakeMember, "follow", lambda *_: None, raising=False)
    monkeypatch.setattr(FakeWriter, "abandon", FakeWriter.get_ready, raising=False)
    assert len(client.receive(wait=0)) == handed_out


def test_an_iteration_ends_when_another_thread_closes_the_client(client):
    for message in client:
        if message.offset == 4:
            threading.Timer(0.2, client.close).start()


def test_a_batch_that_comes_while_another_thread_closes_the_client_is_given_back(client, monkeypatch):
    receive = client.receive
    closing = threading.Thread(target=client.close)

    def receive_and_close(*some, **more):
        batch = receive(*some, **more)
        if batch:
            closing.start()
            closing.join(0.5)
        return batch

    monkeypatch.setattr(client, "receive", receive_and_close)
    assert list(client) == []
    closing.join(60)
    assert client._topics.writer.given_back() == [0, 1, 2, 3, 4]


def test_an_iteration_that_goes_on_does_not_disturb_close(client, monkeypatch):
    put_one = client._topics.writer.put_one

    def put_and_take(marker):  # as another thread's iteration may at this moment
        put_one(marker)
        client.read_ahead.pop()

    assert next(iter(client)).offset == 0
    monkeypatch.setattr(client._topics.writer, "put_one", put_and_take)
    client.close()
    assert client._topics.writer.given_back() == [1, 2, 3, 4]


def test_what_got_stale_is_given_back_before_close_closes_the_writer(client, monkeypatch):
    messages = iter(client)
    next(messages)
    give_back = client._topics.writer.give_back
    closing = threading.Thread(target=client.close)

    def close_and_give_back(places):
        if not closing.ident:
            closing.start()
            closing.join(0.5)
        give_back(places)

    monkeypatch.setattr(client._topics.writer, "give_back", close_and_give_back)
    client.read_ahead._min_lease_left_s = 60
    assert list(messages) == []
    closing.join(60)
    assert client._topics.writer.given_back() == [1, 2, 3, 4]


@pytest.mark.parametrize("lease", [0, 0.099])
def test_leases_have_a_least_length(client, lease):
    with pytest.raises(ConfigError, match=r"lease: \d+ ms is shorter than the least, 100 ms"):
        client.receive(lease=lease)
    messages = client.receive(lease=0.1)
    assert len(messages) == 5
    with pytest.raises(ConfigError, match="least"):
        client.extend(*messages, lease=lease)


def wait_for_markers(client):
    """Wait until the housekeeper has written some, but not for ever."""
    moment = threading.Event()
    for _ in range(1_000):
        if client._topics.writer.queued or moment.wait(0.01):
            break


def test_what_waits_its_turn_is_given_back_while_another_thread_receives(client):
    """The housekeeper can't do what needs the consumer then, but this it can."""
    assert next(iter(client)).offset == 0
    later = client._clock.monotonic() + 16  # of 30
    client.read_ahead._clock = SimpleNamespace(monotonic=lambda: later)
    with client.receiving:
        wait_for_markers(client)
    assert client._topics.writer.given_back() == [1, 2, 3, 4]


def test_what_failed_start_markers_took_is_given_back_while_nobody_receives(client, monkeypatch):
    """They were written after all, and the leases run while the user's code is busy with other messages."""
    assert len(client.receive()) == 5
    monkeypatch.setattr(
        client.receiver._member,
        "pop_orphaned_starts",
        lambda: [(0, 7)] if not client._topics.writer.queued else [],
    )
    wait_for_markers(client)
    assert client._topics.writer.given_back() == [7]


def test_a_failure_does_not_end_housekeeping(client, monkeypatch, caplog):
    """Else the client would leave its group and commit nothing while the user's code is busy."""
    failure = Unavailable("Kafka does not answer")
    failures = [failure]

    def pop_orphaned_starts():
        if failures:
            raise failures.pop()
        return [(0, 7)] if not client._topics.writer.queued else []

    assert len(client.receive()) == 5
    monkeypatch.setattr(client.receiver._member, "pop_orphaned_starts", pop_orphaned_starts)
    wait_for_markers(client)
    assert client._topics.writer.given_back() == [7]
    assert failures_of_housekeeping(caplog) == [failure]
    caplog.clear()


def test_what_an_interrupted_receive_took_is_given_back(client, monkeypatch):
    calls = []
    starting = SimpleNamespace(
        wait_until_confirmed=lambda _: 1 / 0, give_back=lambda: calls.append("given back")
    )
    monkeypatch.setattr(client._topics.writer, "start", lambda *_: starting)
    with pytest.raises(ZeroDivisionError):
        client.receive()
    assert client.receive(wait=0) == []
    assert calls == ["given back"]


class SlowLink:
    """A clock, and a writer whose start markers take 80 ms to be confirmed."""

    def __init__(self):
        self.now = 100.0
        self.leases_ms = []

    def monotonic(self):
        return self.now

    def wall_ms(self):
        return int(self.now * 1000)

    def sleep(self, seconds):
        self.now += seconds

    def start(self, takes, _delays, lease_ms, *_):
        self.leases_ms.append(lease_ms)

        def wait_until_confirmed(_):
            self.now += 0.08
            return StartOutcome(dict.fromkeys(takes, 0), {})

        return SimpleNamespace(wait_until_confirmed=wait_until_confirmed)


def test_over_a_slow_link_short_leases_are_lengthened_so_that_messages_are_handed_out(client, monkeypatch):
    link = SlowLink()
    client.receiver._clock = client._in_flight._clock = link
    monkeypatch.setattr(client._topics.writer, "start", link.start)
    member = client.receiver.join()
    found = []
    for _ in range(3):
        member._coming = [Record(topic="q", value=b"", partition=0, offset=0)]
        found.append(len(client._receive_once(10, 0, 100)))
    assert found == [0, 1, 1]  # the first time it is not known yet
    assert link.leases_ms[0] == 100
    assert all(260 <= lease_ms <= 264 for lease_ms in link.leases_ms[1:])
    member._coming = [Record(topic="q", value=b"", partition=0, offset=0)]
    assert len(client._receive_once(10, 0, 1_000)) == 1
    assert link.leases_ms[-1] == 1_000


@pytest.mark.parametrize("confirmed", [False, True])
def test_who_acknowledges_is_told_that_another_thread_has_closed_the_client(client, monkeypatch, confirmed):
    messages = client.receive(1)

    def write(*_, **__):
        client.close()
        raise Unavailable("the writer is closed")

    monkeypatch.setattr(client._topics.writer, "write" if confirmed else "put", write, raising=False)
    with pytest.raises(Closed):
        client.ack(*messages, confirmed=confirmed)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_housekeeper_that_could_not_start_is_started_by_the_next_call(client, monkeypatch, error):
    def start(_thread):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(type(error)):
            client._housekeeper.ensure_started()
    assert client.receive(1)
    assert client._housekeeper.is_started


def test_what_is_cut_off_is_replaced_in_a_pause_of_those_who_receive(client, monkeypatch):
    replaced = threading.Event()
    monkeypatch.setattr(receiver, "_CHECK_CUT_OFF_AFTER_S", 0.0)
    monkeypatch.setattr(client.receiver._cut_off, "is_due", lambda: not replaced.is_set())
    monkeypatch.setattr(client.receiver._cut_off, "find", list)
    monkeypatch.setattr(client.receiver, "_clients", lambda: ["a consumer"])
    monkeypatch.setattr(client.receiver, "replace", lambda found: found == ["a consumer"] and replaced.set())
    deadline = time.monotonic() + 60
    while not replaced.is_set():
        client.receive(wait=0.1)
        assert time.monotonic() < deadline


def test_to_ask_whether_kafka_answers_creates_no_topic(client):
    """Brokers that create topics by themselves take a producer's question for a wish."""
    with FakeKafka() as kafka:
        client.receiver._cut_off.find([librdkafka.new_producer(kafka.connection(), {})])
        assert kafka.may_create == {client._queue.markers_topic}  # to which the producer writes
