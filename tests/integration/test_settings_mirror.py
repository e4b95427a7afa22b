"""The settings of queues for clients without ZooKeeper, by the topic kmq.queues of a real Kafka."""

import contextlib
import dataclasses
import json
import logging
from dataclasses import replace

import pytest
from confluent_kafka import Producer
from kazoo.exceptions import NotEmptyError
from support import LiveQueue, until

from kmqpy import KmqClient, queue_for
from kmqpy.cli.app import run
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, MessageError, QueueNotFound, TopicError
from kmqpy.kafka import librdkafka, settings_mirror
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Kind
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.kafka.settings import SETTINGS_TOPIC, KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import SettingsMirror, settings_of
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import Topics


@pytest.fixture
def settings(queue_name) -> QueueSettings:
    return QueueSettings(
        name=queue_name,
        markers_topic=f"{queue_name}-m",
        dead_letter_topic=f"{queue_name}-dead",
        consumer_group=f"{queue_name}-group",
        lease_ms=10_000,
        max_delay_ms=1_000,
    )


@pytest.fixture
def own_topic(connection, queue_name, monkeypatch):
    """Another topic than the one that all tests share; nobody has made it yet."""
    monkeypatch.setattr(settings_mirror, "SETTINGS_TOPIC", f"mirror-{queue_name}")
    return f"mirror-{queue_name}"


def forgotten(registry: Registry, queue: LiveQueue) -> bool:
    """ZooKeeper knows nothing of the queue any more; its leader may have disturbed the first try."""
    with contextlib.suppress(NotEmptyError):
        registry._requests.zk.delete(ZnodePaths(queue.connection.root).queue(queue.name), recursive=True)
    return queue.name not in registry.names()


def forget() -> None:
    """As another process, which has read nothing yet."""
    settings_mirror._cache.clear()


def write(connection: KafkaConnection, topic: str, *records: tuple[bytes | None, bytes | None]) -> None:
    producer = Producer({"bootstrap.servers": connection.bootstrap})
    for key, value in records:
        producer.produce(topic, value, key, 0)
    assert producer.flush(60) == 0


def test_clients_know_what_a_queue_was_made_with(admin, connection, settings, capsys, monkeypatch):
    admin.create_queue(settings)
    with KmqClient(settings.name, connection) as producer, KmqClient(settings.name, connection) as client:
        assert client.settings == settings
        with pytest.raises(MessageError, match="max_delay_ms, 1000"):
            producer.send("x", delay=2)
        producer.send("x")
        (message,) = client.receive(wait=10)
        assert 5_000 <= message.lease_until_ms - SYSTEM_CLOCK.wall_ms() <= 10_000
        client.ack(message, confirmed=True)
    url = f"kafka://{connection.bootstrap}?queue={settings.name}&root={connection.root}"
    with queue_for(url) as queue:
        assert queue.size() == 0  # of the topics that are its own
        assert queue.in_flight() == 0
    monkeypatch.delenv("KMQ_ZOOKEEPER", raising=False)
    given = ["--bootstrap", connection.bootstrap, "--root", connection.root]
    assert run(["send", settings.name, "x", "--delay", "2s", *given]) == 2
    assert "longer than the queue allows, 1s" in capsys.readouterr().err


def test_what_contradicts_the_queue_is_refused_with_both_values(admin, connection, settings):
    admin.create_queue(settings)
    for other in (
        QueueSettings(name=settings.name, lease_ms=5_000),
        QueueSettings(name=settings.name, lease_ms=30_000),  # said, though it is the default
    ):
        told = f"lease_ms: {other.lease_ms} is not what queue .* 10000"
        with pytest.raises(ConfigError, match=told):
            KmqClient(other, connection)
    with pytest.raises(ConfigError, match=r"max_delay_ms: 5000 is not what queue .* 1000"):
        queue_for(
            f"kafka://{connection.bootstrap}?queue={settings.name}&root={connection.root}&max_delay_ms=5s"
        )
    for same in (
        QueueSettings(name=settings.name),
        QueueSettings(name=settings.name, lease_ms=10_000),
        settings,
        replace(settings),
    ):
        assert settings_of(same, connection) == settings
    # What was read from where the queue's own settings are is taken as it is.
    stored = QueueSettings.from_json(replace(settings, max_redeliveries=9).to_json())
    assert settings_of(stored, connection) is stored


def test_changes_are_known_at_once_and_after_its_deletion_nothing_is(admin, connection, settings):
    admin.create_queue(settings)
    assert settings_of(settings.name, connection) == settings
    # By another process: what was read before is kept for a while, but not believed where it contradicts.
    cached = dict(settings_mirror._cache)
    changed = admin.alter_queue(settings.name, max_redeliveries=7)
    settings_mirror._cache.update(cached)
    assert settings_of(QueueSettings(name=settings.name, max_redeliveries=7), connection) == changed
    forget()
    assert settings_of(settings.name, connection) == changed
    admin.delete_queue(settings.name)
    forget()
    assert settings_of(settings.name, connection) == QueueSettings(name=settings.name, markers="jvm")
    with pytest.raises(QueueNotFound):
        KmqClient(settings.name, connection)


