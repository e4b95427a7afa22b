"""Queues with lanes are created, altered, counted and deleted, on a real Kafka and ZooKeeper."""

import pytest
from support import collect, delete_topic, make_topic, until

from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.kafka.admin import lane_removal
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Kind
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.client.consumer import QueueConsumer
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.session import connect


@pytest.fixture
def registry(zookeeper, connection):
    with connect(zookeeper) as client:
        yield Registry(client, connection.root)


def send_to(lane, connection, count):
    """Send messages to a lane as if it were a queue."""
    with KmqClient(QueueSettings(name=lane.name, markers_topic=lane.markers_topic), connection) as there:
        there.send_many([b"%d" % n for n in range(count)])


def test_lanes_from_creation_to_deletion(admin, connection, registry, queue_name):
    settings = QueueSettings(name=queue_name, retry_lane=True, priorities=3)
    assert admin.create_queue(settings, partitions=2).partitions == 2
    *others, main = settings.lanes()
    assert [lane.name for lane in others] == [
        f"{queue_name}__{end}" for end in ("retry", "priority2", "priority1")
    ]
    assert main == settings
    (listed,) = admin.list_queues()
    assert listed.settings == settings
    assert [admin.is_registered(lane.name) for lane in settings.lanes()] == [False, False, False, True]
    assert [(one.name, one.lane_of) for one in registry.lanes(queue_name)] == sorted(
        (lane.name, queue_name) for lane in others
    )
    for lane in others:
        assert registry.get(lane.name).settings == lane
        assert registry.get(lane.name).partitions == 2
    assert {topic.partitions for topic in admin.describe_queue(queue_name).topics} == {2}
    assert [topic.name for topic in admin.describe_queue(queue_name).topics] == list(topics_of(settings))
    assert admin.create_queue(queue_name).partitions == 2  # changes nothing

    admin.alter_queue(queue_name, partitions=3, lease_ms=700)
    for lane in registry.lanes(queue_name):
        assert (lane.lease_ms, registry.get(lane.name).partitions) == (700, 3)
    assert {topic.partitions for topic in admin.describe_queue(queue_name).topics} == {3}

    admin.delete_queue(queue_name)
    assert not admin.is_registered(queue_name)
    assert registry.names() == []
    assert Topics(connection).names().isdisjoint(topics_of(settings))


def test_lanes_are_added_to_a_queue_in_use_and_removed_once_they_are_empty(
    admin, connection, registry, queue_name, monkeypatch
):
    monkeypatch.setattr(lane_removal, "QUIET_S", 0.2)
    admin.create_queue(queue_name, partitions=2, retention=30 * 24 * 3600)
    topics = Topics(connection)
    topics.configure(queue_name, changed := {"max.message.bytes": "5000000", "flush.messages": "1"})
    until(
        lambda: changed.items() <= topics.describe([queue_name], with_config=True)[queue_name].config.items()
    )
    with_lanes = admin.alter_queue(queue_name, retry_lane=True, priorities=2)
    retry, urgent, _ = with_lanes.lanes()

    def shown(key):
        configs = {topic.name: topic.config for topic in admin.describe_queue(queue_name).topics}
        return [configs[name][key] for name in (queue_name, retry.name, urgent.markers_topic)]

    for key in ("retention.ms", "max.message.bytes", "flush.messages", "min.insync.replicas"):
        until(lambda key=key: len(set(shown(key))) == 1)  # a broker may show for a moment how they were made
    assert topics.own_config(retry.name).keys() & {"flush.messages", "flush.ms"} == {"flush.messages"}
    assert topics.own_config(retry.markers_topic)["message.timestamp.type"] == "LogAppendTime"
    send_to(urgent, connection, 3)

    marked = admin.alter_queue(queue_name, retry_lane=False, priorities=1)
    assert marked.draining_lanes == ("retry", "priority1")
    assert marked.copies_topic == queue_name  # nobody writes there any more
    assert [lane.name for lane in marked.lanes()] == [retry.name, urgent.name, queue_name]
    with pytest.raises(Unavailable, match=r"3 messages .* --priorities 1"):
        admin.remove_lanes(queue_name, timeout=1)
    assert admin.settings(queue_name).draining_lanes == ("priority1",)  # the retry lane is gone by now
    assert retry.name not in registry.names()
    with QueueConsumer(urgent, connection) as consumer:
        taken = consumer.receive(10, wait=10)
        consumer.ack(taken, confirmed=True)
    assert not admin.remove_lanes(queue_name, timeout=10).has_lanes
    assert registry.names() == [queue_name]
    assert Topics(connection).names() & {retry.name, urgent.name, urgent.markers_topic} == set()
    assert not admin.remove_lanes(queue_name).has_lanes  # nothing is left to do

    again = admin.alter_queue(queue_name, priorities=2)
    assert admin.alter_queue(queue_name, priorities=1).draining_lanes
    assert admin.alter_queue(queue_name, priorities=2) == again  # taken back


