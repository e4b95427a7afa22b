"""The topics of a queue in Kafka: create, check, describe, grow, delete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from kmqpy import kafka
from kmqpy.clock import SYSTEM_CLOCK
from kmqpy.config import DAY_MS, Connection, QueueSettings
from kmqpy.errors import AccessDenied, ConfigError, QueueNotFound, TopicError, Unavailable

MAX_MESSAGE_BYTES = 1024 * 1024
"""The largest message that send() takes: key, value and headers, in bytes."""

_HEADROOM_BYTES = 64 * 1024
"""Room in the topics' limits for the headers of copies (rule R7)."""

_TRY_S = 2.0
_MOVED_S = 0.2
"""How long one of several tries of a request may take."""

DEFAULT_RETENTION_MS = 14 * DAY_MS


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as Kafka describes it; `config` holds the settings that matter to kmqpy."""

    name: str
    topic_id: str
    partitions: int
    replication: int
    config: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueTopics:
    """The topics of a queue; `dead_letters` is None while that topic is missing."""

    queue: TopicInfo
    markers: TopicInfo
    dead_letters: TopicInfo | None

    @property
    def partitions(self) -> int:
        """How many partitions the queue has."""
        return self.queue.partitions


def dead_letter_queue(queue: QueueSettings) -> QueueSettings:
    """The dead letters of `queue` as a queue of their own, with a markers topic."""
    return QueueSettings(
        name=queue.dead_letter_topic,
        redelivery_count_header=queue.redelivery_count_header,
        max_redeliveries=None,
    )


class Topics:
    """Administration of queue topics. Every call may raise Unavailable."""

    def __init__(self, connection: Connection, timeout_s: float = kafka.REQUEST_TIMEOUT_S) -> None:
        self._connection = connection
        self._timeout = timeout_s
        self._admin = kafka.admin(connection)

    def create(
        self,
        queue: QueueSettings,
        partitions: int = 1,
        replication: int | None = None,
        retention_ms: int = DEFAULT_RETENTION_MS,
    ) -> QueueTopics:
        """Create what is missing of the queue's four topics, and check them all.

        Retention follows rule R9: both topics must outlive the longest hold or delay.
        `replication` defaults to 3, or to the number of brokers if there are fewer.

        Raises ConfigError for bad numbers, TopicError when existing topics do not fit.
        """
        if partitions < 1:
            raise ConfigError(f"partitions: {partitions} must be at least 1")
        longest_ms = max(queue.max_delay_ms, queue.max_hold_ms)
        if retention_ms <= longest_ms:
            raise ConfigError(
                f"retention: {retention_ms} ms must be longer than max_delay and max_hold "
                f"({longest_ms} ms), or a held message could disappear"
            )
        brokers = self.brokers()
        replication = min(3, brokers) if replication is None else replication
        if not 1 <= replication <= brokers:
            raise ConfigError(f"replication: {replication} must be from 1 to the {brokers} brokers")
        common = {
            "retention.ms": str(retention_ms),
            "retention.bytes": "-1",
            "cleanup.policy": "delete",
            "unclean.leader.election.enable": "false",
            "min.insync.replicas": "2" if replication >= 3 else "1",
        }
        dead = dead_letter_queue(queue)
        limit = MAX_MESSAGE_BYTES + _HEADROOM_BYTES
        wanted = [
            (queue.name, {**common, "max.message.bytes": str(limit)}),
            (queue.markers_topic, {**common, "message.timestamp.type": "LogAppendTime"}),
            (dead.name, {**common, "max.message.bytes": str(limit + _HEADROOM_BYTES)}),
            (dead.markers_topic, {**common, "message.timestamp.type": "LogAppendTime"}),
        ]
        futures = self._admin.create_topics(
            [NewTopic(name, partitions, replication, config=config) for name, config in wanted],
            operation_timeout=self._timeout,
            request_timeout=self._timeout,
        )
        for name, future in futures.items():
            self._result(future, f"create topic {name}", but=KafkaError.TOPIC_ALREADY_EXISTS)
        self._wait_until_told(futures, 1)
        # The controller answers before the brokers know of it.
        deadline = SYSTEM_CLOCK.monotonic() + self._timeout
        known = self.describe(list(futures))
        while len(known) < len(wanted) and SYSTEM_CLOCK.monotonic() < deadline:
            SYSTEM_CLOCK.sleep(0.05)
            known = self.describe(list(futures))
        found = self._checked(queue, known)  # asking once more could reach a broker that was not told yet
        if found.partitions != partitions:
            raise TopicError(
                f"topic {queue.name} exists with {found.partitions} partitions, not {partitions}; "
                "use kmq queue alter to add some"
            )
        return found

    def check(self, queue: QueueSettings) -> QueueTopics:
        """The queue's topics; raises QueueNotFound or TopicError when they can't be used."""
        return self._checked(queue, self.describe([queue.name, queue.markers_topic, queue.dead_letter_topic]))

    def _checked(self, queue: QueueSettings, found: Mapping[str, TopicInfo]) -> QueueTopics:
        if queue.name not in found:
            raise QueueNotFound(
                f"queue {queue.name!r}: there is no such topic; create it with: kmq queue create {queue.name}"
            )
        if queue.markers_topic not in found:
            raise TopicError(
                f"queue {queue.name!r}: its markers topic {queue.markers_topic!r} does not exist; "
                f"create it with: kmq queue create {queue.name}"
            )
        messages, markers = found[queue.name], found[queue.markers_topic]
        if messages.partitions > markers.partitions:
            raise TopicError(
                f"queue {queue.name!r}: {messages.partitions} partitions, but its markers topic has "
                f"{markers.partitions}; they must be equal. Mend it with: "
                f"kmq queue alter {queue.name} --partitions {messages.partitions}"
            )
        return QueueTopics(messages, markers, found.get(queue.dead_letter_topic))

    def describe(self, names: Sequence[str], *, with_config: bool = False) -> dict[str, TopicInfo]:
        """Those of the topics that exist, by name."""
        deadline = SYSTEM_CLOCK.monotonic() + self._timeout
        while True:
            left = deadline - SYSTEM_CLOCK.monotonic()
            try:
                return self._describe(names, max(0.1, min(left, _TRY_S)), with_config=with_config)
            except AccessDenied:
                raise
            except Unavailable:
                left = deadline - SYSTEM_CLOCK.monotonic()
                if left <= 0:
                    raise
            # librdkafka waits for the controller of the metadata that it has, though that broker be dead.
            with kafka.kafka_errors("connect", self._connection):
                kafka.metadata(self._admin, left, self._connection)

    def _describe(self, names: Sequence[str], timeout_s: float, *, with_config: bool) -> dict[str, TopicInfo]:
        futures = self._admin.describe_topics(TopicCollection(list(names)), request_timeout=timeout_s)
        found: dict[str, TopicInfo] = {}
        for name, future in futures.items():
            topic = self._result(future, f"describe topic {name}", but=KafkaError.UNKNOWN_TOPIC_OR_PART)
            if topic is not None:
                replication = min((len(p.replicas) for p in topic.partitions), default=0)
                found[name] = TopicInfo(name, str(topic.topic_id), len(topic.partitions), replication)
        if not with_config or not found:
            return found
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in found]
        configs = self._admin.describe_configs(resources, request_timeout=timeout_s)
        for resource, future in configs.items():
            entries: dict[str, ConfigEntry] | None = self._result(
                future, f"describe {resource.name}", but=KafkaError.UNKNOWN_TOPIC_OR_PART
            )
            info = found[resource.name]
            if entries is None:  # deleted meanwhile
                del found[info.name]
                continue
            config = {key: entry.value for key, entry in entries.items() if entry.value is not None}
            found[info.name] = TopicInfo(info.name, info.topic_id, info.partitions, info.replication, config)
        return found

    def grow(self, queue: QueueSettings, partitions: int) -> QueueTopics:
        """Raise the number of partitions, the markers topics' first (rule R19)."""
        dead = dead_letter_queue(queue)
        found = self.describe([queue.name, queue.markers_topic, dead.name, dead.markers_topic])
        if queue.name not in found:
            raise QueueNotFound(f"queue {queue.name!r}: there is no such topic")
        if partitions < found[queue.name].partitions:
            raise ConfigError(
                f"partitions: {partitions} is fewer than the {found[queue.name].partitions} there are; "
                "Kafka can't take partitions away"
            )
        for name in (dead.markers_topic, dead.name, queue.markers_topic, queue.name):
            if name in found and found[name].partitions < partitions:
                futures = self._admin.create_partitions(
                    [NewPartitions(name, partitions)],
                    operation_timeout=self._timeout,
                    request_timeout=self._timeout,
                )
                self._result(futures[name], f"add partitions to {name}")
        self._wait_until_told(found, partitions)
        return self.check(queue)

    def _wait_until_told(self, topics: Iterable[str], partitions: int) -> None:
        """The controller decides; brokers hear of it a little later."""
        wanted = set(topics)
        deadline = SYSTEM_CLOCK.monotonic() + self._timeout
        while SYSTEM_CLOCK.monotonic() < deadline:
            known = self.describe(sorted(wanted))
            if all(name in known and known[name].partitions >= partitions for name in wanted):
                return
            SYSTEM_CLOCK.sleep(0.02)

    def delete(self, queue: QueueSettings) -> None:
        """Delete the queue's topics, whichever exist."""
        dead = dead_letter_queue(queue)
        names = [queue.name, queue.markers_topic, dead.name, dead.markers_topic]
        futures = self._admin.delete_topics(
            names, operation_timeout=self._timeout, request_timeout=self._timeout
        )
        for name, future in futures.items():
            self._result(future, f"delete topic {name}", but=KafkaError.UNKNOWN_TOPIC_OR_PART)

    def offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """First and next offset of each partition."""
        wanted = [TopicPartition(topic, p) for p in partitions]
        ends = []
        for spec in (OffsetSpec.earliest(), OffsetSpec.latest()):
            futures = self._admin.list_offsets(dict.fromkeys(wanted, spec), request_timeout=self._timeout)
            ends.append({tp.partition: self._result(f, f"offsets of {topic}") for tp, f in futures.items()})
        first, last = ends
        return {p: (first[p].offset, last[p].offset) for p in first}

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """Change these settings of a topic and leave its others as they are."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        futures = self._admin.incremental_alter_configs([resource], request_timeout=self._timeout)
        for future in futures.values():
            self._result(future, f"configure topic {topic}")

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Delete the records of each partition below the given offset."""
        deadline = SYSTEM_CLOCK.monotonic() + self._timeout
        left = dict(before)
        while left:
            wanted = [TopicPartition(topic, partition, offset) for partition, offset in left.items()]
            futures = self._admin.delete_records(wanted, request_timeout=self._timeout)
            for place, future in futures.items():
                late = SYSTEM_CLOCK.monotonic() > deadline
                moved = None if late else KafkaError.NOT_LEADER_FOR_PARTITION
                if self._result(future, f"delete records of {topic}", but=moved) is not None:
                    del left[place.partition]
            if left:  # to a new leader, of which librdkafka does not know yet
                SYSTEM_CLOCK.sleep(_MOVED_S)
                with kafka.kafka_errors("connect", self._connection):
                    kafka.metadata(self._admin, self._timeout, self._connection)

    def names(self) -> set[str]:
        """Every topic of the cluster but Kafka's own."""
        with kafka.kafka_errors("list topics", self._connection):
            found = kafka.metadata(self._admin, self._timeout, self._connection).topics
        return {name for name in found if not name.startswith("__")}

    def groups(self, topic: str, partitions: int) -> list[str]:
        """The consumer groups that have committed offsets of `topic`."""
        listed = self._result(
            self._admin.list_consumer_groups(request_timeout=self._timeout), "list consumer groups"
        )
        wanted = [TopicPartition(topic, partition) for partition in range(partitions)]
        asked = {
            group.group_id: self._admin.list_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(group.group_id, wanted)], request_timeout=self._timeout
            )[group.group_id]
            for group in listed.valid
        }
        found = []
        for name, future in asked.items():
            # A group can vanish meanwhile.
            result = self._result(future, f"offsets of group {name}", but=KafkaError.GROUP_ID_NOT_FOUND)
            if result is not None and any(place.offset >= 0 for place in result.topic_partitions):
                found.append(name)
        return sorted(found)

    def brokers(self) -> int:
        """How many brokers the cluster has."""
        with kafka.kafka_errors("connect", self._connection):
            return len(kafka.metadata(self._admin, self._timeout, self._connection).brokers)

    def _result(self, future: Future[Any], doing: str, but: int | None = None) -> Any:
        """The future's result; None where Kafka answered with the error code `but`."""
        try:
            return kafka.result(self._admin, future, self._timeout + 5, self._connection)
        except KafkaException as exception:
            error = kafka.error_of(exception)
            if error is not None and error.code() == but:
                return None
            raise kafka.translated(error, doing, self._connection) from exception
