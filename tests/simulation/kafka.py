"""Simulated kmqpy.kafka.librdkafka: makes confluent_kafka's clients over the simulated broker."""

from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition

from kmqpy.kafka import kafka_errors
from kmqpy.kafka import librdkafka as real
from kmqpy.kafka.topics import TopicInfo

from .connection import Connection, no_topic, timed_out
from .consumers import GroupConsumer, MarkersConsumer, Reader
from .producers import PlainProducer
from .world import Steps


class _Answer:
    """A future of what is asked of Kafka."""

    def __init__(self) -> None:
        self._found: TopicInfo | KafkaException | None = None

    def set(self, found: TopicInfo | KafkaException) -> None:
        self._found = found

    def done(self) -> bool:
        return self._found is not None

    def result(self, _timeout_s: float) -> TopicInfo:
        if not isinstance(self._found, TopicInfo):
            raise self._found or timed_out()
        return self._found


class Admin:
    """An admin client that is asked which topics there are."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def poll(self, _timeout_s: float) -> int:
        return 0

    def describe_topics(self, asked: TopicCollection, request_timeout: float) -> dict[str, _Answer]:
        connection, world = self._connection, self._connection.world
        answers = {name: _Answer() for name in asked.topic_names}

        def answer(found: dict[str, TopicInfo], away: bool) -> None:
            for name, one in answers.items():
                one.set(timed_out() if away else found.get(name) or no_topic())

        def arrive() -> None:
            away = connection.is_away()
            later_ms = request_timeout * 1000 if away else 12 * world.topics_rng.random() ** 2
            found = connection.describe()
            world.at(later_ms, lambda: answer(found, away))

        world.at(12 * world.topics_rng.random() ** 2, arrive)
        return answers


class Errors:
    """Stands where kmqpy.kafka.kafka_errors is imported for retrying()."""

    translating = staticmethod(kafka_errors.translating)
    is_retriable = staticmethod(kafka_errors.is_retriable)

    @staticmethod
    def retrying(
        ask: Callable[[float], Steps], timeout_s: float, connection: Connection, *, clock: Any, **_: object
    ) -> Steps:
        """Ask until the answer is no error that may pass."""
        deadline = clock.monotonic() + timeout_s
        while True:
            try:
                return (yield from ask(timeout_s))
            except KafkaException as exception:
                gone = exception.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
                if gone or clock.monotonic() > deadline:
                    raise
            yield 100.0


class Module:
    """Stands where kmqpy.kafka.librdkafka is imported."""

    REPEATED_END_S = real.REPEATED_END_S

    @staticmethod
    def refresh_partition(*_: object) -> bool:
        return False

    @staticmethod
    def answers(*_: object) -> bool:
        return True

    @staticmethod
    def watermarks(reader: "Reader", topic: str, partition: int, _timeout_s: float) -> Steps:
        return reader.get_watermark_offsets(TopicPartition(topic, partition))

    @staticmethod
    def new_admin(connection: Connection) -> Admin:
        return Admin(connection)

    @staticmethod
    def new_producer(connection: Connection, settings: dict[str, Any]) -> Any:
        if "transactional.id" in settings:
            backoff_ms = real._TRANSACTION_SETTINGS["retry.backoff.ms"]
            return connection.world.controls.transactions(
                connection, settings["transactional.id"], backoff_ms
            )
        return PlainProducer(connection, only_errors=settings.get("delivery.report.only.error", False))

    @staticmethod
    def new_consumer(connection: Connection, settings: dict[str, Any]) -> Any:
        if "on_commit" in settings:
            return GroupConsumer(connection, settings["on_commit"])
        return Reader(connection, uncommitted=settings.get("isolation.level") == "read_uncommitted")


class TrackerModule(Module):
    """The same where the markers consumer of a tracker is made, whose reads wait for nothing."""

    @staticmethod
    def new_consumer(connection: Connection, _settings: dict[str, Any]) -> "MarkersConsumer":
        return MarkersConsumer(connection)