def test_a_lane_that_settings_of_an_older_version_lack_is_not_removed_with_its_messages(
    admin, connection, registry, queue_name
):
    admin.create_queue(QueueSettings(name=queue_name, priorities=2))
    urgent, _ = admin.settings(queue_name).lanes()
    send_to(urgent, connection, 2)
    registry.register(QueueSettings(name=queue_name), 1)
    with pytest.raises(TopicError, match=r"holds 2 messages, .* --priorities 2"):
        admin.remove_lanes(queue_name)
    admin.alter_queue(queue_name, priorities=2)
    assert admin.stats(queue_name).depth == 2


def test_a_removal_that_ended_halfway_goes_on(admin, connection, registry, queue_name, monkeypatch):
    monkeypatch.setattr(lane_removal, "QUIET_S", 0.0)
    admin.create_queue(QueueSettings(name=queue_name, retry_lane=True))
    monkeypatch.setattr(Topics, "delete", lambda *_: 1 / 0)
    admin.alter_queue(queue_name, retry_lane=False)
    with pytest.raises(ZeroDivisionError):
        admin.remove_lanes(queue_name)
    monkeypatch.undo()
    assert not admin.settings(queue_name).has_lanes
    assert len(registry.lanes(queue_name)) == 1
    admin.remove_lanes(queue_name)
    assert registry.names() == [queue_name]
    assert f"{queue_name}__retry" not in Topics(connection).names()


def test_of_two_administrators_one_removes_a_lane_and_the_other_adds_it_again(
    admin, connection, zookeeper, queue_name, monkeypatch
):
    """Whoever comes second is refused; a lane that is there has its topics."""
    monkeypatch.setattr(lane_removal, "QUIET_S", 0.0)
    admin.create_queue(QueueSettings(name=queue_name, retry_lane=True))
    admin.alter_queue(queue_name, retry_lane=False)
    topics = Topics(connection)
    real = {"remove": Registry.remove, "delete": Topics.delete}
    with Admin(connection, zookeeper) as other:

        def remove(*given, **more):
            monkeypatch.setattr(Registry, "remove", real["remove"])
            assert other.alter_queue(queue_name, retry_lane=True).retry_lane
            real["remove"](*given, **more)

        monkeypatch.setattr(Registry, "remove", remove)
        with pytest.raises(TopicError, match="was added again"):
            admin.remove_lanes(queue_name)
        assert f"{queue_name}__retry" in topics.names()

        def delete(self, names):
            monkeypatch.setattr(Topics, "delete", real["delete"])
            with pytest.raises(TopicError, match=r"__retry' is being removed"):
                other.alter_queue(queue_name, retry_lane=True)
            real["delete"](self, names)

        admin.alter_queue(queue_name, retry_lane=False)
        monkeypatch.setattr(Topics, "delete", delete)
        assert not admin.remove_lanes(queue_name).has_lanes
        assert f"{queue_name}__retry" not in topics.names()

        register = Registry.register

        def late(self, *given, **more):
            monkeypatch.setattr(Registry, "register", register)
            topics.delete([f"{queue_name}__retry"])  # as at the end of a removal
            return register(self, *given, **more)

        monkeypatch.setattr(Registry, "register", late)
        assert other.alter_queue(queue_name, retry_lane=True).retry_lane
        assert f"{queue_name}__retry" in topics.names()


