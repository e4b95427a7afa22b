"""What one tracker redelivers, dead-letters and leaves alone. Names begin with the case of the failure
list (F…) or the rule (R…) that they hold."""

import itertools
import threading
import time

import pytest
from prometheus_client import generate_latest
from support import LEASE_S, bodies, collect, delete_topic, nothing_comes, stopped_after, until, value

from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.markers.codec import Marker, Op, decode_count, encode_end, encode_key, encode_start
from tracker.leadership.leadership import Leadership
from tracker.redelivery.originals import OriginalsReader
from tracker.redelivery.redeliverer import Redeliverer

LEASE_MS = int(LEASE_S * 1000)


def take(offset: int, after_ms: int = LEASE_MS, partition: int = 0) -> Marker:
    return Marker(partition, offset, Op.TAKE, after_ms)


def end(offset: int, partition: int = 0) -> Marker:
    return Marker(partition, offset, Op.END)


def redelivered(queue, tracker, count: int, timeout: float = 60.0) -> None:
    """Wait until `count` messages in all were redelivered, and no more follow at once."""
    until(
        lambda: value(tracker, queue.name, "redelivered") >= count,
        timeout,
        lambda: (value(tracker, queue.name, "redelivered"), tracker.problems()),
    )
    time.sleep(0.15)
    assert value(tracker, queue.name, "redelivered") == count


def stored(registry, queue, partition: int = 0) -> int:
    """The stored safe offset; 0 while there is none."""
    found = registry.offsets(queue.name).get(partition)
    return 0 if found is None else found.offset


# --- the normal case ----------------------------------------------------------------------------------


def test_a_message_comes_again_when_its_lease_ends_and_not_when_acknowledged(queue):
    queue.tracker()
    queue.send("kept", "lost")
    client = queue.client()
    first = collect(client, 2)
    assert [message.attempts for message in first] == [1, 1]
    client.ack(first[0])
    started = time.monotonic()
    (again,) = collect(client, 1)
    assert time.monotonic() - started > 0.5 * LEASE_S
    assert (again.body, again.attempts) == (b"lost", 2)
    assert again.first_enqueued_ms == first[1].enqueued_ms
    client.ack(again, confirmed=True)
    nothing_comes(client, 2 * LEASE_S)
    assert queue.copies() == {"kept": 1, "lost": 2}


def test_over_the_limit_it_is_dead_lettered(make_queue):
    queue = make_queue(max_redeliveries=1)
    tracker = queue.tracker()
    queue.send("poison", key="k")
    client = queue.client()
    assert collect(client, 1)[0].attempts == 1
    assert collect(client, 1)[0].attempts == 2
    until(lambda: value(tracker, queue.name, "dead_lettered") == 1)
    (dead,) = queue.dead_letters()
    headers = dict(dead.headers())
    assert (dead.key(), dead.value()) == (b"k", b"poison")
    assert headers["kmq-dead-letter-reason"] == b"expired"
    assert headers["kmq-dead-letter-attempts"] == b"2"
    assert headers["kmq-dead-letter-topic"] == queue.name.encode()
    assert queue.copies() == {"poison": 2}


# --- F2: where reading begins ---------------------------------------------------------------------------


def test_f2_a_restart_reads_from_the_safe_offset(make_queue):
    queue = make_queue(markers="jvm")
    queue.send(*(f"m{i}" for i in range(200)))
    with queue.client() as client:
        client.ack(*collect(client, 200, lease=60.0), confirmed=True)
    with queue.registry() as registry, stopped_after(queue.tracker()) as first:
        until(lambda: value(first, queue.name, "markers_read") >= 400)
        until(lambda: stored(registry, queue) >= 400)
    second = queue.tracker()
    time.sleep(0.2)
    assert value(second, queue.name, "markers_read") <= 5  # the ticks


