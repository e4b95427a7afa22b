"""Dead letters whose log is cut back, as by a power cut (rule R39). On a Kafka of this file's own.

A redrive has moved dead letters whose offsets new ones have now.
"""

from collections.abc import Iterator

import pytest
from letters_support import id_of, tracker_headers

from kmqpy.dev import Cluster
from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import cut_logs

COUNT = 12
CUT_AT = 6
NEW = {"old": 0, "new": 100}
"""What is added to the numbers of dead letters in their ids."""
QUEUES = ("redriven", "purged", "elected")
pytestmark = pytest.mark.breadth


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        connection = KafkaConnection(bootstrap=made.bootstrap)
        for name in QUEUES:
            queue = QueueSettings(name=name)
            Topics(connection).create(queue, 1)
            bury_one_by_one(connection, queue, "old", COUNT)
            with KafkaDeadLetters(queue, connection) as letters:
                assert letters.redrive([id_of(number) for number in (1, 2, *range(5, COUNT))]) == COUNT - 3
        keep = {(QueueSettings(name=name).dead_letter_topic, 0): CUT_AT for name in QUEUES}
        keep["elected__undelivered", 0] = COUNT
        cut_logs(made, keep)
        for name in QUEUES:
            bury_one_by_one(connection, QueueSettings(name=name), "new", COUNT)
        yield made


def bury_one_by_one(connection: KafkaConnection, queue: QueueSettings, kind: str, count: int) -> None:
    """Write dead letters in batches of their own, between which a log can be cut."""
    producer = librdkafka.new_producer(connection, {})
    for number in range(count):
        body, headers = f"{kind}{number}".encode(), tracker_headers(queue, number + NEW[kind])
        producer.produce(queue.dead_letter_topic, body, partition=0, headers=headers)
        assert producer.flush(60) == 0


def texts(letters: KafkaDeadLetters) -> list[str]:
    return [letter.body.decode() for letter in letters.peek()]


WAITING = ["old0", "old3", "old4", *(f"new{number}" for number in range(COUNT))]


def opened(cluster: Cluster, name: str) -> KafkaDeadLetters:
    return KafkaDeadLetters(QueueSettings(name=name), KafkaConnection(bootstrap=cluster.bootstrap))


def test_r39_new_dead_letters_wait_at_the_offsets_of_old_ones(cluster: Cluster, caplog) -> None:
    with opened(cluster, "redriven") as letters:
        assert texts(letters) == WAITING
        assert "the log of the dead letters was cut back" in caplog.text
        admin = Admin(
            KafkaConnection(bootstrap=cluster.bootstrap), ZooKeeperConnection(hosts=cluster.zookeeper)
        )
        assert admin.stats(QueueSettings(name="redriven")).dead_letters == len(WAITING)
        assert letters.redrive([id_of(3), id_of(NEW["new"] + 1), id_of(NEW["new"] + 3)]) == 3  # tells the cut
        caplog.clear()
        assert texts(letters) == [one for one in WAITING if one not in ("old3", "new1", "new3")]
        assert "cut back" not in caplog.text
        assert letters.redrive() == len(WAITING) - 3
        assert texts(letters) == []


def test_r39_a_purge_drops_them_all(cluster: Cluster) -> None:
    with opened(cluster, "purged") as letters:
        assert letters.purge() == len(WAITING)
        assert texts(letters) == []


def test_r39_an_election_alone_finishes_no_dead_letter_twice(cluster: Cluster, caplog) -> None:
    with opened(cluster, "elected") as letters:
        assert texts(letters) == WAITING
        assert "cut back" not in caplog.text
