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
    warnings = Throttle(10, clock)
    assert warnings.allows("a")
    assert warnings.allows("b")
    clock.now += 9.9
    assert not warnings.allows("a")
    clock.now += 0.1
    assert warnings.allows("a")
    assert not warnings.allows("a")


def test_kinds_whose_time_is_over_are_forgotten(monkeypatch):
    monkeypatch.setattr(throttle, "_PRUNE_AT_KINDS", 3)
    clock = Standing()
    warnings = Throttle(10, clock)
    for kind in range(3):
        assert warnings.allows(kind)
        clock.now += 4
    assert warnings.allows(3)
    assert list(warnings._last) == [1, 2, 3]
    assert not warnings.allows(1)
