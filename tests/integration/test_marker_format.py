"""Who writes markers in which format: the queue's settings say so, and without them nobody writes ranges."""

import json

import pytest
from confluent_kafka import Producer
from support import collect, committed_records, stopped_after, until

from kmqpy import KmqClient, queue_for
from kmqpy.cli.app import run
from kmqpy.errors import ConfigError
from kmqpy.kafka import librdkafka, settings_mirror
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Kind
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.settings import SETTINGS_TOPIC, KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import SettingsMirror, settings_of
from kmqpy.kafka.topic_names import dead_letter_queue
from kmqpy.kafka.topics import Topics
from kmqpy.queue import storage_for

COUNT = 6


def markers(connection: KafkaConnection, topic: str, op: Op) -> list[Marker]:
    """The markers of messages with this operation."""
    found = map(read_marker, committed_records(connection, topic))
    return [one for one in found if one.op is op and one.offset >= 0]


def has_ranges(connection: KafkaConnection, topic: str, op: Op, *, first: int = 0) -> bool:
    """Whether there are range markers among these, from the `first` on."""
    found = markers(connection, topic, op)[first:]
    assert found
    return any(one.runs for one in found)


def written(connection: KafkaConnection, name: str) -> str:
    """The format in which a client of this queue says that it takes and acknowledges messages."""
    with KmqClient(name, connection) as client:
        client.send_many([str(number) for number in range(COUNT)])
        client.ack(*collect(client, COUNT), confirmed=True)
    topic = client.settings.markers_topic
    last = {markers(connection, topic, op)[-1].runs != () for op in (Op.TAKE, Op.END)}
    assert last == {client.settings.writes_ranges}
    return client.settings.markers


def test_a_queue_that_is_created_has_range_markers_and_one_that_nobody_registered_those_of_the_jvm(
    admin, connection, queue_name, zookeeper
):
    url = f"kafka://{connection.bootstrap}?root={connection.root}&zookeeper={zookeeper.hosts}"
    admin.create_queue(f"{queue_name}-1")
    with storage_for(url) as storage:
        storage.create(f"{queue_name}-2")
        storage.create(f"{queue_name}-3", markers="jvm")
    queue_for(f"{url}&queue={queue_name}-4&create=true").close()
    queue_for(f"{url}&queue={queue_name}-5&create=true&markers=jvm").close()
    for number, wanted in ((1, "range"), (2, "range"), (3, "jvm"), (4, "range"), (5, "jvm")):
        assert written(connection, f"{queue_name}-{number}") == wanted
    Topics(connection).create(QueueSettings(name=queue_name), 1)
    assert written(connection, queue_name) == "jvm"
    assert admin.settings(queue_name).markers == "jvm"
    said = QueueSettings(name=queue_name, markers="range")
    assert settings_of(said, connection) == said
    with Admin(connection, zookeeper) as other:
        other.create_queue(queue_name)
    assert written(connection, queue_name) == "range"


def test_a_format_that_contradicts_the_queue_is_refused(admin, connection, queue_name):
    admin.create_queue(queue_name)
    with pytest.raises(ConfigError, match=r"markers: 'jvm' is not what queue .* was made with, 'range'"):
        KmqClient(QueueSettings(name=queue_name, markers="jvm"), connection)
    with pytest.raises(ConfigError, match="markers: 'jvm' is not what queue"):
        queue_for(f"kafka://{connection.bootstrap}?queue={queue_name}&root={connection.root}&markers=jvm")
    with pytest.raises(ConfigError, match=r"exists with other settings \(markers: range, not jvm\)"):
        admin.create_queue(QueueSettings(name=queue_name, markers="jvm"))
    assert settings_of(QueueSettings(name=queue_name, markers="range"), connection).writes_ranges


def test_a_record_without_a_format_is_of_somebody_who_may_know_that_of_the_jvm_only(connection, queue_name):
    settings = QueueSettings(name=queue_name, lease_ms=7_000)
    Topics(connection).create(settings, 1)
    SettingsMirror(connection).write([settings])
    stored = json.loads(settings.to_json())
    del stored["markers"]
    producer = Producer({"bootstrap.servers": connection.bootstrap})
    producer.produce(SETTINGS_TOPIC, json.dumps(stored), f"{connection.root}/queues/{queue_name}", 0)
    producer.flush(60)
    settings_mirror._cache.clear()
    assert settings_of(queue_name, connection).lease_ms == 7_000
    assert written(connection, queue_name) == "jvm"


