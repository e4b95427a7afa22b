"""Runs one tracker as a task of Spark, on an executor, until the driver's znode is gone.

Executors import this module. It must not import kmqpy.spark, which needs more than a tracker does.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pyarrow as pa
from prometheus_client import Counter
from pyspark import TaskContext

from kmqpy.core import logs
from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import KmqError
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker, relax_garbage_collection

_START_BACKOFF = Backoff(0.5, 2, 5)
"""The pauses between the failure of a tracker and that of its task, which Spark starts again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerReport:
    """Says what one tracker of a job has done since its last start.

    number      the number of the tracker in its job, from 0
    starts      how often Spark has started this tracker
    partitions  how many partitions the tracker owned when it was stopped
    """

    number: int
    tracker: str
    host: str
    starts: int
    partitions: int = 0
    redelivered: int = 0
    dead_lettered: int = 0


REPORT = ", ".join(f"{one.name} {'string' if one.type == 'str' else 'long'}" for one in fields(TrackerReport))
"""The schema of a frame of reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerTask:
    """The function that Spark calls in each task (mapInArrow): runs one tracker, and returns its report.

    Spark pickles the function, with its settings, and sends it to the executors. Plans, logs and the web UI
    show only the name of the function, so only driver and executors know the secrets of the connections.

    job_znode  the driver's ephemeral znode: the tracker runs until this znode is gone
    name       the name of the submission; the ids of its trackers begin with this name
    """

    connection: KafkaConnection
    zookeeper: ZooKeeperConnection
    settings: TrackerSettings
    job_znode: str
    name: str
    log_level: str
    log_format: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the trackers whose numbers `batches` have: one for each task."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield pa.RecordBatch.from_pylist([asdict(self._run(number))])

    def _run(self, number: int) -> TrackerReport:
        context: Any = TaskContext.get()
        starts = context.attemptNumber() + 1
        logs.setup(self.log_level, self.log_format)
        relax_garbage_collection()
        port = self.settings.http_port
        settings = replace(
            self.settings,
            tracker_id=f"{self.name}-{number}-{context.taskAttemptId()}",
            http_port=port + number if port > 0 else port,
        )
        try:
            tracker = Tracker(self.connection, self.zookeeper, settings)
            owned = self._run_while_driver_lives(tracker)
        except KmqError:
            SYSTEM_CLOCK.sleep(_START_BACKOFF.delay(starts))
            raise
        return TrackerReport(
            number=number,
            tracker=settings.tracker_id,
            host=socket.gethostname(),
            starts=starts,
            partitions=owned,
            redelivered=_total(tracker.metrics.redelivered),
            dead_lettered=_total(tracker.metrics.dead_lettered),
        )

    def _run_while_driver_lives(self, tracker: Tracker) -> int:
        """Run the tracker until the driver's znode is gone; returns how many partitions it owned then."""
        owned: list[int] = []

        def look(_data: bytes | None, stat: Any) -> None:
            if stat is None and not owned:
                owned.append(len(tracker.owned()))
                tracker.request_stop()

        with connect(self.zookeeper) as zk, _stopped_by_signals(tracker):
            zk.DataWatch(self.job_znode, look)
            if not owned:
                tracker.run()
        return owned[0] if owned else 0


@contextmanager
def _stopped_by_signals(tracker: Tracker) -> Iterator[None]:
    """Have SIGTERM, and SIGHUP (sent when the JVM ends), stop the tracker first, then the process."""
    got: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        got.append(number)
        tracker.request_stop()

    before: dict[signal.Signals, Callable[[int, Any], Any] | int | None] = {}
    if threading.current_thread() is threading.main_thread():
        before = {one: signal.signal(one, stop) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if got:
        # Spark must not believe that the task is done: if Spark still runs, it starts the tracker again.
        with suppress(ProcessLookupError):
            os.kill(os.getpid(), got[0])


def _total(counter: Counter) -> int:
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))
