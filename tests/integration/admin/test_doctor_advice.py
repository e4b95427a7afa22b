"""Each advice of doctor, followed to the letter on real servers: it mends the finding and loses nothing."""

import contextlib
import io
import logging
import os
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewPartitions, NewTopic
from support import LiveQueue, collect, configure, delete_topic, until

from kmqpy.cli.app import run
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.durations import DAY_MS
from kmqpy.dev import Cluster
from kmqpy.errors import QueueNotFound
from kmqpy.kafka import librdkafka, settings_mirror
from kmqpy.kafka.admin import doctor, queue_deletion, registry_removal
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.checks import settings_topic as settings_topic_checks
from kmqpy.kafka.admin.findings import Finding, Kind
from kmqpy.kafka.admin.registry_entries import StoredOffset, TrackerInfo
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import SettingsMirror
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

pytestmark = pytest.mark.breadth

KMQ = str(Path(sys.executable).with_name("kmq"))
DAYS_20 = str(20 * DAY_MS)
ADVICE = re.compile(r"`(kmq [^`]+)`|set ([a-z.]+)=(\S+) on ([A-Za-z0-9._-]+)")
SETTINGS = {"max_redeliveries": 5, "lease_ms": 2_000, "redelivery_count_header": "tries"}


class Stage:
    """A queue with messages, one of them in flight, and a dead letter; and what a test does to it."""

    commanded = False
    """Whether a tracker was started by `kmq tracker`."""

    def __init__(self, make_queue, monkeypatch, stack: contextlib.ExitStack) -> None:
        self.make_queue = make_queue
        self.monkeypatch = monkeypatch
        self.stack = stack
        self.queue: LiveQueue

    def make(self, *, filled: bool = True, **arguments) -> LiveQueue:
        self.queue = self.make_queue(**{"partitions": 2, **SETTINGS, **arguments})
        self.connection, self.zookeeper = self.queue.connection, self.queue.zookeeper
        self.name, self.settings = self.queue.name, self.queue.settings
        if filled:
            self.fill(self.queue)
        self.admin = self.stack.enter_context(Admin(self.connection, self.zookeeper))
        self.zk = self.stack.enter_context(connect(self.zookeeper))
        self.path = f"{self.connection.root}/queues/{self.name}"
        self.monkeypatch.setenv("KMQ_BOOTSTRAP", self.connection.bootstrap)
        self.monkeypatch.setenv("KMQ_ZOOKEEPER", self.zookeeper.hosts)
        self.monkeypatch.setenv("KMQ_ROOT", self.connection.root)
        self.monkeypatch.setenv("KMQ_TRACKER_HTTP_PORT", "-1")
        self.monkeypatch.setenv("KMQ_TRACKER_OFFSET_INTERVAL_MS", "200")
        return self.queue

    def fill(self, queue: LiveQueue) -> None:
        for body in (b"first", b"second", b"third"):
            queue.append(None, body, topic=queue.name)
        queue.mark(Marker(0, 0, Op.TAKE, 3_600_000))
        queue.append(b"k", b"dead", topic=queue.settings.dead_letter_topic)

    def configure(self, topic: str, **settings: str) -> None:
        configure(self.queue.topics, topic, {key.replace("_", "."): one for key, one in settings.items()})

    def findings(self, kind: Kind) -> list[Finding]:
        if kind in TOLD_OF_ALL:
            found = self.admin.doctor()
        else:
            try:
                found = self.admin.doctor(self.name)
            except QueueNotFound:
                found = []
        return [one for one in found if one.kind is kind and one.queue in (self.name, doctor.SETTINGS_TOPIC)]

    def content(self, queue: LiveQueue) -> dict[str, list]:
        """What the topics hold that there are."""
        return {
            topic: [(one.partition(), one.offset(), one.key(), one.value()) for one in queue.records(topic)]
            for topic in queue.topics.describe(list(topics_of(queue.settings)))
        }

    def retention(self, queue: LiveQueue) -> dict[str, int]:
        """How long the topics keep records, in ms."""
        topics = queue.topics.describe(list(topics_of(queue.settings)), with_config=True)
        kept = {name: int(topic.config["retention.ms"]) for name, topic in topics.items()}
        return {name: 2**63 if ms == -1 else ms for name, ms in kept.items()}

    def follow(self, to_do: str) -> int:
        """Do what the advice says; returns how many things those were."""
        assert "kmq " not in ADVICE.sub("", to_do), to_do
        for command, key, value, topic in (found := ADVICE.findall(to_do)):
            if command == "kmq tracker":
                self.start_tracker()
            elif command:
                self.monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"y\n")))
                code = run(shlex.split(command)[1:])
                assert code == 0 or (command.startswith("kmq doctor") and code == 1), command
            else:
                configure(self.queue.topics, topic, {key: value})
        return len(found)

    def start_tracker(self) -> None:
        """By the command once; then in this process, where it starts sooner."""
        if Stage.commanded:
            self.queue.tracker(wait=False)
            return
        Stage.commanded = True
        process = subprocess.Popen([KMQ, "tracker", "--log-level", "ERROR"], env=os.environ.copy())
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)

    def a_tracker_that_serves(self, *queues: str) -> None:
        """It only says so."""
        info = TrackerInfo("idle", "host", 0, frozenset(queues) or None, kafka_ok=True)
        path = f"{self.connection.root}/trackers/idle"
        self.zk.create(path, info.to_json(), ephemeral=True, makepath=True)

    def store(self, offset: int, topic_id: str = "", now_ms: int = 0) -> None:
        stored = StoredOffset(offset, topic_id or self.queue.found.markers.topic_id, now_ms)
        self.zk.create(f"{self.path}/partitions/0/offset", stored.to_json())

    def own_settings_topic(self, partitions: int = 1, policy: str = "compact") -> str:
        """Another one than all tests share."""
        name = f"mirror-{self.name}"
        for module in (settings_mirror, queue_deletion, doctor, settings_topic_checks):
            self.monkeypatch.setattr(module, "SETTINGS_TOPIC", name)
        if partitions:
            new = NewTopic(name, partitions, 1, config={"cleanup.policy": policy})
            self.queue.topics._admin.create_topics([new])[name].result(60)
            until(lambda: name in self.queue.topics.describe([name]))
        return name

    def tell(self, settings: QueueSettings) -> None:
        """Write it to kmq.queues, with the ids of the topics there are."""
        topics = self.queue.topics.describe(list(topics_of(settings)))
        ids = {name: topic.topic_id for name, topic in topics.items()}
        SettingsMirror(self.connection).write([settings.with_topic_ids(ids)])

    def grow(self, topic: str, partitions: int) -> None:
        self.queue.topics._admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(60)
        until(lambda: self.queue.topics.describe([topic])[topic].partitions == partitions)

    def replicas(self, count: int) -> None:
        """Topics of one replica are shown as if they had so many."""
        describe = Topics.describe
        self.monkeypatch.setattr(
            Topics,
            "describe",
            lambda *args, **more: {
                name: replace(one, replication=count) for name, one in describe(*args, **more).items()
            },
        )


