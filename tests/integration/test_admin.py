"""Administration, counts and the doctor, on a real Kafka and ZooKeeper."""

import tracemalloc
from dataclasses import replace

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewTopic
from support import LEASE_S, collect, delete_topic, until

from kmqpy.core.clock import SYSTEM_CLOCK, SystemClock
from kmqpy.core.durations import DAY_MS
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Kind, Severity
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import MAX_SPAN, Marker, Op
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.settings import NO_ZOOKEEPER, ZooKeeperConnection

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def connection(cluster, queue_name):
    return KafkaConnection(bootstrap=cluster.bootstrap, root=f"/kmq-{queue_name}")


@pytest.fixture
def admin(connection, zookeeper):
    with Admin(connection, zookeeper) as admin:
        yield admin


@pytest.fixture
def admin_of():
    """`admin_of(queue)`: an Admin in the root of a LiveQueue."""
    import contextlib

    with contextlib.ExitStack() as admins:
        yield lambda queue: admins.enter_context(Admin(queue.connection, queue.zookeeper))


def store(queue, offset):
    """Write the stored offset of partition 0, as a tracker does."""
    from kmqpy.zookeeper.session import connect

    with connect(queue.zookeeper) as zk:
        path = f"{queue.connection.root}/queues/{queue.name}/partitions/0/offset"
        if zk.exists(path):
            zk.set(path, offset.to_json())
        else:
            zk.create(path, offset.to_json())


def errors(findings):
    return [one.what for one in findings if one.severity is Severity.ERROR]


