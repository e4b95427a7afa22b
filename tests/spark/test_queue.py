"""The state of a real queue, whose truth is known, as frames."""

import uuid

import foreign_headers
import pytest
from confluent_kafka import Producer
from support import collect, stopped_after, until

from kmqpy.errors import ConfigError, KmqError, QueueNotFound, TopicError
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import INT64_MAX as FOREVER_MS
from kmqpy.kafka.markers.codec import MAX_SPAN, Marker, Op
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.spark import KmqSpark
from kmqpy.spark.records import _loaded, kafka_options


def kmq_of(spark, queue):
    return KmqSpark(spark, queue.connection, queue.settings)


def place(message):
    return message.partition, message.offset


def aborted(queue, *marks):
    """Write markers in a transaction that is aborted, and one in another that is committed: a tick."""
    producer = Producer({"bootstrap.servers": queue.connection.bootstrap, "transactional.id": queue.name})
    producer.init_transactions(10)
    for written, end in (
        (marks, producer.abort_transaction),
        ([codec.tick(0)], producer.commit_transaction),
    ):
        producer.begin_transaction()
        for marker in written:
            key, value, headers = codec.encode(marker)
            producer.produce(queue.settings.markers_topic, value, key, marker.partition, headers=headers)
        producer.flush(10)
        end(10)
    queue.records(queue.settings.markers_topic)


def test_a_queue_whose_truth_is_known(spark, make_queue):
    """With range markers; test_state_table has another one with those of JVM clients."""
    queue = make_queue(2, max_redeliveries=1, lease_ms=600_000)
    producer = queue.producer()
    for number in range(16):
        producer.send(str(number), partition=number % 2)
    client = queue.client()
    took = {int(message.body): message for message in collect(client, 16)}
    expected = {}
    with stopped_after(queue.tracker()):
        client.ack(*(took[number] for number in (0, 1, 2, 13, 15)))
        client.nack(took[3], took[4], reason="not now")
        client.dead_letter(took[5], reason="bad")
        again = {int(message.body): message for message in collect(client, 2)}
        client.nack(again[3], reason="never")
        client.ack(again[4])
        until(lambda: len(queue.dead_letters()) == 2)
    client.extend(took[6], lease=1_000)
    client.nack(took[8])
    client.nack(took[9], delay=1_000)
    client.ack(took[3])  # too late
    producer.send("later", partition=0, delay=1_000)

    def is_delayed() -> bool:
        assert client.receive(wait=0.1) == []
        return bool(queue.marked(Op.DELAY, 0))

    until(is_delayed)
    producer.send("new", partition=1)
    for wrong in ((b"?", b"\x00"), (codec.encode_key(1, 0), None)):
        queue.append(*wrong, partition=1)
    aborted(queue, Marker(1, took[7].offset, Op.END), Marker(0, took[6].offset, Op.NACK, 0))
    client.flush()

    expected |= {place(took[number]): ("processed", None, 1) for number in (0, 1, 2, 13, 15)}
    expected |= {place(took[number]): ("redelivered", None, 1) for number in (3, 4)}
    expected |= {place(took[5]): ("dead", None, 1)}
    expected |= {place(again[3]): ("dead", None, 2), place(again[4]): ("processed", None, 2)}
    expected |= {place(took[number]): ("in_flight", "leased", 1) for number in (6, 7, 10, 11, 12, 14)}
    expected |= {place(took[8]): ("overdue", "released", 1), place(took[9]): ("in_flight", "released", 1)}
    kmq = kmq_of(spark, queue)
    messages = kmq.messages().persist()
    rows = {(row["partition"], row["offset"]): row for row in messages.collect()}
    found = {where: (row["state"], row["in_flight_state"], row["attempts"]) for where, row in rows.items()}
    new = {where: found.pop(where) for where in found.keys() - expected.keys()}
    assert found == expected
    assert sorted(new.items()) == [
        ((0, max(offset for partition, offset in rows if partition == 0)), ("pending", "delayed", 0)),
        ((1, max(offset for partition, offset in rows if partition == 1)), ("pending", None, 0)),
    ]
    redelivered = rows[place(again[4])]
    assert redelivered["first_enqueued"] == rows[place(took[4])]["timestamp"]
    assert redelivered["timestamp"] <= redelivered["taken_at"] <= redelivered["ended_at"]

    entries = {place(one): one.lease_until_ms for one in stats.in_flight(queue.connection, queue.settings)}
    due = {where: round(row["due_at"].timestamp() * 1000) for where, row in rows.items() if row["due_at"]}
    assert due == entries

    problems = kmq.markers().groupBy("problem").count().collect()
    assert {row["problem"]: row["count"] for row in problems}["undecodable"] == 2
    truth = stats.queue_stats(queue.connection, queue.settings)
    depth = {row["partition"]: row for row in kmq.depth().collect()}
    for part in truth.partitions:
        row = depth[part.partition]
        assert row["pending"] == part.depth
        assert row["in_flight"] + row["overdue"] == part.in_flight
        assert row["overdue"] == part.overdue
    letters = {row["origin_offset"]: row for row in kmq.undelivered().collect()}
    assert {(row["reason"], row["attempts"], bytes(row["body"])) for row in letters.values()} == {
        ("rejected: bad", 1, b"5"),
        ("nack: never", 2, b"3"),
    }
    assert sorted((row["state"], row["attempts"], row["messages"]) for row in kmq.attempts().collect()) == [
        ("dead", 1, 1),
        ("dead", 2, 1),
        ("in_flight", 1, 7),
        ("overdue", 1, 1),
        ("pending", 0, 2),
        ("processed", 1, 5),
        ("processed", 2, 1),
        ("redelivered", 1, 2),
    ]
    (median, most) = kmq.latency([0.5, 1], messages).collect()
    assert 0 <= median["total_ms"] <= most["total_ms"]
    messages.unpersist()


