"""What a client takes, hands out, gives back and never loses. Names begin with the case of the failure
list (F…) or the rule (R…) that they hold."""

import itertools
import threading
import time

import pytest
from confluent_kafka import TopicPartition
from support import LEASE_S, Collector, bodies, collect, nothing_comes, total_queue, until, value

from kmqpy.errors import Closed, ReceiptError, Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.client import start_markers
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.client.start_markers import StartBatch, StartMarkerWriter
from kmqpy.kafka.markers.codec import Marker, Op, decode
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.topic_names import topics_of

UNWRITABLE = {"max.message.bytes": "10"}  # no marker is that small
WRITABLE = {"max.message.bytes": "1000000"}


def test_a_client_asks_for_settings_and_topics_with_one_administration_client(queue, monkeypatch):
    queue.send("m")
    made, new_admin = [], librdkafka.new_admin
    monkeypatch.setattr(librdkafka, "new_admin", lambda *given: made.append(given) or new_admin(*given))
    client = queue.client()
    collect(client, 1, ack=True)
    nothing_comes(client, 1.2)  # until it has looked whether the topics were recreated
    assert len(made) == 1


# --- F1, R11, R18: start markers --------------------------------------------------------------------------


def test_f1_without_start_markers_nothing_is_handed_out_or_committed_or_lost(either_queue):
    queue = either_queue
    sent = [f"m{i}" for i in range(300)]
    queue.send(*sent)
    queue.configure(queue.settings.markers_topic, UNWRITABLE)
    client = queue.client()
    nothing_comes(client, 1.5)
    assert queue.committed() < 0
    assert queue.records(queue.settings.markers_topic) == []
    queue.configure(queue.settings.markers_topic, WRITABLE)
    found = collect(client, 300, ack=True, lease=30.0)
    verdict = total_queue(sent, bodies(found))
    assert (verdict.lost, verdict.unexpected, verdict.duplicates) == (set(), set(), {})
    client.flush()
    queue.tracker()
    nothing_comes(client, 1.0)
    assert queue.copies() == dict.fromkeys(sent, 1)


def test_r11_a_lease_that_its_start_marker_used_up_is_not_handed_out(queue, monkeypatch):
    queue.tracker()
    queue.send("m")
    client = queue.client()
    start, slow = StartMarkerWriter.start, [2.7]

    def late(writer, *arguments):
        found = start(writer, *arguments)
        time.sleep(slow.pop() if slow else 0)
        return found

    monkeypatch.setattr(StartMarkerWriter, "start", late)
    (message,) = collect(client, 1, lease=5.0, ack=True)
    assert not slow
    # Given back without count: it comes as a copy, and as its first attempt.
    assert message.offset > 0
    assert message.attempts == 1
    nothing_comes(client, 0.7)


def test_r18_unconfirmed_ends_are_sent_again(queue):
    topic = queue.settings.markers_topic
    with MarkerWriter(queue.connection, queue.settings) as writer:
        writer.put_one(Marker(0, 1, Op.END))
        assert writer.flush(60) == 0
        queue.configure(topic, UNWRITABLE)
        for offset in (2, 3, 4):
            writer.put_one(Marker(0, offset, Op.END))
        assert writer.flush(1.5) == 3  # by now each was refused several times
        queue.configure(topic, WRITABLE)
        assert writer.flush(60) == 0
    assert {record.key()[-1] for record in queue.records(topic)} == {1, 2, 3, 4}


def test_r18_a_nack_that_is_sent_again_is_still_one(queue):
    """librdkafka's delivery reports have no headers, and without them it would be a take."""
    topic = queue.settings.markers_topic
    nack = Marker(0, 1, Op.NACK, counts=False, reason="busy")
    with MarkerWriter(queue.connection, queue.settings) as writer:
        queue.configure(topic, UNWRITABLE)
        writer.put_one(nack)
        assert writer.flush(0.5) == 1
        queue.topics.configure(topic, WRITABLE)
        assert writer.flush(60) == 0
    (record,) = queue.records(topic)
    assert decode(record.key(), record.value(), record.headers()) == nack


# --- F15, F16, R10: consumers that are killed ---------------------------------------------------------------