def without(*ends: str) -> Callable[[Stage], None]:
    def plant(stage: Stage) -> None:
        stage.make()
        for end in ends:
            delete_topic(stage.queue.topics, stage.name + end)

    return plant


def changed(end: str, **settings: str) -> Callable[[Stage], None]:
    def plant(stage: Stage) -> None:
        stage.make()
        stage.configure(stage.name + end, **settings)

    return plant


def short_beside_long(stage: Stage) -> None:
    """Of one topic only: what another keeps for long must not be deleted."""
    stage.make()
    stage.configure(stage.settings.dead_letter_topic, retention_ms="-1")
    stage.configure(f"{stage.settings.dead_letter_topic}__markers", retention_ms="-1")
    stage.configure(stage.name, retention_ms=DAYS_20)
    stage.configure(stage.settings.markers_topic, retention_ms="3600000")


def grown(end: str) -> Callable[[Stage], None]:
    return lambda stage: stage.make() and stage.grow(stage.name + end, 3)


def not_registered(stage: Stage) -> None:
    stage.make(register=False)


def registered_with(partitions: int) -> Callable[[Stage], None]:
    def plant(stage: Stage) -> None:
        stage.make(register=False)
        stage.queue.register(partitions)

    return plant


def deleting(stage: Stage) -> None:
    stage.make()
    registry_removal.mark_deleting(stage.admin._context.registry._requests, stage.name)


