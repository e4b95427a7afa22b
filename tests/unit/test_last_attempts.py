"""What trackers keep to find out which copies were acknowledged: bounded, with pauses (rule R32)."""

from typing import ClassVar

import pytest

from kmqpy.core.clock import SystemClock
from kmqpy.kafka.copies.late_acks import CheckedCopies
from kmqpy.kafka.markers.late_operations import CopyHeaders
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.redelivery import last_attempts
from tracker.redelivery.last_attempts import LastAttempts

QUEUE = QueueSettings(name="jobs")
COPIES = {7: CopyHeaders(1)}


class Clock(SystemClock):
    now = 100.0

    def monotonic(self):
        return self.now


class Check:
    """Takes a second for each look, and finishes none."""

    made: ClassVar[list["Check"]] = []

    def __init__(self, _connection, _queue, clock, _topic_id):
        self.clock, self.looks, self.closed = clock, 0, False
        self.made.append(self)

    def examine(self, copies, _within_s):
        self.looks += 1
        self.clock.now += 1
        return CheckedCopies(unread=[(0, offset) for offset in copies[0]])

    def close(self):
        self.closed = True


@pytest.fixture
def attempts(monkeypatch):
    monkeypatch.setattr(Check, "made", [])
    monkeypatch.setattr(last_attempts, "LateAckCheck", Check)
    return LastAttempts(KafkaConnection(), Clock(), 2)


def test_after_a_look_that_was_not_finished_there_is_none_for_four_times_as_long(attempts):
    for _ in range(5):
        assert attempts.examine(QUEUE, 0, ("Q", "M"), COPIES, 1.0).unread == [(0, 7)]
    assert Check.made[0].looks == 1
    attempts._clock.now += 4
    attempts.examine(QUEUE, 0, ("Q", "M"), COPIES, 1.0)
    assert [check.looks for check in Check.made] == [2]


def test_only_what_was_needed_last_is_kept(attempts):
    for ids in (("Q", "M"), ("Q", "N"), ("Q", "M"), ("R", "M")):
        attempts.examine(QUEUE, 0, ids, COPIES, 1.0)
    assert [check.closed for check in Check.made] == [False, True, False]
    attempts.close()
    assert all(check.closed for check in Check.made)


def test_r46_in_lanes_that_were_added_since_it_is_looked_too(attempts):
    for priorities in (1, 1, 2):
        queue = QueueSettings(name="jobs", retry_lane=True, priorities=priorities).lanes()[0]
        attempts.examine(queue, 0, ("Q", "M"), COPIES, 1.0)
    assert len(Check.made) == 2
