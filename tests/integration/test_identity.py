"""A queue is its topic id (rule R24): what was known of a topic counts for none that has its name later."""

import dataclasses
import io
import json
import threading
import time

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewPartitions
from support import bodies, collect, delete_topic, make_topic, until, value

from kmqpy.cli.app import run
from kmqpy.core.backoff import Backoff
from kmqpy.errors import AccessDenied, Closed, Fenced, ReceiptError, TopicError
from kmqpy.kafka import librdkafka, settings_mirror
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Kind
from kmqpy.kafka.client.offset_commits import Commit, commit_metadata
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.settings import SETTINGS_TOPIC, QueueSettings
from kmqpy.kafka.settings_mirror import SettingsMirror, check_topics, settings_of
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import Topics
from kmqpy.message import Message
from tracker import topic_probe
from tracker.partition import owned_partition

OLD, NEW = 60, 300
LEASE_S = 60.0
ACKER_LEASE_S = 5.0
"""Until what was taken before it was known that the topic is another one comes again."""


def make_anew(queue):
    queue.topics.delete(topics_of(queue.settings))
    queue.topics.create(queue.settings, queue.partitions)
    queue.found = queue.topics.check(queue.settings)


class Acker:
    """A thread that takes and acknowledges messages, whatever a client raises."""

    def __init__(self, client):
        self.client = client
        self.bodies = []
        self.gone = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            try:
                for message in self.client.receive(wait=0.1, lease=ACKER_LEASE_S):
                    self.bodies.append(message.body.decode())
                    self.client.ack(message)
            except TopicError:
                self.gone.set()
                time.sleep(0.05)
            except ReceiptError:  # it was taken before it was known that the topic is another one
                pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("pause", [False, pytest.param(True, marks=pytest.mark.breadth)])
@pytest.mark.parametrize(("clients", "partitions"), [(2, 3), pytest.param(1, 1, marks=pytest.mark.breadth)])
def test_r24_clients_that_live_through_a_queue_made_anew_take_all_its_messages(
    make_queue, clients, partitions, pause
):
    """The new topic is soon longer than the old one: a position in the one is good in the other."""
    # How soon a topic that is gone is noticed; see `pause`.
    queue = make_queue(partitions, kafka={"topic.metadata.refresh.interval.ms": 300})
    queue.tracker()
    spread = {"partition": 0} if partitions == 1 else {"partition": None}
    old, new = [f"old {i}" for i in range(OLD)], [f"new {i}" for i in range(NEW)]
    own = [queue.client() for _ in range(clients)]
    with Acker(own[0]) as first, Acker(own[-1]) as last:
        until(lambda: sum(len(one.partitions) for one in own) == partitions)
        queue.send(*old, **spread)
        until(lambda: set(old) <= {*first.bodies, *last.bodies})
        queue.topics.delete(topics_of(queue.settings))
        if pause:
            until(lambda: first.gone.is_set() or last.gone.is_set())
        queue.topics.create(queue.settings, partitions)
        queue.send(*new, **spread)
        until(
            lambda: set(new) <= {*first.bodies, *last.bodies},
            what=lambda: len(set(new) - {*first.bodies, *last.bodies}),
        )
    for client in own:
        client.flush()
    until(lambda: stats.queue_stats(queue.connection, queue.settings).depth == 0)


def commit(queue, offset, metadata):
    member = librdkafka.new_consumer(queue.connection, {"group.id": queue.settings.consumer_group})
    try:
        member.commit(offsets=[TopicPartition(queue.name, 0, offset, metadata)], asynchronous=False)
    finally:
        member.close()


@pytest.mark.parametrize(
    ("of", "left"), [("old", 5), ("new", 2), pytest.param("unknown", 2, marks=pytest.mark.breadth)]
)
def test_r24_commits_count_for_the_topic_that_they_name(queue, of, left):
    sent = [f"m{i}" for i in range(5)]
    queue.send(*sent)
    ids = TopicIds("of-another-topic", queue.found.markers.topic_id) if of == "old" else queue.found.ids
    commit(queue, 3, "kmq1:0" if of == "unknown" else commit_metadata(Commit(3, 0), ids))
    assert stats.queue_stats(queue.connection, queue.settings).depth == left
    assert bodies(collect(queue.client(), left)) == sent[-left:]


