"""Fixtures of all tests of the member of the consumer group."""

import pytest
from confluent_kafka import Message
from group_members import GIVEN, IDENTITY, FakeConsumer, active

from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op


@pytest.fixture
def consumer(monkeypatch):
    fake = FakeConsumer()
    monkeypatch.setattr(librdkafka, "new_consumer", lambda connection, settings: fake)
    return fake


@pytest.fixture
def member(consumer):
    made = GroupMember(
        *GIVEN,
        **IDENTITY,
        outcome_known=lambda _: True,
    )
    made._partitions[0] = active(markers_offset=5)
    return made


@pytest.fixture
def takes(monkeypatch):
    """The markers of partition 0: takes, by markers offset the queue offset, or those of a range marker.

    Or another marker: its key, value and headers.
    """
    log = {}

    def scan(_connection, _topic, starts, visit, **_):
        ((partition, start),) = starts.items()
        end = max(log, default=-1) + 1
        for at in sorted(at for at in log if at >= start and partition == 0):
            taken = log[at]
            if isinstance(taken, tuple):
                key, value, headers = taken
            elif isinstance(taken, list):
                key, value, headers = codec.encode(
                    *codec.ranges(0, Op.TAKE, taken, redeliver_after_ms=60_000)
                )
            else:
                key, value, headers = codec.encode(Marker(0, taken, Op.TAKE, 60_000))
            visit(Message(topic="q__markers", key=key, value=value, headers=headers, partition=0, offset=at))
        return {partition: partition_reader.ReadPosition(0, end, end)}

    monkeypatch.setattr(partition_reader, "scan", scan)
    monkeypatch.setattr(partition_reader, "bounds", lambda *_, **__: {0: (0, 1_000)})
    return log
