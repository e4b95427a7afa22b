"""Requests of an earlier transaction that come late (rules R36, R37), on a real Kafka."""

import contextlib
from collections import Counter

import pytest
from support import LiveQueue, stopped_after, until, value

from kmqpy.kafka import librdkafka
from kmqpy.kafka.copies import torn_transactions
from kmqpy.kafka.copies.copy_transaction import (
    CopyTransaction,
    NewRecord,
    ProducerUnusable,
    TransactionCancelled,
    open_producer,
)
from kmqpy.kafka.markers.claim_headers import CLAIM, CLAIM_ID, COPIES_TO, naming_tick
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.lineage import COPY, RecordPlace, read_copies
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.settings import KafkaConnection
from tests.chaos.controls import behind
from tests.chaos.proxy import Proxy
from tests.chaos.requests import Api, Hold, Holder, Way
from tests.torn import tear
from tracker.redelivery.redeliverer import Redeliverer


class HeldEnds(Holder):
    """Holds the next EndTxn back, if it is told to."""

    def __init__(self, way):
        super().__init__(way, "")
        self.armed = False

    def hold(self, request):
        if request.api == Api.END_TXN and self.armed:
            self.armed = False
            return Hold(self.way, 0.1)  # so that only librdkafka's pause is longer than REPEATED_END_S
        return None


@pytest.mark.parametrize("way", [Way.AFTER_RESET, Way.UNANSWERED])
@pytest.mark.parametrize("commits", [True, False])
def test_r36_a_producer_whose_end_was_sent_twice_is_used_no_more(queue, way, commits):
    """Holds librdkafka to what REPEATED_END_S relies on; users' settings do not change it."""
    with Proxy() as proxy:
        gate = proxy.gate()
        users = KafkaConnection(
            bootstrap=queue.connection.bootstrap, kafka={"retry.backoff.ms": 1, "retry.backoff.max.ms": 2}
        )
        through = behind(users, proxy, gate)
        gate.holder = holder = HeldEnds(way)
        producer = open_producer(through, f"late-{queue.name}", 60_000, "test", 30)

        def transact():
            transaction = CopyTransaction(producer, queue.name, queue.settings.markers_topic, 30)
            transaction.execute([NewRecord(0, None, b"copy", [])], lambda _: [], lambda: commits)

        expected = contextlib.nullcontext() if commits else pytest.raises(TransactionCancelled)
        with expected:
            transact()
        assert not producer.may_end_again
        holder.armed = True
        with expected:
            transact()
        assert producer.may_end_again
        with pytest.raises(ProducerUnusable):
            transact()
    assert queue.copies() == ({"copy": 2} if commits else {})


@pytest.fixture(autouse=True)
def absence_is_believed_soon(monkeypatch):
    monkeypatch.setattr(torn_transactions, "_ABSENCE_CONFIRMED_S", 0.2)


def take(offset):
    return Marker(0, offset, Op.TAKE, 300)


def named_copies(queue: LiveQueue) -> Counter[RecordPlace]:
    """How often end markers name each copy in `kmq-copy`."""
    found: Counter[RecordPlace] = Counter()
    for record in queue.records(queue.settings.markers_topic):
        if data := dict(record.headers() or ()).get(COPY):
            found.update(read_copies(data, queue.name, read_marker(record).count))
    return found


@pytest.mark.parametrize("copies", [0, 1, pytest.param(3, marks=pytest.mark.breadth)])
def test_r37_what_a_torn_transaction_has_copied_is_not_copied_again(queue, monkeypatch, copies):
    torn = tear(monkeypatch, copies)
    tracker = queue.tracker()
    queue.send("a", "b", "c")
    queue.mark_all(map(take, range(3)))
    until(lambda: value(tracker, queue.name, "torn_transactions") == 1, what=tracker.problems)
    assert torn
    until(lambda: sum(queue.copies().values()) == 6)
    until(lambda: queue.ended() == {0, 1, 2})
    assert queue.copies() == {"a": 2, "b": 2, "c": 2}
    assert set(named_copies(queue).values()) == {1}
    assert sum(named_copies(queue).values()) == 3
    # The next redelivery tears nothing and finds nothing torn.
    queue.mark_all([take(record.offset()) for record in queue.records()[3:]])
    until(lambda: queue.copies() == {"a": 3, "b": 3, "c": 3})
    assert value(tracker, queue.name, "torn_transactions") == 1


def test_r37_torn_dead_letters_are_not_made_again(make_queue, monkeypatch):
    queue = make_queue(max_redeliveries=0)
    tear(monkeypatch, 2)
    tracker = queue.tracker()
    queue.send("a", "b", "c")
    queue.mark_all(map(take, range(3)))
    until(lambda: queue.ended() == {0, 1, 2}, what=tracker.problems)
    assert sorted(record.value() for record in queue.dead_letters()) == [b"a", b"b", b"c"]
    assert queue.copies() == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize("snapshots", [1, pytest.param(1_000_000, marks=pytest.mark.breadth)])