@pytest.mark.breadth
def test_frames_have_all_lanes_of_a_queue(spark, make_queue):
    queue = make_queue(retry_lane=True, priorities=2, max_redeliveries=0, lease_ms=60_000)
    kmq = kmq_of(spark, queue)
    with queue.producer() as producer:
        producer.send_many(["a", "b"])
        producer.send("u", priority=1)
    client = queue.client()
    found = collect(client, 3)
    client.ack(*(one for one in found if one.body == b"a"), confirmed=True)
    client.dead_letter(*(one for one in found if one.body == b"u"), confirmed=True)
    with stopped_after(queue.tracker(wait=False)):
        until(queue.dead_letters)
    _, of_one, _ = queue.settings.lanes_apart()
    rows = KmqSpark(spark, queue.connection, of_one).messages().collect()
    assert [(row["offset"], row["state"]) for row in rows] == [(0, "dead")]
    retry, urgent, main = (lane.name for lane in queue.settings.lanes_apart())
    messages = kmq.messages().persist()
    assert {(row["lane"], row["state"]) for row in messages.collect()} == {
        (urgent, "dead"),
        (main, "processed"),
        (main, "in_flight"),
    }
    (depth,) = kmq.depth(messages).collect()
    assert (depth["dead"], depth["processed"], depth["in_flight"]) == (1, 1, 1)
    messages.unpersist()
    assert {(row["lane"], bytes(row["value"])) for row in kmq.read(state="dead").collect()} == {
        (urgent, b"u")
    }
    assert {row["lane"] for row in kmq.read().collect()} == {main, urgent}
    assert {row["lane"] for row in kmq.markers().collect()} == {main, urgent, retry}  # its assignment tick
    (letter,) = kmq.undelivered().collect()
    assert (letter["origin_topic"], bytes(letter["body"])) == (urgent, b"u")


