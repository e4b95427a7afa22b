"""Holds and checks the settings of a queue on Kafka and of the connection to Kafka.

Also reads the settings of the connections to Kafka and ZooKeeper from the config file and the environment.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from kmqpy.core.durations import MIN_LEASE_MS
from kmqpy.core.environment import config_file, from_environment, unknown_variables
from kmqpy.core.settings import (
    build,
    check_addresses,
    check_limit,
    convert,
    flat,
    json_object,
    keys,
    refuse_unknown,
    with_default_port,
)
from kmqpy.errors import ConfigError, shown
from kmqpy.queue_policy import LEASES, RETRIES, QueuePolicy
from kmqpy.zookeeper.settings import ZooKeeperConnection

_log = logging.getLogger(__name__)

KafkaSettings = Mapping[str, Any]
"""Settings of librdkafka by librdkafka's names; handed on unchanged."""
CLOCK_LEAD_MS = 5_000
"""Milliseconds by which a timestamp may be ahead of the broker's clock, by default. Trackers replace a later
timestamp by this bound (rule R23 of docs/rules.md)."""
MARKERS_SUFFIX = "__markers"
DEAD_LETTERS_SUFFIX = "__undelivered"
"""Default endings of the names of a queue's markers topic and dead-letter topic."""
RETRY_SUFFIX = "__retry"
PRIORITY_SUFFIX = "__priority"
"""Endings of the names of a queue's other lanes; a number follows the second one."""
MAX_PRIORITIES = 10
"""The most priorities of a queue: send() knows those from 0 to 9."""
LANE_SUFFIXES = (RETRY_SUFFIX, *(f"{PRIORITY_SUFFIX}{level}" for level in range(MAX_PRIORITIES - 1, 0, -1)))
"""The endings of the lanes but the main one, in the order in which clients take from them."""
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SECRET_NAME = re.compile(
    r"pass(word|phrase)|secret|token|sasl\.jaas|\.key$|key\.pem|api_key|oauthbearer\.config", re.IGNORECASE
)
OTHER_TABLES = ("tracker", "gateway")
"""Tables of the config file that hold no settings of connections."""
MARKER_FORMATS = ("range", "jvm")
"""The formats of markers: kmqpy's own, one marker for many messages, and that of the JVM library kmq, one
for each message. kmqpy reads both, mixed in one topic; programs on the JVM read theirs only."""
_FORMER_SETTINGS = ("claims",)
"""Settings of queues that earlier versions stored, ignored where they are read."""
SETTINGS_TOPIC = "kmq.queues"
"""The topic that tells clients the settings of all queues; see kmqpy.kafka.settings_mirror."""


