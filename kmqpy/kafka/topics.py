"""Creates, checks, describes, grows and deletes the topics of a queue in Kafka."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.first_contact import Service, is_awaited
from kmqpy.core.forks import ForkGuard
from kmqpy.core.pieces import pieces
from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.cut_off import may_be_cut_off
from kmqpy.kafka.retention import DEFAULT_RETENTION_MS, check_retention
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, check_connection
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.kafka.topic_names import dead_letter_queue, markers_topics, topics_of

MAX_MESSAGE_BYTES = 1024 * 1024
"""The largest message that send() takes, in bytes as message_headers.size_of() counts them."""

HEADROOM_BYTES = 64 * 1024
"""Bytes that topics allow beyond MAX_MESSAGE_BYTES, for headers of copies (rule R7 of docs/rules.md)."""

_MAX_DEAD_LETTER_LIMIT = 100_000_000
"""Bytes; brokers take no larger requests, by default."""

_EXTRA_WAIT_S = 5.0
"""Seconds that librdkafka gets, after the time limit of a request, to report that the request timed out."""
_MAX_GROUP_REQUESTS = 100
"""groups() asks for at most this many consumer groups at once."""
_WITHOUT_MEMBERS = (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD)

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as Kafka describes it.

    Attributes:
        name: Its name.
        topic_id: Distinguishes it from earlier and later topics of the name.
        partitions: How many.
        replication: Replicas of each partition.
        config: All its settings, or none if they were not asked for.
        behind: The partitions of which a replica is not in sync.
    """

    name: str
    topic_id: str
    partitions: int
    replication: int
    config: dict[str, str] = field(default_factory=dict)
    behind: tuple[int, ...] = field(default=(), compare=False)


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

    @property
    def ids(self) -> TopicIds:
        """The ids of the queue topic and the markers topic."""
        return TopicIds(self.queue.topic_id, self.markers.topic_id)


class GroupMember(NamedTuple):
    """A member of a consumer group; `client_id` is what it calls itself."""

    group: str
    client_id: str


Members = dict[str, list[GroupMember]]
"""The members of consumer groups, by the topics of which they have partitions."""


def dead_letter_limit(limit: int) -> int:
    """`max.message.bytes` of the dead-letter topic of a queue topic with `limit`.

    Ten times `limit`, at most 100 MB, but always more than `limit`: messages that are too large to be copied
    to the queue topic become dead letters (rule R7).
    """
    return max(limit + HEADROOM_BYTES, min(10 * limit, _MAX_DEAD_LETTER_LIMIT))


