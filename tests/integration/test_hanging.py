"""Transactions that nobody ends: who says so, and what ends them. On a Kafka of this file's own.

The coordinator takes the transactions of `own` for ended, as after KAFKA-20734. The last test has it forget
all transactions: tests of `own` come before.
"""

import contextlib
import logging
import os
import re
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from support import Collector, LiveQueue, bodies, collect, stopped_after, until

from kmqpy.cli.app import run
from kmqpy.dev import Cluster
from kmqpy.dev import cluster as dev_cluster
from kmqpy.dev.class_archive import ClassArchive, archive_for
from kmqpy.dev.jars import jar_set
from kmqpy.dev.java import find_java
from kmqpy.kafka import hanging
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Finding, Kind
from kmqpy.kafka.copies.copy_headers import Origin, redelivery_headers
from kmqpy.kafka.copies.copy_transaction import CopyTransaction, NewRecord, open_producer
from kmqpy.kafka.copies.end_markers import end_markers
from kmqpy.kafka.hanging import HangingTransactions
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM, naming_tick
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection

pytestmark = pytest.mark.breadth

JARS = Path(__file__).with_name("jars.json")
STATES = "__transaction_state"


@pytest.fixture(autouse=True)
def settings(monkeypatch) -> None:
    """Looks are frequent, and transactions may last as long as Kafka says."""
    monkeypatch.setattr(hanging, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(stats, "_HELD_BACK_MS", 0)


@pytest.fixture
def nothing_may_last(monkeypatch):
    """A function after whose call each open transaction counts as hanging."""

    def change() -> None:
        monkeypatch.setattr(HangingTransactions, "_bound_ms", lambda _: 1)

    return change


@pytest.fixture
def judged(monkeypatch) -> set[HangingTransactions]:
    """Who has judged, from now on, whether a transaction hangs."""
    judges = set()
    bound_ms = HangingTransactions._bound_ms

    def judge(search: HangingTransactions) -> int:
        bound = bound_ms(search)
        judges.add(search)
        return bound

    monkeypatch.setattr(HangingTransactions, "_bound_ms", judge)
    return judges


TODAYS = pytest.mark.parametrize("cluster", ["kafka"], indirect=True)
WITH_OLD = pytest.mark.parametrize(
    "cluster", ["kafka", pytest.param("kafka-3.5", marks=pytest.mark.breadth)], indirect=True
)
"""Before 3.6, Kafka does not ask the coordinator about records of transactions."""


@pytest.fixture(scope="module")
def cluster(request) -> Iterator[Cluster]:
    """One of the sets of jars, running."""
    old = request.param != "kafka"

    def jars_of(kind: str) -> list[Path]:
        return jar_set(request.param, JARS) if old and kind == "kafka" else jar_set(kind)

    def archive_of(kind: str, *where: Any) -> ClassArchive | None:
        # Of a kind of its own: a new archive replaces those of its kind, without which servers start slowly.
        return archive_for("old-kafka" if old and kind == "kafka" else kind, *where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dev_cluster, "jar_set", jars_of)
        patch.setattr(dev_cluster, "archive_for", archive_of)
        with Cluster() as started:
            yield started


def make_queue(cluster: Cluster, name: str) -> LiveQueue:
    connection = KafkaConnection(bootstrap=cluster.bootstrap)
    zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
    return LiveQueue(connection, zookeeper, name, lease_ms=60_000)


class Claim:
    """The claim of one message, of which nothing was decided since."""

    def __init__(self, offset: int) -> None:
        self.record = NewRecord(0, *naming_tick(0, CLAIM, [offset]))

    def decide(self, _position: int) -> tuple[()]:
        return ()


class LeftOpen(BaseException):
    """Ends a process, as it were, before it ends its transaction."""


def redeliver(queue: LiveQueue, offset: int) -> None:
    """What a tracker writes that redelivers a message of partition 0; but the transaction stays open."""
    producer = open_producer(queue.connection, f"kmq-tracker-{queue.name}-0", 60_000, "open", 30)
    remember(queue.connection.bootstrap)
    headers = redelivery_headers((), Origin(0, offset, 0), queue.settings, 1, ())

    def leave() -> bool:
        raise LeftOpen

    with pytest.raises(LeftOpen):
        CopyTransaction(producer, queue.name, queue.settings.markers_topic, 10).execute(
            [NewRecord(0, None, b"message", headers)],
            lambda places: end_markers(queue.name, 0, {offset: places[0]}, copy_topic=queue.name),
            leave,
            Claim(offset),
        )


_remembered: dict[bytes, tuple[int, bytes]] = {}
"""By its key, the partition and value of the record with which the coordinator knows a transactional.id."""


def remember(bootstrap: str) -> None:
    """Keep what the coordinator knows of each new transactional.id: that no transaction is open."""
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "states", "enable.partition.eof": True})
    with contextlib.closing(reader):
        partitions = reader.list_topics(STATES, 30).topics[STATES].partitions
        reader.assign([TopicPartition(STATES, partition, 0) for partition in partitions])
        left = set(partitions)
        while left:
            for record in reader.consume(100, 0.1):
                if record.error() is None:
                    _remembered.setdefault(record.key(), (record.partition(), record.value()))
                else:
                    assert record.error().code() == KafkaError._PARTITION_EOF
                    left.discard(record.partition())


