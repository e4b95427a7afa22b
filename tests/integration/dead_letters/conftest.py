"""A queue of topics of its own for each test, and its dead letters."""

from collections.abc import Iterator
from typing import Any

import pytest
from letters_support import PARTITIONS

from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics


@pytest.fixture
def connection(cluster: Any) -> KafkaConnection:
    return KafkaConnection(bootstrap=cluster.bootstrap)


@pytest.fixture
def queue(connection: KafkaConnection, queue_name: str) -> QueueSettings:
    settings = QueueSettings(name=queue_name)
    Topics(connection).create(settings, PARTITIONS)
    return settings


@pytest.fixture
def letters(connection: KafkaConnection, queue: QueueSettings) -> Iterator[KafkaDeadLetters]:
    with KafkaDeadLetters(queue, connection) as opened:
        yield opened