@pytest.mark.breadth
def test_r24_receipts_are_of_the_topic_also_to_a_client_that_only_acknowledges(queue):
    finisher = queue.client()
    queue.send("old")
    with queue.client() as client:
        (old,) = collect(client, 1, lease=LEASE_S)
    finisher.extend(old, lease=LEASE_S)
    make_anew(queue)
    queue.send("new")
    with queue.client() as client:
        (new,) = collect(client, 1, lease=LEASE_S)
    finisher.extend(new, lease=LEASE_S, confirmed=True)
    finisher.ack(new.receipt, confirmed=True)
    for finish in (finisher.ack, finisher.nack, finisher.dead_letter):
        with pytest.raises(ReceiptError, match="deleted since"):
            finish(old)
        with pytest.raises(ReceiptError, match="deleted since"):
            finish(old.receipt)
    assert queue.ended() == {0}


@pytest.mark.parametrize("late_acks", [False, True])
def test_r24_an_old_receipt_ends_no_message_also_of_a_client_that_can_not_know(
    make_queue, monkeypatch, late_acks
):
    """Neither one that is in flight, nor its copy."""
    queue = make_queue(markers="range", late_acks=late_acks)
    sent = [f"m{number}" for number in range(4)]
    queue.send(*sent)
    unaware = queue.client(instance_id="unaware")
    with queue.client() as client:
        old = [one.receipt for one in collect(client, 4, lease=LEASE_S)]
    unaware.ack()  # from now on, it knows the topic
    monkeypatch.setattr(unaware._consumer.current._topics, "look", lambda: None)
    make_anew(queue)
    queue.send(*sent)
    client = queue.client()
    new = collect(client, 4, lease=1.0 if late_acks else LEASE_S)
    client.ack(new[3].receipt, confirmed=True)
    tracker = queue.tracker()
    if late_acks:
        until(lambda: sum(queue.copies().values()) == 7, what=queue.copies)
    unaware.ack(old[0], confirmed=True)
    unaware.dead_letter(old[1], confirmed=True)
    unaware.nack(old[2], confirmed=True)
    if late_acks:
        assert sorted(bodies(collect(client, 3))) == sent[:3]
    else:
        part = tracker._partitions[queue.name, 0]
        until(lambda: len(part.state) == 3)
        assert [(entry.offset, entry.state) for entry in part.state.in_order()] == [
            (offset, EntryState.LEASED) for offset in range(3)
        ]
        assert value(tracker, queue.name, "undecodable_markers") == 0
        found = stats.queue_stats(queue.connection, queue.settings)
        assert (found.depth, found.in_flight) == (0, 3)


@pytest.mark.parametrize("as_receipts", [False, True])
def test_r24_a_client_may_learn_of_the_new_topic_while_it_finishes_a_message_of_it(queue, as_receipts):
    """The clients have done nothing since the topic was recreated, so they know only its former id."""
    clients = [queue.client() for _ in range(4)]
    for one in clients:
        one.ack()  # of nothing: from now on, it knows the topic
    make_anew(queue)
    queue.send(*(f"m{i}" for i in range(4)))
    with queue.client() as client:
        taken = collect(client, 4, lease=LEASE_S)
    given = [one.receipt for one in taken] if as_receipts else taken
    clients[0].ack(given[0], confirmed=True)
    clients[1].nack(given[1], confirmed=True)
    clients[2].dead_letter(given[2], confirmed=True)
    clients[3].extend(given[3], lease=LEASE_S, confirmed=True)
    marked = [queue.marked(op, 0) for op in (Op.END, Op.NACK, Op.DEAD_LETTER, Op.EXTEND)]
    assert marked == [{0}, {1}, {2}, {3}]


def test_r24_a_closed_client_does_not_change_to_a_new_topic(queue):
    """Nobody would close the writer that it made."""
    client = queue.client()
    client.receive(wait=0)
    closed = client._consumer.current
    client.close()
    make_anew(queue)
    queue.send("m0")
    (new,) = collect(queue.client(), 1, lease=LEASE_S)
    before = closed._topics.writer
    for finish in (closed.ack, closed.nack, closed.dead_letter):
        with pytest.raises(Closed):
            finish(new.receipt)
    assert closed._topics.writer is before