def unreadable(stage: Stage) -> None:
    name = f"unreadable-{uuid.uuid4().hex}"
    stage.make(name=name, markers_topic=f"{name}-marks", max_lease_ms=DAY_MS)
    data = stage.settings.to_json().replace(
        b'"max_lease_ms": 86400000', b'"max_lease_ms": 86400000, "new": 1'
    )
    stage.zk.set(stage.path, data)


def unusable_znode(stage: Stage) -> None:
    stage.make()
    stage.zk.create(f"{stage.path}/partitions/0/leader", b"copied")


def shared(*topics: str) -> Callable[[Stage], None]:
    """The queue has these topics of another one, which holds messages; it is empty itself."""

    def plant(stage: Stage) -> None:
        first = stage.make()
        names = {topic: getattr(first.settings, topic) for topic in topics}
        other = first
        stage.make(filled=False, name=f"{first.name}-b", root=first.connection.root, **names)
        stage.others = [other]

    return plant


def two_brokers(stage: Stage) -> None:
    """A queue that was made with one replica."""
    cluster = stage.stack.enter_context(Cluster(brokers=2))
    connection = KafkaConnection(bootstrap=cluster.bootstrap)
    zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
    stage.make_queue = lambda **more: stage.stack.enter_context(
        LiveQueue(connection, zookeeper, "jobs", replication=1, **more)
    )
    stage.make(filled=False)


def few_in_sync(stage: Stage) -> None:
    stage.make()
    stage.configure(stage.name, min_insync_replicas="1")
    stage.replicas(3)


def a_tracker_for(queues: list[str]) -> Callable[[Stage], None]:
    return lambda stage: stage.make() and stage.a_tracker_that_serves(*queues)


def stored(offset: int, topic_id: str = "", ahead_ms: int = 0) -> Callable[[Stage], None]:
    def plant(stage: Stage) -> None:
        stage.make()
        stage.store(offset, topic_id, SYSTEM_CLOCK.wall_ms() + ahead_ms if ahead_ms else 0)

    return plant


def below_log(stage: Stage) -> None:
    stage.make()
    stage.queue.mark(Marker(0, 1, Op.END))
    stage.store(0)
    stage.queue.topics.delete_records(stage.settings.markers_topic, {0: 1})


def deleted_before_taken(stage: Stage) -> None:
    stage.make()
    group = librdkafka.new_consumer(stage.connection, {"group.id": stage.settings.consumer_group})
    group.commit(offsets=[TopicPartition(stage.name, 0, 0)], asynchronous=False)
    group.close()
    stage.queue.topics.delete_records(stage.name, {0: 2})


def marker_ahead(stage: Stage) -> None:
    stage.make()
    stage.configure(stage.settings.markers_topic, message_timestamp_type="CreateTime")
    stage.queue.mark(Marker(0, 1, Op.END), timestamp_ms=SYSTEM_CLOCK.wall_ms() + 3_000_000)


def other_group(stage: Stage) -> None:
    stage.make()
    group = librdkafka.new_consumer(stage.connection, {"group.id": f"audit-{stage.name}"})
    group.commit(offsets=[TopicPartition(stage.name, 0, 0)], asynchronous=False)
    group.close()


def read_by_jvm(ending: str, group: str) -> Callable[[Stage], None]:
    """A member of a consumer group reads one of the topics, and calls itself as those on the JVM do."""

    def plant(stage: Stage) -> None:
        stage.make()
        name = f"{group}{stage.name}"
        member = librdkafka.new_consumer(
            stage.connection, {"group.id": name, "client.id": f"consumer-{name}-1"}
        )
        stage.stack.callback(member.close)
        member.subscribe([f"{stage.name}{ending}"])
        until(lambda: member.poll(0.1) or member.assignment())

    return plant