@pytest.fixture(scope="module")
def own(cluster) -> Iterator[dict[str, LiveQueue]]:
    """Queues of messages in flight; the redelivery of the first hangs in both partitions."""
    with contextlib.ExitStack() as queues:
        _remembered.clear()
        made = {}
        for kind in ("nowhere", "copies", "ends", "overtaken"):
            name = f"own-{kind}-{uuid.uuid4().hex[:8]}"
            queue = made[kind] = queues.enter_context(make_queue(cluster, name))
            messages = ["message", *(("acknowledged", "due") if kind == "overtaken" else ())]
            queue.send(*messages)
            queue.mark_all([Marker(0, offset, Op.TAKE, 1) for offset in range(len(messages))])
            redeliver(queue, 0)
        # Kafka lets only tools of its own write to this topic, which it knows by this name.
        writer = Producer({"bootstrap.servers": cluster.bootstrap, "client.id": "__admin_client"})
        for key, (partition, value) in _remembered.items():
            writer.produce(STATES, value, key, partition)
        assert writer.flush(30) == 0
        cluster.broker().kill()
        cluster.broker().start()  # its coordinator reads what it knows from the topic
        yield made


def commit_in(queue: LiveQueue, topic: str) -> None:
    """Commit the hanging transaction of `redeliver` in one topic, with a record that harms nobody."""
    producer = open_producer(queue.connection, f"kmq-tracker-{queue.name}-0", 10_000, "open", 30)
    producer.begin_transaction()
    key, value, headers = codec.encode(codec.tick(0))
    if topic == queue.name:
        key, value, headers = None, b"another", []
    producer.produce(topic, value, key, 0, headers=headers)
    producer.flush(10)
    producer.commit_transaction(10)


def findings(queue: LiveQueue) -> list[Finding]:
    with Admin(queue.connection, queue.zookeeper) as admin:
        return [one for one in admin.doctor(queue.name) if one.kind is Kind.HANGING_TRANSACTION]


def fix(queue: LiveQueue, monkeypatch, capsys) -> str:
    monkeypatch.setenv("KMQ_BOOTSTRAP", queue.connection.bootstrap)
    monkeypatch.setenv("KMQ_ZOOKEEPER", queue.zookeeper.hosts)
    monkeypatch.setenv("KMQ_ROOT", queue.connection.root)
    run(["doctor", queue.name, "--fix", "--yes"])
    return "".join(capsys.readouterr())


def delivered(queue: LiveQueue, count: int) -> list[str]:
    """What a client gets, once a tracker has redelivered what is due."""
    with stopped_after(queue.tracker()) as tracker, queue.client() as client:
        found = bodies(collect(client, count, ack=True))
        until(lambda: not queue_in_flight(queue), what=tracker.problems)
        return [*found, *bodies(client.receive(wait=0.2))]


def queue_in_flight(queue: LiveQueue) -> int:
    with Admin(queue.connection, queue.zookeeper) as admin:
        counted = admin.stats(queue.name)
        return counted.in_flight + counted.depth


def hanging_seconds(tracker, queue: LiveQueue, topic: str) -> float | None:
    labels = {"queue": queue.name, "topic": topic, "partition": "0"}
    return tracker.metrics.registry.get_sample_value("kmq_hanging_transaction_seconds", labels)


def depth(tracker, queue: LiveQueue) -> float | None:
    labels = {"queue": queue.name, "partition": "0"}
    return tracker.metrics.registry.get_sample_value("kmq_depth", labels)


@TODAYS
class TestOwn:
    """What a tracker or redrive has written, `doctor --fix` ends."""

    def test_both_partitions_are_found_and_mended(self, own, nothing_may_last, monkeypatch, capsys):
        queue = own["nowhere"]
        assert findings(queue) == []  # it may last 15 minutes
        nothing_may_last()
        markers = queue.settings.markers_topic
        assert [one.what.partition(":")[0] for one in findings(queue)] == [
            f"{topic}, partition 0" for topic in (queue.name, markers)
        ]
        assert all(f"`kmq doctor {queue.name} --fix`" in one.to_do for one in findings(queue))
        told = fix(queue, monkeypatch, capsys)
        assert f"ended   {queue.name}, partition 0" in told
        assert f"ended   {markers}, partition 0" in told
        assert findings(queue) == []
        assert delivered(queue, 1) == ["message"]
        assert queue.copies() == {"message": 2}  # with the original

    def test_committed_copies_are_not_made_again(self, own, nothing_may_last, monkeypatch, capsys):
        """An abort of their end markers would have them made again."""
        queue = own["copies"]
        commit_in(queue, queue.name)
        nothing_may_last()
        assert "copied a second time" in findings(queue)[0].to_do
        assert "ended   " in fix(queue, monkeypatch, capsys)
        assert sorted(delivered(queue, 2)) == ["another", "message"]
        assert queue.copies() == {"message": 2, "another": 1}

    def test_end_markers_that_are_committed(self, own, nothing_may_last, monkeypatch, capsys):
        """An abort of the copies would lose the message."""
        queue = own["ends"]
        commit_in(queue, queue.settings.markers_topic)
        nothing_may_last()
        assert "do not abort it" in findings(queue)[0].to_do
        assert "ended   " not in fix(queue, monkeypatch, capsys)
        commit_in(queue, queue.name)  # as the next redelivery would
        assert findings(queue) == []
        assert sorted(delivered(queue, 2)) == ["another", "message"]
        assert queue.copies() == {"message": 2, "another": 1}

    def test_a_redelivery_that_is_overtaken_loses_no_copies(self, own, monkeypatch):
        """Copies written before the acknowledgement is known are aborted, and what hangs with them."""
        monkeypatch.setattr(hanging, "LOOK_EVERY_S", 30.0)  # the redelivery is due before
        queue = own["overtaken"]
        commit_in(queue, queue.settings.markers_topic)
        execute, overtaken = CopyTransaction.execute, []

        def overtake(*args, **more):
            if not overtaken:
                overtaken.append(True)
                queue.mark(Marker(0, 1, Op.END))
            execute(*args, **more)

        monkeypatch.setattr(CopyTransaction, "execute", overtake)
        with stopped_after(queue.tracker()) as tracker:
            until(lambda: queue.ended() == {0, 1, 2}, what=tracker.problems)
        assert overtaken
        assert queue.copies() == {"message": 2, "acknowledged": 1, "due": 2}


