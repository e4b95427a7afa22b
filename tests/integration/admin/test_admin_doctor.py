"""What the doctor finds, on a real Kafka and ZooKeeper; test_doctor_advice.py follows what it advises."""

import pytest
from admin_support import errors, store, warnings
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewTopic
from support import delete_topic, until

from kmqpy.errors import TopicError
from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.doctor import Doctor
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.markers.codec import Marker, Op


class TestDoctor:
    def test_a_missing_tracker_is_an_error(self, admin, queue_name):
        admin.create_queue(queue_name)
        assert errors(admin.doctor(queue_name)) == ["no tracker runs: nothing is redelivered"]
        assert warnings(admin.doctor(queue_name)) == []

    def test_planted_faults_in_topics_are_found(self, make_queue, admin_of):
        queue = make_queue()
        admin = admin_of(queue)
        markers, dead = queue.settings.markers_topic, queue.settings.dead_letter_topic
        queue.configure(markers, {"retention.ms": "3600000", "message.timestamp.type": "CreateTime"})
        queue.configure(queue.name, {"retention.bytes": "1000000", "max.message.bytes": "90000000"})
        queue.configure(dead, {"cleanup.policy": "compact"})
        delete_topic(queue.topics, f"{dead}__markers")
        found = " | ".join(one.what for one in admin.doctor(queue.name))
        for what in (
            f"{markers} keeps records for 1h, but a message can be leased or delayed for 7d",
            f"{markers} has the clients' timestamps",
            f"{queue.name} has retention.bytes=1000000",
            "large ones get stuck",
            f"{dead} is compacted",
            f"markers topic {dead}__markers does not exist",
        ):
            assert what in found

    def test_partition_counts_that_differ_are_found(self, queue, admin_of):
        admin = admin_of(queue)
        from confluent_kafka.admin import NewPartitions

        queue.topics._admin.create_partitions([NewPartitions(queue.name, 2)])[queue.name].result()
        until(lambda: queue.topics.describe([queue.name])[queue.name].partitions == 2)
        found = errors(admin.doctor(queue.name))
        assert f"{queue.name} has 2 partitions, {queue.settings.markers_topic} has 1" in found
        with pytest.raises(TopicError, match="kmq queue alter"):
            admin.stats(queue.name)

    def test_a_recreated_markers_topic_and_offsets_outside_the_log(self, queue, admin_of):
        admin = admin_of(queue)
        markers_id = queue.found.markers.topic_id
        for offset, topic_id, what in (
            (0, "earlier", "of an earlier topic"),
            (5, markers_id, "beyond the end"),
        ):
            store(queue, StoredOffset(offset, topic_id, 0))
            assert [one for one in warnings(admin.doctor(queue.name)) if what in one]
        for _ in range(3):
            queue.mark(Marker(0, 0, Op.END))
        store(queue, StoredOffset(1, markers_id, 0))
        queue.topics.delete_records(queue.settings.markers_topic, {0: 2})
        assert [one for one in errors(admin.doctor(queue.name)) if "below the log start 2" in one]

    def test_a_foreign_group_and_an_unregistered_queue(self, make_queue, admin_of):
        queue = make_queue(register=False)
        admin = admin_of(queue)
        queue.send("a")
        foreign = librdkafka.new_consumer(queue.connection, {"group.id": f"audit-{queue.name}"})
        foreign.subscribe([queue.name])
        until(lambda: foreign.poll(0.1))
        foreign.commit(asynchronous=False)
        foreign.close()
        found = admin.doctor(queue.name)
        assert [one for one in warnings(found) if f"audit-{queue.name}" in one]
        assert [one for one in errors(found) if "not registered" in one]
        assert queue.name in [one.queue for one in admin.doctor() if "not registered" in one.what]

    def test_each_consumer_group_is_asked_once_by_doctor_and_never_by_a_tracker(
        self, make_queue, admin_of, monkeypatch
    ):
        first, second = make_queue(), make_queue()
        admin = admin_of(first)
        second.connection = first.connection
        second.register()
        for queue in (first, second):
            group = librdkafka.new_consumer(queue.connection, {"group.id": queue.settings.consumer_group})
            group.commit(offsets=[TopicPartition(queue.name, 0, 0)], asynchronous=False)
            group.close()
        kafka_admin = admin._context.topics._admin
        listed, asked = [], []
        list_groups = kafka_admin.list_consumer_groups
        list_offsets = kafka_admin.list_consumer_group_offsets
        monkeypatch.setattr(
            kafka_admin, "list_consumer_groups", lambda **more: listed.append(1) or list_groups(**more)
        )
        monkeypatch.setattr(
            kafka_admin,
            "list_consumer_group_offsets",
            lambda wanted, **more: (
                asked.extend(one.group_id for one in wanted) or list_offsets(wanted, **more)
            ),
        )
        Doctor(admin._context).quick_look(first.name)
        assert (listed, asked) == ([], [])
        found = admin.doctor()
        assert {one.queue for one in found} >= {first.name, second.name}
        assert len(listed) == 1
        assert len(asked) == len(set(asked))
        assert {f"kmq-{first.name}", f"kmq-{second.name}"} <= set(asked)

    def test_a_tracker_asks_for_its_own_group_only(self, queue, monkeypatch, caplog):
        monkeypatch.setattr(Doctor, "examine", None)
        queue.tracker()
        until(lambda: "one replica only" in caplog.text)

    def test_r25_queues_whose_settings_cannot_be_read(self, admin, connection, zookeeper, queue_name):
        from kmqpy.zookeeper.session import connect

        with connect(zookeeper) as zk:
            for lost in (False, True):
                admin.create_queue(queue_name, partitions=2)
                zk.set(f"{connection.root}/queues/{queue_name}", b"\xff")
                if lost:
                    zk.delete(f"{connection.root}/queues/{queue_name}/partitions", recursive=True)
                assert not admin.is_registered(queue_name)
                for found in (admin.doctor(queue_name), admin.doctor()):
                    (what,) = [what for what in errors(found) if "registry" in what]
                    assert "its settings in the registry can't be read" in what
                assert admin.create_queue(queue_name).partitions == 2
                assert [one.partitions for one in admin.list_queues()] == [2]
                assert [one for one in errors(admin.doctor(queue_name)) if "registry" in one] == []
            zk.set(f"{connection.root}/queues/{queue_name}", b"\xff")
            admin.delete_queue(queue_name)
            assert zk.get_children(f"{connection.root}/queues") == []
        assert admin._context.topics.describe([queue_name]) == {}

    def test_r25_more_partitions_than_the_topic_has(self, admin, connection, zookeeper, queue_name):
        from kmqpy.zookeeper.session import connect

        admin.create_queue(queue_name)
        with connect(zookeeper) as zk:
            zk.create(f"{connection.root}/queues/{queue_name}/partitions/1")
        assert f"trackers know of 2 partitions, {queue_name} has 1" in warnings(admin.doctor(queue_name))


def test_topics_of_other_kinds_are_no_queues(admin, queue_name):
    futures = admin._context.topics._admin.create_topics([NewTopic(queue_name, 1, 1)])
    futures[queue_name].result()
    assert queue_name not in [one.queue for one in admin.doctor()]
