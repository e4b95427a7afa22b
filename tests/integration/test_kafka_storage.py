"""What the storage on Kafka does beyond the contract."""

import time
import uuid
from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic
from support import LiveQueue, until

from kmqpy.errors import ConfigError, NotSupported, QueueNotFound, ReceiptError
from kmqpy.kafka.admin.registry_requests import RegistryRequests
from kmqpy.kafka.client.record_message import KafkaMessage
from kmqpy.kafka.client.sender import new_producer
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.kafka.settings_mirror import SettingsMirror
from kmqpy.kafka.topics import Topics
from kmqpy.queue import queue_for, storage_for


@pytest.fixture
def url(cluster, zookeeper) -> str:
    """Of a storage with a root of its own; nothing redelivers."""
    return f"kafka://{cluster.bootstrap}?zookeeper={zookeeper.hosts}&root=/kmq-{uuid.uuid4().hex[:8]}"


def threads() -> int:
    """How many threads this process has, those of librdkafka too."""
    return len([*Path("/proc/self/task").iterdir()])


def take_one(queue, **arguments):
    found = []
    until(lambda: found.extend(queue.receive(1, wait=0.5, **arguments)) or found)
    return found[0]


def test_queues_that_only_send_and_count_share_their_connections(url):
    names = [f"shared-{uuid.uuid4().hex[:8]}" for _ in range(4)]
    with storage_for(url) as storage:
        for name in names:
            storage.create(name)
        first = storage.open(names[0])
        first.send("x")
        assert first.size() == 1
        before = threads()
        queues = [storage.open(name) for name in names * 5]
        for queue in queues:
            queue.send("x")
        assert threads() - before <= 5
        assert queues[0].size() == 6
        for name in names:
            storage.delete(name)


def test_what_receives_is_closed_when_it_is_idle_and_opened_again(url):
    name = f"idle-{uuid.uuid4().hex[:8]}"
    with storage_for(f"{url}&idle_timeout_ms=200ms") as storage:
        storage.create(name)
        queue = storage.open(name)
        queue.send_many(["a", "b"])
        assert queue.partitions == []  # only sends so far
        message = take_one(queue, lease=60)
        assert queue.partitions == [0]
        time.sleep(1)
        assert queue.partitions == [0]  # it has a message in flight
        message.ack(confirmed=True)
        until(lambda: queue.partitions == [])
        message.ack(confirmed=True)  # harmless, and does not need the client that received it
        other = take_one(queue, lease=60)
        assert {message.body, other.body} == {b"a", b"b"}
        storage.delete(name)


def test_a_missing_queue_is_made_where_the_url_says_so(url):
    name = f"made-{uuid.uuid4().hex[:8]}"
    with pytest.raises(QueueNotFound, match=name):
        queue_for(f"{url}&queue={name}")
    made = f"{url}&queue={name}&create=true&partitions=3&max_redeliveries=1"
    for _ in range(2):
        with queue_for(made) as queue:
            assert queue.settings.max_redeliveries == 1
    with pytest.raises(ConfigError, match="max_redeliveries: 2 is not what"):
        queue_for(f"{url}&queue={name}&max_redeliveries=2")
    with storage_for(url) as storage:
        found = storage.describe(name)
        assert (found.settings["partitions"], found.settings["order"], found.ready) == (3, "any", 0)
        for setting, error in [
            ({"order": "fifo"}, NotSupported),
            ({"partitions": "many"}, ConfigError),
            ({"retention_ms": 1}, ConfigError),
            ({"markers_topic": "a/b"}, ConfigError),
        ]:
            with pytest.raises(error, match=next(iter(setting)).partition("_")[0]):
                storage.create(f"{name}-2", **setting)
        assert storage.list() == [name]
        storage.delete(name)
        with pytest.raises(QueueNotFound):
            storage.describe(name)


