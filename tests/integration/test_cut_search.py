"""Whether a log was cut back, and where: on a broker whose logs are cut."""

from collections.abc import Iterator
from functools import partial

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from kmqpy.core.clock import wait_until
from kmqpy.dev import Cluster
from kmqpy.errors import TopicError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.cut_search import find_cut
from kmqpy.kafka.markers.log_cuts import Cut
from kmqpy.kafka.settings import KafkaConnection
from tests.cut_logs import cut_logs

TOPIC = "cut"
pytestmark = pytest.mark.breadth
NEW, EMPTY, UNCUT, CONTROL, DELETED, ALL = range(6)
"""Partitions: cut and written anew; cut only; with transactions; the same, cut; deleted from; all cut."""


@pytest.fixture(scope="module")
def connection() -> Iterator[KafkaConnection]:
    """A broker that has elected leaders anew since the records that the tests ask about were written."""
    with Cluster() as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 6, 1)])[TOPIC].result(20)
        for partition in (NEW, EMPTY, DELETED, ALL):
            send(cluster, partition, 10)
        in_transaction(cluster, UNCUT, 2)  # and a record that ends it, at offset 2
        in_transaction(cluster, CONTROL, 1)
        send(cluster, CONTROL, 2)  # at 2 and 3
        for done in admin.delete_records([TopicPartition(TOPIC, DELETED, 5)]).values():
            done.result(20)
        cut_logs(cluster, {(TOPIC, NEW): 6, (TOPIC, EMPTY): 6, (TOPIC, CONTROL): 2, (TOPIC, ALL): 0})
        send(cluster, NEW, 3)
        send(cluster, UNCUT, 2)  # at 3 and 4
        in_transaction(cluster, CONTROL, 1)  # at 2, with its end at 3
        yield KafkaConnection(bootstrap=cluster.bootstrap)


def send(cluster: Cluster, partition: int, count: int) -> None:
    """Write records, each in a batch of its own."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap})
    for _ in range(count):
        producer.produce(TOPIC, b"one", partition=partition)
        assert producer.flush(20) == 0


def in_transaction(cluster: Cluster, partition: int, count: int) -> None:
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "transactional.id": f"{partition}", "acks": "all"}
    )
    producer.init_transactions(20)
    producer.begin_transaction()
    for _ in range(count):
        producer.produce(TOPIC, b"one", partition=partition)
    producer.commit_transaction(20)
    # Kafka writes the record that ends it a little later.
    bounds = partial(
        partition_reader.bounds, KafkaConnection(bootstrap=cluster.bootstrap), TOPIC, [partition]
    )
    assert wait_until(lambda: bounds() == bounds(uncommitted=True), 20)


@pytest.mark.parametrize("known", [6, 7, 8, 9, 100])
def test_a_log_that_was_written_anew(connection: KafkaConnection, known: int) -> None:
    assert find_cut(connection, TOPIC, NEW, offset=known, epoch=0) == Cut(2, 6, 0)


@pytest.mark.parametrize("partition", [NEW, EMPTY])
def test_what_lies_below_a_cut_is_still_there(connection: KafkaConnection, partition: int) -> None:
    assert find_cut(connection, TOPIC, partition, offset=5, epoch=0) is None


def test_a_log_that_ends_earlier(connection: KafkaConnection) -> None:
    assert find_cut(connection, TOPIC, EMPTY, offset=6, epoch=0) == Cut(2, 6, 0)
    assert find_cut(connection, TOPIC, EMPTY, offset=9, epoch=0) == Cut(2, 6, 0)
    assert find_cut(connection, TOPIC, ALL, offset=9, epoch=0) == Cut(2, 0, 0)


def test_a_log_that_ends_earlier_while_no_leader_was_elected_was_not_cut(connection: KafkaConnection) -> None:
    """A leader that answers late says that, too; or the record is a lie. It was asked again."""
    assert find_cut(connection, TOPIC, EMPTY, offset=9, epoch=7) is None


def test_a_new_leader_alone_is_no_cut(connection: KafkaConnection) -> None:
    assert find_cut(connection, TOPIC, UNCUT, offset=1, epoch=0) is None
    assert find_cut(connection, TOPIC, UNCUT, offset=4, epoch=2) is None
    assert find_cut(connection, TOPIC, UNCUT, offset=2, epoch=0, may_be_control=True) is None


def test_where_a_message_stood_a_transaction_ends_now(connection: KafkaConnection) -> None:
    assert find_cut(connection, TOPIC, CONTROL, offset=3, epoch=0) == Cut(2, 1, 0)
    assert find_cut(connection, TOPIC, CONTROL, offset=3, epoch=0, may_be_control=True) == Cut(2, 1, 0)
    assert find_cut(connection, TOPIC, CONTROL, offset=2, epoch=0) == Cut(2, 1, 0)
    assert find_cut(connection, TOPIC, CONTROL, offset=0, epoch=0) is None


def test_what_retention_has_deleted_says_nothing(connection: KafkaConnection) -> None:
    assert find_cut(connection, TOPIC, DELETED, offset=4, epoch=0) is None
    assert find_cut(connection, TOPIC, DELETED, offset=5, epoch=0) is None


def test_what_can_not_be_asked(connection: KafkaConnection) -> None:
    with pytest.raises(TopicError):
        find_cut(connection, "missing", 0, offset=0, epoch=0, timeout_s=3)
    nobody = KafkaConnection(bootstrap="127.0.0.1:1")
    with pytest.raises(Unavailable):
        find_cut(nobody, TOPIC, 0, offset=0, epoch=0, timeout_s=1)
