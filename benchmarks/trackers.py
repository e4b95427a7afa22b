"""Starts trackers, kmqpy's and the JVM kmq's, and waits until they are ready."""

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
    """A tracker of kmqpy that owns all partitions of the queue; the queue must be registered."""
    with tracker_process(lab, queue) as tracker:
        tracker.wait_until_it_owns(partitions)
        yield tracker
        tracker.stop()  # a killed one would own the partitions of the deleted queue until its session ends


def tracker_process(lab: Lab, queue: QueueSettings) -> TrackerProcess:
    """A tracker of kmqpy that was just started."""
    return TrackerProcess(
        lab.connection, lab.zookeeper, queue=queue.name, offset_interval=f"{OFFSET_INTERVAL_S}s"
    )


@contextmanager
def jvm(lab: Lab, queue: QueueSettings, _partitions: int) -> Iterator[Child]:
    """The JVM kmq's tracker, after the time that it needs to join its group."""
    with jvm_process(lab, queue) as tracker:
        tracker.line()
        time.sleep(_JVM_JOINS_WITHIN_S)
        tracker.check()
        yield tracker


def jvm_process(lab: Lab, queue: QueueSettings) -> Child:
    """The JVM kmq's tracker, just started."""
    return children.peer("jvm", "track", bootstrap=lab.connection.bootstrap, queue=queue.to_json().decode())
