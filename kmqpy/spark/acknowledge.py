"""The driver acknowledges messages, once a sink has committed their micro-batch.

It writes end markers ("this message is acknowledged"), and commits the offsets of the queue's group. After
KmqSpark.take(), a row is not ok if write_stream()'s argument `ok` is false or null for it. The driver gives
the messages of such rows back to the queue: it writes nacks, and a tracker redelivers the messages later.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaException, TopicPartition
from py4j.protocol import Py4JNetworkError
from pyspark.sql.streaming.listener import StreamingQueryListener

from kmqpy.errors import ConfigError, KmqError, Unavailable
from kmqpy.kafka import kafka_errors, librdkafka, partition_reader
from kmqpy.kafka.client.marker_writer import Item
from kmqpy.kafka.client.offset_commits import Commit, commit_metadata
from kmqpy.kafka.cut_off import may_be_cut_off
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import CurrentSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.spark.checkpoint import cause, error_line
from kmqpy.spark.failed_query import LeftoverMessages
from kmqpy.spark.failures import Failure, FailurePolicy, nacks
from kmqpy.spark.lanes import Lanes, LaneWriter
from kmqpy.spark.report import REPORTS, merged
from kmqpy.spark.take import FAILURES, failed_messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        StreamingQueryProgress,
    )

_log = logging.getLogger(__name__)

_CONFIRM_TIMEOUT_S = 10.0
"""How long flush() and close() wait for Kafka to confirm the end markers. Then flush() raises Unavailable,
and close() gives up: the messages are redelivered."""
_END_EVENT_TIMEOUT_S = 60.0
"""How long Spark's event that a query has ended is waited for; then a warning is logged."""


OnSkipped = Callable[[int], None]
"""Called with the number of offsets that a query has skipped: those of messages, and of control records."""


class SkippedMessages:
    """Compares where micro-batches begin with where the log began before they were read.

    The log may lose messages that a micro-batch has read, so only the earlier look at it counts.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        queue: QueueSettings,
        partitions: int,
        on_skipped: OnSkipped | None = None,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._partitions = partitions
        self._lows: dict[str, Mapping[int, int]] = {}
        self._told: dict[tuple[str, int], int] = {}
        self._on_skipped = on_skipped

    def look(self) -> None:
        """Read where each partition's log begins; without an answer, what was known stays."""
        for _, lane in Lanes(self._queue).bases():
            with contextlib.suppress(KmqError):
                found = partition_reader.bounds(self._connection, lane.name, range(self._partitions))
                self._lows[lane.name] = {partition: low for partition, (low, _) in found.items()}

    def report(self, sources: Iterable[Any]) -> None:
        """Log what a micro-batch has skipped, call `on_skipped`, and look at the log for the next one.

        sources  of the progress of the micro-batch; format("kmq") tells by itself what it skips
        """
        for source in sources:
            for topic, partition, start in _offsets(source.startOffset, self._lows):
                low = self._lows[topic].get(partition, 0)
                start = max(start, self._told.get((topic, partition), 0))
                if low <= start:
                    continue
                self._told[topic, partition] = low
                _log.error(
                    "messages were deleted before they were read",
                    extra={"queue": topic, "partition": partition, "from": start, "to": low},
                )
                if self._on_skipped is not None:
                    self._on_skipped(low - start)
        self.look()


def _offsets(position: str | None, topics: Iterable[str]) -> list[tuple[str, int, int]]:
    """Topic, partition and offset in a position of Spark's Kafka source; none in those of other sources."""
    try:
        found = json.loads(position or "{}")
        return [(one, int(p), int(offset)) for one in topics for p, offset in found.get(one, {}).items()]
    except (ValueError, TypeError, AttributeError):
        return []