def test_a_deletion_that_has_begun_lets_nobody_add_lanes(
    admin, connection, zookeeper, queue_name, monkeypatch
):
    admin.create_queue(QueueSettings(name=queue_name, retry_lane=True))
    delete = Topics.delete
    with Admin(connection, zookeeper) as other:

        def meanwhile(self, names):
            with pytest.raises(TopicError, match="is being removed"):
                other.alter_queue(queue_name, priorities=2)
            delete(self, names)

        monkeypatch.setattr(Topics, "delete", meanwhile)
        admin.delete_queue(queue_name)
        assert other.list_queues() == []


def test_an_open_client_counts_lanes_that_were_added_since(admin, connection, zookeeper, queue_name):
    admin.create_queue(queue_name)
    with KmqClient(queue_name, connection, zookeeper) as queue:
        urgent, _ = admin.alter_queue(queue_name, priorities=2).lanes()
        send_to(urgent, connection, 2)
        with QueueConsumer(urgent, connection) as consumer:
            (taken,) = consumer.receive(1, wait=10, lease=60)
            (orphan,) = queue.orphans()
            assert (orphan.receipt, orphan.message.body) == (taken.receipt, b"0")
        assert queue.size() == 1
        assert queue.in_flight() == 1
        assert queue.purge() == 2
        assert queue.size() == 0


def test_a_client_that_receives_first_when_a_lane_was_just_removed(
    admin, connection, queue_name, monkeypatch
):
    monkeypatch.setattr(lane_removal, "QUIET_S", 0.0)
    admin.create_queue(QueueSettings(name=queue_name, retry_lane=True))
    with KmqClient(queue_name, connection) as queue:
        admin.alter_queue(queue_name, retry_lane=False)
        admin.remove_lanes(queue_name)
        queue.send("a")
        assert [one.body for one in collect(queue, 1)] == [b"a"]
        admin.delete_queue(queue_name)
    with pytest.raises(QueueNotFound):
        KmqClient(queue_name, connection)


def test_where_jvm_trackers_serve_a_queue_lanes_are_refused(admin, queue_name):
    admin.create_queue(QueueSettings(name=queue_name, markers="jvm"))
    with pytest.raises(ConfigError, match="trackers on the JVM see one lane"):
        admin.alter_queue(queue_name, retry_lane=True)
    assert admin.alter_queue(queue_name, retry_lane=True, markers="range").retry_lane
    with pytest.raises(ConfigError, match="trackers on the JVM see one lane"):
        admin.alter_queue(queue_name, markers="jvm")


def test_what_is_counted_listed_and_purged_is_that_of_all_lanes(admin, connection, zookeeper, queue_name):
    settings = QueueSettings(name=queue_name, priorities=2, lease_ms=60_000)
    admin.create_queue(settings)
    urgent, _ = settings.lanes()
    send_to(urgent, connection, 2)
    send_to(QueueSettings(name=queue_name), connection, 3)
    with QueueConsumer(urgent, connection) as consumer:
        (taken,) = consumer.receive(1, wait=10)
        found = admin.stats(queue_name)
        assert (found.depth, found.in_flight) == (4, 1)
        assert [(one.queue, one.depth) for one in found.lanes] == [(urgent.name, 1), (queue_name, 3)]
        assert [one.receipt for one in admin.in_flight(queue_name)] == [taken.receipt]
        assert admin.stats(settings) == found
    with KmqClient(settings, connection, zookeeper) as queue:
        assert (queue.size(), queue.in_flight()) == (4, 1)
        assert [one.body for one in queue.peek(3)] == [b"1", b"0", b"1"]
        (orphan,) = queue.orphans()
        assert (orphan.message.body, orphan.receipt) == (b"0", taken.receipt)
        assert queue.purge() == 5
        assert (queue.size(), queue.in_flight()) == (0, 0)


