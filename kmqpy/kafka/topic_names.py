"""The names of a queue's four topics, and which of them two queues share. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kmqpy.kafka.settings import QueueSettings


def dead_letter_queue(queue: QueueSettings) -> QueueSettings:
    """The dead letters of `queue` as a queue of their own, with a markers topic."""
    return QueueSettings(
        name=queue.dead_letter_topic,
        redelivery_count_header=queue.redelivery_count_header,
        max_redeliveries=None,
    )


def topics_of(queue: QueueSettings) -> dict[str, str]:
    """The names of the queue's four topics, its own first, each with what it is to the queue."""
    dead = dead_letter_queue(queue)
    return {
        queue.name: "queue topic",
        queue.markers_topic: "markers topic",
        dead.name: "dead-letter topic",
        dead.markers_topic: "dead letters' markers topic",
    }


def markers_topics(queue: QueueSettings) -> dict[str, str]:
    """The names of the topics that hold messages of the queue, its own first, each with its markers topic."""
    dead = dead_letter_queue(queue)
    return {queue.name: queue.markers_topic, dead.name: dead.markers_topic}


@dataclass(frozen=True, slots=True)
class SharedTopic:
    """A topic of a queue (`role` says which) that is a topic of queue `other`, too (`role_there`)."""

    name: str
    role: str
    other: str
    role_there: str


def shared_topics(queue: QueueSettings, others: Iterable[QueueSettings]) -> list[SharedTopic]:
    """Return the topics that the queue shares with one of `others`, among which `queue` itself may be."""
    own = topics_of(queue)
    return [
        SharedTopic(name, own[name], other.name, role)
        for other in others
        if other.name != queue.name
        for name, role in topics_of(other).items()
        if name in own
    ]
