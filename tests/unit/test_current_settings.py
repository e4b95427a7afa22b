"""The lanes that an open client takes its queue to have, and whether what it sent there is safe (R47)."""

import pytest

from kmqpy.errors import Unavailable
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import CurrentSettings, SettingsMirror

WITH_LANES = QueueSettings(name="q", priorities=3)
LANES = {lane.name for lane in WITH_LANES.lanes()[:-1]}


@pytest.fixture
def stored(monkeypatch):
    """What kmq.queues has; an error: it can't be read."""
    there = [WITH_LANES]

    def find(_mirror, _name):
        if isinstance(there[0], Exception):
            raise there[0]
        return there[0]

    monkeypatch.setattr(SettingsMirror, "find", find)
    return there


@pytest.fixture
def current(clock):
    return CurrentSettings(WITH_LANES, KafkaConnection(), clock)


def test_lanes_that_are_added_or_drained_are_known_ten_seconds_later(stored, current, clock):
    stored[0] = QueueSettings(name="q", draining_lanes=("priority2",), priorities=2)
    clock.advance(9)
    assert current.recent() is WITH_LANES
    clock.advance(2)
    assert current.recent() is stored[0]


def test_r47_what_is_confirmed_soon_is_safe_whatever_becomes_of_the_lane(stored, current, clock):
    current.refresh()
    since = clock.monotonic()
    stored[0] = QueueSettings(name="q")
    clock.advance(2)
    assert current.keeps(LANES, since)


@pytest.mark.parametrize(
    "now",
    [
        QueueSettings(name="q", draining_lanes=("priority2",), priorities=2),
        QueueSettings(name="q", priorities=2),
        Unavailable("away"),
    ],
)
def test_r47_what_is_confirmed_late_is_safe_only_if_the_lane_is_there_still(stored, current, clock, now):
    current.refresh()
    since = clock.monotonic()
    clock.advance(20)
    assert current.keeps(LANES, since)
    stored[0] = now
    clock.advance(1)
    assert not current.keeps(LANES, since)


def test_r47_settings_of_unknown_age_prove_nothing(stored, current, clock):
    since = clock.monotonic()
    stored[0] = Unavailable("away")
    current.recent()
    assert not current.keeps(LANES, since)
    stored[0] = WITH_LANES
    assert current.keeps(LANES, since)
