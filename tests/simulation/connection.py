"""How a simulated process reaches the simulated broker, and the errors when it does not."""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kmqpy.errors import QueueNotFound
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import QueueTopics, TopicInfo

from .lanes import lane_topics
from .model import LANE_SUFFIXES, Broker, Group
from .world import Process, Steps

REQUEST_TIMEOUT_MS = 400.0


def timed_out() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT))


def no_topic() -> KafkaException:
    return KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))


class Connection:
    """What kmqpy's parts are given instead of addresses: the process they are in."""

    bootstrap = "broker"
    address = "broker:9092"
    root = "/kmq"
    timeout_s = 10.0
    kafka: Mapping[str, str] = MappingProxyType({})
    queue_topic = "q"
    markers_topic = "q__markers"

    def __init__(self, process: Process, broker: Broker, group: Group, zookeeper: Any) -> None:
        self.process = process
        self.world = process.world
        self.broker = broker
        self.group = group
        self.zookeeper = SimpleNamespace(hosts=zookeeper, security=None)

    def reach(self) -> Steps:
        """One way to a broker; raises when it can't be reached."""
        yield self.world.latency()
        if self.process.kafka_cut_until > self.world.now or self.world.unlucky():
            yield REQUEST_TIMEOUT_MS
            raise timed_out()

    def is_away(self) -> bool:
        """Whether Kafka does not answer a question about topics now."""
        world = self.world
        unlucky = world.faults and world.topics_rng.random() < world.error_rate
        return unlucky or self.process.kafka_cut_until > world.now

    def describe(self) -> dict[str, TopicInfo]:
        """The topics of the queue's lanes, as far as they exist, as some broker knows them."""
        number = self.broker.number_told()
        own = [topic for suffix in LANE_SUFFIXES for topic in lane_topics(self.queue_topic, suffix)]
        names = [name for name in own if (name, 0) in self.broker.logs and name not in self.broker.missing]
        return {name: TopicInfo(name, f"{name}-{number}", self.broker.partitions, 3) for name in names}

    def checked(self, lane: QueueSettings) -> QueueTopics:
        """Those of one lane, when they are to exist."""
        found = self.describe()
        if not {lane.name, lane.markers_topic} <= found.keys():
            raise QueueNotFound("there is no such topic")
        return QueueTopics(found[lane.name], found[lane.markers_topic], None)
