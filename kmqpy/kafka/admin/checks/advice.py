"""Texts for the advice of the doctor's checks: commands, settings of topics, durations."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from kmqpy.core.durations import DAY_MS
from kmqpy.kafka.settings import RETRY_SUFFIX, QueueSettings
from kmqpy.kafka.topics import TopicInfo
from kmqpy.queue_policy import RETRIES


def create_command(queue: QueueSettings, topics: Mapping[str, TopicInfo], omitted_topics: set[str]) -> str:
    """Return the command that creates this queue, with an option for each setting that is no default.

    Topics in `omitted_topics` are not named, so that the queue gets topics with the default names instead.
    """
    default = QueueSettings(name=queue.name)
    words = [f"kmq queue create {queue.name}"]
    if queue.name in topics:
        words.append(f"--partitions {topics[queue.name].partitions}")
    if (retention := config_number(topics.get(queue.name), "retention.ms")) is not None and retention != -1:
        words.append(f"--retention {duration_text(retention)}")
    given = dataclasses.asdict(queue)
    options: dict[str, Callable[[Any], str]] = {
        "max_redeliveries": lambda limit: "none" if limit is None else str(limit),
        **dict.fromkeys(("lease_ms", "max_delay_ms", "max_lease_ms"), duration_text),
    }
    names = ("markers_topic", "dead_letter_topic", "consumer_group", "redelivery_count_header", "markers")
    options |= dict.fromkeys(names, shlex.quote) | {"priorities": str}
    words += [
        f"--{key.removesuffix('_ms').replace('_', '-')} {shown(given[key])}"
        for key, shown in options.items()
        if given[key] != getattr(default, key) and given[key] not in omitted_topics
    ]
    words += [f"--{key.replace('_', '-')}" for key in ("late_acks", "collapse", "retry_lane") if given[key]]
    words += [
        set_option(key, given[key]) for key in ("lane_share", *RETRIES) if given[key] != getattr(default, key)
    ]
    return " ".join(words)


def set_option(key: str, value: Any) -> str:
    """Return the option of `kmq queue create` and `alter` for a setting that has none of its own."""
    return f"--set {key}={','.join(value) if isinstance(value, tuple) else value}"


def option_of_lane(topic: str) -> str:
    """Return the option of `kmq queue alter` that adds the lane with this topic."""
    return "--retry-lane" if topic.endswith(RETRY_SUFFIX) else f"--priorities {int(topic[-1]) + 1}"


def grow_command(queue: QueueSettings, partitions: int) -> str:
    """Return the command that gives the queue this many partitions."""
    return f"`kmq queue alter {queue.name} --partitions {partitions}`"


def set_advice(key: str, value: object, topic: str) -> str:
    """Return advice to change a setting of a topic, in the form that `Finding` describes."""
    return f"set {key}={value} on {topic}"


def config_number(topic: TopicInfo | None, key: str) -> int | None:
    """A topic's setting as a number; None where the topic is missing, or Kafka does not tell the setting."""
    text = "" if topic is None else topic.config.get(key, "")
    return int(text) if text.lstrip("-").isdigit() else None


def duration_text(ms: int) -> str:
    """A duration as commands of `kmq` take it, such as 14d; `ever` for Kafka's -1."""
    if ms == -1:
        return "ever"
    for unit, size in (("d", DAY_MS), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms and ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


def has_client_timestamps(topic: TopicInfo | None) -> bool:
    """True if clients, not brokers, set the timestamps of the topic's records."""
    config = {} if topic is None else topic.config
    return config.get("message.timestamp.type", "LogAppendTime") != "LogAppendTime"
