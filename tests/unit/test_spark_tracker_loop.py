"""The loop of a Spark tracker's driver, without servers and without Spark."""

import itertools

import pyspark
import pytest

from kmqpy.errors import Unavailable
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.kafka.topics import TopicInfo
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.leadership.published_view import LeadershipView
from tracker.spark.tracker import SparkTracker


class FakeSpark:
    version = pyspark.__version__


class FakeTopics:
    def __init__(self) -> None:
        self.away = False

    def brokers(self) -> int:
        if self.away:
            raise Unavailable("Kafka")
        return 1

    def describe(self, names) -> dict[str, TopicInfo]:
        return {name: TopicInfo(name, f"id of {name}", 1, 1) for name in names}


class FakeLeadership:
    def __init__(self) -> None:
        self.view = LeadershipView(connected=True)

    def snapshot(self) -> LeadershipView:
        return self.view


class FakeMember:
    def __init__(self) -> None:
        self.told: list[bool] = []

    def kafka_probed(self, *, answered: bool) -> None:
        self.told.append(answered)


class Time:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("connected", [True, False])
def test_kafka_is_probed_also_while_nothing_is_ours(connected: bool) -> None:
    """Otherwise a tracker that stands by counts as one without Kafka, or as one with it for ever."""
    time = Time()
    tracker = SparkTracker(
        FakeSpark(), KafkaConnection(), ZooKeeperConnection(), "q", checkpoint="/c", clock=time
    )
    topics = tracker._topics = FakeTopics()
    member = tracker._member = FakeMember()
    leadership = tracker._leadership = FakeLeadership()
    leadership.view = LeadershipView(connected=connected)
    tracker._topic_ids = {name: f"id of {name}" for name in ("q", "q__markers")}
    tracker._turn()
    tracker._turn()
    assert member.told == [True]
    topics.away = True
    time.now += 5
    tracker._turn()
    assert member.told == [True, False]


def test_a_query_that_fails_again_and_again_is_started_later_and_later() -> None:
    tracker = SparkTracker(
        FakeSpark(), KafkaConnection(), ZooKeeperConnection(), "q", checkpoint="/c", clock=Time()
    )
    waits = []
    for _ in range(12):
        tracker._failed(None, now=0.0)
        waits.append(tracker._retry_at)
    assert 0 < waits[0] < 1
    assert all(later >= 1.5 * wait or later == waits[-1] for wait, later in itertools.pairwise(waits))
    assert waits[-1] > 5