@pytest.mark.breadth
def test_r24_messages_are_of_their_queue_and_storage_like_receipts(make_queue, queue_name):
    queue, other = make_queue(), make_queue(name=f"{queue_name}-other")
    queue.send("mine")
    other.send("other")
    client = queue.client()
    (mine,) = collect(client, 1, lease=LEASE_S)
    (foreign,) = collect(other.client(), 1, lease=LEASE_S)
    fields = {"body": b"", "headers": (), "attempts": 1, "enqueued_ms": 0, "first_enqueued_ms": 0}
    in_memory = Message(queue=queue.name, id="0", lease_until_ms=0, receipt="memory-1", **fields)
    for finish in (client.ack, client.nack, client.dead_letter, lambda *m: client.extend(*m, lease=LEASE_S)):
        for message in (foreign, dataclasses.replace(foreign, queue=queue.name), in_memory):
            with pytest.raises(ReceiptError):
                finish(message)
            with pytest.raises(ReceiptError):
                finish(mine, message)
    client.flush()
    assert queue.ended() == set()
    copy = dataclasses.replace(mine, body=b"changed")
    assert (type(copy), copy.body, copy.receipt) == (Message, b"changed", mine.receipt)
    client.ack(copy, confirmed=True)
    assert queue.ended() == {0}


def test_r24_a_markers_topic_made_anew_alone_costs_no_message(queue):
    queue.send(*(f"m{i}" for i in range(5)))
    client = queue.client()
    taken = collect(client, 5, lease=LEASE_S)
    until(lambda: queue.committed() == 5)
    markers = queue.settings.markers_topic
    delete_topic(queue.topics, markers)
    queue.topics.create(queue.settings, 1)
    queue.send("m5", "m6")
    taken += collect(client, 2, lease=LEASE_S)
    assert bodies(taken) == [f"m{i}" for i in range(7)]
    client.ack(*taken, confirmed=True)
    until(lambda: queue.committed() == 7)
    assert stats.queue_stats(queue.connection, queue.settings).depth == 0


@pytest.mark.parametrize("probe_every_s", [0.2, pytest.param(3_600, marks=pytest.mark.breadth)])
def test_r24_a_tracker_redelivers_no_message_of_a_new_topic_for_one_of_the_old(
    queue, monkeypatch, probe_every_s
):
    """Also when it is due before the next probe."""
    monkeypatch.setattr(topic_probe, "_PROBE_EVERY_S", probe_every_s)
    tracker = queue.tracker()
    queue.send(*(f"old {i}" for i in range(20)))
    with queue.client() as client:
        collect(client, 20, lease=3.0)
    part = tracker._partitions[queue.name, 0]
    until(lambda: len(part.state) == 20)
    make_anew(queue)
    new = [f"new {i}" for i in range(20)]
    queue.send(*new)
    until(lambda: part.topic_ids[0] == queue.found.queue.topic_id)
    with queue.client() as client:
        taken = collect(client, 20, lease=LEASE_S)
        client.ack(*taken[:10], confirmed=True)
        client.extend(*taken[10:], lease=0.5, confirmed=True)
        until(lambda: sum(queue.copies().values()) == 30, what=queue.copies)
    assert queue.copies() == {**dict.fromkeys(new[:10], 1), **dict.fromkeys(new[10:], 2)}


def test_two_clients_with_one_instance_id_do_not_go_on_side_by_side(queue):
    queue.send(*(f"m{i}" for i in range(5)))
    first = queue.client(instance_id="one")
    collect(first, 5, lease=LEASE_S)
    second = queue.client(instance_id="one")
    told = []

    def is_told():
        try:
            first.receive(wait=0.1)
        except Fenced as error:
            told.append(str(error))
        second.receive(wait=0.1)
        return told

    until(is_told)
    assert "instance_id of its own" in told[0]
    with pytest.raises(Fenced):  # for good
        first.receive()
    with pytest.raises(Fenced):
        next(iter(first))
    queue.send("last")
    assert bodies(collect(second, 1, lease=LEASE_S)) == ["last"]


def add_partitions(queue, topic, count):
    queue.topics._admin.create_partitions([NewPartitions(topic, count)])[topic].result(60)
    until(lambda: queue.topics.describe([topic])[topic].partitions == count)