def test_f16_what_a_killed_consumer_had_started_is_not_handed_out_before_its_lease_ends(either_queue):
    queue = either_queue
    sent = [f"m{i}" for i in range(200)]
    queue.send(*sent)
    taker = queue.taker_process("--batch=10", "--lease=5", "--instance=one")
    taker.read(30)
    taker.kill()
    taker.read(200)  # what it had printed before
    started = queue.started()
    taken = {one["body"] for one in taker.taken}
    assert taken <= {f"m{offset}" for offset in started}
    # The same member comes back: no session has to end first.
    client = queue.client(instance_id="one")
    rest = collect(client, 200 - len(started), ack=True, lease=60.0)
    nothing_comes(client, 0.5)
    verdict = total_queue({f"m{i}" for i in range(200) if i not in started}, bodies(rest))
    assert (verdict.lost, verdict.unexpected, verdict.duplicates) == (set(), set(), {})
    assert {message.attempts for message in rest} <= {1}
    client.flush()
    queue.tracker()
    again = collect(client, len(started), ack=True, lease=60.0)
    assert {message.attempts for message in again} == {2}
    assert sorted(bodies(again) + bodies(rest)) == sorted(sent)


def test_f15_a_message_that_kills_its_consumer_ends_as_dead_letter(make_queue):
    queue = make_queue(max_redeliveries=2)
    tracker = queue.tracker()
    queue.send("poison")
    attempts = []
    for _ in range(3):
        taker = queue.taker_process("--crash", "--lease=0.5", "--instance=one")
        attempts += [one["attempts"] for one in taker.read(1)]
        assert taker.wait() == 9
    assert attempts == [1, 2, 3]
    until(lambda: value(tracker, queue.name, "dead_lettered") == 1)
    (dead,) = queue.dead_letters()
    assert dict(dead.headers())["kmq-dead-letter-reason"] == b"expired"
    assert dict(dead.headers())["kmq-dead-letter-attempts"] == b"3"


def test_r10_a_commit_without_metadata_is_plain_at_least_once(queue):
    """As JVM clients commit: what follows the committed offset comes, started or not."""
    queue.send(*(f"m{i}" for i in range(5)))
    for offset in range(5):
        queue.mark(Marker(0, offset, Op.TAKE, 60_000))
    group = librdkafka.new_consumer(queue.connection, {"group.id": queue.settings.consumer_group})
    group.commit(offsets=[TopicPartition(queue.name, 0, 2)], asynchronous=False)
    group.close()
    assert bodies(collect(queue.client(), 3, lease=60.0)) == ["m2", "m3", "m4"]


def test_r10_a_commit_says_from_where_a_successor_must_read_markers(queue):
    queue.send(*(f"m{i}" for i in range(5)))
    with queue.client() as first:
        collect(first, 3, max_messages=1, lease=60.0)
        until(lambda: queue.committed() == 3)
        # A start that no commit covers, as of a member that died between the two.
        queue.mark(Marker(0, 3, Op.TAKE, 60_000))
    assert bodies(collect(queue.client(), 1, lease=60.0)) == ["m4"]


# --- sharing, leaving, staying ------------------------------------------------------------------------------


def test_a_rolling_restart_makes_no_duplicates(make_queue):
    queue = make_queue(4, lease_ms=60_000)
    tracker = queue.tracker()
    sent = []

    def send(count: int) -> None:
        for partition in range(4):
            new = [f"{partition}-{len(sent) + i}" for i in range(count)]
            queue.send(*new, partition=partition)
            sent.extend(new)

    send(100)
    members = [Collector(queue.client()) for _ in range(2)]
    until(lambda: len(members[0].messages) + len(members[1].messages) > 50)
    ended = []
    for _ in range(2):
        send(50)
        leaving = members.pop(0)
        leaving.stop()
        leaving.client.close()
        ended.append(leaving)
        members.append(Collector(queue.client()))
    everyone = [*ended, *members]
    until(lambda: sum(len(member.messages) for member in everyone) >= len(sent))
    time.sleep(0.5)
    for member in members:
        member.stop()
        member.client.flush()
    delivered = [message for member in everyone for message in member.messages]
    verdict = total_queue(sent, bodies(delivered))
    assert (verdict.lost, verdict.unexpected, verdict.duplicates) == (set(), set(), {})
    assert value(tracker, queue.name, "redelivered") == 0


@pytest.mark.parametrize("retry_lane", [pytest.param(False, marks=pytest.mark.breadth), True])
def test_static_members_restart_without_moving_partitions(make_queue, retry_lane):
    queue = make_queue(2, retry_lane=retry_lane)
    with queue.client(instance_id="a") as one, queue.client(instance_id="b") as two:
        queue.send("p0", partition=0)
        queue.send("p1", partition=1)
        until(lambda: (one.receive(wait=0.1), two.receive(wait=0.1)) and _share(one, two))
        before = two.partitions
    again = queue.client(instance_id="a")
    still = queue.client(instance_id="b")
    until(lambda: (again.receive(wait=0.1), still.receive(wait=0.1)) and _share(again, still))
    assert still.partitions == before
    if retry_lane:
        members = [again._consumer.current, still._consumer.current]
        until(lambda: (again.receive(wait=0.1), still.receive(wait=0.1)) and all(map(_follow, members)))


