"""Which open transactions hang, by what looks at a partition find one after another."""

from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME

from kmqpy.core.clock import SystemClock
from kmqpy.errors import AccessDenied
from kmqpy.kafka import hanging
from kmqpy.kafka.hanging import HangingTransactions
from kmqpy.kafka.markers.lineage import ANCESTORS
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.kafka.topics import Topics

PLACE = ("q", 0)
MINUTE_MS = 60_000


class Moved(SystemClock):
    now_ms = 100 * MINUTE_MS

    def wall_ms(self) -> int:
        return self.now_ms


class Record:
    """The first record of a transaction."""

    def __init__(self, kind: int, timestamp_ms: int, *headers: tuple[str, bytes]) -> None:
        self._told = kind, timestamp_ms
        self._headers = list(headers)

    def timestamp(self) -> tuple[int, int]:
        return self._told

    def headers(self) -> list[tuple[str, bytes]]:
        return self._headers


class Partition:
    """A search, the last stable offset and end that it sees, and the record that it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
        self.clock = Moved()
        self.stable, self.end = 5, 9
        self.record = Record(TIMESTAMP_CREATE_TIME, 0)
        self.reads = 0
        self.search = HangingTransactions(KafkaConnection(), self.clock, **arguments)
        monkeypatch.setattr(hanging, "_behind", self._behind)
        monkeypatch.setattr(hanging, "_first_records", self._first_records)
        monkeypatch.setattr(hanging, "Topics", self._topics)

    def _behind(self, *_: object) -> dict[tuple[str, int], tuple[int, int]]:
        return {PLACE: (self.stable, self.end)} if self.stable < self.end else {}

    def _first_records(self, *_: object) -> list[Record]:
        self.reads += 1
        return [self.record]

    def _topics(self, *_: object) -> Topics:
        raise AccessDenied("settings of brokers")

    def look(self, after_minutes: float = 0) -> list[int]:
        self.clock.now_ms += int(after_minutes * MINUTE_MS)
        return [one.waiting for one in self.search.look([PLACE])]


@pytest.fixture
def partition(monkeypatch: pytest.MonkeyPatch) -> Partition:
    return Partition(monkeypatch)


def test_a_last_stable_offset_that_moves_slowly_is_no_hang(partition: Partition) -> None:
    for partition.stable in range(5, 9):
        assert partition.look(10) == []
        assert partition.look(10) == []


def test_one_that_stays_for_longer_than_a_transaction_may_last_hangs(partition: Partition) -> None:
    assert partition.look() == partition.look(15.9) == []
    assert partition.look(0.2) == [4]
    partition.stable = partition.end
    assert partition.look() == []
    assert partition.reads == 1


@pytest.mark.parametrize(
    ("trust_producers", "record", "hangs"),
    [
        (False, Record(TIMESTAMP_LOG_APPEND_TIME, 80 * MINUTE_MS), True),
        (False, Record(TIMESTAMP_LOG_APPEND_TIME, 90 * MINUTE_MS), False),
        (False, Record(TIMESTAMP_CREATE_TIME, 80 * MINUTE_MS), False),  # any producer can say so
        (False, Record(TIMESTAMP_CREATE_TIME, 80 * MINUTE_MS, (ANCESTORS, b"0:1")), True),
        (True, Record(TIMESTAMP_CREATE_TIME, 80 * MINUTE_MS), True),
        (True, Record(TIMESTAMP_CREATE_TIME, 900 * MINUTE_MS), False),
    ],
)
def test_whose_times_are_believed(
    monkeypatch: pytest.MonkeyPatch, trust_producers: bool, record: Record, hangs: bool
) -> None:
    partition = Partition(monkeypatch, trust_producers=trust_producers)
    partition.record = record
    assert partition.look() == []  # another look has to meet it in the same place
    assert bool(found := partition.search.look([PLACE])) is hangs
    by_kafka = record.timestamp()[0] == TIMESTAMP_LOG_APPEND_TIME
    assert all(one.told_by_producer is not by_kafka for one in found)


def test_a_topic_that_may_not_be_read_is_judged_by_what_was_seen(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AccessDenied("q")

    monkeypatch.setattr(hanging, "_first_records", refuse)
    assert partition.look() == partition.look() == []
    assert partition.look(17) == [4]