def test_r19_partitions_added_with_kafkas_own_tools_are_served(make_queue):
    queue = make_queue(1, kafka={"topic.metadata.refresh.interval.ms": 300})
    tracker = queue.tracker()
    client = queue.client()
    queue.send("m0")
    client.ack(*collect(client, 1, lease=60.0))
    add_partitions(queue, queue.name, 3)
    queue.append(None, b"m1", topic=queue.name, partition=1)  # a new client would be refused for a moment
    queue.append(None, b"m2", topic=queue.name, partition=2)
    taken: set[str] = set()
    while taken != {"m1", "m2"}:  # one may come twice before the other's partition is assigned
        taken.update(bodies(collect(client, 1)))
    until(lambda: len(tracker.owned()) == 3, what=tracker.problems)
    # More than one copy where a busy machine gives messages back whose leases were too short.
    until(lambda: min(queue.copies()[one] for one in ("m1", "m2")) >= 2, what=queue.copies)
    assert queue.copies()["m0"] == 1
    assert queue.topics.check(queue.settings).markers.partitions == 3
    until(lambda: tracker.problems() == [], what=tracker.problems)


@pytest.mark.breadth
def test_r19_partitions_that_a_tracker_can_not_add_are_named(make_queue, monkeypatch):
    queue = make_queue(1)
    tracker = queue.tracker()

    def refused(self, _settings, partitions):
        raise AccessDenied("add partitions: not allowed")

    monkeypatch.setattr(Topics, "grow", refused)
    add_partitions(queue, queue.settings.markers_topic, 2)
    add_partitions(queue, queue.name, 3)
    until(lambda: len(tracker.owned()) == 2, what=tracker.problems)
    wanted = f"kmq queue alter {queue.name} --partitions 3"
    until(lambda: any(wanted in problem for problem in tracker.problems()), what=tracker.problems)


def make_alone_anew(queue, topic, partitions=1):
    """As with Kafka's own tools; whatever else is of the queue stays."""
    delete_topic(queue.topics, topic)
    make_topic(queue.topics, topic, partitions)


def knows_topics(queue):
    """Whether kmq.queues says which topics the queue has now."""
    told = SettingsMirror(queue.connection).find(queue.name)
    now = queue.topics.describe(list(topics_of(queue.settings)))
    return told is not None and told.topic_ids == {name: one.topic_id for name, one in now.items()}


