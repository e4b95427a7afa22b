"""(f) Measures how long redelivery stands still when a tracker is killed and a standby takes over.

One partition has many messages in flight with leases of an hour. One more message is taken every 50 ms, with
a lease of 500 ms, so that a redelivery is always due. The time is that from kill -9 to the log-append time of
the first committed copy after the kill.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks import children, trackers
from benchmarks.children import Failed, until
from benchmarks.lab import Lab, starts
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes
from kmqpy.kafka.settings import QueueSettings
from tracker.settings import TrackerSettings

SESSION_S = TrackerSettings().session_timeout_ms / 1000
_TRICKLE = 6_000
_EVERY_S = 0.05
_TIMEOUT_S = 180.0


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """One case, with both formats of markers."""
    formats = {trackers.KMQPY_RANGE: "range", trackers.KMQPY_JVM: "jvm"}
    yield Case(
        work="failover",
        name=f"kill -9 with a standby, {sizes.failover_in_flight:,} in flight, session of {SESSION_S:.0f} s",
        metrics={"seconds": "s to the next redelivery"},
        peers={
            peer: _turn(lab, marker_format, sizes.failover_in_flight)
            for peer, marker_format in formats.items()
            if marker_format in sizes.formats
        },
        repeats=sizes.few_repeats,
    )


def _turn(lab: Lab, marker_format: str, count: int) -> Callable[[], Figures]:
    def turn() -> Figures:
        with lab.queue(1, register=True, markers=marker_format, max_redeliveries=None) as queue:
            lab.preload(queue, 1, count + _TRICKLE, 100)
            with (
                trackers.tracker_process(lab, queue) as one,
                trackers.tracker_process(lab, queue) as other,
            ):
                until(lambda: _owners(one, other) != [], "a tracker owns the partition", 30.0, child=one)
                with children.peer(
                    "kmqpy",
                    "hold",
                    bootstrap=lab.connection.bootstrap,
                    queue=queue.to_json().decode(),
                    batch=5_000,
                    messages=count,
                ) as holder:
                    holder.result()
                until(
                    lambda: one.metric("kmq_in_flight") + other.metric("kmq_in_flight") >= count,
                    "the tracker has read all markers",
                    300.0,
                )
                with _trickle(lab, queue, count):
                    until(lambda: bool(lab.records(queue.name, 1, count + _TRICKLE)), "a redelivery", 30.0)
                    (leader,) = _owners(one, other)
                    killed_ms = time.time() * 1000
                    leader.kill()
                    seconds = (_next_copy_ms(lab, queue, count, killed_ms) - killed_ms) / 1000
                (other if leader is one else one).stop()
        return {"seconds": seconds}

    return turn


def _owners(*found: children.TrackerProcess) -> list[children.TrackerProcess]:
    return [tracker for tracker in found if tracker.metric("kmq_owned_partitions")]


@contextmanager
def _trickle(lab: Lab, queue: QueueSettings, first: int) -> Iterator[None]:
    """Take a message every _EVERY_S, until the block ends."""
    stopping = threading.Event()

    producer = lab.producer()

    def take() -> None:
        for offset in itertools.islice(itertools.count(first), _TRICKLE):
            lab.fill(queue.markers_topic, 0, starts([offset], 500), producer)
            if stopping.wait(_EVERY_S):
                return

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _next_copy_ms(lab: Lab, queue: QueueSettings, count: int, after_ms: float) -> float:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        times = [record.timestamp()[1] for record in lab.records(queue.name, 1, count + _TRICKLE)]
        found = [at for at in times if at > after_ms]
        if found:
            return float(min(found))
        time.sleep(0.5)
    raise Failed(f"no redelivery within {_TIMEOUT_S:.0f} s of the kill")