def test_the_doctor_looks_at_each_lane(admin, connection, queue_name):
    settings = QueueSettings(name=queue_name, retry_lane=True)
    admin.create_queue(settings)
    kinds = {Kind.NO_TRACKER, Kind.ONE_REPLICA}
    assert [(one.queue, one.kind) for one in admin.doctor(queue_name)] == [
        (queue_name, Kind.NO_TRACKER),
        (queue_name, Kind.ONE_REPLICA),
    ]
    retry, _ = settings.lanes()
    Topics(connection).delete([retry.markers_topic])
    (found,) = [one for one in admin.doctor(queue_name) if one.kind not in kinds]
    assert (found.queue, found.kind) == (retry.name, Kind.MARKERS_TOPIC_MISSING)
    assert found.to_do.startswith(f"`kmq queue create {queue_name}`")
    admin.create_queue(queue_name)
    assert {one.kind for one in admin.doctor(queue_name)} == kinds
    Topics(connection).grow(retry, 2)
    advice = {one.to_do for one in admin.doctor(queue_name) if one.kind is Kind.TOO_MANY_PARTITIONS}
    assert advice == {f"`kmq queue alter {queue_name} --partitions 2`"}


def test_r24_a_lane_whose_topic_was_recreated_without_its_markers_is_not_read(admin, connection, queue_name):
    """Its messages would count as taken."""
    settings = QueueSettings(name=queue_name, retry_lane=True)
    admin.create_queue(settings)
    retry, _ = settings.lanes()
    send_to(retry, connection, 1)
    with KmqClient(queue_name, connection) as queue:
        queue.ack(collect(queue, 1), confirmed=True)
    topics = Topics(connection)
    delete_topic(topics, retry.name)
    make_topic(topics, retry.name)
    send_to(retry, connection, 1)
    with (
        KmqClient(queue_name, connection) as queue,
        pytest.raises(TopicError, match=f"'{retry.name}': its topic was recreated, .* {queue_name}$"),
    ):
        collect(queue, 1)
    (found,) = [one for one in admin.doctor(queue_name) if one.kind is Kind.MARKERS_OF_EARLIER_TOPIC]
    assert "none is taken or redelivered" in found.what


def test_lanes_that_would_take_the_topics_or_the_name_of_another_queue(admin, registry, queue_name):
    admin.create_queue(f"{queue_name}__retry")
    with pytest.raises(ConfigError, match=f"'{queue_name}__retry' is the queue topic of queue"):
        admin.create_queue(QueueSettings(name=queue_name, retry_lane=True))
    admin.create_queue(queue_name)
    with pytest.raises(ConfigError, match=f"'{queue_name}__retry' is the queue topic of queue"):
        admin.alter_queue(queue_name, retry_lane=True)
    assert registry.get(f"{queue_name}__retry").settings.lane_of is None


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"priorities": 11}, "priorities: 11 is not from 1 to 10"),
        ({"priorities": 0}, "priorities: 0 must be"),
        ({"lane_share": 1.0}, "lane_share: 1.0 is not between 0 and 1"),
        ({"retry_lane": True, "collapse": True}, "collapse: not in a queue with lanes"),
        ({"retry_lane": True, "markers": "jvm"}, "markers: a queue with lanes needs 'range'"),
        ({"draining_lanes": ("main",)}, "draining_lanes: 'main' is not a lane"),
    ],
)
def test_settings_that_go_with_no_lanes(given, error):
    with pytest.raises(ConfigError, match=error):
        QueueSettings(name="jobs", **given)