@dataclass(frozen=True, kw_only=True)
class QueueSettings(QueuePolicy):
    """The settings of a queue on Kafka: its policy, topics, group and header, how its markers are written.

    Names that are left empty follow the queue's name: `<queue>__markers`, `<queue>__undelivered`, group
    `kmq-<queue>`. The registry in ZooKeeper and the topic kmq.queues hold the settings as JSON.

    A client completes the settings that it is given from the stored ones. It raises ConfigError if both have
    a value and the values differ. Settings that were read from the store are complete.

    Args:
        name: Of the queue and its topic.
        max_redeliveries: As in QueuePolicy.
        lease_ms: As in QueuePolicy.
        max_delay_ms: As in QueuePolicy.
        max_lease_ms: As in QueuePolicy.
        retry_delays: As in QueuePolicy.
        retry_max_ms: As in QueuePolicy.
        retry_jitter: As in QueuePolicy.
        markers_topic: Empty: `<queue>__markers`.
        dead_letter_topic: Empty: `<queue>__undelivered`.
        consumer_group: Empty: `kmq-<queue>`.
        redelivery_count_header: The header in which copies carry their number of redeliveries.
        markers: The format in which kmqpy writes the queue's markers. "range": one marker for many messages,
            several times as fast. "jvm": that of the JVM library kmq, whose trackers can read no other. Who
            finds no stored settings writes JVM markers unless told otherwise, because a program on the JVM
            may own a queue that nobody registered.
        late_acks: A client that takes a copy (a message that a tracker has appended again) hands it out only
            if nobody acknowledged or rejected the message after it was copied, and no lease or delay that
            somebody gave it after that still runs (rule R32 of docs/rules.md). Trackers of versions without
            late acks refuse such a queue; clients of these versions hand such copies out.
        collapse: Of equal messages that wait in one partition, clients hand out the first one and end the
            others (see kmqpy.kafka.client.collapsing); senders put equal messages into one partition. It
            can't be altered.
        retry_lane: Copies go to a topic of their own, the *retry lane*, which clients read first: so they do
            not stand behind the messages that wait.
        priorities: How many priorities the queue has: each above 0 has a topic of its own, its lane.
        lane_share: The part of a batch that a higher lane gets while lower lanes have messages. Clients take
            it when they are made.
        draining_lanes: The endings of lanes that are being removed ("retry", "priority1"): clients still take
            from them, and nobody writes to them.
    """

    markers_topic: str = ""
    dead_letter_topic: str = ""
    consumer_group: str = ""
    redelivery_count_header: str = "kmq-redelivery-count"
    markers: str = "range"
    late_acks: bool = False
    collapse: bool = False
    retry_lane: bool = False
    priorities: int = 1
    lane_share: float = 0.75
    draining_lanes: tuple[str, ...] = ()

    def __new__(cls, *_: Any, **given: Any) -> Self:  # noqa: D102
        made = super().__new__(cls)
        # Not a field, so that settings are equal whether a value was given or is the default.
        object.__setattr__(
            made, "_given_fields", frozenset(name for name, value in given.items() if value != "")
        )
        return made

    def __post_init__(self) -> None:
        check_topic_name(self.name, "name")
        derived = {
            "markers_topic": f"{self.name}{MARKERS_SUFFIX}",
            "dead_letter_topic": f"{self.name}{DEAD_LETTERS_SUFFIX}",
            "consumer_group": f"kmq-{self.name}",
        }
        for key, default in derived.items():
            if not getattr(self, key):
                object.__setattr__(self, key, default)
        for key in ("name", "markers_topic", "dead_letter_topic"):
            check_topic_name(getattr(self, key), key)
            if getattr(self, key) == SETTINGS_TOPIC:
                raise ConfigError(
                    f"{key}: {SETTINGS_TOPIC} is the topic of all queues' settings; choose another"
                )
        if len({self.name, self.markers_topic, self.dead_letter_topic}) < 3:
            raise ConfigError(f"queue {self.name!r}: its three topics must have different names")
        if not self.redelivery_count_header:
            raise ConfigError("redelivery_count_header: must not be empty")
        for key in ("consumer_group", "redelivery_count_header"):
            if not getattr(self, key).isprintable():
                raise ConfigError(f"{key}: {getattr(self, key)!r} can't be printed")
        if self.markers not in MARKER_FORMATS:
            raise ConfigError(f"markers: {shown(self.markers)} is neither 'range' nor 'jvm'")
        if not 1 <= check_limit(self.priorities, "priorities") <= MAX_PRIORITIES:
            raise ConfigError(f"priorities: {self.priorities} is not from 1 to {MAX_PRIORITIES}")
        if not (isinstance(self.lane_share, int | float) and 0 < self.lane_share < 1):
            raise ConfigError(f"lane_share: {shown(self.lane_share)} is not between 0 and 1")
        object.__setattr__(self, "draining_lanes", tuple(self.draining_lanes))
        if unknown := {f"__{ending}" for ending in self.draining_lanes}.difference(LANE_SUFFIXES):
            raise ConfigError(f"draining_lanes: {shown(min(unknown)[2:])} is not a lane")
        if self.has_lanes and self.collapse:
            raise ConfigError("collapse: not in a queue with lanes; leave out retry_lane and priorities")
        if self.has_lanes and self.markers == "jvm":
            raise ConfigError(
                "markers: a queue with lanes needs 'range', since trackers on the JVM see one lane"
            )
        super().__post_init__()

    @property
    def given_fields(self) -> frozenset[str] | None:
        """The fields that the constructor was given, unless as ""; None in settings read from the store."""
        given: frozenset[str] | None = self.__dict__["_given_fields"]
        return given

    @property
    def topic_ids(self) -> Mapping[str, str]:
        """The ids of the queue's topics, by name, as kmq.queues has them (rule R24); empty if not known.

        Like `given_fields`, they do not count when settings are compared or stored.
        """
        ids: Mapping[str, str] = self.__dict__.get("_topic_ids", {})
        return ids

    @property
    def has_lanes(self) -> bool:
        """True if the queue has more than its main lane."""
        return self.retry_lane or self.priorities > 1 or bool(self.draining_lanes)

    @property
    def lane_of(self) -> str | None:
        """In settings that lanes() returns, except those of the main lane: the name of the queue."""
        return self.__dict__.get("_lane_of")

    @property
    def queue_name(self) -> str:
        """The name of the queue, even in the settings of a lane, where `name` is that of the lane's topic."""
        return self.lane_of or self.name

    @property
    def lane_ending(self) -> str:
        """Of a lane's settings: "retry" or "priority1" and so on; "" for the main lane."""
        return "" if self.lane_of in (None, self.name) else self.name.removeprefix(f"{self.lane_of}__")

    @property
    def copies_topic(self) -> str:
        """The topic to which trackers append copies of this lane's messages."""
        return f"{self.queue_name}{RETRY_SUFFIX}" if self.retry_lane else self.name

    def lanes(self) -> tuple[QueueSettings, ...]:
        """The lanes of this queue in the order in which clients take from them; the last is the main lane.

        A *lane* is a queue topic with its markers topic, and as many partitions as the others. Trackers serve
        each like a queue of its own. The lanes share limits, dead letters and the consumer group. The main
        lane is what a queue without lanes consists of, and has these settings.
        """
        if self.lane_of is not None:
            return (self,)
        return (*map(self._lane, self._lane_suffixes()), self)

    def lanes_apart(self) -> tuple[QueueSettings, ...]:
        """Like lanes(), for what reads one of them; also the main lane has no others beside it here."""
        main = self.as_lane_of(self.name, self.markers_topic)
        object.__setattr__(main, "_given_fields", None)
        return (*self.lanes()[:-1], main)

    @property
    def main_markers_topic(self) -> str:
        """The markers topic of the main lane, even in the settings of another lane."""
        return str(self.__dict__.get("_main_markers", self.markers_topic))

    @property
    def lane_markers(self) -> dict[str, str]:
        """The markers topics of all lanes of the queue by their names; also in the settings of a lane."""
        names = [f"{self.queue_name}{suffix}" for suffix in self._lane_suffixes()]
        there = {name: f"{name}{MARKERS_SUFFIX}" for name in names}
        return {**there, self.queue_name: self.main_markers_topic, self.name: self.markers_topic}

    def _lane_suffixes(self) -> list[str]:
        there = [RETRY_SUFFIX] if self.retry_lane else []
        there += [f"{PRIORITY_SUFFIX}{level}" for level in range(1, self.priorities)]
        there += [f"__{ending}" for ending in self.draining_lanes]
        return [suffix for suffix in LANE_SUFFIXES if suffix in there]

    @property
    def lane_names(self) -> list[str]:
        """The names of the topics of lanes()."""
        return [lane.name for lane in self.lanes()]

    def possible_lanes(self) -> list[str]:
        """The topics of the lanes that a client of this queue looks for, those that it has among them.

        Lanes are added in order: so of the priorities that the queue lacks, one is enough.
        """
        if self.lane_of is not None:
            return []
        names = {f"{self.name}{RETRY_SUFFIX}", *(lane.name for lane in self.lanes()[:-1])}
        if self.priorities < MAX_PRIORITIES:
            names.add(f"{self.name}{PRIORITY_SUFFIX}{self.priorities}")
        return sorted(names)

    def priority_lane(self, priority: int) -> QueueSettings:
        """The lane of messages with this priority; the highest of the queue, if it has fewer priorities.

        Args:
            priority: 0 to 9.
        """
        level = min(priority, self.priorities - 1)
        return self._lane(f"{PRIORITY_SUFFIX}{level}") if level else self

    def _lane(self, suffix: str) -> QueueSettings:
        name = f"{self.name}{suffix}"
        lane = dataclasses.replace(self, name=name, markers_topic=f"{name}{MARKERS_SUFFIX}")
        object.__setattr__(lane, "_given_fields", None)
        return lane.as_lane_of(self.name, self.markers_topic)

    def as_lane_of(self, queue: str, main_markers: str = "") -> QueueSettings:
        """Return these settings as those of a lane of this queue.

        Args:
            queue: The queue's name.
            main_markers: The markers topic of the main lane; empty: the default name.

        Raises:
            ConfigError: The name is not that of a lane of the queue.
        """
        if queue_of(self.name) != queue:
            raise ConfigError(f"lane_of: {self.name!r} is not a lane of queue {shown(queue)}")
        lane = copy.copy(self)
        object.__setattr__(lane, "_lane_of", queue)
        object.__setattr__(lane, "_main_markers", main_markers or f"{queue}{MARKERS_SUFFIX}")
        return lane

    @property
    def writes_ranges(self) -> bool:
        """True if kmqpy writes range markers for this queue; everything that writes markers asks this."""
        return self.markers == "range"

    def unregistered(self) -> QueueSettings:
        """Return these settings for a queue of which nothing is stored: JVM markers, if none were given.

        A queue with lanes has ranges.
        """
        if self.given_fields is None or "markers" in self.given_fields or self.has_lanes:
            return self
        told = copy.copy(self)
        object.__setattr__(told, "markers", "jvm")
        return told

    def with_topic_ids(self, ids: Mapping[str, str]) -> QueueSettings:
        """Return a copy of these settings that holds these topic ids.

        Args:
            ids: By name of the topic.
        """
        told = copy.copy(self)
        object.__setattr__(told, "_topic_ids", dict(ids))
        return told

    def to_json(self) -> bytes:
        """The registry's form; what is off is left out, for versions that don't know it.

        Trackers of such a version refuse a queue in which it is on.
        """
        values = {
            key: value
            for key, value in dataclasses.asdict(self).items()
            if (value or key not in ("late_acks", "collapse", "retry_lane", "draining_lanes", *RETRIES))
            and (key, value) not in (("priorities", 1), ("lane_share", type(self).lane_share))
        }
        return json.dumps(values, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes, *, newer: bool = False) -> QueueSettings:
        """The reverse of to_json().

        Args:
            data: Bytes of the store.
            newer: Ignore settings of newer versions.

        Raises:
            ConfigError: They are not settings.
        """
        values = json_object(data, "queue settings")
        if newer:
            values = {key: value for key, value in values.items() if key in cls.__dataclass_fields__}
        return cls.stored(values)

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> QueueSettings:
        """Settings as they are stored in the registry.

        Without `markers`, the queue has JVM markers: whoever stored the settings may know no others. Leases
        below 100 ms, which earlier versions allowed, become 100 ms, and settings of earlier versions that no
        longer exist are ignored, because registered queues must be served.

        Args:
            values: Settings by name; what is left out gets the default.

        Raises:
            ConfigError: An argument or setting is invalid.
        """
        values = {
            "markers": "jvm",
            **{key: value for key, value in values.items() if key not in _FORMER_SETTINGS},
        }
        leases = {key: convert(key, values[key], int) for key in LEASES if key in values}
        least = {key: MIN_LEASE_MS for key, value in leases.items() if 0 <= value < MIN_LEASE_MS}
        read = build(cls, values, least)
        object.__setattr__(read, "_given_fields", None)
        return read


