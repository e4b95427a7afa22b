"""Keeps trackers running as long tasks of a Spark job.

    with TrackerJob(spark, connection, zookeeper, trackers=4) as job: ...

Each task runs an ordinary Tracker, a member in ZooKeeper like any other. Spark places the tasks, and starts a
task again when its process or machine dies. For each submission of the job, the driver creates an ephemeral
znode. The trackers watch that znode, and stop gracefully when it is gone: because the driver has deleted it,
or because the driver's session has ended.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import ConfigError, KmqError, MissingExtra, Unavailable
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.kafka.settings import KafkaConnection, check_connection
from kmqpy.zookeeper.session import connect, gather, unavailable
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.settings import TrackerSettings
from tracker.spark.checks import check_session

try:
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.sql import DataFrame, SparkSession

    from kmqpy.spark.checkpoint import error_line
    from kmqpy.spark.session import check_version
    from kmqpy.spark.taker import for_executors
    from tracker.spark.task import REPORT, TrackerReport, TrackerTask
except ImportError:
    raise MissingExtra("spark", "tracker.spark.job") from None

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_ZOOKEEPER_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 120.0
"""All trackers must start within this time the first time; a cluster may have to start executors first."""
_STOP_TIMEOUT_S = 20.0
"""How long trackers may take to stop; then Spark interrupts them. They finish transactions for up to 15 s."""
_INTERRUPT_TIMEOUT_S = 5.0
_RESUBMIT_BACKOFF = Backoff(0.4, 2, 30, jitter=0)
_MAX_FAILED_SUBMISSIONS = 5
"""When this many submissions in a row have failed, or the JVM is gone, the last error is raised. The count
begins anew, at 1, with a submission that failed after all its trackers had started."""


class TrackerJob:
    """Runs trackers on the executors of a Spark session, which may be one of Spark Connect.

    kmqpy must be installed on the executors, which must reach Kafka and ZooKeeper. Spark needs a slot for
    each tracker, and no speculation. spark.task.maxFailures should be high (for a local master:
    `local[N,1000000]`): when a task has failed that often, the whole job is submitted again.

    `run` blocks until the job is stopped, and returns the reports of the trackers. `start`, or a `with`
    block, does the same in a thread; then `stop` returns the reports.

    Args:
        spark: The session.
        connection: Kafka; PEM files are read here.
        zookeeper: ZooKeeper, as executors reach it.
        trackers: How many.
        settings: The settings of each tracker. The ids of the trackers begin with `tracker_id`. Tracker
            number n serves /metrics on port http_port + n; on any free port if http_port is 0, on none if it
            is -1.
        log_level: Of the trackers' logs.
        log_format: Likewise: text or json.
        stopping: The trackers stop when it is set.
        clock: For tests.
    """

    def __init__(
        self,
        spark: SparkSession,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection,
        *,
        trackers: int = 2,
        settings: TrackerSettings | None = None,
        log_level: str = "INFO",
        log_format: str = "text",
        stopping: threading.Event | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._spark = spark
        self._connection = check_connection(connection)
        self._zookeeper = zookeeper
        self._trackers = trackers
        self._settings = settings or TrackerSettings()
        self._log_options = {"log_level": log_level, "log_format": log_format}
        self._clock = clock
        self._paths = ZnodePaths(connection.root)
        self._stopping = stopping or threading.Event()
        self._thread: threading.Thread | None = None
        self._zookeeper_session = ExitStack()
        self._zk: Any = None
        self._name = ""
        """The name of the present submission: the ids of its trackers begin with it."""
        self._all_started = False  # trackers of the present submission
        self._ever_started = False
        self._reports: list[TrackerReport] = []
        self._error: Exception | None = None

    def running(self) -> list[str]:
        """The ids of the trackers that are members in ZooKeeper now; raises Unavailable."""
        name = self._name
        if not name:
            return []
        with unavailable(self._zk):
            found = gather([self._zk.get_children_async(self._paths.trackers)], _ZOOKEEPER_TIMEOUT_S)
        return sorted(one for one in found[0] or () if one.startswith(f"{name}-"))

    def start(self) -> Self:
        """Connect, check Spark, and run the job in a thread of its own.

        Raises:
            ConfigError: Spark can't run the trackers, or executors lack kmqpy.
            Unavailable: ZooKeeper does not answer.
        """
        self._connect()
        self._thread = threading.Thread(target=self._run_and_keep_error, name="kmq-tracker-job")
        self._thread.start()
        return self

    def run(self) -> list[TrackerReport]:
        """Run until `request_stop` is called; returns the report of each tracker."""
        self._connect()
        self._run_and_keep_error()
        return self._result()

    def request_stop(self) -> None:
        """Ask `run` to end; returns at once, so that signal handlers can call it."""
        self._stopping.set()

    def stop(self) -> list[TrackerReport]:
        """Stop the trackers gracefully; returns their reports. Raises the error that ended the job before."""
        self.request_stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._result()

    def __enter__(self) -> Self:
        return self if self._thread is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- before the first submission ------------------------------------------------------------------

    def _connect(self) -> None:
        with ExitStack() as undo:
            self._zk = undo.enter_context(connect(self._zookeeper, self._settings.session_timeout_ms))
            try:
                check_version(self._spark.version, "Spark")
                conf = self._spark.conf
                check_session(self._trackers, lambda key: conf.get(key, "") or "", os.cpu_count() or 1)
                found = {
                    row["problem"] for row in self._tasks(_probe(self._zookeeper), "problem string").collect()
                }
            except KmqError:
                raise
            except Exception as error:
                raise ConfigError(f"Spark: it can't run trackers: {error_line(error)}") from error
            if problems := sorted(found - {""}):
                raise ConfigError(f"executors: {problems[0]}")
            self._zookeeper_session = undo.pop_all()

    def _tasks(self, function: Callable[[Any], Any], schema: str) -> DataFrame:
        """A frame that calls `function` in a task for each tracker, with the number of the tracker."""
        numbers = self._spark.range(0, self._trackers, 1, self._trackers)
        return numbers.mapInArrow(function, schema)

    # --- until it is stopped --------------------------------------------------------------------------

    def _run_and_keep_error(self) -> None:
        try:
            with self._zookeeper_session:
                self._submit_until_stopped()
        except Exception as error:  # raised by run() and stop()
            self._error = error if isinstance(error, KmqError) else KmqError(f"Spark: {error_line(error)}")

    def _result(self) -> list[TrackerReport]:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._reports

    def _submit_until_stopped(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._all_started = False
            why = "the driver's znode was gone"
            try:
                self._reports = self._submit()
            except Unavailable as error:  # the job waits for ZooKeeper, like every tracker
                why = str(error)
            except ConfigError:
                raise
            except Exception as error:
                why = error_line(error)
                if self._stopping.is_set():
                    _log.warning("Spark ended before the trackers: %s", why)
                    return
                failures = 1 if self._all_started else failures + 1
                if _is_gone(error) or failures == _MAX_FAILED_SUBMISSIONS:
                    raise
            if not self._stopping.is_set():
                _log.warning("trackers ended; starting them again", extra={"why": why})
                self._pause(_RESUBMIT_BACKOFF.delay(max(1, failures)))

    def _submit(self) -> list[TrackerReport]:
        """Run the trackers once, until they have all ended."""
        name = f"{self._settings.tracker_id}-{uuid.uuid4().hex[:6]}"
        znode = self._paths.job(name)
        task = TrackerTask(
            connection=for_executors(self._connection),
            zookeeper=self._zookeeper,
            settings=self._settings,
            job_znode=znode,
            name=name,
            **self._log_options,
        )
        with unavailable(self._zk):
            made = self._zk.create_async(znode, b"", ephemeral=True, makepath=True)
            made.get(timeout=_ZOOKEEPER_TIMEOUT_S)
        self._name = name
        rows = _collected(self._spark, self._tasks(task, REPORT), name)
        try:
            self._wait(rows)
        finally:
            with suppress(Exception):  # the znode ends with our session at the latest
                self._zk.delete_async(znode).get(timeout=_ZOOKEEPER_TIMEOUT_S)
            if not wait([rows], _STOP_TIMEOUT_S).done:
                with suppress(Exception):
                    self._spark.interruptTag(name)
                wait([rows], _INTERRUPT_TIMEOUT_S)
        return [TrackerReport(**row.asDict()) for row in rows.result()] if rows.done() else []

    def _wait(self, rows: Future[list[Any]]) -> None:
        """Wait until the tasks have ended, or the job is to be stopped.

        Raises ConfigError if not all trackers start the first time. Later submissions may have fewer: the
        cluster may have shrunk.
        """
        deadline = self._clock.monotonic() + _START_TIMEOUT_S
        while not wait([rows], _POLL_S).done and not self._stopping.is_set():
            if self._all_started:
                continue
            started = 0
            with suppress(Unavailable):
                started = len(self.running())
            if started >= self._trackers:
                self._all_started = self._ever_started = True
                _log.info("trackers running", extra={"trackers": started, "ids": f"{self._name}-…"})
            elif not self._ever_started and self._clock.monotonic() > deadline:
                raise ConfigError(
                    f"trackers: {started} of {self._trackers} have started within {_START_TIMEOUT_S:.0f} s; "
                    "Spark has fewer free slots, or the others can't start: see the logs of its executors"
                )

    def _pause(self, seconds: float) -> None:
        deadline = self._clock.monotonic() + seconds
        while not self._stopping.is_set() and self._clock.monotonic() < deadline:
            self._clock.sleep(_POLL_S)


def _collected(spark: SparkSession, frame: DataFrame, tag: str) -> Future[list[Any]]:
    """The rows of a frame: a thread of its own waits for them, whose jobs have this tag."""
    rows: Future[list[Any]] = Future()

    def collect() -> None:
        try:
            spark.addTag(tag)  # of this thread
            rows.set_result(frame.collect())
        except Exception as error:
            rows.set_exception(error)

    # A daemon: the process must end even if Spark does not answer any more.
    threading.Thread(target=collect, name="kmq-tracker-rows", daemon=True).start()
    return rows


def _is_gone(error: Exception) -> bool:
    """Return True if the JVM is gone, so that it never answers again."""
    return isinstance(error, ConnectionError) or (
        isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError)
    )


def _probe(zookeeper: ZooKeeperConnection) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function for mapInArrow that says why this executor can't run a tracker; an empty text if it can.

    It has its own imports, and Spark sends it by value: an executor may be without kmqpy.
    """
    hosts, security = zookeeper.hosts, asdict(zookeeper.security)

    def probe(batches: Iterator[Any]) -> Iterator[Any]:
        import socket

        import pyarrow as pa

        for batch in batches:
            try:
                import tracker.spark.task  # noqa: F401
                from kmqpy.errors import KmqError
                from kmqpy.zookeeper.session import connect
                from kmqpy.zookeeper.settings import ZooKeeperConnection, ZooKeeperSecurity
            except ImportError as error:
                problem = f"{error}; install kmqpy with its dependencies there, or send it with --py-files"
            else:
                problem = ""
                try:
                    with connect(ZooKeeperConnection(hosts=hosts, security=ZooKeeperSecurity(**security))):
                        pass
                except KmqError as error:
                    problem = str(error)
            if problem:
                problem = f"{socket.gethostname()}: {problem}"
            yield pa.RecordBatch.from_pylist([{"problem": problem}] * batch.num_rows)

    return probe