@pytest.mark.parametrize("which", ["{}", "{}__markers", "{}__undelivered"])
def test_a_topic_that_others_have_written_to_is_taken_over_only_when_told(url, cluster, which):
    connection = KafkaConnection(bootstrap=cluster.bootstrap)
    name = f"foreign-{uuid.uuid4().hex[:8]}"
    topic, topics = which.format(name), Topics(connection)
    for one in {name, topic}:
        topics._create({one: NewTopic(one, 1, 1)})
    producer = new_producer(connection).current()
    producer.produce(topic, b"of somebody else")
    assert producer.flush(60) == 0
    with storage_for(url) as storage:
        with pytest.raises(ConfigError, match=f"topic '{topic}' is there already.* adopt=True"):
            storage.create(name)
        assert storage.list() == []
        assert topics.describe([*{name, topic}]).keys() == {name, topic}  # no other was made
        if topic == name:
            storage.create(name, adopt=True)
            assert storage.open(name).size() == 1
            storage.delete(name)
    topics.delete([name, topic])


def test_a_new_queue_without_topics_asks_for_no_other_s_settings(url, monkeypatch):
    """There may be thousands, and the first send through a gateway waits for it."""
    name = f"new-{uuid.uuid4().hex[:8]}"
    with storage_for(url) as storage:
        with monkeypatch.context() as patch:
            patch.setattr(SettingsMirror, "records", lambda _: pytest.fail("all were read"))
            storage.create(name)
        storage.delete(name)


def test_a_missing_queue_is_told_without_reading_settings(url, monkeypatch):
    name = f"missing-{uuid.uuid4().hex[:8]}"
    with storage_for(url) as storage:
        storage.create(name)
        with monkeypatch.context() as patch:
            patch.setattr(RegistryRequests, "all_raw", lambda *_: pytest.fail("all were read"))
            patch.setattr(RegistryRequests, "raw", lambda *_: (None, None))
            with pytest.raises(QueueNotFound, match=f"did you mean {name}"):
                storage.open(f"{name}s")
        storage.delete(name)


def test_a_queue_of_another_root_keeps_its_topics(url):
    """Two roots on one Kafka, and the same name in both."""
    name = f"both-{uuid.uuid4().hex[:8]}"
    with storage_for(url) as storage, storage_for(f"{url}-other") as other:
        storage.create(name)
        with pytest.raises(ConfigError, match=f"of queue '{name}' of another ZooKeeper root"):
            other.create(name)
        other.create(name, adopt=True)
        storage.open(name).send("x")
        other.delete(name)
        assert other.list() == []
        assert storage.describe(name).ready == 1
        storage.delete(name)


def test_without_zookeeper_queues_are_opened_only(make_queue):
    live: LiveQueue = make_queue()
    url = f"kafka://{live.connection.bootstrap}?root={live.connection.root}"
    with storage_for(url) as storage:
        with storage.open(live.name) as queue:
            queue.send("x")
        assert storage.describe(live.name).ready == 1
        for needs_it in (storage.list, lambda: storage.create("x"), lambda: storage.delete(live.name)):
            with pytest.raises(ConfigError, match="zookeeper"):
                needs_it()


def test_a_message_knows_its_place_and_one_only_looked_at_is_not_acknowledged(make_queue):
    live: LiveQueue = make_queue()
    url = f"kafka://{live.connection.bootstrap}?root={live.connection.root}&queue={live.name}"
    with queue_for(url) as queue:
        queue.send_many(["a", "b"])
        (seen, _) = queue.peek()
        with pytest.raises(ReceiptError, match="only looked at"):
            queue.ack([seen, seen])
        with pytest.raises(ReceiptError, match="only looked at"):
            queue.nack(seen)
        message = take_one(queue)
        assert isinstance(message, KafkaMessage)
        assert (message.topic, message.partition, message.offset) == (live.name, 0, 0)
        assert (seen.id, seen.receipt, message.id) == ("0-0", "", "0-0")
        queue.ack(message, confirmed=True)
    assert live.ended() == {0}