@pytest.mark.parametrize("before", ["jvm", "range"])
def test_running_clients_keep_the_format_that_alter_changes_and_trackers_read_both(make_queue, before):
    after = {"jvm": "range", "range": "jvm"}[before]
    queue = make_queue(markers=before, lease_ms=1_000)
    with Admin(queue.connection, queue.zookeeper) as admin:
        old = queue.client(max_in_flight=2 * COUNT)
        queue.send(*(f"a{number}" for number in range(COUNT)))
        collect(old, COUNT)
        assert admin.alter_queue(queue.name, markers=after).markers == after
        old.send_many([f"b{number}" for number in range(COUNT)])
        collect(old, COUNT)
        topic = queue.settings.markers_topic
        takes = {bool(one.runs) for one in markers(queue.connection, topic, Op.TAKE)}
        assert takes == {before == "range"}
        old.close()
    # The tracker comes now: else it would redeliver what the old client has while that takes the rest.
    with stopped_after(queue.tracker()):
        with KmqClient(queue.name, queue.connection) as new:
            assert new.settings.markers == after
            again = collect(new, 2 * COUNT, lease=60)  # of both formats
            assert {one.attempts for one in again} == {2}
            new.ack(*again, confirmed=True)
        assert has_ranges(queue.connection, topic, Op.TAKE)
        assert not all(one.runs for one in markers(queue.connection, topic, Op.TAKE))
        until(lambda: {one.offset() for one in queue.records()} <= queue.ended())


@pytest.mark.parametrize("fmt", ["jvm", "range"])
def test_all_that_writes_markers_writes_them_in_the_format_of_the_queue(make_queue, fmt):
    """Tracker, redrive, purge of dead letters, purge."""
    ranges = fmt == "range"
    queue = make_queue(markers=fmt, max_redeliveries=0)
    topic = queue.settings.markers_topic
    queue.send(*(str(number) for number in range(4 * COUNT)))
    client = queue.client()
    with stopped_after(queue.tracker()):
        collect(client, 4 * COUNT)
        until(lambda: len(queue.dead_letters()) == 4 * COUNT)
    assert has_ranges(queue.connection, topic, Op.END) is ranges
    letters = KafkaDeadLetters(queue.settings, queue.connection)
    ids = [one.id for one in letters.list()]
    dead = dead_letter_queue(queue.settings).markers_topic
    letters.redrive(ids[: 2 * COUNT])
    assert has_ranges(queue.connection, dead, Op.END) is ranges
    before = len(markers(queue.connection, dead, Op.END))
    letters.purge()
    assert has_ranges(queue.connection, dead, Op.END, first=before) is ranges
    assert letters.list() == []
    letters.close()
    collect(client, 2 * COUNT, lease=60)
    before = len(markers(queue.connection, topic, Op.END))
    with Admin(queue.connection, queue.zookeeper) as admin:
        assert admin.purge(queue.settings) == 2 * COUNT
        assert admin.stats(queue.name).in_flight == 0
    assert has_ranges(queue.connection, topic, Op.END, first=before) is ranges


def test_the_command_creates_and_alters_and_its_other_commands_follow(
    connection, zookeeper, queue_name, capsys
):
    given = ["--bootstrap", connection.bootstrap, "--root", connection.root, "--zookeeper", zookeeper.hosts]

    def kmq(*arguments: str) -> str:
        assert run([*arguments, *given]) == 0
        return capsys.readouterr().out

    kmq("queue", "create", queue_name, "--markers", "jvm")
    assert json.loads(kmq("queue", "describe", queue_name, "-o", "json"))["settings"]["markers"] == "jvm"
    assert "jvm" in kmq("queue", "describe", queue_name)
    kmq("queue", "create", f"{queue_name}-2")
    assert (
        json.loads(kmq("queue", "describe", f"{queue_name}-2", "-o", "json"))["settings"]["markers"]
        == "range"
    )
    kmq("queue", "alter", queue_name, "--markers", "range")
    settings_mirror._cache.clear()
    assert settings_of(queue_name, connection).writes_ranges
    assert run(["queue", "alter", queue_name, "--markers", "fast", *given]) == 2


def test_range_markers_are_refused_while_a_group_reads_the_markers_as_jvm_trackers_do(
    admin, connection, queue_name
):
    queue = QueueSettings(name=queue_name)
    Topics(connection).create(queue, 1)
    told = f"consumer group redelivery-{queue_name} reads {queue.markers_topic}"
    tracker = librdkafka.new_consumer(connection, {"group.id": f"redelivery-{queue_name}"})
    tracker.subscribe([queue.markers_topic])
    until(lambda: tracker.poll(0.1) or tracker.assignment())
    with pytest.raises(ConfigError, match=f"markers: {told}"):
        admin.create_queue(queue)
    assert admin.list_queues() == []
    admin.create_queue(QueueSettings(name=queue_name, markers="jvm"))
    assert not [one for one in admin.doctor(queue_name) if one.kind is Kind.RANGES_WITH_JVM_TRACKER]
    with pytest.raises(ConfigError, match=f"markers: {told}"):
        admin.alter_queue(queue_name, markers="range")
    admin.alter_queue(queue_name, lease_ms=9_000)
    tracker.close()
    admin.alter_queue(queue_name, markers="range")
    tracker = librdkafka.new_consumer(connection, {"group.id": f"redelivery-{queue_name}"})
    tracker.subscribe([queue.markers_topic])
    until(lambda: tracker.poll(0.1) or tracker.assignment())
    (found,) = [one for one in admin.doctor(queue_name) if one.kind is Kind.RANGES_WITH_JVM_TRACKER]
    assert told in found.what
    assert f"`kmq queue alter {queue_name} --markers jvm`" in found.to_do
    tracker.close()