class Topics:
    """Administers the topics of queues. Retries requests for `timeout_s` seconds after retriable errors.

    Every call may raise Unavailable if Kafka does not answer, or can't do the request within this time.
    """

    def __init__(
        self, connection: KafkaConnection, timeout_s: float | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._guard = ForkGuard("what administers topics")
        self._connection = check_connection(connection)
        self._timeout = connection.timeout_s if timeout_s is None else timeout_s
        self._clock = clock
        self._changed_at: dict[str, float] = {}  # by topic: when it was created or got more partitions here
        self._admin = librdkafka.new_admin(connection)

    @property
    def admin(self) -> AdminClient:
        """The client that asks now; after a failure it may be another one."""
        return self._admin

    def create(
        self,
        queue: QueueSettings,
        partitions: int = 1,
        replication: int | None = None,
        retention_ms: int = DEFAULT_RETENTION_MS,
        *,
        anew: Iterable[str] = (),
    ) -> QueueTopics:
        """Create the missing ones of the queue's topics; check the queue topic and the markers topic.

        All of them must keep records for longer than the longest lease or delay (rule R9). `replication`
        defaults to 3, or to the number of brokers if there are fewer. `anew`: topics that were just deleted;
        brokers that create topics by themselves may have recreated them, so they get these settings, too.

        Raises ConfigError for bad numbers, TopicError when existing topics do not fit.
        """
        if partitions < 1:
            raise ConfigError(f"partitions: {partitions} must be at least 1")
        check_retention(queue, retention_ms)
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
        limit = MAX_MESSAGE_BYTES + HEADROOM_BYTES
        wanted = {}
        for name, markers in markers_topics(queue).items():
            most = dead_letter_limit(limit) if name == dead.name else limit
            wanted[name] = {**common, "max.message.bytes": str(most)}
            wanted[markers] = {**common, "message.timestamp.type": "LogAppendTime"}
        new = {
            name: NewTopic(name, partitions, replication, config=config) for name, config in wanted.items()
        }
        self._create(new)
        # Another describe() could ask a broker that does not know the new topics yet.
        known = self._wait_until_shown(wanted, 1, new)
        for name in anew:
            if name not in known:
                raise Unavailable(
                    f"create topic {name}: Kafka at {self._connection.bootstrap} does not show it yet; "
                    "try again"
                )
            self.configure(name, wanted[name])
            if known[name].partitions < partitions:
                self._add_partitions(name, partitions)
                known |= self._wait_until_shown([name], partitions)
        found = self._checked(queue, known)
        if found.partitions != partitions:
            more = f"add some with: kmq queue alter {queue.queue_name} --partitions {partitions}"
            raise TopicError(
                f"topic {queue.name} exists with {found.partitions} partitions, not {partitions}; "
                f"{more if partitions > found.partitions else 'Kafka removes none'}"
            )
        return found

    def create_compacted(self, name: str, replication: int) -> None:
        """Create a topic of one partition that keeps the last record of each key, unless it is there."""
        config = {
            "cleanup.policy": "compact",
            "unclean.leader.election.enable": "false",
            "min.insync.replicas": "2" if replication >= 3 else "1",
        }
        new = {name: NewTopic(name, 1, replication, config=config)}
        self._create(new)
        self._wait_until_shown([name], 1, new)

    def _create(self, topics: Mapping[str, NewTopic]) -> None:
        self._ask(
            "create topic {}",
            topics,
            lambda admin, names, try_s: admin.create_topics(
                [topics[name] for name in names], operation_timeout=try_s, request_timeout=try_s
            ),
            none_on=KafkaError.TOPIC_ALREADY_EXISTS,  # perhaps by an earlier try, whose answer was lost
        )

    def check(self, queue: QueueSettings, partition: int | None = None) -> QueueTopics:
        """The queue's topics; raises QueueNotFound or TopicError if queue or markers topic can't be used.

        With `partition`, the markers topic needs only this partition, not all that the queue topic has.
        """
        found = self.describe([queue.name, queue.markers_topic, queue.dead_letter_topic])
        return self._checked(queue, found, partition)

    def _checked(
        self, queue: QueueSettings, found: Mapping[str, TopicInfo], partition: int | None = None
    ) -> QueueTopics:
        if queue.name not in found:
            raise QueueNotFound(
                f"queue {queue.name!r}: there is no such topic; "
                f"create it with: kmq queue create {queue.queue_name}"
            )
        if queue.markers_topic not in found:
            raise TopicError(
                f"queue {queue.name!r}: its markers topic {queue.markers_topic!r} does not exist; "
                f"create it with: kmq queue create {queue.queue_name}"
            )
        messages, markers = found[queue.name], found[queue.markers_topic]
        needed = messages.partitions if partition is None else partition + 1
        if needed > markers.partitions:
            raise TopicError(
                f"queue {queue.name!r}: {messages.partitions} partitions, but its markers topic has "
                f"{markers.partitions}; they must be equal. Correct that with: "
                f"kmq queue alter {queue.queue_name} --partitions {messages.partitions}"
            )
        return QueueTopics(messages, markers, found.get(queue.dead_letter_topic))

    def describe(self, names: Sequence[str], *, with_config: bool = False) -> dict[str, TopicInfo]:
        """Return the topics that exist, by name."""
        for _ in kafka_errors.tries(self._timeout, self._clock):
            topics = self._ask(
                "describe topic {}",
                names,
                lambda admin, left, try_s: admin.describe_topics(
                    TopicCollection(left), request_timeout=try_s
                ),
                none_on=KafkaError.UNKNOWN_TOPIC_OR_PART,
            )
            existing = [name for name, topic in topics.items() if topic is not None]
            configs = self._configs(existing) if with_config else {name: {} for name in existing}
            if len(configs) == len(existing):
                break  # otherwise a topic was deleted meanwhile, or this broker does not know it yet
        return {name: _topic_info(name, topics[name], config) for name, config in configs.items()}

    def own_config(self, name: str) -> dict[str, str]:
        """The settings that a topic has of its own, which are not those of brokers or of Kafka."""
        return self._configs([name], own=True).get(name, {})

    def _configs(self, names: Sequence[str], *, own: bool = False) -> dict[str, dict[str, str]]:
        """The settings of those topics that exist."""
        of_topic = (ConfigSource.DYNAMIC_TOPIC_CONFIG, ConfigSource.DYNAMIC_TOPIC_CONFIG.value)
        described: dict[str, dict[str, ConfigEntry] | None] = self._ask(
            "describe {}",
            names,
            lambda admin, left, try_s: admin.describe_configs(
                [ConfigResource(ResourceType.TOPIC, name) for name in left], request_timeout=try_s
            ),
            none_on=KafkaError.UNKNOWN_TOPIC_OR_PART,
        )
        return {
            name: {
                key: entry.value
                for key, entry in entries.items()
                if entry.value is not None and (not own or entry.source in of_topic)
            }
            for name, entries in described.items()
            if entries is not None
        }

    def grow(self, queue: QueueSettings, partitions: int) -> QueueTopics:
        """Add partitions to the queue's topics; to each markers topic before its topic (rule R19)."""
        found = self.describe(list(topics_of(queue)))
        if queue.name not in found:
            raise QueueNotFound(f"queue {queue.name!r}: there is no such topic")
        if partitions < found[queue.name].partitions:
            raise ConfigError(
                f"partitions: {partitions} is fewer than the {found[queue.name].partitions} there are; "
                "Kafka can't take partitions away"
            )
        for name in reversed(topics_of(queue)):
            if name in found and found[name].partitions < partitions:
                self._add_partitions(name, partitions)
        known = self._wait_until_shown(found, partitions)
        for name in found:
            if name not in known or known[name].partitions < partitions:
                raise Unavailable(
                    f"add partitions to {name}: Kafka at {self._connection.bootstrap} does not show "
                    f"{partitions} yet; try again"
                )
        return self._checked(queue, known)

    def _add_partitions(self, name: str, partitions: int) -> None:
        self._ask(
            "add partitions to {}",
            [name],
            lambda admin, names, try_s: admin.create_partitions(
                [NewPartitions(name, partitions) for name in names],
                operation_timeout=try_s,
                request_timeout=try_s,
            ),
            none_on=KafkaError.INVALID_PARTITIONS,  # added by an earlier try, whose answer was lost
        )

    def _wait_until_shown(
        self, topics: Iterable[str], partitions: int, new: Mapping[str, NewTopic] | None = None
    ) -> dict[str, TopicInfo]:
        """Wait until a broker shows `partitions` partitions of each topic; the controller answers before.

        Creates topics in `new` that are not shown once more: brokers with ZooKeeper say of a topic that is
        still being deleted that it exists.

        Returns the last description, even when the time is over and partitions are missing.
        """
        names = list(topics)
        self._changed_at.update(dict.fromkeys(names, self._clock.monotonic()))
        for _ in kafka_errors.tries(self._timeout, self._clock):
            known = self.describe(names)
            if all(name in known and known[name].partitions >= partitions for name in names):
                break
            if missing := {name: topic for name, topic in (new or {}).items() if name not in known}:
                self._create(missing)
        return known

    def delete(self, topics: Iterable[str]) -> None:
        """Delete those of these topics that exist, and wait until a broker does not know them any more."""
        names = list(topics)
        for name in names:
            self._changed_at.pop(name, None)
        self._ask(
            "delete topic {}",
            names,
            lambda admin, left, try_s: admin.delete_topics(
                left, operation_timeout=try_s, request_timeout=try_s
            ),
            none_on=KafkaError.UNKNOWN_TOPIC_OR_PART,
        )
        for _ in kafka_errors.tries(self._timeout, self._clock):  # the controller answers before brokers know
            if not self.describe(names):
                break

    def offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """First offset and end of the log of each partition."""
        first = self._list_offsets(topic, partitions, OffsetSpec.earliest())
        last = self._list_offsets(topic, first, OffsetSpec.latest())
        return {p: (first[p].offset, last[p].offset) for p in first}

    def latest_timestamps(self, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Offset and timestamp (ms) of the latest record, by timestamp, of each partition with records."""
        found = self._list_offsets(topic, partitions, OffsetSpec.max_timestamp())
        return {p: (one.offset, one.timestamp) for p, one in found.items() if one.offset >= 0}

    def _list_offsets(self, topic: str, partitions: Iterable[int], spec: OffsetSpec) -> dict[int, Any]:
        found = self._ask(
            f"offsets of {topic}",
            [TopicPartition(topic, p) for p in partitions],
            lambda admin, left, try_s: admin.list_offsets(dict.fromkeys(left, spec), request_timeout=try_s),
            topic=topic,
        )
        return {place.partition: one for place, one in found.items()}

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """Change these settings of a topic; its other settings stay."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        self._ask(
            f"configure topic {topic}",
            [resource],
            lambda admin, left, try_s: admin.incremental_alter_configs(left, request_timeout=try_s),
            topic=topic,
        )

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Delete the records of each partition below its offset in `before`."""
        self._ask(
            f"delete records of {topic}",
            [TopicPartition(topic, partition, offset) for partition, offset in before.items()],
            lambda admin, left, try_s: admin.delete_records(left, request_timeout=try_s),
            topic=topic,
        )

    def names(self) -> set[str]:
        """All topics of the cluster but Kafka's own, which begin with `__`."""
        found = self._metadata("list topics").topics
        return {name for name in found if not name.startswith("__")}

    def groups(self) -> tuple[dict[str, list[str]], Members]:
        """Return the consumer groups with committed offsets, by topic, and what members() returns.

        Sends one request for each group, and another for each with members.
        """
        listed = self._list_groups()
        names = sorted(group.group_id for group in listed)
        committed: dict[str, Any] = {}
        for some in pieces(names, _MAX_GROUP_REQUESTS):
            committed |= self._ask(
                "offsets of group {}",
                some,
                lambda admin, groups, _: {
                    group: admin.list_consumer_group_offsets(
                        [ConsumerGroupTopicPartitions(group)], request_timeout=librdkafka.GROUP_REQUEST_S
                    )[group]
                    for group in groups
                },
                none_on=KafkaError.GROUP_ID_NOT_FOUND,  # a group can vanish meanwhile
            )
        found: dict[str, list[str]] = {}
        for group in sorted(committed):
            places = [] if committed[group] is None else committed[group].topic_partitions
            for topic in {place.topic for place in places if place.offset >= 0}:
                found.setdefault(topic, []).append(group)
        return found, self._members_of(listed)

    def members(self) -> Members:
        """Return the members of consumer groups, by the topics that they read now.

        Sends one request for each group with members.
        """
        return self._members_of(self._list_groups())

    def _list_groups(self) -> list[Any]:
        (listed,) = self._ask(
            "list consumer groups",
            [None],
            lambda admin, _, try_s: {None: admin.list_consumer_groups(request_timeout=try_s)},
        ).values()
        return list(listed.valid)

    def _members_of(self, groups: Iterable[Any]) -> Members:
        with_members = sorted(one.group_id for one in groups if one.state not in _WITHOUT_MEMBERS)
        described = self._ask(
            "describe group {}",
            with_members,
            lambda admin, left, try_s: admin.describe_consumer_groups(left, request_timeout=try_s),
            none_on=KafkaError.GROUP_ID_NOT_FOUND,  # a group can vanish meanwhile
        )
        found: Members = {}
        for group in with_members:
            for member in [] if described[group] is None else described[group].members:
                for topic in sorted({place.topic for place in member.assignment.topic_partitions}):
                    found.setdefault(topic, []).append(GroupMember(group, member.client_id))
        return found

    def brokers(self) -> int:
        """How many brokers the cluster has."""
        return len(self._metadata("connect").brokers)

    def longest_transaction_ms(self) -> int | None:
        """The longest time-out that Kafka lets a transaction have; None if no broker tells."""
        brokers = self._metadata("connect").brokers
        if not brokers:  # for a moment after all were away
            return None
        broker = str(min(brokers))
        entries = self._ask(
            "describe broker {}",
            [broker],
            lambda admin, left, try_s: admin.describe_configs(
                [ConfigResource(ResourceType.BROKER, one) for one in left], request_timeout=try_s
            ),
        )[broker]
        setting = entries.get("transaction.max.timeout.ms")
        return None if setting is None or setting.value is None else int(setting.value)

    def _metadata(self, doing: str) -> Any:
        self._guard.raise_if_inherited()
        with kafka_errors.translating(doing, self._connection):
            admin = self._admin
            try:
                return librdkafka.metadata(admin, self._timeout, self._connection)
            except KafkaException as exception:
                self._renew_after(admin, exception)
                raise

    def _renew_after(self, admin: AdminClient, exception: KafkaException) -> None:
        """Replace `admin` for later requests if the exception says that `admin` may be cut off."""
        if admin is self._admin and may_be_cut_off(kafka_errors.error_of(exception)):
            self._admin = librdkafka.new_admin(self._connection)

    def _ask(
        self,
        doing: str,
        wanted: Iterable[K],
        request: Callable[[AdminClient, list[K], float], Mapping[Any, Future[Any]]],
        *,
        none_on: int | None = None,
        topic: str | None = None,
    ) -> dict[K, Any]:
        """Kafka's answer for each item of `wanted`; None if the answer was the error code `none_on`.

        request  called with a client, items and a time limit in seconds; returns the futures of the items, in
                 the same order. Called again with the items that failed with retriable errors
        doing    begins error messages; `{}` in it stands for the item that failed
        topic    the topic of all items; if this object has just created or grown the topic, the error that a
                 broker does not know the topic is retriable, too
        """
        self._guard.raise_if_inherited()
        admin = self._admin
        left = list(dict.fromkeys(wanted))
        found: dict[K, Any] = {}
        tried = False

        def ask(try_s: float) -> None:
            nonlocal left, tried
            if is_awaited(Service.KAFKA):
                librdkafka.look_up(admin, try_s)
            if tried:  # else librdkafka asks the controller and leaders that it knows, even if they are gone
                admin.list_topics(timeout=try_s)
            tried = True
            failed: dict[K, KafkaError | None] = {}
            futures = [*request(admin, left, try_s).values()]
            for one in left:
                try:
                    found[one] = librdkafka.wait_result(
                        admin, futures.pop(0), try_s + _EXTRA_WAIT_S, self._connection
                    )
                except KafkaException as exception:
                    error = kafka_errors.error_of(exception)
                    if error is not None and error.code() == none_on:
                        found[one] = None
                    else:
                        failed[one] = error
            # Put errors that are not retriable first: the first one decides whether to try again.
            left = sorted(failed, key=lambda one: kafka_errors.is_retriable(failed[one]))
            if left:
                raise KafkaException(failed[left[0]])

        def is_of_new_topic(exception: KafkaException) -> bool:
            is_new = self._clock.monotonic() - self._changed_at.get(topic or "", -math.inf) < self._timeout
            return is_new and kafka_errors.is_unknown_topic(kafka_errors.error_of(exception))

        if left:
            try:
                kafka_errors.retrying(
                    ask, self._timeout, self._connection, also=is_of_new_topic, clock=self._clock
                )
            except KafkaException as exception:
                self._renew_after(admin, exception)
                error = kafka_errors.error_of(exception)
                raise kafka_errors.translated(error, doing.format(left[0]), self._connection) from exception
        return found


def _topic_info(name: str, topic: Any, config: dict[str, str]) -> TopicInfo:
    replication = min((len(p.replicas) for p in topic.partitions), default=0)
    behind = tuple(sorted(one.id for one in topic.partitions if len(one.isr) < len(one.replicas)))
    return TopicInfo(name, str(topic.topic_id), len(topic.partitions), replication, config, behind)
