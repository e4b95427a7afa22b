"""What all our librdkafka clients share: settings, quiet logs, errors in our own words."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from kmqpy.clock import SYSTEM_CLOCK
from kmqpy.config import Connection, KafkaSettings
from kmqpy.errors import ConfigError, KmqError, MessageError, TopicError, Unavailable

_log = logging.getLogger("kmqpy.librdkafka")

_REPEAT_S = 30.0


class _OnceInAWhile(logging.Filter):
    """Lets each kind of librdkafka's complaints through every 30 s; it tries 20 times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show it. The kind is the first word, FAIL for example."""
        kind = record.getMessage().partition(" ")[0]
        now = SYSTEM_CLOCK.monotonic()
        if now - self._shown.get(kind, -_REPEAT_S) < _REPEAT_S:
            return False
        self._shown[kind] = now
        return True


_log.addFilter(_OnceInAWhile())

REQUEST_TIMEOUT_S = 10.0
"""How long a request to Kafka may take before it counts as away."""

_LOOK_TIMEOUT_S = 2.0

_AWAY = {
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.REQUEST_TIMED_OUT,
}
_NO_TOPIC = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}


def producer(connection: Connection, defaults: KafkaSettings) -> Producer:
    """A producer whose records are acknowledged by all in-sync replicas and never reordered."""
    common = {"enable.idempotence": True, "acks": "all", "partitioner": "murmur2_random"}
    with _settings_errors():
        return Producer(connection.kafka_settings({**common, **defaults}), logger=_log)


def consumer(connection: Connection, defaults: KafkaSettings) -> Consumer:
    """A consumer that sees committed records only, unless `defaults` say otherwise."""
    common = {
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "allow.auto.create.topics": False,
        "fetch.queue.backoff.ms": 5,
        "group.id": "kmq-none",
    }
    with _settings_errors():
        return Consumer(connection.kafka_settings({**common, **defaults}), logger=_log)


def admin(connection: Connection) -> AdminClient:
    """An administration client."""
    with _settings_errors():
        return AdminClient(connection.kafka_settings({}), logger=_log)


def look_again(client: Producer | Consumer, topic: str, partition: int, exception: KafkaException) -> bool:
    """Whether a call failed only because the partition is a new one; then it works now.

    A client that knows a topic looks for new partitions every five minutes only.
    """
    error = error_of(exception)
    if error is None or error.code() != KafkaError._UNKNOWN_PARTITION:
        return False
    try:
        return partition in client.list_topics(topic, _LOOK_TIMEOUT_S).topics[topic].partitions
    except KafkaException:
        return False


def error_of(exception: BaseException) -> KafkaError | None:
    """The KafkaError inside a KafkaException, if that is what this is."""
    if isinstance(exception, KafkaException) and exception.args:
        error = exception.args[0]
        if isinstance(error, KafkaError):
            return error
    return None


def translated(error: KafkaError | None, doing: str, connection: Connection) -> KmqError:
    """`error` in our words: what was being done, and what to do next."""
    text = error.str() if error is not None else "unknown error"
    if error is None:
        return KmqError(f"{doing}: {text}")
    code = error.code()
    if code in _AWAY:
        return Unavailable(
            f"{doing}: Kafka at {connection.bootstrap} does not answer ({text}); "
            "check the address and that it runs"
        )
    if code in _NO_TOPIC:
        return TopicError(f"{doing}: the topic does not exist; create it with: kmq queue create")
    if code in _TOO_LARGE:
        return MessageError(f"{doing}: the message is larger than the topic allows ({text})")
    return KmqError(f"{doing}: {text}")


@contextmanager
def kafka_errors(doing: str, connection: Connection) -> Iterator[None]:
    """Raise librdkafka's errors as ours."""
    try:
        yield
    except KafkaException as exception:
        raise translated(error_of(exception), doing, connection) from exception


@contextmanager
def _settings_errors() -> Iterator[None]:
    try:
        yield
    except (KafkaException, TypeError, ValueError) as exception:
        error = error_of(exception)
        raise ConfigError(f"Kafka settings: {error.str() if error else exception}") from None