def warnings(findings):
    # With one broker every topic has one replica only.
    return [
        one.what for one in findings if one.severity is Severity.WARNING and "one replica" not in one.what
    ]


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
        assert stats.committed_offsets(connection, queue, range(8), topics.check(queue).ids) == {}
        assert queue.name not in topics.groups()
        assert topics.grow(queue, 10).partitions == 10
        assert topics.offsets(queue.name, range(10)) == dict.fromkeys(range(10), (0, 0))
        topics.delete_records(queue.name, dict.fromkeys(range(10), 0))
        topics.delete(topics_of(queue))
        assert topics.describe([queue.name]) == {}


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
        settings = QueueSettings(name=queue_name, max_hold_ms=30 * DAY_MS)
        with pytest.raises(ConfigError, match="retention"):
            admin.create_queue(settings, retention=20 * 86_400)
        admin.create_queue(settings)
        kept = int(admin.describe_queue(queue_name).topics[0].config["retention.ms"])
        assert kept > 30 * DAY_MS

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
            ({"max_redelivery": 3}, "max_redelivery: unknown setting; did you mean max_redeliveries"),
            ({"consumer_group": "other"}, "consumer_group: it can't be changed"),
            ({"markers_topic": "other"}, "markers_topic: it can't be changed"),
            ({"dead_letter_topic": "other"}, "dead_letter_topic: it can't be changed"),
            ({"max_redeliveries": -1}, "max_redeliveries: -1"),
            ({"max_hold_ms": 14 * DAY_MS}, "retention"),  # as long as Kafka keeps messages
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
        assert {offset: one.state for offset, one in listed.items()} == {
            taken[1].offset: EntryState.RELEASED,
            taken[2].offset: EntryState.LEASED,
            taken[3].offset: EntryState.LEASED,
        }
        held = listed[taken[2].offset]
        assert (held.holder, held.attempts, held.receipt) == ("me", 1, taken[2].receipt)
        assert abs(held.lease_until_ms - held.since_ms - 30_000) < 2_000
        assert listed[taken[1].offset].reason == "no"
        (delayed,) = (one for one in admin.in_flight(queue.name) if one.partition == 1)
        assert (delayed.state, delayed.attempts) == (EntryState.DELAYED, 0)
        assert len(admin.in_flight(queue.name, limit=2)) == 2

    def test_what_nobody_redelivers_gets_overdue_by_the_clock_on_the_wall(self, make_queue):
        """No tracker runs, so nothing is written any more that would tell the time."""
        queue = make_queue(2)
        queue.send("a", "b", "c")
        queue.mark_all([Marker(0, 0, Op.TAKE, 60_000), Marker(0, 1, Op.TAKE, 3_600_000)])

        class Later(SystemClock):
            ahead_ms = 0

            def wall_ms(self):
                return super().wall_ms() + self.ahead_ms

        clock = Later()
        with Admin(queue.connection, queue.zookeeper, clock=clock) as admin:
            for clock.ahead_ms, overdue in ((0, 0), (120_000, 1), (7_200_000, 2), (-120_000, 0)):
                found = admin.stats(queue.name)
                assert (found.overdue, found.in_flight, found.depth) == (overdue, 2, 1)
                assert [part.overdue for part in found.partitions] == [overdue, 0]

    def test_the_oldest_is_the_first_that_nobody_has_taken(self, make_queue, admin_of):
        queue = make_queue(2)
        minutes = {0: (9, 5, 3), 1: (7, 6)}
        now_ms = SYSTEM_CLOCK.wall_ms()
        for partition, ages in minutes.items():
            for age in ages:
                sent_ms = now_ms - 60_000 * age
                queue.append(None, b"m", partition=partition, timestamp_ms=sent_ms, topic=queue.name)
        queue.mark(Marker(0, 0, Op.TAKE, 60_000))
        found = admin_of(queue).stats(queue.name)
        oldest = [now_ms - 60_000 * age for age in (5, 7)]
        assert [part.oldest_ms for part in found.partitions] == oldest
        assert found.oldest_ms == min(oldest)

    def test_control_records_and_started_messages_are_no_depth(self, queue, admin_of):
        """Offsets from the committed one to the end are 6 here, and one message waits."""
        queue.send("waits")
        producer = librdkafka.new_producer(queue.connection, {"transactional.id": queue.name})
        producer.init_transactions()
        for body, commit in (("aborted", False), ("started", True)):
            producer.begin_transaction()
            producer.produce(queue.name, body.encode(), partition=0)
            producer.flush()
            if commit:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        assert [record.offset() for record in queue.records()] == [0, 3]
        queue.mark(Marker(0, 3, Op.TAKE, 60_000))  # by a client that died before its commit
        low, end = partition_reader.bounds(queue.connection, queue.name, [0])[0]
        assert (low, end) == (0, 5)
        found = admin_of(queue).stats(queue.name)
        assert (found.depth, found.in_flight, found.exact) == (1, 1, True)

    def test_above_the_limit_offsets_are_counted(self, queue, admin_of, monkeypatch):
        queue.send(*"abcdef")
        monkeypatch.setattr(stats, "COUNT_LIMIT", 4)
        found = admin_of(queue).stats(queue.name)
        assert (found.depth, found.exact) == (6, False)

    def test_above_the_limit_what_was_started_is_no_depth(self, queue, admin_of, monkeypatch):
        """By clients that commit no offsets, as those of the JVM library."""
        queue.send(*"abcdefghijkl")
        monkeypatch.setattr(stats, "COUNT_LIMIT", 2)
        queue.mark_all(Marker(0, offset, Op.TAKE, 60_000) for offset in (0, 1, 2, 4, 8, 9))
        found = admin_of(queue).stats(queue.name)
        assert (found.depth, found.in_flight, found.exact) == (6, 6, False)

    def test_a_lying_marker_changes_nothing(self, queue, admin_of):
        """It names messages that do not exist, or those of another partition."""
        queue.send(*"abc")
        start = Marker(0, 0, Op.TAKE, 60_000)
        queue.mark(start)
        lies = [Marker(0, 0, Op.TAKE, INT64_MAX, runs=((0, MAX_SPAN),)), Marker(0, 3, Op.TAKE, 1)]
        lies += [Marker(partition, 1, Op.TAKE, 1) for partition in (-1, -3, 1)]
        for lie in lies:
            queue.append(*codec.encode(lie))
        queue.append(*codec.encode(replace(start, offset=1, redeliver_after_ms=INT64_MAX)))
        admin = admin_of(queue)
        found = admin.stats(queue.name)
        assert (found.depth, found.in_flight, found.overdue, found.exact) == (1, 2, 0, True)
        listed = admin.in_flight(queue.name)
        assert [(one.offset, one.state) for one in listed] == [(0, EntryState.LEASED), (1, EntryState.LEASED)]
        lengths = [one.lease_until_ms - one.since_ms for one in listed]
        assert lengths == [60_000, queue.settings.max_hold_ms]

    def test_an_offset_stored_for_an_earlier_markers_topic_hides_nothing(self, queue, admin_of):
        queue.send("a")
        queue.mark(Marker(0, 0, Op.TAKE, 60_000))
        store(queue, StoredOffset(1, "earlier", 0))
        assert [one.offset for one in admin_of(queue).in_flight(queue.name)] == [0]

    def test_many_lying_markers_cost_nothing(self, queue, admin_of):
        queue.send("a")
        lie = Marker(0, 0, Op.TAKE, INT64_MAX, runs=((0, MAX_SPAN),))
        queue.mark_all(replace(lie, offset=n, runs=((n * MAX_SPAN, MAX_SPAN),)) for n in range(100))
        admin = admin_of(queue)
        admin.stats(queue.name)  # imports, connections
        tracemalloc.start()
        try:
            found, listed = admin.stats(queue.name), admin.in_flight(queue.name)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (found.depth, found.in_flight, listed) == (1, 0, [])
        assert peak < 2_000_000  # bytes; for 6,553,600 messages

    def test_an_open_transaction_holds_nobody_up(self, queue, admin_of):
        queue.send("a")
        producer = librdkafka.new_producer(queue.connection, {"transactional.id": queue.name})
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
        until(lambda: [one.attempts for one in admin.in_flight(queue.name)] == [2])
        assert again[0].attempts == 2

        def counts():
            found = admin.stats(queue.name)
            return found.dead_letters, found.depth, found.in_flight

        until(lambda: counts() == (1, 0, 0), what=counts)
        assert admin.stats(queue.name).partitions[0].owner == "t1"
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

    def test_purge_ends_what_is_taken_while_it_runs(self, queue, admin_of, monkeypatch):
        queue.send("a")
        delete = Topics.delete_records

        def taken_just_before(*arguments):
            queue.mark(Marker(0, 0, Op.TAKE, 30_000))
            delete(*arguments)

        monkeypatch.setattr(Topics, "delete_records", taken_just_before)
        assert admin_of(queue).purge(queue.name) == 1
        assert queue.ended() == {0}


