"""(l) Measures trackers on Spark: how late a redelivery is, and how long they take to start and to stop.

`kmq spark-tracker` runs on a local master, and is compared with one ordinary tracker. Lateness is measured
like in the work of that name. The start lasts from that of the process, with its JVM, until all partitions
have owners; the stop lasts from SIGTERM until the process has ended.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks import lateness, trackers
from benchmarks.children import Child, SparkTrackerProcess, until
from benchmarks.lab import Lab
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.settings import QueueSettings
from kmqpy.zookeeper.session import connect

TRACKERS = 2
_NAME = f"{TRACKERS} trackers on Spark, range markers"
_START_TIMEOUT_S = 120.0


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """Two cases: lateness; start and stop."""
    yield Case(
        work="trackers on Spark",
        name="lateness, as above",
        metrics={"p50_ms": "ms p50", "p99_ms": "ms p99", "max_ms": "ms max"},
        peers={
            trackers.KMQPY_RANGE: lateness.turn(lab, trackers.kmqpy, "range", sizes),
            _NAME: lateness.turn(lab, on_spark, "range", sizes),
        },
        repeats=sizes.few_repeats,
    )
    yield Case(
        work="trackers on Spark",
        name=f"{lateness.PARTITIONS} partitions, start and stop",
        metrics={"start_s": "s until all are owned", "stop_s": "s from SIGTERM to the end"},
        peers={trackers.KMQPY: _start_and_stop(lab, trackers.kmqpy), _NAME: _start_and_stop(lab, on_spark)},
        repeats=sizes.few_repeats,
    )


@contextmanager
def on_spark(lab: Lab, queue: QueueSettings, partitions: int) -> Iterator[Child]:
    """Trackers on Spark that own all partitions of the queue."""
    with (
        SparkTrackerProcess(lab.connection, lab.zookeeper, TRACKERS, queue.name) as job,
        connect(lab.zookeeper) as zookeeper,
    ):
        registry = Registry(zookeeper, lab.connection.root)
        until(
            lambda: len(registry.owners(queue.name)) == partitions,
            "trackers on Spark own all partitions",
            _START_TIMEOUT_S,
            child=job,
        )
        yield job
        job.stop()


def _start_and_stop(lab: Lab, tracker: trackers.Tracker) -> Callable[[], Figures]:
    def turn() -> Figures:
        with lab.queue(lateness.PARTITIONS, register=True) as queue:
            began = time.monotonic()
            with tracker(lab, queue, lateness.PARTITIONS):
                started = time.monotonic()
            stopped = time.monotonic()
        return {"start_s": started - began, "stop_s": stopped - started}

    return turn