def mend(queue, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setenv("KMQ_BOOTSTRAP", queue.connection.bootstrap)
    monkeypatch.setenv("KMQ_ROOT", queue.connection.root)
    monkeypatch.setenv("KMQ_ZOOKEEPER", queue.zookeeper.hosts)
    assert run(["queue", "create", queue.name]) == 0
    queue.found = queue.topics.check(queue.settings)


def refuses(client, command):
    """Within a second it may take some of the new topic as if they were of the old one; they come again."""
    try:
        client.ack(*client.receive(wait=0.2))
    except TopicError as error:
        return command in str(error)
    return False


@pytest.mark.parametrize(
    "tracked", [True, pytest.param(False, marks=pytest.mark.breadth)], ids=["tracker-alive", "tracker-down"]
)
def test_r24_a_queue_topic_made_anew_beside_its_markers_is_named_and_mended(
    make_queue, queue_name, monkeypatch, tracked
):
    """The markers say of the new messages that they are finished, or leased."""
    monkeypatch.setattr(owned_partition, "_TAKEOVER_PAUSE", Backoff(0.2, 2, 1, jitter=0))
    queue = make_queue(2, kafka={"topic.metadata.refresh.interval.ms": 300})
    other = make_queue(name=f"{queue_name}-b", root=queue.connection.root)
    tracker = queue.tracker(wait=False)
    until(lambda: len(tracker.owned()) == 3, what=tracker.problems)
    until(lambda: knows_topics(queue))
    old, new = [f"old {i}" for i in range(OLD)], [f"new {i}" for i in range(NEW)]
    live = queue.client()
    queue.send(*old, partition=None)
    taken = collect(live, OLD, lease=LEASE_S)
    live.ack(*taken[: OLD // 2], confirmed=True)
    with queue.registry() as registry:
        until(lambda: all(one.queue_id for one in registry.offsets(queue.name).values()))
    if not tracked:
        tracker.stop()
    make_alone_anew(queue, queue.name, 2)
    live.send_many(new)

    if not tracked:
        tracker = queue.tracker(wait=False)
    command = f"kmq queue create {queue.name}"
    for _ in range(3):
        until(lambda: refuses(live, command))
    with pytest.raises(TopicError, match=command):
        queue.client()
    until(lambda: sum(command in one for one in tracker.problems()) == 2, what=tracker.problems)
    until(lambda: tracker.owned() == [(other.name, 0)], what=tracker.owned)
    other.send("other")
    with other.client() as client:
        collect(client, 1)
    until(lambda: other.copies() == {"other": 2})
    with Admin(queue.connection, queue.zookeeper) as admin:
        assert Kind.MARKERS_OF_EARLIER_TOPIC in {one.kind for one in admin.doctor(queue.name)}
    assert set(queue.copies().values()) == {1}

    mend(queue, monkeypatch)
    with Acker(live) as first, Acker(queue.client()) as last:
        until(
            lambda: set(new) <= {*first.bodies, *last.bodies},
            what=lambda: len(set(new) - {*first.bodies, *last.bodies}),
        )
    live.flush()
    until(lambda: tracker.problems() == [], what=tracker.problems)
    until(lambda: knows_topics(queue))
    with Admin(queue.connection, queue.zookeeper) as admin:
        assert Kind.MARKERS_OF_EARLIER_TOPIC not in {one.kind for one in admin.doctor(queue.name)}
    until(lambda: stats.queue_stats(queue.connection, queue.settings).depth == 0)


@pytest.fixture
def admin_of(request):
    """What administers a queue that trackers know of; kmq.queues knows it, too."""

    def made(queue):
        admin = Admin(queue.connection, queue.zookeeper)
        request.addfinalizer(admin.close)
        admin.create_queue(queue.settings)
        return admin

    return made


@pytest.mark.breadth
@pytest.mark.parametrize("forged", [False, True])
def test_r24_what_clients_took_that_could_not_know_comes_again_when_the_markers_are_made_anew(
    make_queue, admin_of, forged
):
    """They say in commits that they took some; it is also so where kmq.queues says what is not true."""
    queue = make_queue(2)
    admin = admin_of(queue)
    if forged:
        tell(queue, {queue.name: "x", queue.settings.markers_topic: queue.found.markers.topic_id})
    else:
        queue.send(*(f"old {i}" for i in range(5)))
        queue.mark_all(Marker(0, offset, Op.END) for offset in range(5))
        make_alone_anew(queue, queue.name)  # by a broker, with as many partitions as it pleased
    sent = [f"new {i}" for i in range(8)]
    for body in sent:
        queue.append(None, body.encode(), topic=queue.name)
    queue.mark(Marker(0, 5, Op.TAKE, 600_000))
    commit(queue, 6, commit_metadata(Commit(6, 1), queue.topics.check(queue.settings, 0).ids))
    with pytest.raises(TopicError, match="not its markers topic"):
        queue.client()

    found = admin.create_queue(queue.name)
    assert (found.partitions, found.markers.partitions) == (2, 2)
    assert knows_topics(queue)
    queue.tracker()
    client = queue.client()
    taken = set()
    until(lambda: taken.update(bodies(collect(client, 1, ack=True))) or taken >= set(sent), what=taken)


@pytest.mark.breadth
def test_r24_with_a_queue_topic_that_is_missing_its_markers_are_made_anew(make_queue, admin_of, monkeypatch):
    """As they should be, also where a broker makes them by itself as soon as they are gone."""
    queue = make_queue(2)
    admin = admin_of(queue)
    queue.configure(queue.settings.markers_topic, {"retention.ms": "-1"})
    for by_broker in (False, True):
        queue.send(*(f"m{i}" for i in range(5)))
        with queue.client() as client:
            assert len(collect(client, 5, ack=True)) == 5
        before = admin.describe_queue(queue.name).topics
        delete_topic(queue.topics, queue.name)
        if by_broker:
            monkeypatch.setattr(Topics, "delete", lambda _self, names: make_alone_anew(queue, *names))
        admin.create_queue(queue.name)
        after = admin.describe_queue(queue.name).topics
        assert [one.topic_id for one in before[2:]] == [one.topic_id for one in after[2:]]  # dead letters
        assert before[1].topic_id != after[1].topic_id
        assert after[1].partitions == 2
        assert after[1].config["retention.ms"] == "-1"
        assert after[1].config["message.timestamp.type"] == "LogAppendTime"


@pytest.mark.breadth
def test_r24_dead_letters_whose_topic_was_made_anew_are_listed_again_when_it_is_mended(queue, admin_of):
    admin = admin_of(queue)
    dead = queue.settings.dead_letter_topic
    queue.append(None, b"old", topic=dead)
    queue.mark(Marker(0, 0, Op.END), topic=f"{dead}__markers")
    make_alone_anew(queue, dead)
    queue.append(None, b"new", topic=dead)
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        assert list(letters.list()) == []
    kind = Kind.MARKERS_OF_EARLIER_TOPIC
    assert [f"{dead}__markers" in one.what for one in admin.doctor(queue.name) if one.kind is kind] == [True]
    queue.client().close()  # that is no reason to refuse
    admin.create_queue(queue.name)
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        assert len(list(letters.list())) == 1
    assert kind not in {one.kind for one in admin.doctor(queue.name)}


@pytest.mark.breadth
def test_r24_a_queue_that_is_deleted_and_made_anew_is_refused_by_nobody(make_queue, admin_of):
    queue = make_queue(1, kafka={"topic.metadata.refresh.interval.ms": 300})
    admin = admin_of(queue)
    live = queue.client()
    with Acker(live) as acker:
        for number in range(3):
            queue.send(f"m{number}")
            until(lambda n=number: f"m{n}" in acker.bodies)
            told = settings_of(queue.name, queue.connection)
            admin.delete_queue(queue.name)
            admin.create_queue(queue.settings)
            check_topics(told, queue.topics.check(queue.settings), queue.connection)  # out of date
            queue.client().close()


@pytest.mark.breadth
def test_r24_markers_of_unknown_topics_are_left_alone(make_queue, queue_name):
    queue = make_queue(1, register=False)
    with Admin(queue.connection, queue.zookeeper) as admin:
        queue.mark(Marker(0, 0, Op.END))
        delete_topic(queue.topics, queue.name)
        with pytest.raises(TopicError, match="delete that topic first"):
            admin.create_queue(queue.settings)
        with pytest.raises(TopicError, match="delete that topic first"):
            admin.create_queue(
                QueueSettings(name=f"{queue_name}-b", markers_topic=queue.settings.markers_topic)
            )
        assert queue.ended() == {0}
        delete_topic(queue.topics, queue.settings.markers_topic)
        admin.create_queue(queue.settings)


def tell(queue, ids):
    """Write in kmq.queues that the queue has topics of these ids."""
    record = {**dataclasses.asdict(queue.settings), "topic_ids": ids}
    key = f"{queue.connection.root}/queues/{queue.name}".encode()
    queue.append(key, json.dumps(record).encode(), topic=SETTINGS_TOPIC)
    settings_mirror._cache.clear()


@pytest.mark.breadth
def test_r24_records_with_ids_that_are_none_tell_nothing_of_topics(queue, admin_of):
    """Those without any are of older versions."""
    admin_of(queue)
    name, marks = queue.name, queue.found.markers
    for ids in (None, 5, {"a": 1}, {name: 7, marks.name: marks.topic_id}, {name: "x"}, {}):
        tell(queue, ids)
        queue.client().close()
    queue.tracker()
    until(lambda: knows_topics(queue))


@pytest.mark.breadth
def test_r24_a_forged_record_does_not_have_a_healthy_queues_markers_made_anew(queue, admin_of):
    """Stored offsets know which topics belong together."""
    admin = admin_of(queue)
    queue.send(*(f"m{i}" for i in range(5)))
    tracker = queue.tracker()
    with queue.client() as client:
        client.ack(*collect(client, 5), confirmed=True)
    until(lambda: knows_topics(queue))
    tracker.stop()  # stores its offset
    tell(
        queue, {queue.name: "AAAAAAAAAAAAAAAAAAAAAA", queue.found.markers.name: queue.found.markers.topic_id}
    )
    with pytest.raises(TopicError):
        queue.client()
    assert admin.create_queue(queue.settings).markers.topic_id == queue.found.markers.topic_id
    settings_mirror._cache.clear()
    with queue.client() as client:
        assert client.receive(wait=2.0) == []
