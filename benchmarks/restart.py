"""(g) Measures how soon a tracker that starts on a long markers topic redelivers its first message.

The topic holds start and end markers in the JVM format. For each turn, 1,000 more messages are taken. kmqpy's
tracker reads their markers, stores its markers offset, and is stopped; when the leases have ended, it is
started again. The JVM tracker stores nothing, so it is only started, after the leases have ended. The time is
that from the start of the process to the log-append time of the first copy. In the second case, one message
was taken before all others, and its lease lasts for days.
"""

import itertools
import time
from collections.abc import Callable, Iterator

from benchmarks import trackers
from benchmarks.children import Child, Failed, TrackerProcess, until
from benchmarks.lab import HOUR_MS, Lab, Record, ends, starts
from benchmarks.results import JVM, Case, Figures
from benchmarks.sizes import Sizes
from kmqpy.kafka.settings import QueueSettings

IN_FLIGHT = 1_000
_BLOCK = 500
_TURNS = 32
_POOL = IN_FLIGHT * _TURNS
_TIMEOUT_S = 900.0
_QUIET_S = 2


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case with short leases only, and one with a long lease before them."""
    for long_lease in sizes.restart_cases:
        with lab.queue(1, register=True, max_redeliveries=None) as queue:
            messages = _POOL + sizes.markers // 2
            lab.preload(queue, 1, messages, 20)  # trackers skip markers of messages that don't exist
            if long_lease:
                lab.fill(queue.markers_topic, 0, starts([0], 100 * HOUR_MS))
            lab.fill(queue.markers_topic, 0, _finished(sizes.markers))
            pool = itertools.count(IN_FLIGHT, IN_FLIGHT)
            peers = {trackers.KMQPY: _kmqpy_turn(lab, queue, messages, pool, sizes.restart_lease_s)}
            if not long_lease:
                peers[JVM] = _jvm_turn(lab, queue, messages, pool, sizes.restart_lease_s)
            yield Case(
                work="restart",
                name=f"{sizes.markers:,} markers, {IN_FLIGHT:,} in flight"
                + (", and one long lease before them all" if long_lease else ""),
                metrics={"seconds": "s to the first redelivery"},
                peers=peers,
                repeats=sizes.few_repeats,
            )


def _finished(count: int) -> Iterator[Record]:
    """Start and end markers of `count` / 2 messages that are finished."""
    for first in range(_POOL, _POOL + count // 2, _BLOCK):
        yield from starts(range(first, first + _BLOCK), HOUR_MS)
        yield from ends(range(first, first + _BLOCK))


def _kmqpy_turn(
    lab: Lab, queue: QueueSettings, messages: int, pool: Iterator[int], lease_s: int
) -> Callable[[], Figures]:
    def turn() -> Figures:
        with trackers.tracker_process(lab, queue) as tracker:
            _wait_until_it_has_read(tracker)
            taken_at = _take(lab, queue, next(pool), lease_s)
            until(
                lambda: tracker.metric("kmq_in_flight") >= IN_FLIGHT, "it has read them", 30.0, child=tracker
            )
            time.sleep(2 * trackers.OFFSET_INTERVAL_S)
            tracker.stop()
        _sleep_until(taken_at + lease_s + 1)
        with trackers.tracker_process(lab, queue) as tracker:
            figures = _first_copy(lab, queue, messages, tracker)
            tracker.stop()
        return figures

    return turn


def _jvm_turn(
    lab: Lab, queue: QueueSettings, messages: int, pool: Iterator[int], lease_s: int
) -> Callable[[], Figures]:
    def turn() -> Figures:
        _sleep_until(_take(lab, queue, next(pool), lease_s) + lease_s + 1)
        with trackers.jvm_process(lab, queue) as tracker:
            return _first_copy(lab, queue, messages, tracker)

    return turn


def _take(lab: Lab, queue: QueueSettings, first: int, lease_s: int) -> float:
    lab.fill(queue.markers_topic, 0, starts(range(first, first + IN_FLIGHT), lease_s * 1000))
    return time.monotonic()


def _first_copy(lab: Lab, queue: QueueSettings, messages: int, tracker: Child) -> Figures:
    """The seconds until the first copy, which is behind `messages` messages.

    Waits until all copies have come: the next turn shall meet none.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        tracker.check()
        times = [record.timestamp()[1] / 1000 for record in lab.records(queue.name, 1, messages)]
        copies = [at for at in times if at >= tracker.started]
        if len(copies) >= IN_FLIGHT:
            time.sleep(_QUIET_S)
            return {"seconds": min(copies) - tracker.started}
        time.sleep(0.5)
    raise Failed(f"no redelivery within {_TIMEOUT_S:.0f} s")


def _wait_until_it_has_read(tracker: TrackerProcess) -> None:
    """Return when the tracker owns the partition, and reads no new markers any more."""
    tracker.wait_until_it_owns(1)
    deadline = time.monotonic() + _TIMEOUT_S
    seen: list[float] = []
    while time.monotonic() < deadline:
        seen.append(tracker.metric("kmq_markers_read_total"))
        if len(seen) > _QUIET_S and seen[-1] > 0 and len(set(seen[-_QUIET_S - 1 :])) == 1:
            return
        time.sleep(1.0)
    raise Failed(f"it has not read all markers within {_TIMEOUT_S:.0f} s")


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
