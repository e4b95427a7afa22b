"""The tracker on Spark: for queues whose redelivery outgrows one machine.

The driver is the member in ZooKeeper and holds the leader znodes. A streaming query does a turn
(`tracker.spark.turn`) of each partition every trigger: Spark distributes the partitions over the executors,
keeps their state (RocksDB, changelog) and runs again what failed; reading markers, planning and
redelivering in transactions is what every tracker does.

Executors read the markers themselves, rather than Spark's Kafka source: a partition that this tracker
gains must begin at the offset which its predecessor stored, that source knows only where its own
checkpoint stands; a takeover reads markers in any case, and nothing is then moved through the JVM twice.
"""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.throttle import Throttle
from kmqpy.errors import ConfigError, KmqError, MissingExtra, QueueNotFound, TopicError
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.client.settings_mirror import SettingsMirror
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import stale_markers_error
from kmqpy.kafka.topics import TopicInfo, Topics
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.health.metrics import TrackerMetrics
from tracker.leadership.leadership import Leadership
from tracker.leadership.published_view import LeadershipView
from tracker.membership import Membership
from tracker.settings import TrackerSettings
from tracker.spark.report import Report
from tracker.spark.turn import Task

try:
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from kmqpy.spark.checkpoint import claim, one_line
    from tracker.spark.query import COUNTERS, SESSION, reports
except ImportError:
    raise MissingExtra("spark", "tracker.spark.tracker") from None

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_PROBE_EVERY_S = 2.0
_PROBE_TIMEOUT_S = 3.0
_STOP_TIMEOUT_S = 10.0
_MAX_TURN_S = 10.0
_MAX_BATCH_S = 60.0
"""Of the turns that one task does one after the other; nothing of a batch is kept before it ends."""
_MAX_LINGER_S = 2.0
"""For what is due soon: as long as from one batch to the next, but a stop has to wait for it."""
_STUCK_S = 2 * _MAX_BATCH_S
_PAUSE = Backoff(0.4, 2, 30, jitter=0)
"""Before a query that failed is started again."""
_GIVE_UP_STATE_AFTER = 4
"""Failures of the query, one after the other."""
_COMPLAIN_EVERY_S = 60.0
_NUMBER = re.compile(r"-?\d+")


def track(
    spark: SparkSession,
    connection: KafkaConnection,
    zookeeper: ZooKeeperConnection,
    queue: str,
    *,
    checkpoint: str,
    trigger: float = 1.0,
    tasks: int | None = None,
    settings: TrackerSettings | None = None,
) -> SparkTracker:
    """Start to redeliver for `queue` on the executors of `spark`; returns the running tracker.

    checkpoint  a folder that all executors and the driver reach; of this queue only, and of one running
                tracker at a time. Gone or lost: start with a new one, the safe offsets in ZooKeeper do
    trigger     seconds from one turn of all partitions to the next
    tasks       how many turns at a time, at the most; fixed by the first start with a checkpoint. Default:
                the cores that Spark has, or the partitions where there are fewer

    Of `settings`, what concerns threads and ticks is not used. Any number of trackers, classic ones and
    such on Spark, share the partitions of a queue. kmqpy and its dependencies must be installed on the
    executors, which reach Kafka and ZooKeeper.

    Raises ConfigError for a checkpoint of another queue, a session of Spark Connect or another version of
    Spark; QueueNotFound, TopicError; Unavailable when Kafka or ZooKeeper is away.
    """
    tracker = SparkTracker(
        spark,
        connection,
        zookeeper,
        queue,
        checkpoint=checkpoint,
        trigger=trigger,
        tasks=tasks,
        settings=settings,
    )
    return tracker.start()


