"""The loop of a Spark tracker's driver, without servers and without Spark."""

import pyspark
import pytest

from kmqpy.config import Connection
from kmqpy.errors import Unavailable
from kmqpy.topics import TopicInfo
from tracker.leadership import LeadershipView
from tracker.spark import SparkTracker


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
    tracker = SparkTracker(FakeSpark(), Connection(), "q", checkpoint="/c", clock=time)
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
