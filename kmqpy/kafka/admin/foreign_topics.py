"""Finds topics that a new queue would take over although somebody else uses them."""

from __future__ import annotations

from kmqpy.errors import ConfigError
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.settings_mirror import SettingsMirror
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import Topics

_ADVICE = "with adopt=True it becomes this queue's, with all that it holds; else choose other names"


def refuse_foreign_topics(queue: QueueSettings, topics: Topics, mirror: SettingsMirror) -> None:
    """Raise ConfigError if a topic of the new queue has had records, or a queue of another root uses it.

    kmq.queues names the queues of other ZooKeeper roots; it is read only if there is such a topic. Accepts
    topics that never had a record: an interrupted creation leaves such topics, and some brokers create topics
    by themselves.
    """
    found = topics.describe(list(topics_of(queue)))
    records = mirror.records() if found else None
    for other in () if records is None else records.others:
        for name in found.keys() & topics_of(other).keys():
            raise ConfigError(
                f"queue: topic {name!r} is one of queue {other.name!r} of another ZooKeeper root; {_ADVICE}"
            )
    for name, one in found.items():
        if any(end > 0 for _, end in topics.offsets(name, range(one.partitions)).values()):
            raise ConfigError(f"queue: topic {name!r} is there already and has had records; {_ADVICE}")