def has_stale_markers(end: str) -> Callable[[Stage], None]:
    """The queue topic, or that of the dead letters, was recreated by itself."""

    def plant(stage: Stage) -> None:
        stage.make()
        stage.tell(stage.settings)
        topic = stage.name + end
        delete_topic(stage.queue.topics, topic)
        stage.queue.topics._admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(60)
        until(lambda: topic in stage.queue.topics.describe([topic]))
        stage.queue.append(None, b"new", topic=topic)

    return plant


def stored_of_earlier_topic(stage: Stage) -> None:
    """A tracker has noted it; kmq.queues knows nothing."""
    stage.make()
    stored = StoredOffset(0, stage.queue.found.markers.topic_id, 0, queue_id="earlier")
    stage.zk.create(f"{stage.path}/partitions/0/offset", stored.to_json())


def settings_topic(partitions: int, policy: str = "compact") -> Callable[[Stage], None]:
    return lambda stage: stage.make() and stage.own_settings_topic(partitions, policy)


def told(change: Callable[[Stage], None]) -> Callable[[Stage], None]:
    def plant(stage: Stage) -> None:
        stage.make()
        stage.own_settings_topic()
        change(stage)

    return plant


def unreadable_record(stage: Stage) -> None:
    stage.tell(stage.settings)
    stage.queue.append(stage.path.encode(), b"{", topic=settings_mirror.SETTINGS_TOPIC)


def of_no_queue(stage: Stage) -> None:
    """As after ZooKeeper has forgotten; the topics are there."""
    stage.tell(stage.settings)
    stage.admin._context.registry.remove(stage.name)


def of_nothing(stage: Stage) -> None:
    """Somebody has deleted the topics, too."""
    of_no_queue(stage)
    stage.queue.topics.delete(topics_of(stage.settings))


def start_a_tracker(stage: Stage) -> None:
    stage.start_tracker()


def take_the_next(stage: Stage) -> None:
    client = stage.queue.client()
    collect(client, 1, ack=True, lease=60.0)
    client.close()  # which commits


