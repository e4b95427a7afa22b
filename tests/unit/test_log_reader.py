"""How logs are read to their ends, with a consumer that says what librdkafka may say."""

from dataclasses import dataclass, field

import pytest
from confluent_kafka import KafkaError, Message

from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import source


def record(offset):
    return Message(topic="q", partition=0, offset=offset, value=b"v", timestamp=(1, 1), headers=[])


def end_at(offset):
    return Message(topic="q", partition=0, offset=offset, error=KafkaError(KafkaError._PARTITION_EOF))


@dataclass
class FakeConsumer:
    """Three messages, of which a replica that lags behind its leader has two; then a control record."""

    answers: list = field(
        default_factory=lambda: [[record(0), record(1), end_at(2)], [record(2)], [end_at(4)]]
    )

    def assign(self, places):
        pass

    def pause(self, places):
        pass

    def close(self):
        pass

    def get_watermark_offsets(self, place, timeout):
        return 0, 4

    def consume(self, count, timeout):
        if timeout == 0:
            return []
        return self.answers.pop(0)


@pytest.fixture
def consumer(monkeypatch):
    fake = FakeConsumer()
    monkeypatch.setattr(librdkafka, "new_consumer", lambda connection, settings: fake)
    return fake


def test_the_end_of_a_replica_is_not_the_end_of_the_log(consumer):
    offsets = []
    reached = partition_reader.scan(KafkaConnection(), "q", {0: 0}, lambda one: offsets.append(one.offset()))
    assert offsets == [0, 1, 2]
    assert reached[0].position == reached[0].end == 4


def test_nor_for_the_source_of_spark(consumer):
    options = source._Options(
        queue=QueueSettings(name="q"), connection=KafkaConnection(), start="", max_rows=None
    )
    batches = list(source._read(options, source._Part(0, 0, 4)))
    assert [one for batch in batches for one in batch.column("offset").to_pylist()] == [0, 1, 2]
