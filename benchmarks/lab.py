"""Makes, fills and reads the topics on which the benchmarks measure."""

import itertools
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import NewTopic

from benchmarks.children import Failed
from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.copies.copy_transaction import NewRecord
from kmqpy.kafka.markers import codec
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

HOUR_MS = 3_600_000
_CHUNK = 20_000
_MAX_QUEUED = 400_000
_STAMP = struct.Struct(">qq")

Record = tuple[bytes | None, bytes]
"""The key and the value of a record."""


class Lab:
    """One cluster, and the queues that are made on it, each with a name of its own."""

    def __init__(self, connection: KafkaConnection, zookeeper: ZooKeeperConnection) -> None:
        self.connection = connection
        self.zookeeper = zookeeper
        self._admin = librdkafka.new_admin(connection)
        self._numbers = itertools.count(1)

    @contextmanager
    def queue(self, partitions: int, *, register: bool = False, **settings: Any) -> Iterator[QueueSettings]:
        """Make a queue, and delete it at the end of the block; with `register`, trackers serve it."""
        queue = QueueSettings(name=f"bench-{next(self._numbers)}", **settings)
        # Kafka's default would let the sender say when a record was appended.
        topic = NewTopic(queue.name, partitions, 1, config={"message.timestamp.type": "LogAppendTime"})
        for future in self._admin.create_topics([topic]).values():
            future.result()
        Topics(self.connection).create(queue, partitions)
        if register:
            with self._registry() as registry:
                registry.register(queue, partitions)
        try:
            yield queue
        finally:
            if register:
                with self._registry() as registry:
                    registry.remove(queue.name)
            self._delete(
                name for name in self._admin.list_topics().topics if name.startswith(f"{queue.name}_")
            )
            self._delete([queue.name])

    @contextmanager
    def view(self, queue: QueueSettings, partitions: int) -> Iterator[QueueSettings]:
        """The same queue topic, as if nobody had ever read it: with a new group and markers topic."""
        name = f"{queue.name}__view-{next(self._numbers)}"
        view = replace(queue, markers_topic=f"{name}-markers", consumer_group=name)
        Topics(self.connection).create(view, partitions)
        try:
            yield view
        finally:
            self._delete([view.markers_topic])

    def producer(self) -> Producer:
        """A producer for many records, whose delivery reports are only of records that it could not send."""
        return librdkafka.new_producer(
            self.connection,
            {
                "linger.ms": 20,
                "batch.size": 500_000,
                "queue.buffering.max.messages": 2 * _MAX_QUEUED,
                "queue.buffering.max.kbytes": 1_000_000,
                "delivery.report.only.error": True,
            },
        )

    def fill(
        self, topic: str, partition: int, records: Iterable[Record], producer: Producer | None = None
    ) -> None:
        """Append records to one partition as fast as possible; raises Failed if one can't be written."""
        producer = producer or self.producer()
        failed: list[Any] = []
        for chunk in _batched(records):
            batch = [{"key": key, "value": value} for key, value in chunk]
            if producer.produce_batch(
                topic, batch, partition, on_delivery=lambda *it: failed.append(it)
            ) < len(batch):
                raise Failed(f"{topic}: the queue of the producer is full")
            while len(producer) > _MAX_QUEUED:
                producer.poll(0.05)
        if producer.flush(60) or failed:
            raise Failed(f"{topic}: not everything could be written")

    def append(self, topic: str, records: Iterable[NewRecord]) -> None:
        """Append records with headers; slower than fill(). Raises Failed if one can't be written."""
        producer = self.producer()
        failed: list[Any] = []
        for partition, key, value, headers in records:
            producer.produce(
                topic,
                value,
                key,
                partition,
                headers=list(headers),
                on_delivery=lambda *it: failed.append(it),
            )
            while len(producer) > _MAX_QUEUED:
                producer.poll(0.05)
        if producer.flush(60) or failed:
            raise Failed(f"{topic}: not everything could be written")

    def preload(self, queue: QueueSettings, partitions: int, count: int, size: int) -> None:
        """Append `count` messages of `size` bytes, the same number to each partition."""
        body = b"x" * size
        for partition in range(partitions):
            share = count // partitions + (partition < count % partitions)
            self.fill(queue.name, partition, itertools.repeat((None, body), share))

    def end(self, topic: str, partition: int) -> int:
        """The offset after the last record."""
        reader = librdkafka.new_consumer(self.connection, {})
        try:
            return int(reader.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)[1])
        finally:
            reader.close()

    def records(self, topic: str, partitions: int, first: int = 0) -> list[Any]:
        """Every committed record from offset `first` on."""
        found: list[Any] = []
        partition_reader.scan(self.connection, topic, dict.fromkeys(range(partitions), first), found.append)
        return found

    @contextmanager
    def _registry(self) -> Iterator[Registry]:
        with connect(self.zookeeper) as zk:
            yield Registry(zk, self.connection.root)

    def _delete(self, topics: Iterable[str]) -> None:
        names = list(topics)
        if names:
            for future in self._admin.delete_topics(names).values():
                future.result()


def starts(offsets: Iterable[int], lease_ms: int, partition: int = 0) -> Iterator[Record]:
    """Start markers in the JVM format: one for each offset."""
    value = codec.encode_start(lease_ms)
    return ((codec.encode_key(partition, offset), value) for offset in offsets)


def ends(offsets: Iterable[int], partition: int = 0) -> Iterator[Record]:
    """End markers in the JVM format: one for each offset."""
    value = codec.encode_end()
    return ((codec.encode_key(partition, offset), value) for offset in offsets)


def stamped(number: int, monotonic_ns: int, size: int = 100) -> bytes:
    """A message body with the number of its message, and the time when the message was sent."""
    return _STAMP.pack(number, monotonic_ns).ljust(size, b"x")


def stamp_of(body: bytes) -> tuple[int, int]:
    """The number and the time in a body that stamped() has made."""
    number, monotonic_ns = _STAMP.unpack_from(body)
    return number, monotonic_ns


def _batched(records: Iterable[Record]) -> Iterator[tuple[Record, ...]]:
    iterator = iter(records)
    while chunk := tuple(itertools.islice(iterator, _CHUNK)):
        yield chunk