class Acknowledger(StreamingQueryListener):
    """Acknowledges messages of one queue when Spark reports that a sink has committed their micro-batch.

    If that event never comes (the driver was killed, Spark dropped the event), the messages are not
    acknowledged, and a tracker redelivers them.
    """

    def __init__(
        self,
        spark: SparkSession,
        queue: QueueSettings,
        connection: KafkaConnection,
        ids: Mapping[str, TopicIds],
        skipped: SkippedMessages | None = None,
    ) -> None:
        self._spark = spark
        self._queue = queue
        self._connection = connection
        self._ids = ids
        self.skipped = skipped
        self._run_of_metric: dict[str, str | None] = {}
        """The run that reports each watched metric; None before its first report and after its end."""
        self._policies: dict[str, FailurePolicy] = {}
        """By the name of a metric: how messages that it reports as failed are given back."""
        self._running: set[str] = set()
        """Runs of any query of the session that have started and not ended."""
        self._ended: dict[str, str | None] = {}
        """Runs that have ended; the error of each that failed, else None."""
        self._spared: set[str] = set()
        """Runs for which _spare() was called."""
        self._refused: dict[str, ConfigError] = {}
        """Runs whose messages are not acknowledged, each with the error that says why."""
        self._changed = threading.Condition()
        self._lanes = Lanes(queue)
        self._current = CurrentSettings(queue, connection)
        self._writer = LaneWriter(connection, queue)
        self.leftovers = LeftoverMessages(queue, connection, self._writer)
        self._committer = self._new_committer()
        self._committed_up_to: dict[int, int] = {}
        spark.streams.addListener(self)

    def _new_committer(self) -> Consumer:
        return librdkafka.new_consumer(self._connection, {"group.id": self._queue.consumer_group})

    def watch(self, name: str, policy: FailurePolicy | None = None) -> None:
        """Acknowledge what tasks report in the observed metric `name`; give back what it says has failed."""
        with self._changed:
            self._run_of_metric[name] = None
            if policy is not None:
                self._policies[name] = policy

    def flush(self) -> None:
        """Wait until Kafka has confirmed the end markers written so far; raises Unavailable."""
        if left := self._writer.flush(_CONFIRM_TIMEOUT_S):
            raise Unavailable(
                f"markers topic {self._queue.markers_topic}: {left} end markers are not confirmed yet"
            )

    def wait_for_end(self, run_id: str) -> None:
        """Wait until Spark has sent all events of an ended query, and its messages are acknowledged.

        Messages that the query left in flight lose no attempt. Raises ConfigError if the query was refused,
        and Unavailable if Kafka does not confirm the end markers.
        """
        self._wait_for_end_event(run_id)
        self._spare(run_id)
        self.flush()
        if error := self._refused.pop(run_id, None):
            raise error

    def close(self) -> None:
        """Wait for the events of ended queries, write the last end markers, and stop listening.

        Raises ConfigError if a query was refused, and wait_for_end() has not raised that error.
        """
        try:
            active = {str(query.runId) for query in self._spark.streams.active}
            for run_id in list(self._running - active):
                self._wait_for_end_event(run_id)
            self._spark.streams.removeListener(self)
        except Exception as error:  # the session was stopped before, and does not answer
            level = logging.WARNING
            if isinstance(error, ConnectionError | Py4JNetworkError):
                level = logging.DEBUG  # the JVM has died: awaiting a query raises this error, too
            _log.log(level, "Spark does not answer: %s", error_line(error), extra={"queue": self._queue.name})
        finally:
            self._writer.close(_CONFIRM_TIMEOUT_S)
            self._committer.close()
        for refused in self._refused.values():
            raise refused

    # --- callbacks: Spark calls them one after the other, and drops the errors that they raise

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """See StreamingQueryListener."""
        self._running.add(str(event.runId))

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """See StreamingQueryListener."""
        progress = event.progress
        try:
            # Other queries of the session may be of other queues.
            ours = self._run_of_metric.keys() & progress.observedMetrics.keys()
            if not ours:
                return
            if self.skipped is not None:
                self.skipped.report(progress.sources)
            if error := _refusal(progress):
                self._refuse(str(progress.runId), error)
                return
            # All metrics together: one process() of the plan may have given back what another handed on.
            reports: list[str] = []
            failures: dict[Place, Failure] = {}
            for name in ours:
                if self._may_acknowledge(name, str(progress.runId)):
                    metric = progress.observedMetrics[name].asDict()
                    reports += metric.get(REPORTS) or ()
                    for place, one in failed_messages(metric.get(FAILURES) or ()).items():
                        failures[place] = self._policies[name].given_back(one.reason, one.attempts)
            self._acknowledge(reports, failures)
            self._look_at_lanes()
        except Exception:  # messages that were not acknowledged are redelivered
            _log.exception("acknowledging failed", extra={"queue": self._queue.name})

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802, ARG002
        """See StreamingQueryListener."""
        self._look_at_lanes()  # a query that is idle may be so because all that comes goes to a new lane

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """See StreamingQueryListener."""
        run_id = str(event.runId)
        with self._changed:
            ours = run_id in self._run_of_metric.values()
        if ours:  # other runs may be of other queues; wait_for_end() spares a run that has reported nothing
            self._spare(run_id, event.exception)
        with self._changed:
            self._running.discard(run_id)
            self._ended[run_id] = event.exception
            self._run_of_metric = {
                name: None if run == run_id else run for name, run in self._run_of_metric.items()
            }
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------------------

    def _look_at_lanes(self) -> None:
        """Log an error if the queue has other lanes than this query reads; once for each change."""
        before = self._current.value
        if (now := self._current.recent()).lane_names != before.lane_names:
            _log.error(
                "the lanes of the queue have changed; start the query again, with a new KmqSpark",
                extra={"queue": self._queue.name, "lanes": now.lane_names},
            )

    def _may_acknowledge(self, name: str, run_id: str) -> bool:
        """Return True if the run is the first of the running ones that has reported this metric."""
        with self._changed:
            if self._run_of_metric[name] in (None, run_id):
                self._run_of_metric[name] = run_id
                return True
        _log.error(
            "two queries run on one result of process() or take(); only the first one's are acknowledged",
            extra={"queue": self._queue.name, "run": run_id},
        )
        return False

    def _wait_for_end_event(self, run_id: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: run_id in self._ended, _END_EVENT_TIMEOUT_S):
                _log.warning("Spark does not tell of the end of a query", extra={"run": run_id})

    def _spare(self, run_id: str, failure: str | None = None) -> None:
        """Have messages that an ended query left in flight lose no attempt; once for each run."""
        with self._changed:
            if run_id in self._spared:
                return
            self._spared.add(run_id)
            failure = failure or self._ended.get(run_id)
        try:
            self.flush()  # acknowledged messages are not in flight
            self.leftovers.spare(None if failure is None else cause(failure))
        except Exception:  # the end of their leases counts as an attempt
            _log.exception("messages in flight pay an attempt", extra={"queue": self._queue.name})

    def _refuse(self, run_id: str, error: ConfigError) -> None:
        """Log why messages of this run are not acknowledged, and stop its query; once for each run."""
        if run_id in self._refused:
            return
        self._refused[run_id] = error
        _log.error("%s", error, extra={"queue": self._queue.name, "run": run_id})
        # In a thread of its own: Spark may wait for its listeners when a query ends.
        threading.Thread(target=self._stop_query, args=(run_id,), name="kmq-stop-query", daemon=True).start()

    def _stop_query(self, run_id: str) -> None:
        try:
            for query in self._spark.streams.active:
                if str(query.runId) == run_id:
                    query.stop()
        except Exception as error:  # the query has ended, or the session has
            _log.warning("the query can't be stopped: %s", error_line(error), extra={"run": run_id})

    def _acknowledge(self, reports: list[str], failures: Mapping[Place, Failure]) -> None:
        report = merged(reports)
        # A message that a task has left (see BatchReport) is given back by that task, or redelivered anyway.
        failures = {
            (partition, offset): failure
            for (partition, offset), failure in failures.items()
            if offset in report.done.get(partition, ())
        }
        for partition, offset in failures:
            report.done[partition].discard(offset)
        self._writer.put(nacks(self._queue, failures))
        for partition, offsets in report.done.items():
            self._writer.put(self._end_markers(partition, offsets))
        self._commit(report.next)

    def _end_markers(self, partition: int, offsets: OffsetRuns) -> list[Item]:
        if self._queue.writes_ranges:
            return [*codec.ranges_of_runs(partition, Op.END, offsets.runs())]
        return [(partition, range(first, first + count)) for first, count in offsets.runs()]

    def _commit(self, next_: Mapping[int, Place]) -> None:
        """Commit how far the queue was taken: the next reader starts there (rule R10 of docs/rules.md)."""
        known = self._committed_up_to
        new = {number: place for number, place in next_.items() if place[0] > known.get(number, -1)}
        if not new:
            return
        places = []
        for number, (offset, at) in new.items():
            lane, partition = self._lanes.place(number)
            metadata = commit_metadata(Commit(offset, at), self._ids[lane.name])
            places.append(TopicPartition(lane.name, partition, offset, metadata))
        try:
            self._committer.commit(offsets=places, asynchronous=False)
        except KafkaException as exception:
            error = kafka_errors.error_of(exception)
            if may_be_cut_off(error):
                self._committer = self._new_committer()
            _log.error(
                "commit failed; if the group has other consumers, they and Spark process every message twice",
                extra={"group": self._queue.consumer_group, "error": error.name() if error else "unknown"},
            )
            return
        self._committed_up_to.update({number: offset for number, (offset, _) in new.items()})


def _refusal(progress: StreamingQueryProgress) -> ConfigError | None:
    """The error for a query whose plan has stateful operators: aggregations, joins of streams, limits, ...

    Such an operator keeps rows in Spark's state when the sink commits a micro-batch. The messages of these
    rows can't be acknowledged, because Spark does not report when their results are in the sink.
    """
    names = sorted({operator.operatorName for operator in progress.stateOperators})
    if not names:
        return None
    return ConfigError(
        f"query {progress.name or progress.id}: its plan has stateful operators ({', '.join(names)}: an "
        "aggregation, a join of streams, a deduplication, a limit). Their rows are in Spark's state, not in "
        "the sink, so nothing was acknowledged and the query was stopped; its messages will be redelivered. "
        "Write the result of process() to a table and aggregate that, or aggregate each micro-batch in "
        "foreachBatch"
    )
