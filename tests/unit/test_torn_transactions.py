"""Which copies of torn transactions are found (rule R37), and who mends them, without Kafka."""

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME
from confluent_kafka import Message as Record
from fake_kafka import Transactions

from kmqpy.errors import Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.copies.copy_transaction import TransactionCancelled
from kmqpy.kafka.copies.torn_transactions import find_copies
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM_ID
from kmqpy.kafka.markers.lineage import ANCESTORS, COPY
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.open_claims import TornClaim
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.testing import ManualClock
from tracker.redelivery import redeliverer as redeliverer_module
from tracker.redelivery.redeliverer import Redeliverer
from tracker.settings import TrackerSettings

CLAIMED_AT_MS = 1_700_000_000_000


def claim(*offsets, topic="q"):
    runs = OffsetRuns()
    for offset in offsets:
        runs.add(offset)
    return TornClaim(b"a", topic, CLAIMED_AT_MS, runs)


class Log:
    """Partition 0 of a topic from offset 10 on, as partition_reader reads it.

    hides      so many of its last records, from the first `lagging` reads
    stable_at  the seconds of the clock at which the last transaction there ends
    """

    def __init__(self, monkeypatch):
        self.clock = ManualClock()
        self.records = []
        self.hides, self.lagging, self.stable_at = 0, 0, 0.0
        monkeypatch.setattr(partition_reader, "bounds", self._bounds)
        monkeypatch.setattr(partition_reader, "scan_since", self._scan_since)

    def copy_of(self, ancestors, claim_id=b"a", *, clock_behind_s=0):
        """Append a copy; `ancestors` as the header says them."""
        stamp = (TIMESTAMP_CREATE_TIME, CLAIMED_AT_MS + 5 - clock_behind_s * 1_000)
        headers = [(ANCESTORS, ancestors), (CLAIM_ID, claim_id)]
        at = 10 + len(self.records)
        self.records.append(
            Record(topic="q", partition=0, offset=at, value=b"", headers=headers, timestamp=stamp)
        )

    def find(self, *offsets):
        found = find_copies(KafkaConnection(), "q", "q", [0], {0: [claim(*offsets)]}, self.clock)
        return found.get((0, b"a"), {})

    def _readable(self):
        return self.records[: -self.hides] if self.hides and self.lagging > 0 else self.records

    def _bounds(self, _connection, _topic, partitions, *, uncommitted=False):
        is_open = not uncommitted and self.clock.monotonic() < self.stable_at
        end = 10 if is_open else 10 + len(self._readable())
        return dict.fromkeys(partitions, (10, end))

    def _scan_since(self, _connection, _topic, times_ms, visit, **_):
        (since_ms,) = times_ms.values()
        visit(0, [record for record in self._readable() if record.timestamp()[1] >= since_ms])
        self.lagging -= 1


@pytest.fixture
def log(monkeypatch):
    return Log(monkeypatch)


def test_copies_are_found_by_their_claim(log):
    log.copy_of(b"0:1")
    log.copy_of(b"0:2", b"another")
    log.copy_of(b"0:1,0:3")
    assert log.find(1, 2, 3) == {1: (0, 10), 3: (0, 12)}


def test_the_first_of_two_is_the_copy(log):
    """Programs forward records with all their headers."""
    log.copy_of(b"0:1")
    log.copy_of(b"0:1")
    assert log.find(1) == {1: (0, 10)}


def test_what_the_claim_does_not_name_any_more_has_its_end_marker(log):
    log.copy_of(b"0:1")
    log.copy_of(b"0:2")
    assert log.find(2) == {2: (0, 11)}


@pytest.mark.parametrize("ancestors", [b"1:1", b"p:0:1", b"0:1,p:0:1", b"?", b""])
def test_copies_of_messages_of_other_partitions_are_none(log, ancestors):
    log.copy_of(ancestors)
    assert log.find(1) == {}


def test_a_broker_that_says_for_a_moment_that_the_log_ends_before_the_copies_is_asked_again(log):
    log.copy_of(b"0:1")
    log.copy_of(b"0:2")
    log.hides, log.lagging = 1, 1
    assert log.find(1, 2) == {1: (0, 10), 2: (0, 11)}
    assert log.clock.monotonic() >= 1


