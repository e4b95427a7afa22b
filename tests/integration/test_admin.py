"""Administration, counts and the doctor, on a real Kafka and ZooKeeper."""

from dataclasses import replace

import pytest
from confluent_kafka.admin import NewTopic
from support import LEASE_S, collect, until

from kmqpy import kafka, log_reader, stats
from kmqpy.admin import Admin
from kmqpy.config import DAY_MS, Connection, QueueSettings
from kmqpy.doctor import Severity
from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.inflight import Hold
from kmqpy.markers import Marker, Op
from kmqpy.message import Receipt
from kmqpy.registry import StoredOffset

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def connection(cluster, queue_name):
    return Connection(bootstrap=cluster.bootstrap, zookeeper=cluster.zookeeper, root=f"/kmq-{queue_name}")


@pytest.fixture
def admin(connection):
    with Admin(connection) as admin:
        yield admin


@pytest.fixture
def admin_of():
    """`admin_of(queue)`: an Admin in the root of a LiveQueue."""
    import contextlib

    with contextlib.ExitStack() as admins:
        yield lambda queue: admins.enter_context(Admin(queue.connection))


def errors(findings):
    return [one.what for one in findings if one.severity is Severity.ERROR]


def warnings(findings):
    # With one broker every topic has one replica only.
    return [
        one.what for one in findings if one.severity is Severity.WARNING and "one replica" not in one.what
    ]