@pytest.mark.breadth
def test_what_lies_counts_for_nothing(spark, make_queue):
    queue = make_queue(max_lease_ms=600_000, lease_ms=300)
    dead, bootstrap = queue.settings.dead_letter_topic, queue.connection.bootstrap
    queue.send(*"abc")
    queue.append(None, b"dead", topic=dead)
    of_another = [("kmq-dead-letter-topic", b"another"), ("kmq-dead-letter-partition", b"0")]
    queue.append(None, b"not mine", [*of_another, ("kmq-dead-letter-offset", b"0")], topic=dead)
    queue.mark_all([Marker(0, 0, Op.TAKE, FOREVER_MS), Marker(0, 1, Op.TAKE, FOREVER_MS)])
    queue.mark_all(codec.ranges(0, Op.TAKE, range(MAX_SPAN), redeliver_after_ms=0))  # most do not exist
    queue.mark_all(codec.ranges(0, Op.END, range(1, MAX_SPAN)))  # the others do
    for topic in (queue.settings.markers_topic, f"{dead}__markers"):
        for partition in (-1, -3, 1):
            queue.append(codec.encode_key(partition, 0), codec.encode_end(), topic=topic)
        foreign_headers.write(
            bootstrap, topic, codec.encode_end(), [(b"caf\xe9", b"")], key=codec.encode_key(0, 0)
        )
    kmq = kmq_of(spark, queue)
    found = kmq.messages().orderBy("offset").select("state", "attempts", "taken_at", "due_at").collect()
    assert [(row["state"], row["attempts"]) for row in found] == [
        ("in_flight", 1),
        ("processed", 1),
        ("processed", 1),
    ]
    assert (found[0]["due_at"] - found[0]["taken_at"]).total_seconds() == 600
    assert [bytes(row["body"]) for row in kmq.undelivered().collect()] == [b"dead"]
    truth = stats.queue_stats(queue.connection, queue.settings)
    assert (truth.depth, truth.in_flight, truth.dead_letters) == (0, 1, 1)


@pytest.mark.breadth
def test_dead_letters_that_were_redriven(spark, make_queue):
    queue = make_queue(1)
    queue.producer().send("bad")
    client = queue.client()
    with stopped_after(queue.tracker()):
        client.dead_letter(*collect(client, 1, lease=60.0), reason="bad")
        until(queue.dead_letters)
    kmq = kmq_of(spark, queue)
    assert kmq.undelivered().count() == 1
    stream = kmq.undelivered(stream=True).select("body", "reason").writeStream.format("memory")
    stream.queryName("letters").trigger(availableNow=True).start().awaitTermination(60)
    assert [(bytes(row["body"]), row["reason"]) for row in spark.table("letters").collect()] == [
        (b"bad", "rejected: bad")
    ]
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        assert letters.run_redrive().redriven == 1
    until(lambda: kmq.undelivered().count() == 0)
    assert sorted(row["state"] for row in kmq.messages().collect()) == ["dead", "pending"]


def test_markers_as_a_stream(spark, make_queue):
    queue = make_queue(1)
    queue.mark_all([Marker(0, 0, Op.TAKE, 500), Marker(0, 0, Op.END, runs=((0, 2),))])
    stream = kmq_of(spark, queue).markers(stream=True).select("at", "op", "offset", "offsets").writeStream
    stream.format("memory").queryName("seen").trigger(availableNow=True).start().awaitTermination(60)
    assert sorted(map(tuple, spark.table("seen").collect())) == [(0, "take", 0, None), (1, "end", 0, [0, 1])]


@pytest.mark.breadth
def test_an_empty_queue(spark, make_queue):
    kmq = kmq_of(spark, make_queue(3))
    assert [tuple(row) for row in kmq.depth().collect()] == [(n, *[0] * 6, None) for n in range(3)]
    assert kmq.undelivered().count() == 0
    assert kmq.latency().collect() == []