def test_f2_the_safe_offset_is_that_of_the_oldest_start(make_queue):
    queue = make_queue(markers="jvm")
    queue.send("held", *(f"m{i}" for i in range(50)))
    client = queue.client()
    with queue.registry() as registry, stopped_after(queue.tracker()):
        taken = collect(client, 51, lease=60.0)
        assert taken[0].body == b"held"
        client.ack(*taken[1:], confirmed=True)
        time.sleep(0.5)
        assert stored(registry, queue) <= 2  # the ticks of takeover and assignment may stand before it
    second = queue.tracker()
    until(lambda: value(second, queue.name, "markers_read") >= 101)
    client.nack(taken[0], confirmed=True)
    assert bodies(collect(client, 1)) == ["held"]


def test_r17_one_long_lease_does_not_make_a_restart_read_what_is_finished(make_queue):
    """The offset is stored with a snapshot; a nack proves that the long lease is known from it alone."""
    queue = make_queue(markers="jvm")
    queue.send("held", "nacked", *(f"m{i}" for i in range(200)))
    client = queue.client()
    with (
        queue.registry() as registry,
        stopped_after(queue.tracker(snapshot_after_markers=20)) as first,
    ):
        held, nacked, *others = collect(client, 202, lease=60.0)
        client.extend(held, lease=90.0, confirmed=True)
        client.nack(nacked, delay=60.0, confirmed=True)
        client.ack(*others, confirmed=True)
        until(lambda: value(first, queue.name, "markers_read") >= 404)
        until(lambda: stored(registry, queue) >= 404)
        assert [row.offset for row in registry.offsets(queue.name)[0].in_flight] == [0, 1]
    with Admin(queue.connection, queue.zookeeper) as admin:
        seen = {one.offset: (one.state, one.lease_until_ms) for one in admin.in_flight(queue.name)}
    second = queue.tracker()
    time.sleep(0.2)
    assert value(second, queue.name, "markers_read") <= 5  # the ticks
    assert {offset: state for offset, (state, _) in seen.items()} == {0: "leased", 1: "released"}
    with Admin(queue.connection, queue.zookeeper) as admin:
        again = {one.offset: (one.state, one.lease_until_ms) for one in admin.in_flight(queue.name)}
    assert again == seen, "restarts prolong no lease"
    client.nack(held, confirmed=True)
    assert bodies(collect(client, 1)) == ["held"]


def test_r8_an_offset_of_another_topic_is_not_used(queue):
    """The markers topic was deleted and recreated: what was stored says nothing about it."""
    queue.send("m")
    with queue.registry() as registry:
        with stopped_after(queue.tracker()) as first:
            queue.mark_all([end(10**6)] * 20)
            until(lambda: stored(registry, queue) >= 20)
            delete_topic(queue.topics, queue.settings.markers_topic)
            until(lambda: any("takeover failed" in text for text in first.problems()), what=first.problems)
        until(lambda: _recreated(queue))
        queue.mark(take(0))
        queue.mark_all([end(10**6)] * 30)
        second = queue.tracker()
        redelivered(queue, second, 1)


def _recreated(queue) -> bool:
    try:
        queue.topics.create(queue.settings, queue.partitions)
    except Exception:
        return False
    return True


def test_r8_an_offset_beyond_the_end_is_not_used(queue):
    from dataclasses import replace

    from kmqpy.kafka.admin.znode_paths import ZnodePaths
    from kmqpy.zookeeper.session import connect

    queue.send("m")
    queue.mark(take(0))
    with stopped_after(queue.tracker()):
        until(lambda: queue.copies() == {"m": 2})
        with queue.registry() as registry:
            until(lambda: 0 in registry.offsets(queue.name))
    queue.mark(take(1))
    with queue.registry() as registry:
        stored = replace(registry.offsets(queue.name)[0], offset=10**6)
    with connect(queue.zookeeper) as zk:
        zk.set(ZnodePaths(queue.connection.root).offset(queue.name, 0), stored.to_json())
    redelivered(queue, queue.tracker(), 1)


def test_r1_nothing_is_redelivered_before_all_markers_are_read(queue):
    """More than a tracker reads at once stands between a due message and its end."""
    queue.send("m")
    queue.mark_all([take(0, 0), *[end(10**6)] * 12_000, end(0)])
    tracker = queue.tracker()
    until(lambda: value(tracker, queue.name, "markers_read") >= 12_002)
    time.sleep(0.3)
    assert value(tracker, queue.name, "redelivered") == 0
    assert queue.copies() == {"m": 1}