_ALL = ("all", "-1")
_OF_KMQPY: Mapping[str, tuple[str, ...]] = {
    "acks": _ALL,
    "request.required.acks": _ALL,
    "enable.idempotence": ("true",),
    "check.crcs": ("true",),
    "enable.auto.commit": ("false",),
    "auto.offset.reset": (),
    "allow.auto.create.topics": ("false",),
    "isolation.level": (),
    "group.id": (),
    "group.instance.id": (),
    "partition.assignment.strategy": ("cooperative-sticky",),
    "transactional.id": (),
    "default.topic.config": (),
}
"""Settings of librdkafka that promises depend on, and the values that do no harm."""
_LITERALS = {"1": "true", "t": "true", "0": "false", "f": "false"}
"""How librdkafka spells truth, too."""


@dataclass(frozen=True, kw_only=True)
class KafkaConnection:
    """Where Kafka is, and how a client connects to Kafka and finds the settings of queues.

    Args:
        bootstrap: `host:port[,host:port]`.
        root: The namespace of the queues: the znode under which kmqpy keeps everything. The root is a field
            of this class, not of ZooKeeperConnection, because clients without ZooKeeper need it to find a
            queue's settings in the topic kmq.queues.
        timeout_ms: For how long a call is tried, opening included, before it raises Unavailable; a send has a
            limit of its own, KmqClient's `delivery_timeout`.
        kafka: Settings of librdkafka (security and the like), handed on unchanged. Those that
            promises depend on, like acks and group.id, raise ConfigError.
    """

    bootstrap: str = "127.0.0.1:9092"
    root: str = "/kmq"
    timeout_ms: int = 10_000
    kafka: KafkaSettings = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.bootstrap.strip(" ,"):
            raise ConfigError("bootstrap: must not be empty; name a broker, for example host:9092")
        check_addresses(self.bootstrap, "bootstrap", "host:9092")
        if not self.root.startswith("/") or self.root.endswith("/"):
            raise ConfigError(f"root: {self.root!r} must start with / and not end with it")
        if not 1 <= self.timeout_ms < 2**31:
            raise ConfigError(f"timeout_ms: {self.timeout_ms} is not from 1 to {2**31 - 1}")
        for name, value in self.kafka.items():
            known = _OF_KMQPY.get(name.removeprefix("topic."))
            text = str(value).lower()
            if known is not None and _LITERALS.get(text, text) not in known:
                instead = ", or give clients an instance_id" if name == "group.instance.id" else ""
                raise ConfigError(
                    f"kafka: kmqpy sets {name} itself, as its promises need it, and not {value!r}; leave it "
                    f"out{instead}"
                )

    def __repr__(self) -> str:
        return (
            f"KafkaConnection(bootstrap={self.bootstrap!r}, root={self.root!r}, "
            f"kafka={redacted(self.kafka)!r})"
        )

    @classmethod
    def from_environment(cls) -> KafkaConnection:
        """Build the settings from the file KMQ_CONFIG; variables of the environment override the file.

        The variables are KMQ_BOOTSTRAP and KMQ_ROOT, as `kmq dev up` prints them, and KMQ_KAFKA_… for each
        setting of librdkafka, with `_` for each dot (KMQ_KAFKA_SASL_PASSWORD).

        Raises:
            ConfigError: For bad values and for an unknown key in the file.
        """
        return build_connections(*connection_layers())[0]

    @property
    def timeout_s(self) -> float:
        """`timeout_ms` in seconds."""
        return self.timeout_ms / 1000

    @property
    def address(self) -> str:
        """`bootstrap` for error texts: each address with its port, 9092 where none is given."""
        return with_default_port(self.bootstrap, 9092)

    def kafka_settings(self, defaults: KafkaSettings) -> dict[str, Any]:
        """Settings for a librdkafka client: `defaults`, overridden by the settings in `kafka`.

        Args:
            defaults: Settings of librdkafka.
        """
        return {**defaults, **self.kafka, "bootstrap.servers": self.bootstrap}


