"""What iterating over a client does while another thread closes it, without Kafka."""

import threading
from types import SimpleNamespace

import pytest
from confluent_kafka import Message as Record

from kmqpy import client as client_module
from kmqpy.client import KmqClient
from kmqpy.config import Connection, QueueSettings
from kmqpy.errors import Unavailable
from kmqpy.markers import Op
from kmqpy.records import by_partition
from kmqpy.starting import Started


class FakeTopics:
    def __init__(self, connection):
        pass

    def check(self, queue):
        return SimpleNamespace(queue=SimpleNamespace(topic_id="id"), markers=SimpleNamespace(partitions=1))


class FakeWriter:
    def __init__(self, *_, **__):
        self.posted = []
        self.closed = False

    def get_ready(self):
        pass

    def settled(self, partition):
        return True

    def start(self, takes, *_):
        return SimpleNamespace(confirmed=lambda: Started(dict.fromkeys(takes, 0), {}))

    def post(self, marker):
        if self.closed:
            raise Unavailable("the writer is closed")
        self.posted.append(marker)

    def close(self, timeout_s):
        self.closed = True

    def given_back(self):
        assert all(marker.op is Op.NACK and not marker.counts for marker in self.posted)
        return [marker.offset for marker in self.posted]


class FakeSource:
    """Gives a batch of so many messages, once."""

    size = 0

    def __init__(self, *_, **__):
        self._coming = [Record(topic="q", value=b"", partition=0, offset=at) for at in range(self.size)]

    def poll(self, max_records, wait_s):
        records, self._coming = self._coming, []
        if not records:
            threading.Event().wait(wait_s)
        return records, by_partition(records)

    def abandoned(self):
        return []

    def taken(self, *_):
        pass

    def start_over(self):
        pass

    maintain = keep_alive = close = start_over


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(client_module, "Topics", FakeTopics)
    monkeypatch.setattr(client_module, "MarkerWriter", FakeWriter)
    monkeypatch.setattr(client_module, "QueueSource", FakeSource)
    monkeypatch.setattr(FakeSource, "size", 5)
    made = KmqClient(QueueSettings(name="q"), Connection())
    yield made
    made.close()


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
    closing.join(5)
    assert client._writer.given_back() == [0, 1, 2, 3, 4]


def test_an_iteration_that_goes_on_does_not_disturb_close(client, monkeypatch):
    post = client._writer.post

    def post_and_take(marker):  # as another thread's iteration may at this moment
        post(marker)
        if client._iterating:
            client._iterating.popleft()

    assert next(iter(client)).offset == 0
    monkeypatch.setattr(client._writer, "post", post_and_take)
    client.close()
    assert client._writer.given_back() == [1, 2, 3, 4]


def test_what_got_stale_is_given_back_before_close_closes_the_writer(client, monkeypatch):
    messages = iter(client)
    next(messages)
    release = client._release
    closing = threading.Thread(target=client.close)

    def close_and_release(places):
        if not closing.ident:
            closing.start()
            closing.join(0.5)
        release(places)

    monkeypatch.setattr(client, "_release", close_and_release)
    monkeypatch.setattr(client_module, "_MIN_LEASE_LEFT", 2)
    assert list(messages) == []
    closing.join(5)
    assert client._writer.given_back() == [1, 2, 3, 4]