# --- R13: who may take over ------------------------------------------------------------------------------


def test_r13_leadership_is_verified_after_the_fencing_and_before_anything_else(queue, monkeypatch):
    """The view of it may be old; whoever has the partition by now goes on with it, and must not be fenced."""
    queue.send("m")
    queue.mark(take(0, 0))
    open_, verify, steps = Redeliverer.open, Leadership.verify, []
    is_mine = threading.Event()

    def opened(self, timeout_s):
        open_(self, timeout_s)
        steps.append("fenced")

    def verified(self, *partition):
        steps.append("verified")
        return is_mine.is_set() and verify(self, *partition)

    monkeypatch.setattr(Redeliverer, "open", opened)
    monkeypatch.setattr(Leadership, "verify", verified)
    tracker = queue.tracker(wait=False)
    until(lambda: steps.count("verified") >= 3, what=lambda: (steps, tracker.problems()))
    assert "fenced" in steps
    assert ("fenced", "fenced") not in itertools.pairwise(steps)
    assert tracker.owned() == []
    assert value(tracker, queue.name, "takeovers") == 0
    assert queue.copies() == {"m": 1}
    with queue.registry() as registry:
        assert registry.offsets(queue.name) == {}
    is_mine.set()
    redelivered(queue, tracker, 1)


# --- what operators see -----------------------------------------------------------------------------------


def test_ages_and_lateness_are_those_of_the_oldest_in_seconds(queue):
    queue.send("oldest", "youngest", "late")
    tracker = queue.tracker()

    def shown(metric: str) -> float:
        labels = {"queue": queue.name, "partition": "0"}
        return tracker.metrics.registry.get_sample_value(f"kmq_{metric}", labels) or 0.0

    queue.mark(take(0, 60_000))
    until(lambda: shown("oldest_in_flight_seconds") > 0.5)
    queue.mark(take(1, 60_000))
    until(lambda: shown("in_flight") == 2)
    assert 0.5 < shown("oldest_in_flight_seconds") < 30
    queue.mark(take(2, -(2**63)))
    redelivered(queue, tracker, 1)
    name = "kmq_redelivery_lateness_seconds_sum"
    assert 0 < tracker.metrics.registry.get_sample_value(name, {"queue": queue.name}) < 30


def test_of_the_issue_depth_and_dead_letters_are_shown_and_go_with_the_queue(make_queue):
    queue = make_queue(2)
    tracker = queue.tracker(http_port=0, count_interval_ms=50)

    def shown(metric: str) -> float | None:
        labels = [{"queue": queue.name, "partition": str(partition)} for partition in range(2)]
        found = [tracker.metrics.registry.get_sample_value(f"kmq_{metric}", one) for one in labels]
        return None if None in found else sum(found)

    def becomes(**wanted: float) -> None:
        until(lambda: {name: shown(name) for name in wanted} == wanted, what=lambda: map(shown, wanted))

    becomes(depth=0, dead_letters=0, overdue=0, oldest_waiting_seconds=0)
    queue.send("a", "b", "c", partition=0)
    queue.send("d", partition=1)
    becomes(depth=4, dead_letters=0)
    assert tracker.metrics.backlog(queue.name) == 4
    until(lambda: shown("oldest_waiting_seconds") > 0.3)
    client = queue.client()
    taken = collect(client, 4, lease=60)
    becomes(depth=0, in_flight=4, oldest_waiting_seconds=0)
    assert tracker.metrics.backlog(queue.name) == 0, "what is leased needs no more consumers"
    client.dead_letter(taken[:2])
    client.nack(taken[2], delay=60)
    client.ack(taken[3])
    becomes(depth=0, dead_letters=2, in_flight=1)
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        letters.run_redrive([letters.list()[0].id])
        becomes(depth=1, dead_letters=1)
        letters.purge()
    becomes(dead_letters=0)
    queue.send(*["x"] * 150, partition=1)
    until(lambda: 151 <= shown("depth") <= 160)  # above 100 an upper bound
    with Admin(queue.connection, queue.zookeeper) as admin:
        admin.delete_queue(queue.name)
    until(lambda: queue.name not in generate_latest(tracker.metrics.registry).decode())


