"""About which partitions a client asks Kafka whether a transaction hangs there."""

from collections.abc import Iterable

import pytest
from confluent_kafka import TopicPartition

from kmqpy.core.clock import SystemClock
from kmqpy.kafka import hanging
from kmqpy.kafka.client.hanging_watch import HangingWatch
from kmqpy.kafka.hanging import HangingTransaction
from kmqpy.kafka.settings import KafkaConnection


class Standing:
    """A consumer and what it knows of its only partition, and the search that it would start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset, self.end = 5, 9
        self.open = False
        self.asked = 0
        monkeypatch.setattr(hanging, "LOOK_EVERY_S", 0.0)
        self.watch = HangingWatch(KafkaConnection(), "q", SystemClock())
        monkeypatch.setattr(self.watch, "_search", self)

    def position(self, places: Iterable[TopicPartition]) -> list[TopicPartition]:
        return [TopicPartition(place.topic, place.partition, self.offset) for place in places]

    def get_watermark_offsets(self, _place: TopicPartition, *, cached: bool) -> tuple[int, int]:
        assert cached
        return 0, self.end

    def look(self, places: Iterable[tuple[str, int]]) -> list[HangingTransaction]:
        self.asked += 1
        return [HangingTransaction(*place, self.offset, 4, 0, ()) for place in places if self.open]

    def asks(self) -> bool:
        before = self.asked
        self.watch.note_positions(self, [0])  # type: ignore[arg-type]
        self.watch.look()
        return self.asked > before


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> Standing:
    return Standing(monkeypatch)


def test_a_client_that_works_on_a_backlog_asks_nothing(standing: Standing) -> None:
    standing.end = 1_000
    for standing.offset in range(5, 10):
        assert not standing.asks()


def test_a_client_that_has_read_everything_asks_nothing(standing: Standing) -> None:
    standing.offset = standing.end
    assert [standing.asks() for _ in range(3)] == [False] * 3


def test_who_stands_still_asks_until_it_goes_on(standing: Standing) -> None:
    assert [standing.asks() for _ in range(3)] == [False, True, True]
    standing.offset += 1
    assert [standing.asks() for _ in range(3)] == [False, True, True]


def test_each_is_logged_once(standing: Standing, caplog: pytest.LogCaptureFixture) -> None:
    standing.open = True
    for _ in range(4):
        standing.asks()
    assert len(caplog.records) == 1
    standing.offset += 1
    standing.asks()
    standing.asks()
    assert len(caplog.records) == 2