def test_r37_a_successor_mends_what_its_predecessor_has_left_torn(queue, monkeypatch, snapshots):
    """The stored offset leads to the claim, although all that stands before it is finished or stored."""
    torn = tear(monkeypatch, 3)
    mend, failed = Redeliverer.mend, []

    def fail(*_):
        failed.append(True)
        raise ProducerUnusable("the first tracker can't")

    monkeypatch.setattr(Redeliverer, "mend", fail)
    with stopped_after(queue.tracker(snapshot_after_markers=snapshots)):
        queue.send("a", "b", "c", "d")
        queue.mark_all(map(take, range(3)))
        until(lambda: len(failed) > 1)
        assert torn
        queue.mark_all([Marker(0, offset, Op.END) for offset in range(3)])  # late: the copies are visible
        (claim_at,) = [
            record.offset()
            for record in queue.records(queue.settings.markers_topic)
            if CLAIM_ID in dict(record.headers() or ())
        ]
    with queue.registry() as registry:
        stored = registry.offsets(queue.name)[0]
    assert stored.offset <= claim_at
    monkeypatch.setattr(Redeliverer, "mend", mend)
    tracker = queue.tracker()
    until(lambda: value(tracker, queue.name, "torn_transactions") == 1, what=tracker.problems)
    until(lambda: sum(named_copies(queue).values()) == 3)
    assert queue.copies() == {"a": 2, "b": 2, "c": 2, "d": 1}


def test_r37_copies_that_an_open_transaction_hides_are_waited_for(queue, monkeypatch):
    monkeypatch.setattr(torn_transactions, "_STABLE_WITHIN_S", 0.2)
    foreign = librdkafka.new_producer(queue.connection, {"transactional.id": f"foreign-{queue.name}"})
    foreign.init_transactions(30)
    tear(monkeypatch, 3)
    queue.send("a", "b", "c")
    foreign.begin_transaction()
    foreign.produce(queue.name, b"x", partition=0)
    assert foreign.flush(10) == 0
    tracker = queue.tracker()
    queue.mark_all(map(take, range(3)))
    until(lambda: any("can't be looked for" in problem for problem in tracker.problems()))
    assert value(tracker, queue.name, "redelivered") == 0
    foreign.commit_transaction(10)
    until(lambda: queue.ended() == {0, 1, 2}, what=tracker.problems)
    assert queue.copies() == {"a": 2, "b": 2, "c": 2, "x": 1}


@pytest.mark.breadth
def test_r37_forged_claims_hold_up_nothing(queue):
    """Anybody can write claims; those that name no transaction cost a look for its copies."""
    queue.send("a", "b", "c", "d")
    headers = [(CLAIM_ID, b"forged-1"), (COPIES_TO, queue.name.encode())]
    key, data, named = naming_tick(0, CLAIM, range(3))

    def forge(number):
        names = [(CLAIM_ID, b"forged-%d" % number), (COPIES_TO, queue.name.encode())]
        queue.append(key, data, [*named, *names])

    for number in range(3):
        forge(number)
    queue.append(None, b"d", headers, topic=queue.name)
    queue.append(None, b"e", [*headers, ("kmq-ancestors", b"0:77")], topic=queue.name)
    queue.append(None, b"f", [*headers, ("kmq-ancestors", b"?")], topic=queue.name)
    tracker = queue.tracker()
    queue.mark_all(map(take, range(4)))
    until(lambda: queue.ended() == {0, 1, 2, 3}, what=tracker.problems)
    assert queue.copies() == {"a": 2, "b": 2, "c": 2, "d": 3, "e": 1, "f": 1}
    # An owner expects no claims but its own, so it looks for nothing and takes over nothing.
    before = value(tracker, queue.name, "torn_transactions"), value(tracker, queue.name, "takeovers")
    forge(3)
    forge(4)
    own = [dict(r.headers() or ()).get(CLAIM_ID) for r in queue.records(queue.settings.markers_topic)]
    for number in (one for one in own if one is not None and not one.startswith(b"forged")):
        queue.append(key, data, [*named, (CLAIM_ID, number), (COPIES_TO, queue.name.encode())])
    for count in (15, 19):  # a claim that is taken for torn is mended between the two
        queue.mark_all([take(record.offset()) for record in queue.records()[-4:]])
        until(lambda at_least=count: sum(queue.copies().values()) >= at_least, what=tracker.problems)
    assert (
        value(tracker, queue.name, "torn_transactions"),
        value(tracker, queue.name, "takeovers"),
    ) == before
