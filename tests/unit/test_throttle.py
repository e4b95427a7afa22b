"""What is let through to the log."""

from kmqpy.core import throttle
from kmqpy.core.clock import SystemClock
from kmqpy.core.throttle import Throttle


class Standing(SystemClock):
    now = 100.0

    def monotonic(self):
        return self.now


def test_each_kind_is_let_through_once_in_a_while():
    clock = Standing()
    complaints = Throttle(10, clock)
    assert complaints.allows("a")
    assert complaints.allows("b")
    clock.now += 9.9
    assert not complaints.allows("a")
    clock.now += 0.1
    assert complaints.allows("a")
    assert not complaints.allows("a")


def test_kinds_whose_time_is_over_are_forgotten(monkeypatch):
    monkeypatch.setattr(throttle, "_KEPT_KEYS", 3)
    clock = Standing()
    complaints = Throttle(10, clock)
    for kind in range(3):
        assert complaints.allows(kind)
        clock.now += 4
    assert complaints.allows(3)
    assert list(complaints._last) == [1, 2, 3]
    assert not complaints.allows(1)