def test_counts_disappear_with_the_partition(queue):
    first = queue.tracker(http_port=0, count_interval_ms=50)
    labels = {"queue": queue.name, "partition": "0"}
    until(lambda: first.metrics.registry.get_sample_value("kmq_depth", labels) == 0)
    first.stop()
    assert first.metrics.registry.get_sample_value("kmq_depth", labels) is None


# --- F5, R14: originals that are gone -------------------------------------------------------------------


def test_f5_a_deleted_original_is_counted_and_no_other_comes_in_its_place(queue):
    queue.send(*(f"m{i}" for i in range(20)))
    queue.mark_all(take(offset) for offset in range(0, 20, 2))
    queue.topics.delete_records(queue.name, {0: 11})
    tracker = queue.tracker()
    redelivered(queue, tracker, 4)
    assert value(tracker, queue.name, "lost_to_retention") == 6  # 0, 2, … 10
    copies = queue.copies()
    assert {body for body, times in copies.items() if times == 2} == {"m12", "m14", "m16", "m18"}
    time.sleep(2 * LEASE_S)
    assert value(tracker, queue.name, "lost_to_retention") == 6  # their end markers were written
    assert tracker.problems() == []


def test_r14_a_message_that_is_not_there_yet_holds_up_no_other(queue):
    """A start marker for an offset beyond the end: wait for it, and redeliver the others."""
    queue.send("a", "b")
    queue.mark(take(0))
    queue.mark(take(10**9))
    queue.mark(take(1))
    tracker = queue.tracker()
    redelivered(queue, tracker, 2)
    assert value(tracker, queue.name, "lost_to_retention") == 0
    queue.mark(take(2))
    redelivered(queue, tracker, 3)


def test_r14_a_message_behind_an_open_transaction_is_waited_for(queue):
    """Whoever reads uncommitted records can take it; before the transaction ends, trackers can't read it."""
    transaction = librdkafka.new_producer(queue.connection, {"transactional.id": f"open-{queue.name}"})
    transaction.init_transactions(60)
    queue.send("before")
    transaction.begin_transaction()
    transaction.produce(queue.name, b"open", partition=0)
    assert transaction.flush(60) == 0
    queue.send("behind")
    queue.mark_all([take(0), take(1), take(2)])
    tracker = queue.tracker()
    reader = OriginalsReader(queue.connection)
    fetched = reader.fetch(queue.name, 0, [0, 1, 2, 3])
    assert (list(fetched.found), fetched.gone, fetched.out_of_reach) == ([0], [], [1, 2, 3])
    until(lambda: value(tracker, queue.name, "redelivered") == 1, what=tracker.problems)
    transaction.commit_transaction(60)
    redelivered(queue, tracker, 3)
    until(lambda: queue.copies() == {"before": 2, "open": 2, "behind": 2}, what=queue.copies)
    assert value(tracker, queue.name, "lost_to_retention") == 0
    reader.close()


def test_r14_an_offset_that_holds_no_message_is_gone(queue):
    """As control records do, and compacted messages."""
    queue.send("a")
    queue.mark(take(0))
    tracker = queue.tracker()
    redelivered(queue, tracker, 1)  # to 1; at 2 stands the end of the transaction
    assert queue.copies() == {"a": 2}  # which is written a moment after the commit
    queue.send("b")
    queue.mark_all([take(2), take(3)])
    redelivered(queue, tracker, 2)
    assert queue.copies() == {"a": 2, "b": 2}
    assert value(tracker, queue.name, "lost_to_retention") == 1


# --- F6, R3: markers that can't be read -----------------------------------------------------------------

KEY = encode_key(0, 0)
GARBAGE = {
    "null key": (None, encode_start(1)),
    "null value": (KEY, None),
    "both null": (None, None),
    "empty": (b"", b""),
    "short key": (KEY[:11], encode_start(1)),
    "long key": (KEY + b"\0", encode_end()),
    "short start": (KEY, encode_start(1)[:8]),
    "long start": (KEY, encode_start(1) + b"\0"),
    "long end": (KEY, b"\0\0"),
    "unknown type": (KEY, b"\xff"),
    "text": (b"hello", b"world"),
    "negative offset": (encode_key(0, -5), encode_start(1)),
    "of another partition": (encode_key(7, 0), encode_end()),
}