PLANTED: dict[Kind, list[Callable[[Stage], None]]] = {
    Kind.QUEUE_TOPIC_MISSING: [without("")],
    Kind.MARKERS_TOPIC_MISSING: [without("__markers")],
    Kind.DEAD_LETTER_TOPIC_MISSING: [
        without("__undelivered"),
        without("__undelivered", "__undelivered__markers"),
    ],
    Kind.DEAD_LETTER_MARKERS_MISSING: [without("__undelivered__markers")],
    Kind.NOT_REGISTERED: [not_registered],
    Kind.DELETING: [deleting],
    Kind.UNREGISTERED_TOPICS: [not_registered],
    Kind.UNREADABLE_SETTINGS: [unreadable],
    Kind.UNUSABLE_ZNODE: [unusable_znode],
    Kind.SHARED_TOPIC: [shared("dead_letter_topic"), shared("markers_topic", "dead_letter_topic")],
    Kind.TOO_FEW_PARTITIONS: [grown("")],
    Kind.TOO_MANY_PARTITIONS: [grown("__markers"), grown("__undelivered__markers")],
    Kind.TOO_FEW_REGISTERED: [registered_with(1)],
    Kind.TOO_MANY_REGISTERED: [registered_with(3)],
    Kind.RETENTION_TOO_SHORT: [
        changed("", retention_ms="3600000"),
        short_beside_long,
    ],
    Kind.RETENTION_WITHOUT_RESERVE: [changed("", retention_ms=str(7 * DAY_MS + 1))],
    Kind.MARKERS_RETENTION_SHORTER: [
        changed("", retention_ms=DAYS_20),
        changed("", retention_ms="-1"),
        changed("__undelivered", retention_ms="-1"),
    ],
    Kind.RETENTION_BYTES: [changed("__undelivered", retention_bytes="1000000")],
    Kind.COMPACTED: [changed("__undelivered", cleanup_policy="compact,delete")],
    Kind.CLIENT_TIMESTAMPS: [changed("__markers", message_timestamp_type="CreateTime")],
    Kind.UNCLEAN_ELECTION: [changed("", unclean_leader_election_enable="true")],
    Kind.TOO_FEW_IN_SYNC: [few_in_sync],
    Kind.TOO_MANY_IN_SYNC: [changed("__markers", min_insync_replicas="2")],
    Kind.ONE_REPLICA: [two_brokers],
    Kind.DEAD_LETTERS_TOO_LARGE: [
        changed("", max_message_bytes="90000000"),
        changed("", max_message_bytes="9000000"),
    ],
    Kind.NO_TRACKER: [Stage.make],
    Kind.NOT_SERVED: [a_tracker_for(["another"])],
    Kind.PARTITIONS_WITHOUT_TRACKER: [a_tracker_for([])],
    Kind.MARKERS_OF_EARLIER_TOPIC: [
        has_stale_markers(""),
        has_stale_markers("__undelivered"),
        stored_of_earlier_topic,
    ],
    Kind.OFFSET_OF_EARLIER_TOPIC: [stored(0, "earlier")],
    Kind.OFFSET_BELOW_LOG: [below_log],
    Kind.OFFSET_BEYOND_LOG: [stored(1_000)],
    Kind.DELETED_BEFORE_TAKEN: [deleted_before_taken],
    Kind.MARKER_TIME_AHEAD: [marker_ahead],
    Kind.STORED_TIME_AHEAD: [stored(0, ahead_ms=3_600_000)],
    Kind.OTHER_GROUPS: [other_group],
    Kind.RANGES_WITH_JVM_TRACKER: [read_by_jvm("__markers", "redelivery-")],
    Kind.RANGES_WITH_JVM_CLIENTS: [read_by_jvm("", "kmq-")],
    Kind.SETTINGS_TOPIC_MISSING: [settings_topic(0)],
    Kind.SETTINGS_TOPIC_NOT_COMPACTED: [settings_topic(1, "delete"), settings_topic(1, "compact,delete")],
    Kind.SETTINGS_TOPIC_PARTITIONS: [settings_topic(2)],
    Kind.RECORD_MISSING: [told(lambda _: None)],
    Kind.RECORD_UNREADABLE: [told(unreadable_record)],
    Kind.RECORD_DIFFERS: [told(lambda stage: stage.tell(replace(stage.settings, max_lease_ms=9 * DAY_MS)))],
    Kind.RECORD_OF_NO_QUEUE: [told(of_no_queue), told(of_nothing)],
}
"""How each finding comes about. A new one must be among these, or below."""

NEITHER_SETTING_NOR_COMMAND = {
    Kind.OK: "nothing to do",
    Kind.TRACKER_WITHOUT_KAFKA: "whoever runs it must look",
    Kind.SETTINGS_TOPIC_UNREADABLE: "whoever gives rights must",
    Kind.DAMAGED_LOG: "whoever runs Kafka must; test_damaged_logs.py shows that kmqpy goes on then",
    Kind.HANGING_TRANSACTION: "test_hanging.py follows it, on a Kafka of its own",
    Kind.NOT_DURABLE: "of other storages than Kafka; test_sql_durability.py follows it",
    Kind.OUT_OF_SYNC: "whoever runs Kafka must; test_outage_leader.py shows it",
    Kind.UNCHECKED: "of other storages than Kafka; test_damaged_storages.py follows it",
    Kind.DAMAGED_TABLE: "the same",
    Kind.LOG_CUT: "what is lost is lost; test_cut_logs_readers.py shows that kmqpy goes on",
}

TOLD_OF_ALL = {
    Kind.UNREGISTERED_TOPICS,
    Kind.SETTINGS_TOPIC_MISSING,
    Kind.SETTINGS_TOPIC_NOT_COMPACTED,
    Kind.SETTINGS_TOPIC_PARTITIONS,
    Kind.RECORD_OF_NO_QUEUE,
}
"""What only `kmq doctor` without a queue finds."""