class Foreign:
    """A producer of somebody else, with a transaction in a topic of a queue."""

    def __init__(self, queue: LiveQueue, topic: str) -> None:
        settings = {"bootstrap.servers": queue.connection.bootstrap, "transactional.id": f"foreign-{topic}"}
        self.producer = Producer(settings)
        self.producer.init_transactions(30)
        self.producer.begin_transaction()
        self.producer.produce(topic, b"open", partition=0)
        self.producer.flush(30)


def forget_transactions(cluster: Cluster) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.delete_topics([STATES])[STATES].result(30)


def run_tools(found: list[Finding]) -> None:
    """Run the commands of Kafka that are advised."""
    jars = [*jar_set("kafka"), *jar_set("kafka-tools", JARS)]
    main = "org.apache.kafka.tools.TransactionsCommand"
    java = [find_java(), "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, jars)), main]
    commands = [re.findall(r"`kafka-transactions.sh ([^`]+ abort [^`]+)`", one.to_do)[0] for one in found]
    running = [subprocess.Popen([*java, *shlex.split(command)]) for command in commands]
    assert [one.wait(120) for one in running] == [0] * len(found)


@WITH_OLD
def test_a_transaction_that_nobody_ends(cluster, nothing_may_last, judged, caplog, monkeypatch):
    name = f"foreign-{uuid.uuid4().hex[:8]}"
    caplog.set_level(logging.ERROR, "kmqpy.kafka.client.hanging_watch")
    with make_queue(cluster, name) as queue, queue.client() as client, contextlib.ExitStack() as after:
        tracker = queue.tracker(http_port=0, count_interval_ms=100)
        taker = Collector(client)
        after.callback(taker.stop)
        queue.send("before")
        until(lambda: bodies(taker.messages) == ["before"])
        open_there = [Foreign(queue, name), Foreign(queue, queue.settings.dead_letter_topic)]
        queue.send("1", "2", "3")

        # Ordinary so far.
        assert queue.topics.longest_transaction_ms() == 900_000
        until(lambda: len(judged) == 2)  # the tracker and the client
        assert hanging_seconds(tracker, queue, name) is None
        assert tracker.problems() == []
        assert findings(queue) == []
        assert bodies(taker.messages) == ["before"]
        assert not caplog.records

        forget_transactions(cluster)
        nothing_may_last()
        topics = {name, queue.settings.dead_letter_topic}
        until(lambda: len(tracker.problems()) == 2, what=tracker.problems)
        assert all(
            any(f"topic {topic}, partition 0" in one for one in tracker.problems()) for topic in topics
        )
        until(lambda: (hanging_seconds(tracker, queue, name) or 0) >= 1)
        until(lambda: depth(tracker, queue) == 4)  # with the record of the transaction
        found = findings(queue)
        assert {one.what.partition(",")[0] for one in found} == topics
        for limit in (stats.COUNT_LIMIT, 2):
            monkeypatch.setattr(stats, "COUNT_LIMIT", limit)
            with Admin(queue.connection, queue.zookeeper) as admin:
                counted = admin.stats(name)
            assert (counted.depth, counted.dead_letters, counted.exact) == (4, 1, False)
        until(lambda: caplog.records)

        run_tools(found)
        until(lambda: tracker.problems() == [], what=tracker.problems)
        until(lambda: len(taker.messages) == 4)
        assert hanging_seconds(tracker, queue, name) is None
        assert findings(queue) == []
        taker.stop()
        assert bodies(taker.messages) == ["before", "1", "2", "3"]
        assert client.receive(wait=0.2) == []
        (told,) = caplog.records
        assert (told.topic, told.partition, told.waiting) == (name, 0, 4)
        del open_there