class TestCreateAlterDelete:
    def test_a_queue_from_creation_to_deletion(self, admin, queue_name):
        settings = QueueSettings(name=queue_name, max_redeliveries=5, redeliver_after_ms=500)
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
        with pytest.raises(ConfigError, match=r"max_redeliveries: 3, not 7.*use kmq queue alter"):
            admin.create_queue(QueueSettings(name=queue_name, max_redeliveries=7))
        with pytest.raises(TopicError, match="exists with 2 partitions, not 3"):
            admin.create_queue(queue_name, partitions=3)
        assert admin.list_queues()[0].settings.max_redeliveries == 3

    def test_a_markers_topic_is_of_one_queue(self, admin, queue_name):
        admin.create_queue(queue_name)
        other = QueueSettings(name=f"{queue_name}-b", markers_topic=f"{queue_name}__markers")
        with pytest.raises(ConfigError, match=f"that of queue '{queue_name}'"):
            admin.create_queue(other)
        assert [queue.settings.name for queue in admin.list_queues()] == [queue_name]

    def test_retention_is_longer_than_the_longest_hold(self, admin, queue_name):
        settings = QueueSettings(name=queue_name, max_hold_ms=30 * DAY_MS)
        with pytest.raises(ConfigError, match="retention"):
            admin.create_queue(settings, retention=20 * 86_400)
        admin.create_queue(settings)
        kept = int(admin.describe_queue(queue_name).topics[0].config["retention.ms"])
        assert kept > 30 * DAY_MS

    def test_alter_changes_topics_and_registry(self, admin, queue_name):
        admin.create_queue(queue_name, partitions=1)
        admin.alter_queue(queue_name, partitions=3, max_redeliveries=None, retention=20 * 86_400)
        found = admin.describe_queue(queue_name)
        assert {topic.partitions for topic in found.topics} == {3}
        assert {topic.config["retention.ms"] for topic in found.topics} == {str(20 * DAY_MS)}
        assert found.settings.max_redeliveries is None
        assert admin.list_queues()[0].partitions == 3

    @pytest.mark.parametrize(
        ("changes", "what"),
        [
            ({"partitions": 1}, "partitions: 1 is fewer than the 2"),
            ({"max_redelivery": 3}, "max_redelivery: unknown setting; did you mean max_redeliveries"),
            ({"consumer_group": "other"}, "consumer_group: it can't be changed"),
            ({"max_redeliveries": -1}, "max_redeliveries: -1"),
            ({"max_hold_ms": 15 * DAY_MS}, "retention"),
            ({"retention": 86_400}, "retention"),
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
            Admin(replace(connection, zookeeper=NOWHERE), timeout=1) as admin,
            pytest.raises(Unavailable, match=f"ZooKeeper at {NOWHERE}"),
        ):
            admin.create_queue(queue_name)
        with Admin(replace(connection, zookeeper="")) as admin, pytest.raises(QueueNotFound):
            admin.stats(queue_name)

    def test_kafka_alone_is_enough_for_counts(self, connection, admin, queue_name):
        admin.create_queue(queue_name)
        with Admin(replace(connection, zookeeper="")) as without:
            assert without.stats(queue_name).depth == 0
            assert without.in_flight(queue_name) == []
            with pytest.raises(ConfigError, match="zookeeper: no address given"):
                without.list_queues()
            with pytest.raises(ConfigError, match="zookeeper: no address given"):
                without.doctor(queue_name)


class TestStats:
    def test_each_kind_of_message_is_counted_once(self, make_queue, admin_of):
        queue = make_queue(2)
        admin = admin_of(queue)
        queue.send("a", "b", "c", "d", partition=0)
        queue.send("late", delay=60, partition=1)
        before = admin.stats(queue.name)
        assert (before.depth, before.in_flight, before.delayed, before.exact) == (5, 0, 0, True)
        client = queue.client(holder="me")
        taken = collect(client, 4, lease=30)
        until(lambda: client.receive(wait=0.05) == [] and admin.stats(queue.name).delayed == 1)
        client.ack(taken[0])
        client.nack(taken[1], delay=30, reason="no", wait=True)
        found = admin.stats(queue.name)
        assert (found.depth, found.in_flight, found.delayed, found.overdue) == (1, 3, 1, 0)
        assert [part.in_flight for part in found.partitions] == [3, 0]
        listed = {one.offset: one for one in admin.in_flight(queue.name) if one.partition == 0}
        assert {offset: one.hold for offset, one in listed.items()} == {
            taken[1].offset: Hold.RELEASED,
            taken[2].offset: Hold.HELD,
            taken[3].offset: Hold.HELD,
        }
        held = listed[taken[2].offset]
        assert (held.holder, held.attempts, held.receipt) == ("me", 1, taken[2].receipt)
        assert abs(held.lease_until_ms - held.since_ms - 30_000) < 2_000
        assert listed[taken[1].offset].reason == "no"
        (delayed,) = (one for one in admin.in_flight(queue.name) if one.partition == 1)
        assert (delayed.hold, delayed.attempts) == (Hold.DELAYED, 0)
        assert len(admin.in_flight(queue.name, limit=2)) == 2

    def test_control_records_and_started_messages_are_no_depth(self, queue, admin_of):
        """Offsets from the committed one to the end are 6 here, and one message waits."""
        queue.send("waits")
        producer = kafka.producer(queue.connection, {"transactional.id": queue.name})
        producer.init_transactions()
        for body, commit in (("aborted", False), ("started", True)):
            producer.begin_transaction()
            producer.produce(queue.name, body.encode(), partition=0)
            producer.flush()
            if commit:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        queue.mark(Marker(0, 3, Op.TAKE, 60_000))  # by a client that died before its commit
        low, end = log_reader.bounds(queue.connection, queue.name, [0])[0]
        assert (low, end) == (0, 5)
        found = admin_of(queue).stats(queue.name)
        assert (found.depth, found.in_flight, found.exact) == (1, 1, True)

    def test_above_the_limit_offsets_are_counted(self, queue, admin_of, monkeypatch):
        queue.send(*"abcdef")
        monkeypatch.setattr(stats, "COUNT_LIMIT", 4)
        found = admin_of(queue).stats(queue.name)
        assert (found.depth, found.exact) == (6, False)

    def test_an_open_transaction_holds_nobody_up(self, queue, admin_of):
        queue.send("a")
        producer = kafka.producer(queue.connection, {"transactional.id": queue.name})
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce(queue.name, b"open", partition=0)
        producer.produce(queue.settings.markers_topic, b"\0", bytes(12), partition=0)
        producer.flush()
        found = admin_of(queue).stats(queue.name)
        assert found.depth == 1
        producer.abort_transaction()

    def test_owner_attempts_and_dead_letters_with_a_tracker(self, make_queue, admin_of):
        queue = make_queue(max_redeliveries=1)
        admin = admin_of(queue)
        tracker = queue.tracker(tracker_id="t1")
        assert errors(admin.doctor(queue.name)) == []
        queue.send("poison")
        client = queue.client()
        collect(client, 1, lease=LEASE_S)
        again = collect(client, 1, lease=LEASE_S)
        assert [one.attempts for one in admin.in_flight(queue.name)] == [2]
        assert again[0].attempts == 2
        until(lambda: admin.stats(queue.name).dead_letters == 1)
        found = admin.stats(queue.name)
        assert (found.depth, found.in_flight) == (0, 0)
        assert found.partitions[0].owner == "t1"
        tracker.stop()
        assert admin.stats(queue.name).partitions[0].stored_offset > 0

    def test_purge_ends_what_is_in_flight(self, queue, admin_of):
        admin = admin_of(queue)
        queue.send("a", "b", "c")
        taken = collect(queue.client(), 1, max_messages=1, lease=30)
        assert len(taken) == 1
        assert admin.purge(queue.name) == 3
        found = admin.stats(queue.name)
        assert (found.depth, found.in_flight) == (0, 0)
        queue.send("after")
        assert admin.stats(queue.name).depth == 1


class TestDoctor:
    def test_without_a_tracker(self, admin, queue_name):
        admin.create_queue(queue_name)
        assert errors(admin.doctor(queue_name)) == ["no tracker runs: nothing is redelivered"]
        assert warnings(admin.doctor(queue_name)) == []

    def test_planted_faults_in_topics(self, make_queue, admin_of):
        queue = make_queue()
        admin = admin_of(queue)
        markers, dead = queue.settings.markers_topic, queue.settings.dead_letter_topic
        queue.topics.configure(markers, {"retention.ms": "3600000", "message.timestamp.type": "CreateTime"})
        queue.topics.configure(queue.name, {"retention.bytes": "1000000", "max.message.bytes": "9000000"})
        queue.topics.configure(dead, {"cleanup.policy": "compact"})
        queue.topics._admin.delete_topics([f"{dead}__markers"])[f"{dead}__markers"].result()
        found = " | ".join(one.what for one in admin.doctor(queue.name))
        for what in (
            f"{markers} keeps records for 1h, but a message can be held or delayed for 7d",
            f"{markers} has the clients' timestamps",
            f"{queue.name} has retention.bytes=1000000",
            "large ones get stuck",
            f"{dead} is compacted",
            f"markers topic {dead}__markers does not exist",
        ):
            assert what in found

    def test_partition_counts_that_differ(self, queue, admin_of):
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
            self.store(queue, StoredOffset(offset, topic_id, 0))
            assert [one for one in warnings(admin.doctor(queue.name)) if what in one]
        for _ in range(3):
            queue.mark(Marker(0, 0, Op.END))
        self.store(queue, StoredOffset(1, markers_id, 0))
        queue.topics.delete_records(queue.settings.markers_topic, {0: 2})
        assert [one for one in errors(admin.doctor(queue.name)) if "below the log start 2" in one]

    def store(self, queue, offset):
        from kmqpy.zookeeper import connect

        with connect(queue.connection.zookeeper) as zk:
            path = f"{queue.connection.root}/queues/{queue.name}/partitions/0/offset"
            if zk.exists(path):
                zk.set(path, offset.to_json())
            else:
                zk.create(path, offset.to_json())

    def test_a_foreign_group_and_an_unregistered_queue(self, make_queue, admin_of):
        queue = make_queue(register=False)
        admin = admin_of(queue)
        queue.send("a")
        foreign = kafka.consumer(queue.connection, {"group.id": f"audit-{queue.name}"})
        foreign.subscribe([queue.name])
        until(lambda: foreign.poll(0.1))
        foreign.commit(asynchronous=False)
        foreign.close()
        found = admin.doctor(queue.name)
        assert [one for one in warnings(found) if f"audit-{queue.name}" in one]
        assert [one for one in errors(found) if "not registered" in one]
        assert queue.name in [one.queue for one in admin.doctor() if "not registered" in one.what]


class TestLogReader:
    def test_single_records_across_gaps_and_what_is_gone(self, queue):
        queue.send(*[str(n) for n in range(3_000)])
        queue.topics.delete_records(queue.name, {0: 10})
        wanted = [5, 10, 11, 1_500, 2_999, 3_000]
        found = log_reader.read_at(queue.connection, queue.name, [(0, offset) for offset in wanted])
        assert {place[1]: record.value().decode() for place, record in found.items()} == {
            10: "10",
            11: "11",
            1_500: "1500",
            2_999: "2999",
        }

    def test_a_missing_topic(self, connection):
        with pytest.raises(TopicError, match="does not exist"):
            log_reader.scan(connection, "there-is-no-such-topic", {0: 0}, print)

    def test_kafka_away(self, connection):
        away = replace(connection, bootstrap=NOWHERE)
        with pytest.raises(Unavailable, match=NOWHERE):
            log_reader.scan(away, "any", {0: 0}, print, timeout_s=0.5)


def test_a_foreign_receipt_names_the_queue(queue):
    receipt = Receipt.parse(collect_one(queue).receipt)
    assert (receipt.queue, receipt.topic_id) == (queue.name, queue.found.queue.topic_id)


def collect_one(queue):
    queue.send("x")
    return collect(queue.client(), 1)[0]


def test_topics_of_other_kinds_are_no_queues(admin, queue_name):
    futures = admin._topics._admin.create_topics([NewTopic(queue_name, 1, 1)])
    futures[queue_name].result()
    assert queue_name not in [one.queue for one in admin.doctor()]
