"""A broker, or a ZooKeeper, that stops answering, goes away and comes back; of a cluster of its own."""

import contextlib
import itertools
import shutil
import struct
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from support import LEASE_S, LiveQueue, bodies, collect, nothing_comes, total_queue, until, value

from kmqpy.dev import Cluster
from kmqpy.dev.ports import free_ports
from kmqpy.errors import Unavailable
from kmqpy.kafka import cut_off
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.client import receiver
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers.codec import Marker, Op, decode
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.chaos.proxy import Cut, Proxy
from tracker import kafka_clients
from tracker.redelivery import tick_writer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def own_cluster(cluster_behind_a_gate):
    return cluster_behind_a_gate[0]


@pytest.fixture
def own_queue(own_cluster, queue_name):
    try:
        with LiveQueue(*addresses(own_cluster), queue_name) as queue:
            yield queue
    finally:
        own_cluster.broker().resume()  # for the next test, if this one failed while it was paused


def addresses(cluster: Cluster) -> tuple[KafkaConnection, ZooKeeperConnection]:
    return KafkaConnection(bootstrap=cluster.bootstrap), ZooKeeperConnection(hosts=cluster.zookeeper)


def test_f1_a_broker_that_does_not_answer_loses_no_messages(own_cluster, own_queue, caplog):
    """The messages were fetched already; their start markers time out, and are written later or not."""
    queue = own_queue
    queue.tracker()
    sent = [f"m{i}" for i in range(101)]
    queue.send(*sent)
    client = queue.client()  # now, so that it fetches all with the first one
    first = collect(client, 1, max_messages=1, ack=True, lease=60.0)
    own_cluster.broker().pause()

    def given_back():
        assert client.receive(wait=0.1) == []
        return any("not confirmed" in record.getMessage() for record in caplog.records)

    until(given_back)
    own_cluster.broker().resume()
    # Messages whose start markers time out again come back after that lease.
    found = collect(client, 100, 120.0, ack=True, lease=15.0)
    verdict = total_queue(sent, bodies(first + found))
    assert (verdict.lost, verdict.unexpected, verdict.duplicates) == (set(), set(), {})
    client.flush()

    def all_committed():
        client.ack(
            *client.receive(wait=0.1)
        )  # a copy that was made while the acknowledgements were on their way
        return queue.committed() == queue.records()[-1].offset() + 1

    until(all_committed)


@pytest.fixture(scope="module")
def cluster_behind_a_gate():
    """A cluster, the bootstrap address of a second way to it, and the gate in that way."""
    second = {}
    with Proxy() as proxy:
        gate = proxy.gate()
        port = proxy.listen(gate, lambda: second["port"])

        def settings(_broker, ports):
            (second["port"],) = free_ports(1)
            client, controller = ports
            plain = f"PLAINTEXT://127.0.0.1:{client}"
            return {
                "listeners": f"{plain},CONTROLLER://127.0.0.1:{controller},GATE://127.0.0.1:{second['port']}",
                "advertised.listeners": f"{plain},GATE://127.0.0.1:{port}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,GATE:PLAINTEXT",
                # So that it is not fenced while it stands still: librdkafka may never connect again once it
                # was told of no broker at all (its issue 5301).
                "broker.session.timeout.ms": "8000",
            }

        with Cluster(broker_settings=settings) as cluster:
            yield cluster, f"127.0.0.1:{port}", gate