def check_connection(value: object) -> KafkaConnection:
    """Return `value`; raises ConfigError if it is no KafkaConnection, but an address as text for example."""
    if hasattr(value, "bootstrap"):  # so that tests can give objects of their own classes
        return typing.cast("KafkaConnection", value)
    shown = repr(value) if isinstance(value, str) else f"an object of type {type(value).__name__}"
    raise ConfigError(
        f"connection: {shown} is not a KafkaConnection; "
        "write it as KafkaConnection(bootstrap='host:9092'), or KafkaConnection.from_environment()"
    )


def is_topic_name(name: object) -> bool:
    """Return True if Kafka accepts `name` as the name of a topic."""
    return isinstance(name, str) and _TOPIC_NAME.fullmatch(name) is not None and name not in {".", ".."}


def queue_of(name: str) -> str:
    """The name of the queue of which a topic of this name would be a lane; without such an ending, `name`."""
    return next((name.removesuffix(one) for one in LANE_SUFFIXES if name.endswith(one)), name)


def check_topic_name(name: str, field_name: str) -> None:
    """Raise ConfigError unless Kafka accepts `name` as the name of a topic."""
    if not is_topic_name(name):
        raise ConfigError(f"{field_name}: invalid topic name {name!r}: use 1 to 249 of a-z A-Z 0-9 . _ -")


