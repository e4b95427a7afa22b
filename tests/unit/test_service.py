"""The tracker's main loop, without servers: what it does with what leadership tells."""

from kmqpy.config import Connection, QueueSettings
from kmqpy.registry import RegisteredQueue
from tracker.leadership import Grant, LeadershipView
from tracker.service import Tracker
from tracker.settings import TrackerSettings


class FakeLeadership:
    def __init__(self) -> None:
        self.released: list[tuple[str, int]] = []

    def release(self, queue: str, partition: int) -> None:
        self.released.append((queue, partition))


def view(releasing: set[tuple[str, int]]) -> LeadershipView:
    queue = RegisteredQueue(QueueSettings(name="q"), partitions=2)
    owned = {("q", 0): Grant(1), ("q", 1): Grant(2)}
    return LeadershipView(owned, frozenset(releasing), {"q": queue}, connected=True)


def test_a_partition_asked_for_again_before_it_was_taken_over_is_released() -> None:
    tracker = Tracker(Connection(), TrackerSettings(http_port=-1))
    leadership = tracker._leadership = FakeLeadership()
    tracker._follow(view({("q", 0)}))
    assert leadership.released == [("q", 0)]
    assert list(tracker._parts) == [("q", 1)]


def test_a_partition_granted_anew_is_taken_over_anew() -> None:
    tracker = Tracker(Connection(), TrackerSettings(http_port=-1))
    tracker._leadership = FakeLeadership()
    tracker._follow(view(set()))
    before = tracker._parts["q", 0]
    again = LeadershipView({("q", 0): Grant(7)}, frozenset(), view(set()).queues, connected=True)
    tracker._follow(again)
    assert tracker._parts["q", 0] is not before
    assert tracker._parts["q", 0].epoch == 7
    assert ("q", 1) not in tracker._parts
