"""Many messages in flight: a tracker killed while it redelivers them, and one with a long lease."""

import gc
import os
import sys
import types

import pytest
from support import until, value

from kmqpy.kafka import partition_reader
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op

MANY = 10_000 if "KMQ_TEST_ALL" in os.environ else 3_000
"""The JVM library made 123 to 32,601 duplicates of 100,000."""


@pytest.mark.timeout(600)
def test_f3_trackers_killed_while_they_redeliver_many(queue):
    """Two are killed one after the other; a third one finishes."""
    sent = [str(number) for number in range(MANY)]
    queue.send(*sent)
    # Small transactions, so that there are many moments to be killed in.
    trackers = [queue.tracker_process(**{"max-batch-messages": 10}) for _ in range(3)]
    until(lambda: any(tracker.value("owned_partitions") for tracker in trackers))
    queue.mark_all(codec.ranges(0, Op.TAKE, range(MANY), redeliver_after_ms=1))

    def copies() -> int:
        """About as many, and a few control records."""
        return partition_reader.bounds(queue.connection, queue.name, [0], uncommitted=True)[0][1] - MANY

    at_kill = []
    for part in (0.1, 0.4):
        until(lambda part=part: copies() > part * MANY, what=copies)
        (leader,) = (tracker for tracker in trackers if tracker.value("owned_partitions"))
        trackers.remove(leader)
        leader.kill()
        at_kill.append(copies())
    until(lambda: sum(queue.copies().values()) >= 2 * MANY, 120, copies, every=0.5)
    (last,) = trackers
    until(lambda: last.value("in_flight") == 0)
    assert max(at_kill) < MANY, "the kill came too late to show anything"
    assert queue.copies() == dict.fromkeys(sent, 2)


def test_f9_what_lies_behind_a_message_held_for_long_is_forgotten(queue):
    """The JVM library keeps everything behind the oldest message in flight."""
    others = 20_000
    tracker = queue.tracker()

    def state():
        """That of now: on a busy machine the tracker may lose its session, and take the partition again."""
        return next((part.state for part in list(tracker._partitions.values())), ())

    empty = size_of(state())
    queue.fill(2 * others + 1)
    (held_at,) = queue.mark_all([Marker(0, 0, Op.TAKE, 3_600_000)])
    # Leases all different, and no neighbours: nothing that could be kept as a run.
    queue.mark_all(Marker(0, 2 * n, Op.TAKE, 3_600_000 + 7 * n) for n in range(1, others + 1))
    until(lambda: len(state()) == others + 1, what=lambda: len(state()))
    full = size_of(state())
    assert full - empty > 20 * others  # bytes: it is the state that is measured
    queue.mark_all(Marker(0, 2 * n, Op.END) for n in range(1, others + 1))
    until(lambda: len(state()) == 1, what=lambda: len(state()))
    # Tables keep some of their width until the next insertion; entries are gone.
    assert size_of(state()) - empty < (full - empty) / 5
    labels = {"queue": queue.name, "partition": "0"}
    until(lambda: tracker.metrics.registry.get_sample_value("kmq_in_flight", labels) == 1)
    assert value(tracker, queue.name, "redelivered") == 0
    # The leased one is not forgotten, and the next tracker need not read all that came after it.
    tracker.stop()
    following = queue.tracker()
    (part,) = following._partitions.values()
    assert [(entry.offset, entry.taken_at) for entry in part.state] == [(0, held_at)]
    assert value(following, queue.name, "markers_read") < others / 10


def size_of(something: object) -> int:
    """Bytes of an object and of all that it alone leads to."""
    seen: dict[int, object] = {}
    found = [something]
    while found:
        one = found.pop()
        if id(one) not in seen and not isinstance(one, type | types.ModuleType | types.FunctionType):
            seen[id(one)] = one
            found += gc.get_referents(one)
    return sum(map(sys.getsizeof, seen.values()))
