"""Hands markers to a producer of librdkafka, one by one or in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from confluent_kafka import KafkaError, Producer

from kmqpy.core.pieces import pieces
from kmqpy.kafka.markers import codec

_BATCH_SIZE = 1_000
"""One call of produce_batch() hands at most this many markers to librdkafka. Other threads of Python wait
meanwhile."""

Report = Callable[[KafkaError | None, Any], None]
"""A delivery callback: the error, or None, and the record."""


def produce(producer: Producer, topic: str, partition: int, marker: codec.Encoded, report: Report) -> None:
    """Hand one marker to `producer`; raises BufferError while its queue is full, and KafkaException."""
    key, value, headers = marker
    producer.produce(
        topic,
        value,
        key,
        partition,
        on_delivery=report,
        headers=headers,  # type: ignore[arg-type]
    )


def produce_all(
    producer: Producer, topic: str, partition: int, offsets: Sequence[int], value: bytes, report: Report
) -> Iterator[bytes]:
    """Hand a marker of `value`, without headers, for each of `offsets` to `producer`, in batches.

    Yields the keys of the markers that the producer did not take, and of a batch of one marker. The caller
    must produce these one by one.
    """
    for some in pieces(offsets, _BATCH_SIZE):
        keys = codec.encode_keys(partition, some)
        if len(keys) > 1:
            batch: list[dict[str, Any]] = [{"key": key, "value": value} for key in keys]
            if producer.produce_batch(topic, batch, partition, on_delivery=report) == len(batch):
                continue
            keys = [one["key"] for one in batch if "_error" in one]
        yield from keys