def _follow(consumer) -> bool:
    return {tuple(lane.consumer.partitions) for lane in consumer._lanes} == {tuple(consumer.partitions)}


def _share(one, two) -> bool:
    return len(one.partitions) == len(two.partitions) == 1


@pytest.mark.slow
def test_slow_user_code_keeps_its_partitions_and_loses_nothing(make_queue):
    # The shortest that brokers allow by default; without a sign of life the member would be out.
    queue = make_queue(lease_ms=60_000, kafka={"max.poll.interval.ms": 6_000, "session.timeout.ms": 6_000})
    queue.send("first")
    client, other = queue.client(), queue.client()
    client.ack(*collect(client, 1))
    assert other.receive(wait=0.5) == []
    sent = [f"m{i}" for i in range(50)]
    queue.send(*sent)
    deadline = time.monotonic() + 7.5
    while time.monotonic() < deadline:
        assert other.receive(wait=0.5) == []
    assert bodies(collect(client, 50, ack=True)) == sent


def test_closing_an_iteration_gives_back_what_was_not_handed_out(either_queue):
    queue = either_queue
    queue.tracker()
    queue.send(*(f"m{i}" for i in range(10)))
    with queue.client() as client:
        for message in client:
            client.ack(message)
            break
    with pytest.raises(Closed):
        client.receive()
    successor = queue.client()
    found = collect(successor, 9, ack=True)
    assert sorted(bodies(found)) == [f"m{i}" for i in range(1, 10)]
    assert {message.attempts for message in found} == {1}
    nothing_comes(successor, 2 * LEASE_S)


def test_r12_max_in_flight_pauses_until_there_is_room(queue):
    queue.send(*(f"m{i}" for i in range(12)))
    client = queue.client(max_in_flight=5)
    first = collect(client, 5, lease=10.0)
    assert client.leased == 5
    nothing_comes(client, 0.4)
    client.ack(first[0])
    client.nack(first[1].receipt)
    assert len(collect(client, 2, lease=60.0)) == 2
    nothing_comes(client, 0.2)
    # The leases of three end, whoever acknowledged them elsewhere.
    assert len(collect(client, 3, lease=60.0)) == 3
    assert client.leased == 5


# --- receipts -----------------------------------------------------------------------------------------------


def test_receipts_are_good_in_other_clients_and_processes(queue):
    queue.tracker()
    queue.send("a", "b", "c", "d")
    client, other = queue.client(), queue.client()
    a, b, c, d = collect(client, 4, lease=60.0)
    other.ack(a.receipt, confirmed=True)
    assert queue.taker_process("--receipts", b.receipt, c.receipt).wait() == 0
    other.nack(d.receipt, count=False)
    (again,) = collect(client, 1)
    assert (again.body, again.attempts) == (b"d", 1)
    client.ack(again, confirmed=True)
    until(lambda: queue.ended() >= {0, 1, 2, 3, 4})  # 4 is the copy of d
    assert queue.copies() == {"a": 1, "b": 1, "c": 1, "d": 2}


def test_r8_receipts_of_a_deleted_topic_are_refused(queue):
    queue.send("old")
    with queue.client() as client:
        (old,) = collect(client, 1, lease=60.0)
    queue.topics.delete(topics_of(queue.settings))
    until(lambda: queue.name not in queue.topics.names())
    queue.topics.create(queue.settings, 1)
    queue.send("new")
    client = queue.client()
    (new,) = collect(client, 1)
    assert new.receipt != old.receipt
    for finish in (client.ack, client.nack, client.dead_letter):
        with pytest.raises(ReceiptError, match="deleted since"):
            finish(old.receipt)
    queue.tracker()
    assert bodies(collect(client, 1)) == ["new"]


def test_an_ack_that_waits_returns_when_it_is_written(make_queue):
    queue = make_queue(markers="jvm")
    queue.send("m")
    client = queue.client()
    (message,) = collect(client, 1, lease=60.0)
    topic = queue.settings.markers_topic
    queue.configure(topic, UNWRITABLE)
    mend = threading.Timer(1.0, queue.topics.configure, (topic, WRITABLE))
    mend.start()
    client.ack(message, confirmed=True)
    *_, last = map(read_marker, queue.records(topic))
    assert (last.op, [*last.offsets()]) == (Op.END, [0])
    mend.join()


