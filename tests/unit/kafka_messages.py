"""A message of Kafka for tests of the command line."""

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka import Message as Record

from kmqpy.kafka.client.record_message import KafkaMessage, ReceiveContext
from kmqpy.kafka.settings import QueueSettings
from kmqpy.telemetry.base import Telemetry


def message(offset=1, **fields):
    """A message of Kafka at this offset."""
    record = Record(
        topic="q",
        partition=0,
        offset=offset,
        timestamp=(TIMESTAMP_LOG_APPEND_TIME, 5),
        **{"value": b"b", **fields},
    )
    return KafkaMessage(record, ReceiveContext(QueueSettings(name="q"), "an-id", 6, Telemetry(), None))
