"""Records that are read from a partition of a real Kafka: one by one, or all."""

from dataclasses import replace

import pytest

from kmqpy.errors import TopicError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.settings import KafkaConnection

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def connection(cluster):
    return KafkaConnection(bootstrap=cluster.bootstrap)


class TestLogReader:
    def test_single_records_across_gaps_and_what_is_gone(self, queue):
        queue.send(*[str(n) for n in range(3_000)])
        queue.topics.delete_records(queue.name, {0: 10})
        wanted = [5, 10, 11, 1_500, 2_999, 3_000]
        found = partition_reader.read_at(queue.connection, queue.name, [(0, offset) for offset in wanted])
        assert {place[1]: record.value().decode() for place, record in found.items()} == {
            10: "10",
            11: "11",
            1_500: "1500",
            2_999: "2999",
        }

    def test_a_missing_topic_is_a_topic_error(self, connection):
        with pytest.raises(TopicError, match="does not exist"):
            partition_reader.scan(connection, "there-is-no-such-topic", {0: 0}, print)

    def test_kafka_away_is_unavailable(self, connection):
        away = replace(connection, bootstrap=NOWHERE)
        with pytest.raises(Unavailable, match=NOWHERE):
            partition_reader.scan(away, "any", {0: 0}, print, timeout_s=0.5)
