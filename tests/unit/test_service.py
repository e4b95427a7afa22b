"""The tracker's main loop, without servers: what it does with what leadership tells."""

import pytest

from kmqpy.config import Connection, QueueSettings
from kmqpy.registry import RegisteredQueue
from tracker.leadership import Grant, LeadershipView
from tracker.service import Tracker
from tracker.settings import TrackerSettings


class FakeLeadership:
    def __init__(self) -> None:
        self.released: list[tuple[str, int]] = []
        self.verified = True

    def may_redeliver(self) -> bool:
        return self.verified

    def release(self, queue: str, partition: int) -> None:
        self.released.append((queue, partition))


@pytest.fixture
def tracker() -> Tracker:
    tracker = Tracker(Connection(), TrackerSettings(http_port=-1))
    tracker._leadership = FakeLeadership()
    return tracker


def view(releasing: set[tuple[str, int]]) -> LeadershipView:
    queue = RegisteredQueue(QueueSettings(name="q"), partitions=2)
    owned = {("q", 0): Grant(1), ("q", 1): Grant(2)}
    return LeadershipView(owned, frozenset(releasing), {"q": queue}, connected=True)


def test_a_partition_asked_for_again_before_it_was_taken_over_is_released(tracker: Tracker) -> None:
    tracker._follow(view({("q", 0)}))
    assert tracker._leadership.released == [("q", 0)]
    assert list(tracker._parts) == [("q", 1)]


def test_a_partition_granted_anew_is_taken_over_anew(tracker: Tracker) -> None:
    tracker._follow(view(set()))
    before = tracker._parts["q", 0]
    again = LeadershipView({("q", 0): Grant(7)}, frozenset(), view(set()).queues, connected=True)
    tracker._follow(again)
    assert tracker._parts["q", 0] is not before
    assert tracker._parts["q", 0].epoch == 7
    assert ("q", 1) not in tracker._parts


def test_who_may_not_redeliver_does_not_take_over(tracker: Tracker) -> None:
    """A takeover fences, and the partition may be another's by now."""
    tracker._follow(view(set()))
    part = tracker._parts["q", 0]
    tracker._submit = lambda part, *_: setattr(part, "busy", True)
    tracker._leadership.verified = False
    tracker._advance(part, now=0.0)
    assert not part.busy
    tracker._leadership.verified = True
    tracker._advance(part, now=0.0)
    assert part.busy
