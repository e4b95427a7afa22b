"""docs/coming-from.md: the names of ours are names of the code, and those of others are known to errors."""

import inspect
import re
from pathlib import Path

import pytest

from kmqpy import KmqClient, Message, Queue, QueueSettings, Retry, Worker
from kmqpy.core import foreign_names
from kmqpy.kafka.client.client_options import ClientOptions
from kmqpy.kafka.storage import KafkaStorage
from kmqpy.queue import Capabilities, DeadLetters, Storage, storage_for
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.sql.opening import SETTINGS as SQL_SETTINGS
from tracker.settings import TrackerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and " here |" not in line
]
OURS = " ".join(here for _, here in ROWS)
FOREIGN = [
    "VisibilityTimeout",
    "maxReceiveCount",
    "DelaySeconds",
    "MessageRetentionPeriod",
    "task_acks_late",
    "visibility_timeout",
    "max_retries",
    "countdown",
    "msgTopic",
    "markerTopic",
    "deadLetterTopic",
    "msgConsumerGroupId",
    "msgTimeoutMs",
    "maxRedeliveryCount",
    "no_ack",
    "consumer_timeout",
    "ephemeralDisabled",
    "ttl",
    "useNowForRedeliverDespiteNoMarkerSeenForMs",
]
_ARGUMENTS = re.compile(r"`?(\w+)\([^)`]*?([a-z_]+)=")


def names_of(*classes):
    return {name for one in classes for name in dir(one)}


def test_the_calls_exist():
    calls = set(re.findall(r"`(?:queue\.|message\.|dead_letters\.|storage\.)?([a-z_]+)\(", OURS))
    assert calls >= {"receive", "extend", "nack", "redrive", "orphans", "purge"}
    assert calls <= names_of(Queue, KmqClient, DeadLetters, Storage, Message)


@pytest.mark.parametrize(("called", "argument"), sorted(set(_ARGUMENTS.findall(OURS))))
def test_the_arguments_exist(called, argument):
    function = next(
        found
        for found in (
            {"Worker": Worker, "Retry": Retry, "QueueSettings": QueueSettings}.get(called),
            *(getattr(one, called, None) for one in (KmqClient, Queue, DeadLetters, Storage)),
        )
        if found is not None
    )
    assert (
        argument in inspect.signature(function).parameters or argument in QueueSettings.__dataclass_fields__
    )


def test_the_settings_exist():
    settings = set(re.findall(r"`([a-z]+_[a-z_]+)(?:=[^`]*)?`", OURS))
    known = names_of(Message, Queue, KmqClient, Storage, KafkaStorage, DeadLetters) | {
        *StoredQueueSettings.__dataclass_fields__,
        *QueueSettings.__dataclass_fields__,
        *TrackerSettings.__dataclass_fields__,
        *Message.__dataclass_fields__,
        *inspect.signature(Worker).parameters,
        *inspect.signature(KafkaStorage.alter).parameters,
        *ClientOptions.__annotations__,
        *Capabilities.__dataclass_fields__,
        *SQL_SETTINGS,
        storage_for.__name__,
    }
    assert settings - known == set()


@pytest.mark.parametrize("name", FOREIGN)
def test_names_of_the_page_are_known_to_errors(name):
    assert name in PAGE
    assert foreign_names._bare(name) in foreign_names._BY_NAME