def test_f6_undecodable_markers_are_skipped_and_counted_also_after_a_restart(queue):
    """The JVM decoder takes some of them for the end marker of message 0."""
    queue.send("a", "b")
    queue.mark(take(0))
    for key, content in GARBAGE.values():
        queue.append(key, content)
    with stopped_after(queue.tracker()) as tracker:
        redelivered(queue, tracker, 1)
        assert value(tracker, queue.name, "undecodable_markers") == len(GARBAGE)
        assert tracker.problems() == []
        for key, content in GARBAGE.values():
            queue.append(key, content)
        queue.mark(take(1, 1_500))
        until(lambda: value(tracker, queue.name, "undecodable_markers") == 2 * len(GARBAGE))
    again = queue.tracker()
    redelivered(queue, again, 1)
    assert queue.copies() == {"a": 2, "b": 2}
    assert again.problems() == []


@pytest.mark.parametrize(
    ("key", "content", "headers"),
    [
        (KEY, b"\x0f of a newer version", ()),
        (KEY, encode_start(1), [("kmq-op", b"of a newer version")]),
    ],
    ids=["type byte", "operation"],
)
def test_r3_a_marker_of_a_newer_version_pins_the_safe_offset(queue, key, content, headers):
    queue.send("a", "b")
    pinned = queue.append(key, content, headers)
    queue.mark_all([end(10**6)] * 20)
    queue.mark(take(1))
    with stopped_after(queue.tracker()) as tracker, queue.registry() as registry:
        redelivered(queue, tracker, 1)
        assert value(tracker, queue.name, "unsupported_markers") == 1
        assert any("newer kmqpy" in text for text in tracker.problems())
        time.sleep(0.5)
        assert stored(registry, queue) <= pinned
    with stopped_after(queue.tracker()) as tracker:  # still there for a newer one to read
        until(lambda: value(tracker, queue.name, "unsupported_markers") == 1)


# --- F8: what a copy holds ------------------------------------------------------------------------------


def test_f8_a_copy_has_key_body_and_all_headers(queue):
    queue.tracker()
    headers = [("a", b"1"), ("a", b"2"), ("null", None), ("empty", b""), ("bytes", b"\xff\x00")]
    queue.append(b"key", b"body", headers, topic=queue.name)
    queue.append(None, b"no key", (), topic=queue.name)
    queue.append(b"no body", None, (), topic=queue.name)
    client = queue.client()
    first = collect(client, 3)
    second = collect(client, 3, lease=1.0)  # so that no second copy overtakes another message's first
    third = collect(client, 3, lease=60.0)
    for before, after, latest in zip(first, second, third, strict=True):
        own = [pair for pair in after.headers if not pair[0].startswith("kmq-")]
        assert own == list(before.headers) == [p for p in latest.headers if not p[0].startswith("kmq-")]
        assert (after.key, after.body) == (before.key, before.body) == (latest.key, latest.body)
        for copy in (after, latest):
            assert copy.header("kmq-original-partition") == b"0"
            assert copy.header("kmq-original-offset") == str(before.offset).encode()
            assert copy.header("kmq-original-timestamp") == str(before.enqueued_ms).encode()
            assert copy.first_enqueued_ms == before.enqueued_ms
        assert decode_count(latest.header("kmq-redelivery-count")) == 2
        assert latest.attempts == 3
        assert len(latest.headers) == len(before.headers) + 6  # nothing piles up
    assert [record.value() for record in queue.records() if record.key() == b"no body"] == [None] * 3


def test_f8_partitions_are_kept(make_queue):
    queue = make_queue(3)
    queue.tracker()
    for partition in range(3):
        queue.send(f"p{partition}", partition=partition)
    client = queue.client()
    collect(client, 3)
    assert {(m.partition, m.body) for m in collect(client, 3, lease=60.0)} == {
        (p, f"p{p}".encode()) for p in range(3)
    }