class SparkTracker:
    """A tracker of one queue on Spark; the arguments are those of `track`.

    `run` blocks until `request_stop`; `start` runs it in a thread. What ends it otherwise (the queue was
    removed, its topics were recreated) is raised by `run`, and by `stop`.
    """

    def __init__(
        self,
        spark: SparkSession,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection,
        queue: str,
        *,
        checkpoint: str,
        trigger: float = 1.0,
        tasks: int | None = None,
        settings: TrackerSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if trigger < 0:
            raise ConfigError(f"trigger: {trigger} must not be negative")
        if tasks is not None and tasks < 1:
            raise ConfigError(f"tasks: {tasks} must be at least 1")
        if not checkpoint:
            raise ConfigError("checkpoint: must not be empty; name a folder that all executors reach")
        _check(spark)
        self._spark = spark
        self._connection = connection
        self._zookeeper = zookeeper
        self._queue = queue
        self._checkpoint = checkpoint.rstrip("/")
        self._trigger = trigger
        self._tasks = tasks
        self._settings = replace(settings or TrackerSettings(), queues=(queue,))
        self._clock = clock
        self.metrics = TrackerMetrics()
        self._topics = Topics(connection, _PROBE_TIMEOUT_S)
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._leadership: Leadership | None = None
        self._member: Membership | None = None

        self._query: StreamingQuery | None = None
        self._running: tuple[QueueSettings, int] | None = None  # for which the query was started
        self._held: dict[int, int] = {}  # epochs of the partitions that were ours when we last looked
        self._failures = 0
        self._retry_at = 0.0
        self._query_problem = ""
        self._topic_ids: dict[str, str] = {}  # of the queue and the markers topic
        self._next_probe = 0.0
        self._beat = clock.monotonic()

        self._lock = threading.Lock()  # of what follows, which the end of a batch changes
        self._batch_at = clock.monotonic()
        self._batches = 0
        self._problems: dict[int, str] = {}
        self._active: set[int] = set()
        self._offsets: dict[int, StoredOffset] = {}  # to be stored
        self._stored: dict[int, int] = {}  # as last stored
        self._next_offsets = 0.0
        self._complaints = Throttle(_COMPLAIN_EVERY_S, self._clock)

    # --- for its user -----------------------------------------------------------------------------------

    @property
    def http_port(self) -> int | None:
        """Where /metrics, /livez and /readyz are served; None when they are not."""
        return self._member.http_port if self._member is not None else None

    def owned(self) -> list[int]:
        """The partitions being redelivered by this tracker now."""
        with self._lock:
            return sorted(self._active & self._held.keys())

    def progress(self) -> dict[str, Any] | None:
        """Spark's progress of the last turn: durations, size of the state; None before the first."""
        query = self._query
        found = query.lastProgress if query is not None else None
        return None if found is None else dict(found)

    def start(self) -> Self:
        """Run in a thread of its own."""
        self._connect()
        self._thread = threading.Thread(target=self._run, name="kmq-spark-tracker")
        self._thread.start()
        return self

    def run(self) -> None:
        """Run until `request_stop` is called."""
        try:
            self._connect()
        except (Py4JError, ConnectionError) as error:
            if self._gone_first(error):
                return
            raise KmqError(f"Spark: {one_line(error)}") from error
        self._run()
        self._raise()

    def request_stop(self) -> None:
        """Ask `run` to end; returns at once, so that signal handlers can call it."""
        self._stopping.set()
        self._wake.set()

    def stop(self) -> None:
        """End the query after the turn it is in, store offsets, give up leadership."""
        self.request_stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def __enter__(self) -> Self:
        return self if self._thread is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def alive(self) -> bool:
        """Whether the driver's loop still turns, and turns of the partitions come to an end."""
        now = self._clock.monotonic()
        stuck = self._query is not None and now - self._batch_at > _STUCK_S + self._trigger
        up = self._member is None or self._member.alive()
        return up and now - self._beat < _STUCK_S and not stuck

    def problems(self) -> list[str]:
        """Why it is not ready; empty when it is."""
        found = [self._query_problem] if self._query_problem else []
        found += ["not started"] if self._member is None else self._member.problems()
        with self._lock:
            problems = sorted(self._problems.items())
        return found + [f"queue {self._queue}, partition {number}: {text}" for number, text in problems]

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    # --- the driver's loop --------------------------------------------------------------------------------

    def _connect(self) -> None:
        connection = self._connection
        with connect(self._zookeeper) as zookeeper:
            registry = Registry(zookeeper, connection.root)
            queue, stored = registry.get(self._queue).settings, registry.offsets(self._queue)
        topics = Topics(connection).check(queue)
        if any(one.is_of_earlier_queue(topics.ids.queue, topics.ids.markers) for one in stored.values()):
            raise stale_markers_error(queue)
        self._topic_ids = {info.name: info.topic_id for info in (topics.queue, topics.markers)}
        self._session = self._spark.newSession()
        for key, value in SESSION.items():
            self._session.conf.set(key, value)
        ids = dict(zip(("queue_topic_id", "markers_topic_id"), self._topic_ids.values(), strict=True))
        claim(self._session, self._checkpoint, "queue", self._queue, ids)
        member = self._member = Membership(
            self,
            connection,
            self._zookeeper,
            self._settings,
            queues=frozenset({self._queue}),
            wake=self._wake,
            clock=self._clock,
        )
        self._leadership = member.leadership
        member.kafka_probed(answered=True)
        member.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
                self._wake.wait(_POLL_S)
                self._wake.clear()
        except Exception as error:  # raised by run() and stop()
            ours = isinstance(error, KmqError)
            if self._gone_first(error):
                return
            self._error = error if ours else KmqError(f"Spark: {one_line(error)}")
            # Spark says its own traceback, and Java's of pages.
            known = ours or isinstance(error, PySparkException | Py4JError | OSError)
            _log.error("tracker ends: %s", self._error, exc_info=not known, extra={"queue": self._queue})
        finally:
            self._close()

    def _gone_first(self, error: Exception) -> bool:
        """Whether this tells only that the signal which we stop for has ended the JVM before us."""
        gone = self._stopping.is_set() and isinstance(error, Py4JError | ConnectionError)
        if gone:
            _log.warning("Spark has gone first: %s", one_line(error), extra={"queue": self._queue})
        return gone

    def _turn(self) -> None:
        assert self._leadership is not None
        self._beat = now = self._clock.monotonic()
        view = self._leadership.snapshot()
        self._release(view)
        mine = {key[1]: epoch for key, epoch in view.owned.items() if key not in view.releasing}
        lost = {number for number, epoch in self._held.items() if mine.get(number) != epoch}
        with self._lock:
            self._held = mine
        if lost and self._query is not None:
            # The executors ask ZooKeeper by themselves; this also ends what they are in the middle of.
            self._stop_query("leadership lost")
        self._probe(now)  # also while nothing is ours: who does not reach Kafka must be given nothing
        registered = view.queues.get(self._queue)
        if registered is None:
            if view.connected and self._running is not None:
                raise QueueNotFound(f"queue {self._queue!r} was removed")
            return
        wanted = (registered.settings, registered.partitions)
        self._look_after_query(now)
        if self._query is not None and (not mine or wanted != self._running):
            self._stop_query("nothing to do" if not mine else "queue changed", gracefully=True)
        if self._query is None and mine and now >= self._retry_at:
            self._start_query(*wanted)

    def _release(self, view: LeadershipView) -> None:
        """Give up what others are to have: the executors see it, and the next owner fences them."""
        assert self._leadership is not None
        for key in view.releasing & view.owned.keys():
            with self._lock:
                self._held.pop(key[1], None)
            self._store_offsets()
            self._leadership.release(*key)

    # --- the query ------------------------------------------------------------------------------------------

    def _start_query(self, queue: QueueSettings, partitions: int) -> None:
        tasks = self._tasks or min(partitions, self._spark.sparkContext.defaultParallelism)
        turn_s = min(_MAX_TURN_S, _MAX_BATCH_S * tasks / partitions)
        linger_s = min(_MAX_LINGER_S, self._trigger)
        task = Task(
            self._connection,
            self._zookeeper,
            queue,
            self._settings.tracker_id,
            self._settings,
            turn_s,
            linger_s,
        )
        self._session.conf.set("spark.sql.shuffle.partitions", str(tasks))
        try:
            self._query = (
                reports(self._session, task, partitions, tasks)
                .writeStream.foreachBatch(self._after_batch)
                .outputMode("update")
                .option("checkpointLocation", f"{self._checkpoint}/query")
                .trigger(processingTime=f"{round(self._trigger * 1000)} milliseconds")
                .start()
            )
        except (PySparkException, Py4JJavaError) as error:  # the file system, for example
            self._failed(error)
            return
        self._running = (queue, partitions)
        try:
            SettingsMirror(self._connection).write([queue.with_topic_ids(self._topic_ids)])
        except KmqError as error:
            _log.warning(
                "clients can't be told of the queue", extra={"queue": self._queue, "error": str(error)}
            )
        self.metrics.begin(self._queue)
        self._batch_at = self._clock.monotonic()
        _log.info("query started", extra={"queue": self._queue, "partitions": sorted(self._held)})

    def _look_after_query(self, now: float) -> None:
        """Start again what has failed; nothing is lost by it."""
        query = self._query
        if query is None or query.isActive:
            return
        self._query = None
        self._failed(query.exception(), now)

    def _failed(self, error: Exception | None, now: float | None = None) -> None:
        self._failures += 1
        if self._failures == _GIVE_UP_STATE_AFTER and error is not None:
            self._discard_state()
        wait_s = _PAUSE.delay(self._failures)
        self._retry_at = (self._clock.monotonic() if now is None else now) + wait_s
        why = one_line(error) if error else "stopped by somebody else, who may use the same checkpoint"
        self._query_problem = f"the query failed: {why}"
        _log.warning("query failed; starting it again", extra={"queue": self._queue, "error": why})

    def _discard_state(self) -> None:
        """Begin without what is in the checkpoint, which may be why it fails; nothing is lost by it."""
        folder = f"{self._checkpoint}/query"
        _log.warning("the state in the checkpoint is thrown away", extra={"folder": folder})
        try:
            jvm: Any = self._spark.sparkContext._jvm
            path = jvm.org.apache.hadoop.fs.Path(folder)
            conf = self._session._jsparkSession.sessionState().newHadoopConf()
            recursive = True
            path.getFileSystem(conf).delete(path, recursive)
        except Py4JJavaError as error:
            _log.warning("it can't be thrown away", extra={"folder": folder, "error": one_line(error)})

    def _stop_query(self, why: str, *, gracefully: bool = False) -> None:
        """End the query; `gracefully`: when the turn it is in has ended."""
        query, self._query = self._query, None
        if query is None:
            return
        batches, deadline = self._batches, self._clock.monotonic() + _STOP_TIMEOUT_S
        try:
            while gracefully and query.isActive and query.status["isTriggerActive"]:
                if self._batches != batches or self._clock.monotonic() > deadline:
                    break
                self._clock.sleep(_POLL_S / 5)
            query.stop()
        except Exception as error:  # a JVM that is gone must not keep us from letting go
            _log.warning("query stopped with an error", extra={"error": one_line(error)})
        with self._lock:
            self._active.clear()
            self._problems.clear()
        self.metrics.owned.labels(self._queue).set(0)
        _log.info("query stopped", extra={"queue": self._queue, "why": why})

    def _after_batch(self, frame: DataFrame, _number: int) -> None:
        """Take in what the turns report; on a thread of Spark's."""
        reports = [Report(**row.asDict()) for row in frame.collect()]
        self._batch_at = self._clock.monotonic()
        self._failures, self._query_problem = 0, ""
        for report in reports:
            self._take_in(report)
        with self._lock:
            self._batches += 1
            owned = len(self._active)
        self.metrics.owned.labels(self._queue).set(owned)
        if self._batch_at >= self._next_offsets:
            self._next_offsets = self._batch_at + self._settings.offset_interval_ms / 1000
            self._store_offsets()

    def _take_in(self, report: Report) -> None:
        name, number = self._queue, report.partition
        for counter in COUNTERS:
            getattr(self.metrics, counter).labels(name).inc(getattr(report, counter))
        for lateness_s in report.lateness:
            self.metrics.lateness.labels(name).observe(lateness_s)
        self.metrics.in_flight.labels(name, str(number)).set(report.in_flight)
        self.metrics.oldest.labels(name, str(number)).set(report.oldest_s)
        if report.problem:
            self._complain(report)
        stored = report.stored if report.owned else None
        with self._lock:
            began = report.active and number not in self._active
            (self._active.add if report.active else self._active.discard)(number)
            if report.problem:
                self._problems[number] = report.problem
            else:
                self._problems.pop(number, None)
            if not report.owned or began:
                self._stored.pop(number, None)
                self._offsets.pop(number, None)
            # A snapshot lets a successor begin further on than the safe offset of a later turn.
            if stored is not None and (
                number not in self._offsets or stored.offset > self._offsets[number].offset
            ):
                self._offsets[number] = replace(stored, queue_id=self._topic_ids[self._queue])
        if began:
            _log.info(
                "partition active", extra={"queue": name, "partition": number, "in_flight": report.in_flight}
            )

    def _complain(self, report: Report) -> None:
        """Log a warning, once a minute for each kind: many texts have offsets in them."""
        if self._complaints.lets_through(_NUMBER.sub("", report.problem)):
            _log.warning(report.problem, extra={"queue": self._queue, "partition": report.partition})

    def _store_offsets(self) -> None:
        """Write the safe offsets to ZooKeeper, so that any tracker can go on from there."""
        assert self._leadership is not None
        with self._lock:
            due = {
                (self._queue, number): stored
                for number, stored in self._offsets.items()
                if stored.offset > self._stored.get(number, -1)
            }
            if not due:
                return
            try:
                written = self._leadership.write_offsets(due)
            except KmqError as error:
                _log.warning("offsets not stored; trying again", extra={"error": str(error)})
                return
            for key in written:
                self._stored[key[1]] = due[key].offset

    def _probe(self, now: float) -> None:
        """See whether Kafka answers, and that the topics are still the ones we know (rules R8, R13)."""
        assert self._member is not None
        if now < self._next_probe:
            return
        self._next_probe = now + _PROBE_EVERY_S
        found: dict[str, TopicInfo] = {}
        answered = False
        try:
            # Any broker can answer this; that no controller does is no reason to withdraw.
            self._topics.brokers()
            answered = True
            found = self._topics.describe([*self._topic_ids])
        except KmqError as error:
            _log.debug("Kafka does not answer: %s", error)
        if any(info.topic_id != self._topic_ids[name] for name, info in found.items()):
            raise TopicError(
                f"queue {self._queue!r}: its topics were deleted and recreated; "
                "start the tracker again, with another checkpoint"
            )
        self._member.kafka_probed(answered=answered)

    def _close(self) -> None:
        assert self._leadership is not None
        assert self._member is not None
        try:
            self._leadership.set_kafka_ok(False)  # so that it takes no more partitions
            self._stop_query("stopping", gracefully=self._error is None)
            self._store_offsets()
        finally:
            self._member.leave()
        _log.info("tracker stopped", extra={"tracker": self._settings.tracker_id})


def _check(spark: SparkSession) -> None:
    """Raise ConfigError for a session that this can't run on."""
    from kmqpy.spark.session import check_version

    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise ConfigError(
            "spark: the tracker can't run under Spark Connect, where a query reports to a process of the "
            "server and not to the one that holds the leader znodes; give it a session of its own: "
            "--master, or kmq spark-tracker by spark-submit"
        )
    check_version(spark.version, "Spark")
