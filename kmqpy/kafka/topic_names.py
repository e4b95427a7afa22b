"""Names the topics of a queue, refuses reserved names, finds topics that two queues share. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kmqpy.errors import ConfigError
from kmqpy.kafka.settings import DEAD_LETTERS_SUFFIX, MARKERS_SUFFIX, QueueSettings


def check_new_queue_name(name: str) -> None:
    """Raise ConfigError if `name` ends like the name of a markers topic or a dead-letter topic.

    Only new queues are checked. Existing queues may have such names, so QueueSettings accepts them.
    """
    for suffix in (MARKERS_SUFFIX, DEAD_LETTERS_SUFFIX):
        if name.endswith(suffix):
            raise ConfigError(
                f"name: {name!r} is that of another topic of queue {name.removesuffix(suffix)!r}; "
                f"choose a name that does not end in {suffix}"
            )


def dead_letter_queue(queue: QueueSettings) -> QueueSettings:
    """The settings of the queue that the dead letters of `queue` form; the dead-letter topic is its topic."""
    return QueueSettings(
        name=queue.dead_letter_topic,
        redelivery_count_header=queue.redelivery_count_header,
        markers=queue.markers,
        max_redeliveries=None,
    )


def topics_of(queue: QueueSettings) -> dict[str, str]:
    """The queue's topics by name, the queue topic first; each value says what the topic is for."""
    dead = dead_letter_queue(queue)
    topics = {
        queue.name: "queue topic",
        queue.markers_topic: "markers topic",
        dead.name: "dead-letter topic",
        dead.markers_topic: "dead letters' markers topic",
    }
    for lane in queue.lanes()[:-1]:
        topics |= {lane.name: "lane", lane.markers_topic: "markers topic of a lane"}
    return topics


def markers_topics(queue: QueueSettings) -> dict[str, str]:
    """The queue topic, the dead-letter topic and the lanes, in this order, each with its markers topic."""
    dead = dead_letter_queue(queue)
    lanes = {lane.name: lane.markers_topic for lane in queue.lanes()[:-1]}
    return {queue.name: queue.markers_topic, dead.name: dead.markers_topic, **lanes}


@dataclass(frozen=True, slots=True)
class SharedTopic:
    """A topic that two queues have: it is the `role` of one queue, and the `role_there` of queue `other`."""

    name: str
    role: str
    other: str
    role_there: str


def shared_topics(queue: QueueSettings, others: Iterable[QueueSettings]) -> list[SharedTopic]:
    """Return the topics that `queue` shares with queues of `others`, which may contain `queue` itself."""
    own = topics_of(queue)
    return [
        SharedTopic(name, own[name], other.name, role)
        for other in others
        if other.queue_name != queue.queue_name
        for name, role in topics_of(other).items()
        if name in own
    ]


def check_topics(settings: QueueSettings, others: Iterable[QueueSettings]) -> None:
    """Raise ConfigError unless the queue has four different topics that no other queue uses.

    A marker names only a partition and an offset: in one topic, nobody could tell the markers of two queues
    apart.
    """
    if len(topics_of(settings)) < 4:
        raise ConfigError(
            f"markers_topic: {settings.markers_topic!r} is that of the dead letters; choose another name"
        )
    for shared in shared_topics(settings, others):
        fields = {"queue topic": "name", "markers topic": "markers_topic"}
        field = fields.get(shared.role, "dead_letter_topic")
        raise ConfigError(
            f"{field}: {shared.name!r} is the {shared.role_there} of queue {shared.other!r}; "
            "each queue needs topics of its own"
        )