def test_roots_do_not_mix(connection, zookeeper, settings):
    one, other = (replace(connection, root=f"{connection.root}-{number}") for number in range(2))
    with Admin(one, zookeeper) as admin:
        admin.create_queue(settings)
    assert settings_of(settings.name, one) == settings
    assert settings_of(settings.name, other) == QueueSettings(name=settings.name, markers="jvm")
    SettingsMirror(other).remove(settings.name)
    forget()
    assert settings_of(settings.name, one) == settings


def test_the_topic_is_compacted_and_replicated_as_the_queue(connection, zookeeper, settings, own_topic):
    with Admin(connection, zookeeper) as admin:
        admin.create_queue(settings, partitions=3)
    topic = Topics(connection).describe([own_topic], with_config=True)[own_topic]
    assert (topic.partitions, topic.replication, topic.config["cleanup.policy"]) == (1, 1, "compact")


def test_no_queue_is_called_like_it(admin):
    for field in ("name", "markers_topic", "dead_letter_topic"):
        with pytest.raises(ConfigError, match=rf"{field}: kmq\.queues is"):
            QueueSettings(**{"name": "q", field: SETTINGS_TOPIC})
    with pytest.raises(ConfigError, match=r"kmq\.queues is"):
        admin.create_queue(SETTINGS_TOPIC)


def test_records_of_others_stop_nobody(connection, settings, own_topic, caplog):
    mirror = SettingsMirror(connection)
    Topics(connection).create(settings)
    mirror.write([settings])
    key = ZnodePaths(connection.root).queue(settings.name).encode()
    renamed = replace(settings, name="other", markers_topic="", dead_letter_topic="").to_json()
    junk = [b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"name": 5}', b"1e999999", b"x" * 900_000, renamed]
    write(connection, own_topic, *((key, value) for value in junk[:7]))
    write(connection, own_topic, (None, b"x"), (None, None), (b"\xff\x00", b"x"), (b"k" * 500_000, b"x"))
    write(connection, own_topic, *((key, value) for value in junk[7:]))
    forget()
    with caplog.at_level(logging.WARNING):
        assert settings_of(settings.name, connection) == settings
        assert settings_of(settings.name, connection) == settings
    assert len([one for one in caplog.records if "can't be read" in one.getMessage()]) == 1
    # A newer version's; what this one does not know is left out.
    newer = json.dumps({**dataclasses.asdict(settings), "max_redeliveries": 8, "colour": "red"}).encode()
    write(connection, own_topic, (key, newer))
    forget()
    assert settings_of(settings.name, connection) == replace(settings, max_redeliveries=8)


def test_a_topic_that_others_fill_faster_than_it_can_be_read_stops_nobody(
    connection, settings, own_topic, monkeypatch, caplog
):
    Topics(connection).create(settings)
    SettingsMirror(connection).write([settings])
    monkeypatch.setattr(settings_mirror, "_READ_TIMEOUT_S", -1.0)
    with caplog.at_level(logging.WARNING):
        assert settings_of(settings.name, connection) == QueueSettings(name=settings.name, markers="jvm")
    assert "is too long to be read" in caplog.text


def test_a_tracker_does_not_tell_of_a_queue_that_is_deleted(make_queue, own_topic):
    queue: LiveQueue = make_queue(1)
    mirror = SettingsMirror(queue.connection)
    tracker = queue.tracker()
    until(lambda: mirror.find(queue.name) == queue.settings)
    with Admin(queue.connection, queue.zookeeper) as admin:
        admin.delete_queue(queue.name)
    other: LiveQueue = make_queue(1, name=f"{queue.name}-b", root=queue.connection.root)
    until(lambda: mirror.find(other.name) == other.settings, what=tracker.problems)
    assert mirror.find(queue.name) is None


def test_an_open_transaction_hides_nothing(connection, settings, own_topic):
    Topics(connection).create(settings)
    mirror = SettingsMirror(connection)
    mirror.write([settings])
    producer = librdkafka.new_producer(connection, {"transactional.id": own_topic})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(own_topic, b"x", b"y", 0)
    producer.flush(60)
    changed = replace(settings, max_redeliveries=9)
    mirror.write([changed])
    assert settings_of(settings.name, connection) == changed
    producer.abort_transaction(60)


def test_without_the_topic_everything_is_as_given_and_one_warning_tells(
    connection, settings, own_topic, caplog
):
    Topics(connection).create(settings)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with KmqClient(settings, connection) as client, KmqClient(settings, connection):
                assert client.settings == settings.unregistered()
        assert settings_of(settings.name, connection) == QueueSettings(name=settings.name, markers="jvm")
    assert [
        one.getMessage()
        for one in caplog.records
        if "kmq" in one.name and "does not exist" in one.getMessage()
    ]
    assert len([one for one in caplog.records if "does not exist" in one.getMessage()]) == 1
    assert own_topic not in Topics(connection).names()  # nor did asking make it


