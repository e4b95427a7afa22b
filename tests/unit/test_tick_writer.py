"""Ticks: a fatal error ends their producer, not the tracker's redelivery."""

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from kmqpy.errors import Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.settings import KafkaConnection
from tracker.redelivery.tick_writer import TickWriter


class FakeProducer:
    """`fatal`: what librdkafka does after a fatal error, once it is known, `later` by a report."""

    fatal_error = None

    def __init__(self, *, fatal: bool = False, later: bool = False) -> None:
        self.fatal, self.later = fatal, later
        self.written = 0
        self._reports: list[Callable[[], None]] = []

    def produce(self, *_: Any, on_delivery: Callable[..., None], **__: Any) -> None:
        if self.fatal and not self.later:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        error = KafkaError(KafkaError._FATAL) if self.fatal else None
        self.written += error is None
        self.later = False
        self._reports.append(lambda: on_delivery(error, self))

    def __len__(self) -> int:
        return len(self._reports)

    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        return 2, 1_000

    def poll(self, _timeout_s: float) -> None:
        for report in self._reports:
            report()
        self._reports.clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeProducer]:
    """The producers that are made, in order: only the first one fails."""
    made: list[FakeProducer] = []

    def producer(*_: Any) -> FakeProducer:
        made.append(FakeProducer(fatal=not made))
        return made[-1]

    monkeypatch.setattr(librdkafka, "new_producer", producer)
    return made


def test_a_takeover_works_again_after_a_fatal_error(made: list[FakeProducer]) -> None:
    tick_writer = TickWriter(KafkaConnection())
    with pytest.raises(Unavailable, match=r"q__markers, partition 3: a tick could not be written: _FATAL"):
        tick_writer.send_tick("q__markers", 3, 0.1)
    assert tick_writer.send_tick("q__markers", 3, 0.1)[:2] == (7, 1_000)
    assert len(made) == 2


def test_a_fatal_error_that_is_reported_later(made: list[FakeProducer]) -> None:
    tick_writer = TickWriter(KafkaConnection())
    made[0].later = True
    tick_writer.post_tick("q__markers", 3, [].append)
    tick_writer.poll()
    tick_writer.post_tick("q__markers", 3, [].append)
    assert [producer.written for producer in made] == [0, 1]


def test_idle_queues_are_redelivered_again_after_a_fatal_error(made: list[FakeProducer]) -> None:
    tick_writer = TickWriter(KafkaConnection())
    with pytest.raises(Unavailable):
        tick_writer.post_tick("q__markers", 3, [].append)
    tick_writer.post_tick("q__markers", 3, [].append)
    assert [producer.written for producer in made] == [0, 1]