def test_copies_are_found_whose_tracker_had_a_slow_clock(log):
    log.copy_of(b"0:1", clock_behind_s=240)
    assert log.find(1) == {1: (0, 10)}


def test_copies_that_an_open_transaction_hides_are_waited_for(log):
    log.copy_of(b"0:1")
    log.stable_at = 1.5
    assert log.find(1) == {1: (0, 10)}
    log.stable_at = 60
    with pytest.raises(Unavailable, match="somebody's transaction stays open"):
        log.find(1)


class Producer(Transactions):
    """Keeps what is committed: topic, key and headers."""

    def produce(self, topic, _value, key, _partition, *, headers, **_):
        self.open.append((topic, key, dict(headers)))


class Mending:
    """A redeliverer and the copies that are found, by their topic."""

    def __init__(self, monkeypatch):
        queue = QueueSettings(name="q")
        self.redeliverer = Redeliverer(KafkaConnection(), queue, 0, TrackerSettings(), ManualClock())
        self.producer = self.redeliverer._producer = Producer()
        self.copies = {"q": {}, "q__undelivered": {}}
        self.searched = []
        monkeypatch.setattr(redeliverer_module, "find_copies", self._find_copies)

    def _find_copies(self, _connection, _queue, topic, *_):
        self.searched.append(topic)
        return {(0, b"a"): self.copies[topic]}

    def mend(self, *claims, may_go_on=True, dead_letters_exist=True):
        return self.redeliverer.mend(claims, lambda: may_go_on, lambda _: dead_letters_exist)


@pytest.fixture
def mending(monkeypatch):
    return Mending(monkeypatch)


def test_messages_that_were_copied_are_ended_and_the_others_are_not(mending):
    mending.copies = {"q": {1: (0, 7)}, "q__undelivered": {4: (0, 9)}}
    assert mending.mend(claim(1, 2), claim(4, 5, topic="q__undelivered")) == 2
    assert [(topic, codec.decode_key(key)) for topic, key, _ in mending.producer.committed] == [
        ("q__markers", (0, 1)),
        ("q__markers", (0, 4)),
    ]
    assert [headers[COPY] for *_, headers in mending.producer.committed] == [b"0:7", b"q__undelivered:0:9"]


def test_r47_copies_in_the_retry_lane_are_found_also_when_the_queue_has_lost_it(mending):
    mending.redeliverer.queue = QueueSettings(name="q", draining_lanes=("retry",))
    mending.copies["q__retry"] = {1: (0, 7)}
    assert mending.mend(claim(1, 2, topic="q__retry"), claim(3, topic="others")) == 1
    assert mending.searched == ["q__retry"]
    assert [headers[COPY] for *_, headers in mending.producer.committed] == [b"q__retry:0:7"]


def test_nothing_is_mended_in_topics_that_were_recreated(mending):
    mending.copies["q"] = {1: (0, 7)}
    with pytest.raises(Unavailable, match="were not written"):
        mending.mend(claim(1), may_go_on=False)
    assert mending.producer.committed == []


def test_r7_a_missing_dead_letter_topic_does_not_hold_up_the_others(mending):
    mending.copies["q"] = {1: (0, 7)}
    assert mending.mend(claim(1), claim(4, topic="q__undelivered"), dead_letters_exist=False) == 1
    assert mending.searched == ["q"]


def test_a_redeliverer_expects_each_of_its_claims_once(mending):
    """Somebody may write it again, and would have it mended again and again."""
    with mending.redeliverer._transaction("q") as transaction:
        claim_id = transaction.claim_id
    assert [mending.redeliverer.expects_claim(one) for one in (b"forged", claim_id, claim_id)] == [
        False,
        True,
        False,
    ]


def test_a_redeliverer_knows_which_claims_it_has_aborted(mending):
    with pytest.raises(TransactionCancelled), mending.redeliverer._transaction("q") as transaction:
        raise TransactionCancelled
    assert transaction.claim_id in mending.redeliverer.aborted_claims