def connection_layers() -> tuple[dict[str, Any], dict[str, Any]]:
    """The connection settings in the file KMQ_CONFIG and those in the environment; raises ConfigError."""
    file = {key: value for key, value in config_file().items() if key not in OTHER_TABLES}
    return file, connections_in_environment()


_OTHER_VARIABLES = ("KMQ_CONFIG", "KMQ_QUEUE_URL", "KMQ_CACHE", "KMQ_AWS_KEY", "KMQ_API_KEY")
_OTHER_PREFIXES = (*(f"KMQ_{table.upper()}_" for table in OTHER_TABLES), "KMQ_TEST_")
_logged_unknown: set[str] = set()


def unknown_in_environment() -> dict[str, str]:
    """The `KMQ_…` variables that kmqpy does not read, each with `; did you mean …?` or an empty text."""
    return unknown_variables(
        os.environ, [KafkaConnection, ZooKeeperConnection], _OTHER_VARIABLES, _OTHER_PREFIXES
    )


def connections_in_environment() -> dict[str, Any]:
    """The connection settings in the environment, by key; logs each unknown variable once."""
    for name, hint in unknown_in_environment().items():
        if name not in _logged_unknown:
            _logged_unknown.add(name)
            _log.warning("%s in the environment is unknown%s", name, hint)
    return {
        **from_environment(KafkaConnection, os.environ),
        **from_environment(ZooKeeperConnection, os.environ),
    }


def build_connections(*layers: Mapping[str, Any]) -> tuple[KafkaConnection, ZooKeeperConnection]:
    """Build both connections from `layers`, each of which may have values for both; see build().

    Raises ConfigError for an unknown key or a bad value.
    """
    ours, zookeepers = keys(KafkaConnection), keys(ZooKeeperConnection)
    for layer in layers:
        refuse_unknown(layer, [*ours, *zookeepers])
    return (
        build(KafkaConnection, *({key: layer[key] for key in layer if key in ours} for layer in layers)),
        build(
            ZooKeeperConnection,
            *({key: layer[key] for key in layer if key in zookeepers} for layer in layers),
        ),
    )


def is_secret(name: str) -> bool:
    """Return True if the value of this setting (of librdkafka or ZooKeeper) must not be printed."""
    return _SECRET_NAME.search(name) is not None


def redacted(settings: KafkaSettings) -> dict[str, Any]:
    """A copy of `settings` that can be printed: each secret is `***`."""
    return {key: "***" if is_secret(key) else value for key, value in flat(settings).items()}
