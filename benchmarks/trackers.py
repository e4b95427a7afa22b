"""Trackers of both makes, running and ready."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from benchmarks import children
from benchmarks.children import Child, TrackerProcess
from benchmarks.lab import Lab
from kmqpy.kafka.settings import QueueSettings

KMQPY = "kmqpy tracker"
KMQPY_RANGE = "kmqpy tracker, range markers"
KMQPY_JVM = "kmqpy tracker, JVM markers"

OFFSET_INTERVAL_S = 1
_JVM_JOINS_WITHIN_S = 5.0

Tracker = Callable[[Lab, QueueSettings, int], AbstractContextManager[Child]]


@contextmanager
def kmqpy(lab: Lab, queue: QueueSettings, partitions: int) -> Iterator[TrackerProcess]:
    """A tracker of kmqpy that owns all partitions of the queue; it must be registered."""
    with tracker_process(lab, queue) as tracker:
        tracker.wait_until_it_owns(partitions)
        yield tracker
        tracker.stop()  # or its leadership lasts as long as its session, and with it the queue


def tracker_process(lab: Lab, queue: QueueSettings) -> TrackerProcess:
    """One that was just started."""
    return TrackerProcess(
        lab.connection, lab.zookeeper, queue=queue.name, offset_interval=f"{OFFSET_INTERVAL_S}s"
    )


@contextmanager
def jvm(lab: Lab, queue: QueueSettings, _partitions: int) -> Iterator[Child]:
    """The JVM kmq's tracker, when it has had the time to join its group."""
    with jvm_process(lab, queue) as tracker:
        tracker.line()
        time.sleep(_JVM_JOINS_WITHIN_S)
        tracker.check()
        yield tracker


def jvm_process(lab: Lab, queue: QueueSettings) -> Child:
    """One that was just started."""
    return children.peer("jvm", "track", bootstrap=lab.connection.bootstrap, queue=queue.to_json().decode())
