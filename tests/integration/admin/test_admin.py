"""Queues are created, altered and deleted, on a real Kafka and ZooKeeper."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support import until

from kmqpy.core.durations import DAY_MS
from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Kind, Severity
from kmqpy.kafka.group_commits import group_commits
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.settings_mirror import SettingsMirror
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.settings import NO_ZOOKEEPER, ZooKeeperConnection

NOWHERE = "127.0.0.1:1"


def test_all_operations_ask_for_topics_with_one_client(admin, queue_name, monkeypatch):
    made, new_admin = [], librdkafka.new_admin
    monkeypatch.setattr(librdkafka, "new_admin", lambda *given: made.append(given) or new_admin(*given))
    admin.create_queue(queue_name)
    admin.stats(queue_name)
    admin.in_flight(queue_name)
    admin.doctor(queue_name)
    admin.purge(queue_name)
    admin.delete_queue(queue_name)
    assert len(made) == 1


def test_every_operation_right_after_topics_were_made(connection, queue_name):
    """Brokers are told of them before there are leaders: NOT_LEADER_FOR_PARTITION in two of three rounds."""
    topics = Topics(connection)
    for number in range(5):
        queue = QueueSettings(name=f"{queue_name}-{number}")
        topics.create(queue, 8)
        topics.delete_records(queue.name, dict.fromkeys(range(8), 0))
        assert topics.offsets(queue.markers_topic, range(8)) == dict.fromkeys(range(8), (0, 0))
        assert len(partition_reader.bounds(connection, queue.dead_letter_topic, range(8))) == 8
        topics.configure(queue.name, {"retention.ms": "900000000"})
        assert topics.describe([queue.name], with_config=True)[queue.name].partitions == 8
        assert group_commits(connection, queue, range(8), topics.check(queue).ids) == {}
        assert queue.name not in topics.groups()
        assert topics.grow(queue, 10).partitions == 10
        assert topics.offsets(queue.name, range(10)) == dict.fromkeys(range(10), (0, 0))
        topics.delete_records(queue.name, dict.fromkeys(range(10), 0))
        topics.delete(topics_of(queue))
        assert topics.describe([queue.name]) == {}


class TestCreateAlterDelete:
    def test_a_queue_from_creation_to_deletion(self, admin, queue_name):
        settings = QueueSettings(name=queue_name, max_redeliveries=5, lease_ms=500)
        assert admin.create_queue(settings, partitions=2).partitions == 2
        (listed,) = admin.list_queues()
        assert (listed.settings, listed.partitions) == (settings, 2)
        found = admin.describe_queue(queue_name)
        assert found.settings == settings
        assert found.registered
        assert [topic.name for topic in found.topics] == [
            queue_name,
            f"{queue_name}__markers",
            f"{queue_name}__undelivered",
            f"{queue_name}__undelivered__markers",
        ]
        assert {topic.partitions for topic in found.topics} == {2}
        assert found.topics[1].config["message.timestamp.type"] == "LogAppendTime"
        assert found.topics[0].config["retention.ms"] == str(14 * DAY_MS)
        admin.delete_queue(queue_name)
        assert admin.list_queues() == []
        with pytest.raises(QueueNotFound):
            admin.describe_queue(queue_name)
        with pytest.raises(QueueNotFound):
            admin.delete_queue(queue_name)

    def test_twice_is_the_same_as_once_but_other_settings_are_refused(self, admin, queue_name):
        admin.create_queue(queue_name, partitions=2)
        admin.create_queue(queue_name)
        with pytest.raises(ConfigError, match=r"max_redeliveries: 3, not 7"):
            admin.create_queue(QueueSettings(name=queue_name, max_redeliveries=7))
        with pytest.raises(TopicError, match="exists with 2 partitions, not 3"):
            admin.create_queue(queue_name, partitions=3)
        with pytest.raises(TopicError, match="exists with 2 partitions, not 1; Kafka removes none"):
            admin.create_queue(queue_name, partitions=1)
        with pytest.raises(ConfigError, match="consumer_group can't be changed"):
            admin.create_queue(QueueSettings(name=queue_name, consumer_group="other"))
        assert admin.list_queues()[0].settings.max_redeliveries == 3

    def test_a_markers_topic_is_of_one_queue(self, admin, queue_name):
        admin.create_queue(queue_name)
        other = QueueSettings(name=f"{queue_name}-b", markers_topic=f"{queue_name}__markers")
        with pytest.raises(ConfigError, match=f"the markers topic of queue '{queue_name}'"):
            admin.create_queue(other)
        assert [queue.settings.name for queue in admin.list_queues()] == [queue_name]

    def test_deleting_a_queue_leaves_the_topics_of_others(self, admin, queue_name):
        """They may be of an earlier version, which allowed that, or made by hand."""
        names = [f"{queue_name}{letter}" for letter in "abc"]
        kept = admin.create_queue(names[0])
        for forged in (
            QueueSettings(name=names[1], dead_letter_topic=names[0]),
            QueueSettings(name=names[2], markers_topic=f"{names[0]}__markers"),
        ):
            admin._context.topics.create(forged)
            admin._context.registry.register(forged, 1)
        found = [(one.queue, one.severity) for one in admin.doctor() if one.kind is Kind.SHARED_TOPIC]
        assert sorted(set(found)) == [
            (names[0], Severity.ERROR),
            (names[0], Severity.WARNING),
            (names[1], Severity.ERROR),
            (names[1], Severity.WARNING),
            (names[2], Severity.ERROR),
        ]
        admin.delete_queue(names[1])
        admin.delete_queue(names[2])
        there = admin._context.topics.check(QueueSettings(name=names[0]))
        assert (there.queue, there.markers) == (kept.queue, kept.markers)
        assert there.dead_letters is not None
        assert not [one for one in admin._context.topics.names() if one.startswith((names[1], names[2]))]

    def test_retention_is_longer_than_the_longest_hold(self, admin, queue_name):
        settings = QueueSettings(name=queue_name, max_lease_ms=30 * DAY_MS)
        with pytest.raises(ConfigError, match="retention"):
            admin.create_queue(settings, retention=20 * 86_400)
        admin.create_queue(settings)
        kept = int(admin.describe_queue(queue_name).topics[0].config["retention.ms"])
        assert kept > 30 * DAY_MS

    def test_changes_of_several_settings_at_a_time_all_count(self, admin, connection, zookeeper, queue_name):
        admin.create_queue(queue_name, partitions=1)
        with Admin(connection, zookeeper) as other, ThreadPoolExecutor(2) as threads:
            for more in range(5):
                for done in (
                    threads.submit(admin.alter_queue, queue_name, lease_ms=2_000 + more),
                    threads.submit(other.alter_queue, queue_name, max_redeliveries=10 + more),
                ):
                    done.result(60)
                for found in (admin.settings(queue_name), SettingsMirror(connection).find(queue_name)):
                    assert (found.lease_ms, found.max_redeliveries) == (2_000 + more, 10 + more)

    def test_alter_changes_topics_and_registry(self, admin, queue_name):
        admin.create_queue(queue_name, partitions=1)
        admin.alter_queue(queue_name, partitions=3, max_redeliveries=None, retention=20 * 86_400)

        def shown():
            topics = admin.describe_queue(queue_name).topics
            return {(topic.partitions, topic.config["retention.ms"]) for topic in topics}

        until(lambda: shown() == {(3, str(20 * DAY_MS))}, what=shown)  # the broker, a moment later
        assert admin.describe_queue(queue_name).settings.max_redeliveries is None
        assert admin.list_queues()[0].partitions == 3

    @pytest.mark.parametrize(
        ("changes", "what"),
        [
            ({"partitions": 1}, "partitions: 1 is fewer than the 2"),
            ({"max_redelivery": 3}, "max_redelivery: can't be changed; did you mean max_redeliveries"),
            ({"consumer_group": "other"}, "consumer_group: can't be changed"),
            ({"markers_topic": "other"}, "markers_topic: can't be changed"),
            ({"dead_letter_topic": "other"}, "dead_letter_topic: can't be changed"),
            ({"max_redeliveries": -1}, "max_redeliveries: -1"),
            ({"max_lease_ms": 14 * DAY_MS}, "retention"),  # as long as Kafka keeps messages
            ({"retention": 7 * 86_400}, "retention"),  # as long as the longest lease
            ({"retention": -1}, "must not be negative"),
        ],
    )
    def test_alter_refuses_what_does_not_fit_and_changes_nothing(self, admin, queue_name, changes, what):
        admin.create_queue(queue_name, partitions=2)
        before = admin.describe_queue(queue_name)
        with pytest.raises(ConfigError, match=what):
            admin.alter_queue(queue_name, **changes)
        assert admin.describe_queue(queue_name) == before

    def test_without_zookeeper_nothing_is_created(self, connection, queue_name):
        with (
            Admin(connection, ZooKeeperConnection(hosts=NOWHERE), timeout=1) as admin,
            pytest.raises(Unavailable, match=f"ZooKeeper at {NOWHERE}"),
        ):
            admin.create_queue(queue_name)
        with Admin(connection, NO_ZOOKEEPER) as admin, pytest.raises(QueueNotFound):
            admin.stats(queue_name)

    def test_kafka_alone_is_enough_for_counts(self, connection, admin, queue_name):
        admin.create_queue(queue_name)
        with Admin(connection, NO_ZOOKEEPER) as without:
            assert without.stats(queue_name).depth == 0
            assert without.in_flight(queue_name) == []
            with pytest.raises(ConfigError, match="zookeeper: no address given"):
                without.list_queues()
            with pytest.raises(ConfigError, match="zookeeper: no address given"):
                without.doctor(queue_name)