@pytest.fixture
def cut_off_soon(monkeypatch):
    """What is cut off is found out, and given up, after a second or two."""
    monkeypatch.setattr(cut_off, "_CHECK_EVERY_S", 0.3)
    monkeypatch.setattr(cut_off, "_CUT_OFF_AFTER_S", 1.0)
    monkeypatch.setattr(cut_off, "_ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(receiver, "_CHECK_CUT_OFF_AFTER_S", 0.3)
    monkeypatch.setitem(tick_writer._PRODUCER_SETTINGS, "message.timeout.ms", 1_000)
    monkeypatch.setattr(kafka_clients, "_PROBE_TIMEOUT_S", 1.0)


def test_whoever_never_reaches_kafka_again_goes_on_with_new_clients(
    cluster_behind_a_gate, queue_name, cut_off_soon
):
    """As after librdkafka's issue 5301. All are told a wrong port, and never ask the bootstrap server."""
    cluster, bootstrap, gate = cluster_behind_a_gate
    astray = {"metadata.recovery.strategy": "none", "topic.metadata.refresh.interval.ms": "200"}
    port = int(bootstrap.partition(":")[2])
    right, wrong = (b"127.0.0.1" + struct.pack(">i", one) for one in (port, free_ports(1)[0]))
    with LiveQueue(*addresses(cluster), queue_name) as queue:
        queue.connection = replace(queue.connection, bootstrap=bootstrap, kafka=astray)
        tracker, client, sender = queue.tracker(), queue.client(), queue.producer(delivery_timeout=1.0)
        sender.send_many(["acknowledged", "taken"], partition=0)
        first = collect(client, 2, lease=5.0)
        client.ack(first[0], confirmed=True)
        confirmed, found = {"taken"}, []

        def is_sent():
            body = f"m{next(numbers)}"
            with contextlib.suppress(Unavailable):
                sender.send(body)
                confirmed.add(body)
                return True
            return False

        def all_came():
            messages = client.receive(wait=0.2, lease=60.0)
            client.ack(*messages)
            found.extend(messages)
            return confirmed <= set(bodies(found))

        numbers = itertools.count()
        gate.rewrite = lambda answer: answer.replace(right, wrong)
        until(lambda: not is_sent(), every=0.2)
        time.sleep(1.0)  # others ask as often as the sender
        # No connection ends: one to the coordinator of a group would ask for the address when it begins anew.
        gate.rewrite = lambda answer: answer
        until(lambda: not tracker.problems(), what=tracker.problems)
        until(is_sent, every=0.2)
        until(all_came, what=lambda: bodies(found))
        client.flush()
        assert "acknowledged" not in bodies(found)
        assert max(Counter(bodies(found)).values()) == 1
        sender.send("taken later")
        for _ in ("the message", "its copy"):
            assert bodies(collect(client, 1, lease=LEASE_S)) == ["taken later"]


@pytest.mark.parametrize("fmt", ["range", pytest.param("jvm", marks=pytest.mark.breadth)])
def test_r10_starts_that_were_written_although_they_timed_out_are_not_written_again(
    cluster_behind_a_gate, queue_name, fmt
):
    """The answers don't come: the tracker redelivers before the client knows that it took something."""
    cluster, bootstrap, gate = cluster_behind_a_gate
    with LiveQueue(*addresses(cluster), queue_name, markers=fmt) as queue:
        tracker = queue.tracker()
        sent = [f"m{i}" for i in range(61)]
        queue.send(*sent)
        with (
            KmqClient(queue.settings, replace(addresses(cluster)[0], bootstrap=bootstrap)) as client,
            healed(gate),
        ):
            first = collect(client, 1, max_messages=1, ack=True, lease=60.0)
            time.sleep(0.5)  # in which the rest is fetched, too
            gate.cut(Cut.MUTE)
            nothing_comes(client, 3.5)
            # Of single markers, no more than five requests are under way: a slow client got a part written.
            written = queue.started() - {first[0].offset}
            assert written
            until(lambda: value(tracker, queue.name, "redelivered") == len(written), what=queue.started)
            gate.heal()
            found = collect(client, 60, ack=True, lease=60.0)
            client.flush()
        copies, takes = queue.copies(), takes_of(queue)
        assert Counter(bodies(first + found)) == dict.fromkeys(sent, 1)
        assert {message.offset for message in found}.isdisjoint(written)
        assert {copies[sent[offset]] for offset in written} == {2}
        assert {takes[offset] for offset in written} == {1}
        assert copies[sent[0]] == 1


@pytest.mark.parametrize("fmt", ["range", pytest.param("jvm", marks=pytest.mark.breadth)])
def test_r11_what_is_confirmed_when_its_lease_is_over_was_given_back_in_time(
    cluster_behind_a_gate, queue_name, fmt
):
    """The start marker is written at once, only the answer comes late: that costs no attempt."""
    cluster, bootstrap, gate = cluster_behind_a_gate
    with LiveQueue(*addresses(cluster), queue_name, markers=fmt, max_redeliveries=0) as queue:
        tracker = queue.tracker()
        queue.send("m0", "m1")
        with (
            KmqClient(queue.settings, replace(addresses(cluster)[0], bootstrap=bootstrap)) as client,
            healed(gate),
        ):
            collect(client, 1, max_messages=1, ack=True, lease=60.0)  # the rest was fetched with it
            client.flush()
            gate.cut(Cut.MUTE)
            heals = threading.Timer(2.5, gate.heal)
            heals.start()
            taken = client.receive(wait=0.1, lease=0.5)
            heals.join()
            assert taken == []
            (again,) = collect(client, 1, lease=60.0)
            assert (again.body, again.attempts) == (b"m1", 1)
            client.ack(again, confirmed=True)
        assert value(tracker, queue.name, "dead_lettered") == 0


def test_a_client_is_closed_although_kafka_does_not_answer(cluster_behind_a_gate, queue_name):
    """librdkafka's own commit and close hang for ever then."""
    cluster, bootstrap, gate = cluster_behind_a_gate
    with LiveQueue(*addresses(cluster), queue_name) as queue:
        queue.send("m")
        client = KmqClient(queue.settings, replace(addresses(cluster)[0], bootstrap=bootstrap))
        collect(client, 1)
        with healed(gate):
            gate.cut(Cut.MUTE)
            client.close()


@contextlib.contextmanager
def healed(gate):
    """The gate is open again when the block ends, however it does."""
    try:
        yield
    finally:
        gate.heal()


def takes_of(queue: LiveQueue) -> Counter[int]:
    """How often each offset of partition 0 was taken."""
    found = (decode(r.key(), r.value(), r.headers()) for r in queue.records(queue.settings.markers_topic))
    return Counter(offset for marker in found if marker.op is Op.TAKE for offset in marker.offsets())


def test_f10_after_a_broker_was_away_everything_goes_on_by_itself(own_cluster, own_queue):
    queue = own_queue
    tracker = queue.tracker()
    client = queue.client()
    sent = [f"m{i}" for i in range(60)]
    queue.send(*sent)
    taken = collect(client, 60, lease=60.0)
    client.ack(*taken[:20], confirmed=True)
    client.extend(*taken[20:], lease=2.5, confirmed=True)
    own_cluster.broker().kill()
    client.ack(*taken[20:30])  # to be confirmed later
    time.sleep(3.0)
    own_cluster.broker().start()
    came = collect(client, 30, ack=True, lease=60.0)
    client.flush()
    # Whether the acks of the second ten came before the redelivery is a race, their copies are single.
    time.sleep(1.5)
    for _ in range(3):
        more = client.receive(wait=0.3, lease=60.0)
        client.ack(*more)
        came += more
    verdict = total_queue(sent[30:], bodies(came))
    assert verdict.lost == set()
    assert verdict.duplicates == {}
    assert verdict.unexpected <= set(sent[20:30])
    assert max(queue.copies().values()) == 2
    until(lambda: tracker.problems() == [], what=tracker.problems)
    assert value(tracker, queue.name, "lost_to_retention") == 0


@pytest.mark.breadth
@pytest.mark.parametrize("comes_back", ["older", pytest.param("empty", marks=pytest.mark.breadth)])
def test_r25_a_zookeeper_that_has_forgotten_is_served_again_without_a_restart(
    own_cluster, own_queue, queue_name, tmp_path, comes_back, caplog
):
    """It turns away whoever has seen later changes than it has: all trackers, for ever."""
    queue, server = own_queue, own_cluster.zookeeper_server()
    data, backup = own_cluster.folder / server.name / "data" / "version-2", tmp_path / "backup"
    tracker, client = queue.tracker(), queue.client()
    leadership = tracker._member.leadership
    if comes_back == "older":
        server.stop()
        shutil.copytree(data, backup)
        server.start()
        until(lambda: tracker.problems() == [], what=tracker.problems)
    with LiveQueue(
        queue.connection, queue.zookeeper, f"{queue_name}-late", root=queue.connection.root
    ) as late:
        until(lambda: len(tracker.owned()) == 2, what=tracker.problems)
        for n in range(200):  # changes that will be forgotten; more than there are afterwards
            leadership._zk.set(f"{queue.connection.root}/queues", b"%d" % n)
        server.stop()
        until(lambda: not leadership.may_redeliver())
        queue.send(*"abc")
        late.send("d")
        taken = {message.body: message for message in collect(client, 3, lease=LEASE_S)}
        client.ack(taken[b"c"], confirmed=True)
        collect(late.client(), 1, lease=LEASE_S)
        shutil.rmtree(data)
        if backup.exists():
            shutil.copytree(backup, data)
        server.start()
        queue.register()
        late.register()
        until(lambda: len(leadership.snapshot().owned) == 2 == len(tracker.owned()), what=tracker.problems)
        until(lambda: (queue.copies() + late.copies()).total() == 4 + 3, what=tracker.problems)
        until(lambda: tracker.problems() == [], what=tracker.problems)
        assert tracker.alive()
        assert (queue.copies(), late.copies()) == ({"a": 2, "b": 2, "c": 1}, {"d": 2})
    assert any("has forgotten changes" in record.getMessage() for record in caplog.records)


def test_r25_a_stored_offset_that_names_a_message_twice_makes_one_copy(own_queue):
    queue = own_queue
    queue.send("a", "b")
    row = Entry(0, 0, 1, 1, EntryState.LEASED)
    stored = StoredOffset(1, queue.found.markers.topic_id, 1, in_flight=(row,) * 50)
    with connect(queue.zookeeper) as zk:
        zk.create(f"{queue.connection.root}/queues/{queue.name}/partitions/0/offset", stored.to_json())
    queue.mark_all([Marker(0, 0, Op.TAKE, 100), Marker(0, 1, Op.TAKE, 100)])
    tracker = queue.tracker()
    until(lambda: value(tracker, queue.name, "redelivered") >= 2, what=tracker.problems)
    tracker.stop()  # after what is under way
    assert queue.copies() == {"a": 2, "b": 2}