class TestBadInput:
    @pytest.mark.parametrize("frame", ["messages", "depth", "attempts", "latency", "undelivered", "markers"])
    def test_an_unknown_queue(self, frame, spark, cluster):
        with pytest.raises(QueueNotFound, match="'no-such-queue': there is no such topic; create it with"):
            getattr(KmqSpark(spark, cluster.bootstrap, "no-such-queue"), frame)()

    def test_dead_letters_without_their_topic(self, spark, make_queue):
        queue = make_queue(1)
        other = KmqSpark(
            spark, queue.connection, type(queue.settings)(name=queue.name, dead_letter_topic="nope")
        )
        with pytest.raises(TopicError, match="its topic 'nope' does not exist; create it"):
            other.undelivered()

    def test_an_invalid_name_is_refused(self, spark):
        with pytest.raises(ConfigError, match="invalid topic name"):
            KmqSpark(spark, "host:9092", "bad/name")

    def test_another_spark(self, spark, monkeypatch):
        monkeypatch.setattr(spark, "version", "3.5.7")
        with pytest.raises(ConfigError, match=r"Spark: version 3\.5\.7, but kmqpy needs 4\.2"):
            KmqSpark(spark, "host:9092", "q")

    def test_a_session_without_the_connector(self, spark):
        with pytest.raises(ConfigError, match="no Kafka connector; make it with configure_spark_with_kmq"):
            _loaded(spark.read.format("no-such-connector"))


class TestSecurity:
    def test_what_librdkafka_is_told_java_is_told(self, tmp_path):
        for name in ("ca", "certificate", "key"):
            (tmp_path / name).write_text(f"PEM of {name}")
        connection = KafkaConnection(
            bootstrap="host:9093",
            kafka={
                "security.protocol": "SASL_SSL",
                "sasl.mechanisms": "SCRAM-SHA-512",
                "sasl.username": "me",
                "sasl.password": 'a"b\\c',
                "ssl.ca.location": str(tmp_path / "ca"),
                "ssl.certificate.location": str(tmp_path / "certificate"),
                "ssl.key.location": str(tmp_path / "key"),
                "ssl.endpoint.identification.algorithm": "none",
                "fetch.queue.backoff.ms": 5,
            },
        )
        assert kafka_options(connection, {"minPartitions": "8"}) == {
            "kafka.bootstrap.servers": "host:9093",
            "kafka.max.poll.records": "50000",
            "kafka.isolation.level": "read_committed",
            "includeHeaders": "true",
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
            'username="me" password="a\\"b\\\\c";',
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.certificates": "PEM of ca",
            "kafka.ssl.keystore.type": "PEM",
            "kafka.ssl.keystore.certificate.chain": "PEM of certificate",
            "kafka.ssl.keystore.key": "PEM of key",
            "kafka.ssl.endpoint.identification.algorithm": "",
            "minPartitions": "8",
        }

    def test_a_file_that_cant_be_read(self):
        with pytest.raises(KmqError, match=r"kafka: ssl\.ca\.location: '/nothing' can't be read"):
            kafka_options(KafkaConnection(kafka={"ssl.ca.location": "/nothing"}))

    @pytest.mark.parametrize(
        "name", ["kafka.isolation.level", "Subscribe", "startingOffsetsByTimestamp", "includeHeaders"]
    )
    def test_options_that_would_read_other_records_are_refused(self, name):
        """Those of aborted transactions, for one."""
        with pytest.raises(ConfigError, match=f"options: {name}: 'x' is not yours to choose"):
            kafka_options(KafkaConnection(), {name: "x"})

    def test_a_setting_that_would_get_lost(self):
        with pytest.raises(
            ConfigError, match=r"kafka: ssl\.engine\.id: has no counterpart in Spark's Kafka source"
        ):
            kafka_options(KafkaConnection(kafka={"ssl.engine.id": "any"}))


def test_a_queue_given_by_name_has_its_own_settings(spark, make_queue):
    """As for clients, kmq.queues tells them; without that, this would look for topics of the usual names."""
    name = "q" + uuid.uuid4().hex[:8]
    queue = make_queue(1, name, markers_topic=f"{name}-m", dead_letter_topic=f"{name}-d", max_lease_ms=90_000)
    with Admin(queue.connection, queue.zookeeper) as admin:
        admin.create_queue(queue.settings)
    queue.send("a", "b")
    here = queue.connection
    kmq = KmqSpark(spark, here, name)
    assert kmq.queue == queue.settings
    assert [row["state"] for row in kmq.messages().collect()] == ["pending", "pending"]
    with pytest.raises(ConfigError, match=r"max_lease_ms: 5000 is not what queue .* 90000"):
        KmqSpark(spark, here, type(queue.settings)(name=name, max_lease_ms=5_000))