class TestDoctor:
    def test_without_a_tracker(self, admin, queue_name):
        admin.create_queue(queue_name)
        assert errors(admin.doctor(queue_name)) == ["no tracker runs: nothing is redelivered"]
        assert warnings(admin.doctor(queue_name)) == []

    def test_planted_faults_in_topics(self, make_queue, admin_of):
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
        admin.diagnose(first.name)
        assert (listed, asked) == ([], [])
        found = admin.doctor()
        assert {one.queue for one in found} >= {first.name, second.name}
        assert len(listed) == 1
        assert len(asked) == len(set(asked))
        assert {f"kmq-{first.name}", f"kmq-{second.name}"} <= set(asked)

    def test_a_tracker_asks_for_its_own_group_only(self, queue, monkeypatch, caplog):
        monkeypatch.setattr(Admin, "doctor", None)
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


class TestLogReader:
    def test_single_records_across_gaps_and_what_is_gone(self, queue):
        queue.send(*[str(n) for n in range(3_000)])
        queue.topics.delete_records(queue.name, {0: 10})
        wanted = [5, 10, 11, 1_500, 2_999, 3_000]
        found = partition_reader.read_at(queue.connection, queue.name, [(0, offset) for offset in wanted])
        assert {place[1]: record.value().decode() for place, record in found.items()} == {
            10: "10",
            11: "11",
            1_500: "1500",
            2_999: "2999",
        }

    def test_a_missing_topic(self, connection):
        with pytest.raises(TopicError, match="does not exist"):
            partition_reader.scan(connection, "there-is-no-such-topic", {0: 0}, print)

    def test_kafka_away(self, connection):
        away = replace(connection, bootstrap=NOWHERE)
        with pytest.raises(Unavailable, match=NOWHERE):
            partition_reader.scan(away, "any", {0: 0}, print, timeout_s=0.5)


def test_a_foreign_receipt_names_the_queue(queue):
    receipt = Receipt.parse(collect_one(queue).receipt)
    assert (receipt.queue, receipt.topic_id) == (queue.name, queue.found.queue.topic_id)


def collect_one(queue):
    queue.send("x")
    return collect(queue.client(), 1)[0]


def test_topics_of_other_kinds_are_no_queues(admin, queue_name):
    futures = admin._context.topics._admin.create_topics([NewTopic(queue_name, 1, 1)])
    futures[queue_name].result()
    assert queue_name not in [one.queue for one in admin.doctor()]
