"""OriginalsReader over a consumer that is stuck, as librdkafka's is when a broker had lost its controller."""

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from kmqpy import KafkaConnection
from kmqpy.kafka import librdkafka
from tracker.redelivery.originals import OriginalsReader


class Record:
    def __init__(self, offset: int, error: KafkaError | None) -> None:
        self.offset: Callable[[], int] = lambda: offset
        self.error: Callable[[], KafkaError | None] = lambda: error

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_000

    def leader_epoch(self) -> None: ...

    def key(self) -> None: ...

    def value(self) -> bytes:
        return b"body"

    def headers(self) -> None: ...


class FakeConsumer:
    """Has the messages 0 to 9, unless it is stuck."""

    def __init__(self, *, stuck: bool) -> None:
        self.stuck = stuck
        self.closed = False
        self._next = 0

    def get_watermark_offsets(self, *_: Any, **__: Any) -> tuple[int, int]:
        return 0, 10

    def assign(self, places: list[Any]) -> None:
        self._next = places[0].offset

    def unassign(self) -> None: ...

    def consume(self, count: int, timeout: float) -> list[Record]:
        if self.stuck:
            return [Record(-1, KafkaError(KafkaError._UNKNOWN_PARTITION))]
        first, self._next = self._next, min(self._next + count, 10)
        if first == self._next and timeout:
            raise AssertionError("waits for what is not there")
        return [Record(offset, None) for offset in range(first, self._next)]

    def close(self) -> None:
        self.closed = True


def test_a_consumer_that_failed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    consumers = [FakeConsumer(stuck=True), FakeConsumer(stuck=False)]
    left = iter(consumers)
    monkeypatch.setattr(librdkafka, "new_consumer", lambda *_: next(left))
    reader = OriginalsReader(KafkaConnection(bootstrap="nowhere:1"))
    with pytest.raises(KafkaException):
        reader.fetch("q", 0, [3, 4])
    assert consumers[0].closed
    assert sorted(reader.fetch("q", 0, [3, 4]).found) == [3, 4]
    assert not consumers[1].closed


def test_markers_are_read_up_to_the_last_one_that_is_wanted_and_not_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond stands a claim of an open transaction: waiting for it takes as long as an empty request."""
    monkeypatch.setattr(librdkafka, "new_consumer", lambda *_: FakeConsumer(stuck=False))
    reader = OriginalsReader(KafkaConnection(bootstrap="nowhere:1"))

    def read(end: int) -> list[int]:
        found: list[int] = []
        reader.read_between("q", 0, 3, end, 1.0, lambda some: found.extend(one.offset() for one in some))
        return found

    assert read(10) == [3, 4, 5, 6, 7, 8, 9]
    assert read(6) == [3, 4, 5]
    assert read(3) == []