MARKERS_GO = {Kind.QUEUE_TOPIC_MISSING, Kind.MARKERS_OF_EARLIER_TOPIC}
"""Where those are of messages that are gone."""

FOR_JVM_PROGRAMS = {Kind.RANGES_WITH_JVM_TRACKER, Kind.RANGES_WITH_JVM_CLIENTS}
"""Where the queue gets another format of markers."""

AND_THEN: dict[Kind, Callable[[Stage], None]] = {
    Kind.OFFSET_OF_EARLIER_TOPIC: start_a_tracker,
    Kind.OFFSET_BELOW_LOG: start_a_tracker,
    Kind.OFFSET_BEYOND_LOG: start_a_tracker,
    Kind.STORED_TIME_AHEAD: start_a_tracker,
    Kind.DELETED_BEFORE_TAKEN: take_the_next,
}
"""What the finding waits for, as its advice says, besides what is to be done."""

STAYS = {
    Kind.MARKER_TIME_AHEAD: "as long as Kafka keeps that marker",
    Kind.OTHER_GROUPS: "the groups may be fine",
    Kind.SETTINGS_TOPIC_PARTITIONS: "Kafka can't take partitions away",
}
"""Findings that are told again, with nothing left to do."""


@pytest.fixture
def stage(make_queue, monkeypatch):
    with contextlib.ExitStack() as stack:
        yield Stage(make_queue, monkeypatch, stack)
    logging.getLogger("kmqpy").handlers.clear()


def test_no_finding_is_left_out():
    assert PLANTED.keys() | NEITHER_SETTING_NOR_COMMAND.keys() == set(Kind)
    assert not PLANTED.keys() & NEITHER_SETTING_NOR_COMMAND.keys()


@pytest.mark.parametrize(
    ("kind", "plant"), [(kind, plant) for kind, plants in PLANTED.items() for plant in plants]
)
def test_an_advice_that_is_followed_mends_the_finding_and_loses_nothing(kind, plant, stage):
    plant(stage)
    until(lambda: stage.findings(kind), what=lambda: stage.admin.doctor(stage.name))
    queues = [stage.queue, *getattr(stage, "others", ())]
    before = [stage.content(queue) for queue in queues]
    kept = [stage.retention(queue) for queue in queues]
    registered = stage.admin._context.registry.every_queue()[0]

    for finding in stage.findings(kind):
        done = stage.follow(finding.to_do)
        assert done or kind in {*AND_THEN, *STAYS}, finding
    AND_THEN.get(kind, lambda _: None)(stage)

    if kind in STAYS:
        assert not any(ADVICE.search(finding.to_do) for finding in stage.findings(kind))
    else:
        until(lambda: not stage.findings(kind), what=lambda: stage.findings(kind))
    after = [stage.content(queue) for queue in queues]
    if kind is Kind.DELETING:  # which is what was asked for
        queues, before, after, kept = queues[1:], before[1:], after[1:], kept[1:]
        registered = [one for one in registered if one.name != stage.name]
    if kind in MARKERS_GO:
        before[0] = {topic: records for topic, records in before[0].items() if "__markers" not in topic}
    for old, new in zip(before, after, strict=True):
        for topic, records in old.items():
            assert new[topic][: len(records)] == records, topic
    for queue, old in zip(queues, kept, strict=True):
        assert all(ms >= old.get(topic, 0) for topic, ms in stage.retention(queue).items())
    wanted = {one.name: stage.settings if one.name == stage.name else one for one in registered}
    for one in stage.admin._context.registry.every_queue()[0]:
        settings = wanted.pop(one.name, one)
        if kind is Kind.SHARED_TOPIC and one.name == stage.name:
            usual = QueueSettings(name=one.name)
            names = {key: getattr(usual, key) for key in ("markers_topic", "dead_letter_topic")}
            settings = replace(settings, **names)
        if kind in FOR_JVM_PROGRAMS:
            settings = replace(settings, markers="jvm")
        assert one == settings
        assert kind is not Kind.RECORD_OF_NO_QUEUE or one == stage.settings
    assert not wanted
