"""What the redeliverer does with copies that Kafka refuses, on a Kafka of the test's own (R7)."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError
from confluent_kafka import Message as Record
from fake_kafka import Transactions

from kmqpy.kafka.copies.copy_transaction import TransactionAborted
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.lineage import ANCESTORS
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.open_claims import TornClaim
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.testing import ManualClock
from tracker.redelivery import redeliverer as redeliverer_module
from tracker.redelivery.claim import Claim
from tracker.redelivery.originals import FetchResult
from tracker.redelivery.redeliverer import Redeliverer
from tracker.redelivery.redelivery_plan import Original, copy_of
from tracker.settings import TrackerSettings

TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)


class Reader:
    """Every tenth message is large."""

    def fetch(self, _topic, _partition, offsets):
        assert offsets == sorted(offsets)
        found = {at: Original(at, 0, None, bytes(1_000 if at % 10 == 0 else 10), ()) for at in offsets}
        return FetchResult(found)


class Bodies:
    """Each message is its offset; no markers follow a plan."""

    def fetch(self, _topic, _partition, offsets):
        return FetchResult({at: Original(at, 0, None, b"%d" % at, ()) for at in offsets})

    def read_between(self, *_):
        pass


class Refusing(Redeliverer):
    """Its topics take no copy of a large one; `sent` are the transactions, as (topic, offsets)."""

    def __init__(self, **queue):
        settings = QueueSettings(name="q", **queue)
        super().__init__(KafkaConnection(), settings, 0, TrackerSettings(max_batch_messages=100))
        self._producer = Producer(())
        self.refusing = ("q", "q__undelivered")
        self.away = ()
        self.sent = []

    def _transact(self, batch, gone, may_go_on):
        offsets = [copy.entry.offset for copy in batch]
        topic = batch[0].topic or "q"
        self.sent.append((topic, offsets))
        if topic in self.away:
            raise TransactionAborted(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), topic)
        if topic in self.refusing and any(offset % 10 == 0 for offset in offsets):
            raise TransactionAborted(TOO_LARGE, topic)
        return Claim(0, offsets, None, None, 0, {})

    def again(self, offsets, exists=lambda _: True):
        self.sent.clear()
        entries = [Entry(offset, offset, 0, 0, EntryState.LEASED) for offset in offsets]
        return self.redeliver(entries, Reader(), lambda: True, exists)


def test_many_that_are_refused_hold_up_the_others_for_a_few_transactions_only():
    redeliverer = Refusing(max_redeliveries=None)
    first = redeliverer.again(range(1_000))
    done = {copy.entry.offset for copy in first.copies}
    assert done == {offset for offset in range(1_000) if offset % 10}
    assert len(redeliverer.sent) < 150
    assert len(first.refused) == 20

    left = [offset for offset in range(1_000) if offset % 10 == 0]
    refused = {offset for offset in left if first.failed[offset] > 0.3}
    assert len(refused) == 20
    second = redeliverer.again([*left, 1_001])
    assert [copy.entry.offset for copy in second.copies] == [1_001]
    singles = [offsets for _, offsets in redeliverer.sent if len(offsets) == 1]
    assert singles[-20:] == [[offset] for offset in sorted(refused)]
    assert second.failed.keys() == set(left)
    assert len(redeliverer.failures.refused()) == 11
    assert redeliverer.failures.refused()[-1] == "30 more messages can't be copied"


def test_dead_letters_and_the_queue_take_turns_in_refusing():
    redeliverer = Refusing(max_redeliveries=2)
    topics, waits = [], []
    for _ in range(6):
        outcome = redeliverer.again([10])
        topics += [topic for topic, _ in redeliverer.sent]
        waits.append(outcome.failed[10])
        (text,) = redeliverer.failures.refused()
        assert text.startswith(f"offset 10: topic {topics[-1]} takes no copy of about 1")
    assert topics == ["q", "q", "q__undelivered", "q", "q__undelivered", "q"]
    assert waits == sorted(set(waits))
    redeliverer.refusing = ()
    assert [copy.dead_letter for copy in redeliverer.again([10]).copies] == [True]
    assert redeliverer.failures.refused() == []


def test_r47_what_the_retry_lane_refuses_stays_in_its_own_lane():
    redeliverer = Refusing(retry_lane=True)
    redeliverer.refusing = ("q__retry",)
    outcome = redeliverer.again([9, 10])
    assert [(copy.entry.offset, copy.topic) for copy in outcome.redelivered] == [(9, "q__retry")]
    (copy,) = redeliverer.again([10]).redelivered
    assert (redeliverer.sent, dict(copy.headers)[ANCESTORS]) == ([("q", [10])], b"0:10")


def test_r47_a_retry_lane_that_is_denied_or_missing_holds_up_nothing():
    redeliverer = Refusing(retry_lane=True)
    redeliverer.away = ("q__retry",)
    assert redeliverer.again([1]).problem is not None
    outcome = redeliverer.again([1])
    assert (redeliverer.sent, outcome.lane_problem) == ([("q", [1])], "topic q__retry could not be written")
    missing = Refusing(retry_lane=True)
    assert "does not exist" in missing.again([1], lambda _: False).lane_problem
    assert missing.sent == [("q", [1])]


def test_r47_what_has_failed_often_stays_in_its_own_lane_before_the_retry_lane_is_tried_again():
    redeliverer = Refusing(retry_lane=True)
    redeliverer.failures._tries[1] = 20
    redeliverer.away = ("q__retry",)
    assert redeliverer.again([1]).failed[1] < redeliverer_module._LANE_AWAY_S / 10


def test_a_redeliverer_with_nothing_to_do_keeps_no_entries():
    """A tracker may own 100,000 partitions, each with a redeliverer."""
    redeliverer = Refusing()
    redeliverer.again(range(5))
    assert redeliverer._since_plan is None


def test_what_has_ended_is_forgotten():
    redeliverer = Refusing()
    redeliverer.again([10, 20, 30])
    redeliverer.failures.forget_ended({20}.__contains__)
    assert [text.partition(":")[0] for text in redeliverer.failures.refused()] == ["offset 20"]


def test_a_message_of_which_no_copy_can_be_made_holds_up_no_other(monkeypatch):
    def fails(entry, original, *rest):
        if entry.offset == 3:
            raise ZeroDivisionError("a fault")
        return copy_of(entry, original, *rest)

    monkeypatch.setattr(redeliverer_module, "copy_of", fails)
    redeliverer = Refusing()
    redeliverer.refusing = ()
    first, second = redeliverer.again(range(5)), redeliverer.again([3])
    assert [copy.entry.offset for copy in first.copies] == [0, 1, 2, 4]
    assert "offset 3: no copy can be made of it: ZeroDivisionError" in first.problem
    assert 0 < first.failed[3] < second.failed[3]


class Producer(Transactions):
    """Does not take records of the offsets in `odd`."""

    def __init__(self, odd):
        super().__init__()
        self.odd = odd

    def produce(self, topic, value, *_, **__):
        if topic == "q":
            if value in self.odd:
                raise ValueError("embedded null byte")
            self.open.append(value)


def test_a_record_that_librdkafka_can_not_be_given_holds_up_no_other():
    redeliverer = Redeliverer(
        KafkaConnection(), QueueSettings(name="q", max_redeliveries=None), 0, TrackerSettings()
    )
    producer = redeliverer._producer = Producer({b"3"})
    entries = [Entry(offset, offset, 0, 0, EntryState.LEASED) for offset in range(8)]
    outcome = redeliverer.redeliver(entries, Bodies(), lambda: True, lambda _: True)
    assert sorted(producer.committed) == [b"0", b"1", b"2", b"4", b"5", b"6", b"7"]
    assert list(outcome.failed) == [3]
    assert not outcome.broken
    assert "offset 3" in redeliverer.failures.refused()[0]


@pytest.mark.parametrize(("answers", "committed"), [([False], 0), ([True, False], 0), ([True] * 3, 8)])
def test_r24_what_was_written_is_committed_only_if_its_topics_are_still_the_same_then(answers, committed):
    settings = TrackerSettings(max_batch_messages=4)
    redeliverer = Redeliverer(KafkaConnection(), QueueSettings(name="q", max_redeliveries=None), 0, settings)
    producer = redeliverer._producer = Producer(set())
    entries = [Entry(offset, offset, 0, 0, EntryState.LEASED) for offset in range(8)]
    outcome = redeliverer.redeliver(entries, Bodies(), partial(answers.pop, 0), lambda _: True)
    assert (len(producer.committed), answers) == (committed, [])
    assert (len(outcome.redelivered), len(outcome.failed)) == (committed, 8 - committed)


@pytest.mark.parametrize(("lasts_s", "transactions"), [(0.7, 2), (0.8, 1)])
def test_r36_after_an_end_that_may_come_again_the_partition_is_taken_over_again(lasts_s, transactions):
    class Slow(Producer):
        def commit_transaction(self, timeout_s):
            clock.advance(lasts_s)
            super().commit_transaction(timeout_s)

    clock = ManualClock()
    settings = TrackerSettings(max_batch_messages=4)
    redeliverer = Redeliverer(
        KafkaConnection(), QueueSettings(name="q", max_redeliveries=None), 0, settings, clock
    )
    producer = redeliverer._producer = Slow(())
    entries = [Entry(offset, offset, 0, 0, EntryState.LEASED) for offset in range(8)]
    outcome = redeliverer.redeliver(entries, Bodies(), lambda: True, lambda _: True)
    assert len(producer.committed) == len(outcome.redelivered) == 4 * transactions
    assert len(outcome.failed) == 8 - 4 * transactions
    assert outcome.broken == producer.may_end_again == (transactions == 1)
    assert outcome.problem is None


@pytest.mark.parametrize(("denied_s", "mended"), [(0, 2), (2, 2), (60, 0)])
def test_r37_a_dead_letter_topic_that_kafka_denies_for_a_moment_is_not_gone(monkeypatch, denied_s, mended):
    copies = {(0, b"claim"): {3: (0, 7), 4: (0, 8)}}
    monkeypatch.setattr(redeliverer_module, "find_copies", lambda *_: copies)
    clock = ManualClock()
    redeliverer = Redeliverer(KafkaConnection(), QueueSettings(name="q"), 0, TrackerSettings(), clock)
    redeliverer._producer = Producer(())
    torn = [TornClaim(b"claim", "q__undelivered", 0, OffsetRuns([(3, 2)]))]
    known_at = clock.monotonic() + denied_s
    assert redeliverer.mend(torn, lambda: True, lambda _: clock.monotonic() >= known_at) == mended


class HangingCopies(Producer):
    """Its next transaction that writes copies ends an earlier one, too; `ended` says how it was each time."""

    def __init__(self):
        super().__init__(())
        self.ended = []
        self._offset = 100

    def produce(self, topic, *some, on_delivery, **more):
        super().produce(topic, *some, **more)
        self._offset += 1
        on_delivery(None, SimpleNamespace(partition=lambda: 0, offset=lambda at=self._offset: at))

    def commit_transaction(self, timeout_s):
        if self.open:
            self.ended.append("committed")
        super().commit_transaction(timeout_s)

    def abort_transaction(self, timeout_s):
        if self.open:
            self.ended.append("aborted")
        super().abort_transaction(timeout_s)


class Acknowledging(Bodies):
    """As each claim is read, message 0 is acknowledged before it. `end`: the last stable offset."""

    def __init__(self, end):
        self.end = end

    def fetch(self, *about):
        return replace(super().fetch(*about), end=self.end)

    def read_between(self, _topic, _partition, begin, _end, _timeout_s, visit):
        key, value, _ = codec.encode(Marker(0, 0, Op.END))
        visit([Record(topic="m", partition=0, offset=begin, key=key, value=value, timestamp=(2, 1_000))])


@pytest.mark.parametrize("markers", ["range", "jvm"])
def test_r44_held_messages_get_a_delay_no_copy_and_no_claim(markers):
    class Marking(Producer):
        """Notes what is written to the markers topic."""

        def produce(self, topic, value, key, *_, headers, **__):
            assert topic == "q__markers"
            assert CLAIM not in dict(headers)
            self.open.append(codec.decode(key, value, headers))

    queue = QueueSettings(name="q", markers=markers, retry_delays=["1s"])
    redeliverer = Redeliverer(KafkaConnection(), queue, 0, TrackerSettings())
    producer = redeliverer._producer = Marking(())
    entries = [Entry(offset, offset, 0, 500, EntryState.LEASED) for offset in range(3)]
    entries.append(Entry(3, 3, 0, 600, EntryState.FAILED, reason="busy"))
    outcome = redeliverer.redeliver(
        entries, Acknowledging(100), lambda: True, lambda: True, position=9, now_ms=700
    )
    assert outcome.held == {1: 800, 2: 800, 3: 900}
    assert (outcome.copies, outcome.gone) == ([], [])
    assert list(outcome.failed) == [0]  # acknowledged meanwhile: the main loop will read it
    tick, *held = producer.committed
    assert (tick.offset, tick.op) == (codec.TICK_OFFSET, Op.END)
    assert all(one.op is Op.NACK and one.by_tracker and one.counts for one in held)
    assert [(list(one.offsets()), one.redeliver_after_ms, one.reason) for one in held] == [
        *([([1, 2], 800, "expired")] if markers == "range" else [([at], 800, "expired") for at in (1, 2)]),
        ([3], 900, "busy"),
    ]


@pytest.mark.parametrize(
    ("end", "ended"), [(101, ["committed", "committed"]), (1_000, ["committed", "aborted", "committed"])]
)
def test_r38_nothing_is_aborted_behind_copies_that_may_hang(monkeypatch, end, ended):
    """After a takeover, and when the last stable offset has not passed the last copy."""
    producer = HangingCopies()
    monkeypatch.setattr(redeliverer_module, "open_producer", lambda *_: producer)
    queue = QueueSettings(name="q", max_redeliveries=None)
    redeliverer = Redeliverer(KafkaConnection(), queue, 0, TrackerSettings())
    redeliverer.open(1.0)
    entries = [Entry(offset, offset, 0, 0, EntryState.LEASED) for offset in range(3)]
    for _ in range(2):
        outcome = redeliverer.redeliver(entries, Acknowledging(end), lambda: True, lambda _: True)
        assert [copy.entry.offset for copy in outcome.redelivered] == [1, 2]
    assert producer.ended == ended
    redeliverer.open(1.0)
    redeliverer.redeliver(entries, Acknowledging(1_000), lambda: True, lambda _: True)
    assert producer.ended == [*ended, "committed"]