def test_trackers_tell_of_queues_and_changes_and_take_nothing_away(make_queue, own_topic):
    queue: LiveQueue = make_queue(1, max_redeliveries=6)
    mirror = SettingsMirror(queue.connection)
    queue.tracker()
    until(lambda: mirror.find(queue.name) == queue.settings)
    with queue.registry() as registry:
        changed = replace(queue.settings, max_redeliveries=2)
        registry.register(changed, 1)  # as a version before would
        until(lambda: mirror.find(queue.name) == changed)
        assert settings_of(queue.name, queue.connection) == changed
        until(lambda: forgotten(registry, queue))
        other: LiveQueue = make_queue(1, name=f"{queue.name}-b", root=queue.connection.root)
        until(lambda: mirror.find(other.name) == other.settings)  # the tracker has seen it all
    assert mirror.find(queue.name) == changed


def test_reading_costs_little(connection, zookeeper, own_topic, queue_name, monkeypatch):
    """1,000 queues are read in about 20 ms; the bound leaves room for a busy machine.

    To parse their records would take half a second, for each queue that a tracker begins to serve.
    """
    topics = Topics(connection)
    topics.create(QueueSettings(name=queue_name))
    queues = [QueueSettings(name=queue_name), *(QueueSettings(name=f"{queue_name}-{n}") for n in range(999))]
    SettingsMirror(connection).write(queues)
    taken = []
    for _ in range(5):
        forget()
        began = SYSTEM_CLOCK.monotonic()
        assert settings_of(f"{queue_name}-998", connection).name.endswith("-998")
        taken.append(SYSTEM_CLOCK.monotonic() - began)
    assert min(taken) < 2
    parsed = []
    monkeypatch.setattr(settings_mirror, "_readable_settings", lambda name, _: parsed.append(name))
    with Admin(connection, zookeeper) as admin:
        admin.doctor(queue_name)
    assert {*parsed} == {queue_name}


def test_queues_of_other_roots_are_nobodys_leftovers(connection, zookeeper, settings):
    theirs, ours = (replace(connection, root=f"{connection.root}-{number}") for number in range(2))
    usual = QueueSettings(name=f"{settings.name}-b")
    with Admin(theirs, zookeeper) as admin:
        admin.create_queue(settings)
        admin.create_queue(usual)
    with Admin(ours, zookeeper) as admin:
        for name in (settings.name, usual.name, settings.markers_topic):
            with pytest.raises(QueueNotFound, match="nothing is left over"):
                admin.delete_queue(name, leftovers=True)
        assert [one for one in admin.doctor() if one.queue in (settings.name, usual.name)] == []
    assert topics_of(usual).keys() <= Topics(connection).names()
    forget()
    assert settings_of(settings.name, theirs) == settings


def test_a_queue_of_another_root_whose_record_can_not_be_read_is_not_left_over(
    connection, zookeeper, settings, own_topic
):
    theirs, ours = (replace(connection, root=f"{connection.root}-{number}") for number in range(2))
    with Admin(theirs, zookeeper) as admin:
        admin.create_queue(settings.name)
    producer = librdkafka.new_producer(connection, {})
    for _ in range(settings_mirror._MAX_VALUES_PER_KEY):
        producer.produce(settings_mirror.SETTINGS_TOPIC, b"garbage", f"{theirs.root}/queues/{settings.name}")
    producer.flush(60)
    with (
        Admin(ours, zookeeper) as admin,
        pytest.raises(TopicError, match="of another ZooKeeper root that can't be read"),
    ):
        admin.delete_queue(settings.name, leftovers=True)
    assert settings.name in Topics(connection).names()


def test_what_is_left_over_of_a_queue_is_deleted_together_with_its_record(connection, zookeeper, settings):
    with Admin(connection, zookeeper) as admin:
        admin.create_queue(settings.name)
        admin._context.registry.remove(settings.name)
        assert Kind.RECORD_OF_NO_QUEUE in {one.kind for one in admin.doctor() if one.queue == settings.name}
        assert (
            admin.delete_queue(settings.name, leftovers=True).topics.keys()
            == topics_of(QueueSettings(name=settings.name)).keys()
        )
        assert [one for one in admin.doctor() if one.queue == settings.name] == []
        with pytest.raises(QueueNotFound, match="nothing is left over"):
            admin.delete_queue(settings.name, leftovers=True)


def test_settings_that_are_stored_elsewhere_are_checked_for_their_topics_as_well(admin, connection, settings):
    """Those of the registry, for example, which the command line uses."""
    admin.create_queue(settings)
    stored = QueueSettings.from_json(settings.to_json())
    topics = Topics(connection).check(stored)
    key = ZnodePaths(connection.root).queue(settings.name).encode()
    ids = {settings.name: "another", settings.markers_topic: topics.ids.markers}
    record = json.dumps({**dataclasses.asdict(settings), "topic_ids": ids}).encode()
    write(connection, SETTINGS_TOPIC, (key, record))
    forget()
    with pytest.raises(TopicError, match=f"kmq queue create {settings.name}"):
        KmqClient(stored, connection)
