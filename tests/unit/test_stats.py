"""Which of the markers are read, without a broker."""

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from kmqpy.errors import AccessDenied
from kmqpy.kafka import hanging, librdkafka, partition_reader
from kmqpy.kafka.admin import stats
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.group_commits import group_commits
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.partition_reader import ReadPosition
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.kafka.topics import QueueTopics, TopicInfo

QUEUE = QueueSettings(name="q")


@pytest.mark.parametrize(
    ("committed", "start"),
    [
        ({0: Commit(500, 700)}, 700),
        ({0: Commit(500, 20)}, 100),  # the log begins later
        ({0: Commit(500, 1_000)}, 1_000),
        ({0: Commit(500, 1_001)}, 100),  # of a markers topic that is no more
        ({0: Commit(500, None)}, 100),  # another kind of client
        ({}, 100),
    ],
)
def test_who_only_peeks_reads_markers_from_where_the_commit_says(committed, start, monkeypatch):
    topic = TopicInfo("q", "id", 1, 1)
    topics = QueueTopics(topic, TopicInfo(QUEUE.markers_topic, "id", 1, 1), None)
    read = {}
    monkeypatch.setattr(stats, "Topics", lambda _: SimpleNamespace(check=lambda _: topics))
    monkeypatch.setattr(stats, "commits_in_log", lambda *_: committed)
    monkeypatch.setattr(partition_reader, "bounds", lambda *_: {0: (100, 1_000)})
    for name in ("scan", "scan_batches"):
        monkeypatch.setattr(
            partition_reader, name, lambda _, name, starts, *__, **___: read.update({name: starts})
        )
    assert stats.waiting_records(KafkaConnection(), QUEUE, limit=1)[0] == []
    assert read == {QUEUE.markers_topic: {0: start}, "q": {0: 500 if committed else 0}}


class Committed:
    """A group's consumer whose coordinator is just moving, or refuses a partition."""

    def __init__(self, *errors):
        self.errors = [*errors]
        self.asked = 0

    def committed(self, places, timeout):
        self.asked += 1
        error = self.errors.pop(0) if self.errors else None
        if error == "all":
            raise KafkaException(KafkaError(KafkaError.NOT_COORDINATOR))
        bad = SimpleNamespace(partition=1, offset=-1001, metadata="", error=error and KafkaError(error))
        good = [SimpleNamespace(partition=p, offset=5, metadata="kmq1:7", error=None) for p in (0, 1)]
        return [good[0], bad if error else good[1]]

    def close(self):
        pass


def test_commits_are_asked_for_until_the_coordinator_knows_them(monkeypatch):
    consumer = Committed("all", KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.UNSTABLE_OFFSET_COMMIT)
    monkeypatch.setattr(librdkafka, "new_consumer", lambda *_: consumer)
    assert group_commits(KafkaConnection(), QUEUE, [0, 1], TopicIds("Q", "M")) == {
        0: Commit(5, 7),
        1: Commit(5, 7),
    }
    assert consumer.asked == 4


def test_a_partition_whose_commit_may_not_be_read_does_not_count_as_without(monkeypatch):
    monkeypatch.setattr(
        librdkafka, "new_consumer", lambda *_: Committed(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    )
    with pytest.raises(AccessDenied):
        group_commits(KafkaConnection(), QUEUE, [0, 1], TopicIds("Q", "M"))


def test_what_waits_behind_a_transaction_beyond_the_limit_counts_by_offsets(monkeypatch):
    """The log of one partition: 4 committed records, then an open transaction and 50,000 records."""

    def scan(_connection, _topic, starts, _visit, *, limit, uncommitted=False):
        end = 50_004 if uncommitted else 4
        return {0: ReadPosition(0, min(starts[0] + limit, end), end)}

    monkeypatch.setattr(partition_reader, "scan", scan)
    monkeypatch.setattr(hanging, "open_since_before", lambda *_: [0])
    ended = OffsetRuns()
    ended.add_runs([(20_000, 10)])
    (one,) = stats._count(KafkaConnection(), "q", {0: 4}, {0: ended}, 0).values()
    assert (one.count, one.exact) == (
        50_000 - stats.COUNT_LIMIT - 10,
        False,
    )  # those it reads are not visited
