"""When a tracker lets others have its partitions, because Kafka does not answer it."""

from kmqpy.core.clock import SystemClock
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker import membership as membership_module
from tracker.leadership.published_view import LeadershipView
from tracker.membership import Membership
from tracker.settings import TrackerSettings


class Clock(SystemClock):
    now = 100.0

    def monotonic(self):
        return self.now


class FakeLeadership:
    kafka_ok = False

    def __init__(self, *_, **__):
        pass

    def set_kafka_ok(self, ok):
        self.kafka_ok = ok

    def may_redeliver(self):
        return True

    def snapshot(self):
        return LeadershipView()


def test_r13_who_does_not_reach_kafka_for_ten_seconds_withdraws(monkeypatch):
    monkeypatch.setattr(membership_module, "Leadership", FakeLeadership)
    clock = Clock()
    settings = TrackerSettings(http_port=-1)
    member = Membership(None, KafkaConnection(), ZooKeeperConnection(), settings, clock)
    member.kafka_probed(answered=False)  # at the start
    assert not member.leadership.kafka_ok
    for answered, after_s, ok in [(True, 0, True), (False, 9, True), (False, 2, False), (True, 0, True)]:
        clock.now += after_s
        member.kafka_probed(answered=answered)
        assert member.leadership.kafka_ok is ok
        assert any("does not answer" in problem for problem in member.problems()) is not ok
