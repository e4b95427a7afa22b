"""About which partitions a client asks Kafka whether a transaction hangs there, or the log is damaged."""

from collections.abc import Iterable, Mapping

import pytest
from confluent_kafka import TopicPartition

from kmqpy.core.clock import Clock, SystemClock
from kmqpy.errors import KmqError, Unavailable
from kmqpy.kafka import hanging
from kmqpy.kafka.client import hanging_watch
from kmqpy.kafka.client.hanging_watch import HangingWatch
from kmqpy.kafka.damaged_logs import DamagedLog
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
        self.damage: list[DamagedLog] | KmqError = []
        self.read: list[int] = []
        monkeypatch.setattr(hanging_watch, "find_damage", self.find_damage)

    def position(self, places: Iterable[TopicPartition]) -> list[TopicPartition]:
        return [TopicPartition(place.topic, place.partition, self.offset) for place in places]

    def get_watermark_offsets(self, _place: TopicPartition, *, cached: bool) -> tuple[int, int]:
        assert cached
        return 0, self.end

    def look(self, places: Iterable[tuple[str, int]]) -> list[HangingTransaction]:
        self.asked += 1
        return [HangingTransaction(*place, self.offset, 4, 0, ()) for place in places if self.open]

    def is_open(self, _place: tuple[str, int]) -> bool:
        return self.open

    def find_damage(
        self, _connection: KafkaConnection, places: Mapping[tuple[str, int], int], _clock: Clock
    ) -> list[DamagedLog]:
        self.read += places.values()
        if isinstance(self.damage, KmqError):
            raise self.damage
        return self.damage if places else []

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


def test_each_position_is_read_once_and_damage_there_is_named(
    standing: Standing, caplog: pytest.LogCaptureFixture
) -> None:
    standing.damage = Unavailable("away")
    for _ in range(3):
        standing.asks()
    assert standing.read == [5, 5]
    standing.damage = [DamagedLog("q", 0, 5, "why")]
    for _ in range(3):
        standing.asks()
    assert standing.read == [5, 5, 5]
    (named,) = caplog.records
    assert (named.levelname, named.topic, named.partition, named.offset) == ("ERROR", "q", 0, 5)
    standing.offset, standing.open = 6, True
    for _ in range(3):
        standing.asks()
    assert standing.read == [5, 5, 5]