@pytest.mark.parametrize("fmt", ["range", pytest.param("jvm", marks=pytest.mark.breadth)])
def test_r26_a_waiting_ack_ignores_other_markers(make_queue, fmt):
    """One that can't be written stands for those of other threads, of which there are always some."""
    queue = make_queue(2, markers=fmt)
    queue.send(*(f"m{i}" for i in range(5)))
    queue.send("refused", partition=1)
    client = queue.client()
    found = collect(client, 6, lease=60.0)
    topic = queue.settings.markers_topic
    queue.configure(topic, {"max.message.bytes": "300"})
    client.nack(*(message for message in found if message.partition == 1), reason="x" * 400)
    for message in found:
        if message.partition == 0:
            client.ack(message, confirmed=True)
            assert message.offset in queue.ended()
    with pytest.raises(Unavailable, match="1 markers"):
        client.flush(0.5)
    queue.topics.configure(topic, WRITABLE)
    client.flush()


def test_a_flush_that_fails_says_so_and_nothing_is_given_up(make_queue):
    queue = make_queue(markers="jvm")
    queue.send("m")
    client = queue.client()
    (message,) = collect(client, 1, lease=60.0)
    queue.configure(queue.settings.markers_topic, UNWRITABLE)
    client.ack(message)
    with pytest.raises(Unavailable, match="1 markers are not confirmed"):
        client.flush(0.5)
    queue.configure(queue.settings.markers_topic, WRITABLE)
    client.flush()
    assert queue.ended() == {message.offset}


@pytest.mark.parametrize(
    "moment", ["among the starts", pytest.param("after the starts", marks=pytest.mark.breadth)]
)
def test_what_an_interrupted_receive_took_is_given_back_at_close(either_queue, monkeypatch, moment):
    """Ctrl-C: nobody calls receive() again."""
    queue = either_queue
    sent = [f"m{i}" for i in range(20)]
    queue.send(*sent)
    patched, name = {
        "among the starts": (start_markers, "produce"),
        "after the starts": (StartBatch, "wait_until_confirmed"),
    }[moment]
    real = getattr(patched, name)

    def interrupted(*arguments):
        monkeypatch.setattr(patched, name, real)
        real(*arguments)
        raise KeyboardInterrupt

    client = queue.client(holder="me")  # start markers with a header are written one by one
    monkeypatch.setattr(patched, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect(client, 20, lease=3600.0)
    client.close()
    queue.tracker()
    again = collect(queue.client(), 20, ack=True)
    assert sorted(bodies(again)) == sorted(sent)
    assert {message.attempts for message in again} == {1}


def test_what_librdkafka_reads_again_is_not_handed_out_again(queue):
    """When pause, resume or seek overtake its look-up of where to begin, it goes back there later."""
    sent = [f"m{i}" for i in range(60)]
    queue.send(*sent)
    client = queue.client()
    first = collect(client, 10, max_messages=10, ack=True, lease=60.0)
    client._consumer.current.receiver._member._consumer.seek(TopicPartition(queue.name, 0, 0))
    rest = collect(client, 50, ack=True, lease=60.0)
    assert sorted(bodies(first + rest)) == sorted(sent)
    nothing_comes(client, 0.5)


@pytest.mark.breadth
@pytest.mark.parametrize("moment", ["before the starts", "after the starts", "in the middle of a poll"])
def test_what_interrupts_receive_loses_no_message(queue, monkeypatch, moment):
    """A handler of signals may raise anywhere, and so does an error that comes behind good records."""
    queue.tracker()
    sent = [f"m{i}" for i in range(60)]
    queue.send(*sent)
    client = queue.client()
    first = collect(client, 10, max_messages=10, ack=True, lease=60.0)
    patched, name = {
        "before the starts": (StartMarkerWriter, "start"),
        "after the starts": (StartBatch, "wait_until_confirmed"),
        "in the middle of a poll": (GroupMember, "_receive_record"),
    }[moment]
    real, calls = getattr(patched, name), itertools.count()
    monkeypatch.setattr(GroupMember, "_expects", lambda *_: False)

    def interrupted(*arguments):
        if next(calls) == 5 or name != "_receive_record":
            monkeypatch.setattr(patched, name, real)
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(patched, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect(client, 50, max_messages=20, lease=1.0)
    rest = collect(client, 50, ack=True, lease=60.0)
    assert sorted(bodies(first + rest)) == sorted(sent)
    if moment == "after the starts":  # nobody was handed them
        assert {message.attempts for message in rest} == {1}
    nothing_comes(client, 1.3)
