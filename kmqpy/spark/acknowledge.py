"""End markers and commits, written by the driver when a sink has a micro-batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException, TopicPartition
from py4j.protocol import Py4JNetworkError
from pyspark.sql.streaming.listener import StreamingQueryListener

from kmqpy.core.backoff import Backoff
from kmqpy.errors import ConfigError, Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.client.marker_writer import Item, MarkerWriter
from kmqpy.kafka.client.offset_commits import commit_metadata
from kmqpy.kafka.cut_off import may_be_cut_off
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.spark.checkpoint import Remembered, cause, one_line
from kmqpy.spark.failed_query import FailedQuery
from kmqpy.spark.failures import Failure, FailurePolicy, nacks
from kmqpy.spark.report import REPORTS, BatchReport, merged
from kmqpy.spark.stateful import refusal
from kmqpy.spark.take import FAILURES, failed_messages
from kmqpy.spark.taker import MarkersFormat

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
_EVENT_TIMEOUT_S = 60.0
"""How long the last event of a query that has ended may take."""


class Acknowledger(StreamingQueryListener):
    """Acknowledges messages of one queue when Spark says that the sink has them.

    Spark tells of a micro-batch after its sink has committed it. What is never told (the driver was
    killed, an event was dropped) is not acknowledged, and so redelivered.
    """

    def __init__(
        self,
        spark: SparkSession,
        queue: QueueSettings,
        connection: KafkaConnection,
        markers_format: MarkersFormat,
        ids: TopicIds,
    ) -> None:
        self._spark = spark
        self._queue = queue
        self._connection = connection
        self._markers_format = markers_format
        self._ids = ids
        self._names: dict[str, str | None] = {}
        """Names of observed metrics that are ours, with the running query that has each."""
        self._policies: dict[str, FailurePolicy] = {}
        self._running: set[str] = set()
        self._ended: dict[str, str | None] = {}
        """Runs that have ended, with what each failed with."""
        self._spared: set[str] = set()
        self._refused: dict[str, ConfigError] = {}
        """The reason why nothing of a query is acknowledged, by its run id."""
        self._changed = threading.Condition()
        self._writer = MarkerWriter(
            connection, queue.markers_topic, coalesce_ms=1 if markers_format == "range" else None
        )
        self._failed_query = FailedQuery(queue, connection, markers_format, self._writer)
        self._committer = self._new_committer()
        self._committed: dict[int, int] = {}
        spark.streams.addListener(self)

    def _new_committer(self) -> Consumer:
        return librdkafka.new_consumer(self._connection, {"group.id": self._queue.consumer_group})

    def watch(self, name: str, policy: FailurePolicy | None = None) -> None:
        """Acknowledge what is reported as the observed metric `name`.

        policy  how messages are given back that the metric says have failed
        """
        with self._changed:
            self._names[name] = None
            if policy is not None:
                self._policies[name] = policy

    def flush(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Wait until the end markers of what Spark has told of are confirmed; raises Unavailable."""
        if left := self._writer.flush(timeout_s):
            raise Unavailable(
                f"markers topic {self._queue.markers_topic}: {left} end markers are not confirmed yet"
            )

    def wait_for_end(self, run_id: str, timeout_s: float = _EVENT_TIMEOUT_S) -> None:
        """Wait until Spark has told everything of an ended query of this queue, and it is acknowledged.

        Raises ConfigError when the query was refused: nothing of it was acknowledged.
        """
        self._wait_until_told(run_id, timeout_s)
        self._spare(run_id)
        self.flush()
        if error := self._refused.pop(run_id, None):
            raise error

    def split_failed(self, backoff: Backoff, remembered: Remembered) -> None:
        """Before a query starts: give back some messages of one that failed, as `kmqpy.spark.isolation` says.

        Raises Unavailable, and ConfigError when the checkpoint can't be written.
        """
        self._failed_query.split(backoff, remembered)

    def close(self) -> None:
        """Acknowledge what Spark has told of, and stop listening.

        Raises ConfigError when a query was refused and nobody was told of it yet.
        """
        try:
            active = {str(query.runId) for query in self._spark.streams.active}
            for run_id in list(self._running - active):
                self._wait_until_told(run_id, _EVENT_TIMEOUT_S)
            self._spark.streams.removeListener(self)
        except Exception as error:  # the session was stopped before, and says nothing any more
            level = logging.WARNING
            if isinstance(error, ConnectionError | Py4JNetworkError):
                level = logging.DEBUG  # its JVM has died: whoever waits for a query gets that error, too
            _log.log(level, "Spark does not answer: %s", one_line(error), extra={"queue": self._queue.name})
        finally:
            self._writer.close(_CLOSE_TIMEOUT_S)
            self._committer.close()
        for refused in self._refused.values():
            raise refused

    # --- what Spark calls: one event after the other; nobody sees what is raised here

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """See StreamingQueryListener."""
        self._running.add(str(event.runId))

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """See StreamingQueryListener."""
        progress = event.progress
        try:
            if error := refusal(progress):
                self._refuse(str(progress.runId), error)
                return
            # Together: what one process() of the plan handed on, another may have given back.
            reports: list[str] = []
            failures: dict[Place, Failure] = {}
            for name in self._names.keys() & progress.observedMetrics.keys():
                if self._is_of(name, str(progress.runId)):
                    metric = progress.observedMetrics[name].asDict()
                    reports += metric.get(REPORTS) or ()
                    failures |= self._failures(name, metric.get(FAILURES) or ())
            self._acknowledge(reports, failures)
        except Exception:  # messages that were not acknowledged are redelivered
            _log.exception("acknowledging failed", extra={"queue": self._queue.name})

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """See StreamingQueryListener."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """See StreamingQueryListener."""
        run_id = str(event.runId)
        with self._changed:
            ours = run_id in self._names.values()
        if ours:  # others may be of other queues; of one that has told nothing yet, wait_for_end() knows
            self._spare(run_id, event.exception)
        with self._changed:
            self._running.discard(run_id)
            self._ended[run_id] = event.exception
            self._names = {name: None if run == run_id else run for name, run in self._names.items()}
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------------------

    def _is_of(self, name: str, run_id: str) -> bool:
        with self._changed:
            if self._names[name] in (None, run_id):
                self._names[name] = run_id
                return True
        _log.error(
            "two queries run on one result of process() or take(); only the first one's are acknowledged",
            extra={"queue": self._queue.name, "run": run_id},
        )
        return False

    def _wait_until_told(self, run_id: str, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: run_id in self._ended, timeout_s):
                _log.warning("Spark does not tell of the end of a query", extra={"run": run_id})

    def _spare(self, run_id: str, failure: str | None = None) -> None:
        """Let messages that an ended query of this queue left in flight lose no attempt by that."""
        with self._changed:
            if run_id in self._spared:
                return
            self._spared.add(run_id)
            failure = failure or self._ended.get(run_id)
        try:
            self.flush()  # what is acknowledged is not in flight
            self._failed_query.spare(None if failure is None else cause(failure))
        except Exception:  # their leases end, which counts
            _log.exception("messages in flight pay an attempt", extra={"queue": self._queue.name})

    def _refuse(self, run_id: str, error: ConfigError) -> None:
        if run_id in self._refused:
            return
        self._refused[run_id] = error
        _log.error("%s", error, extra={"queue": self._queue.name, "run": run_id})
        # In a thread of its own: Spark may wait for its listeners when a query ends.
        threading.Thread(target=self._stop, args=(run_id,), name="kmq-stop-query", daemon=True).start()

    def _stop(self, run_id: str) -> None:
        try:
            for query in self._spark.streams.active:
                if str(query.runId) == run_id:
                    query.stop()
        except Exception as error:  # it has ended, or the session has
            _log.warning("the query can't be stopped: %s", one_line(error), extra={"run": run_id})

    def _failures(self, name: str, texts: Iterable[str]) -> dict[Place, Failure]:
        failed = failed_messages(texts)
        return {
            place: self._policies[name].given_back(one.reason, one.attempts) for place, one in failed.items()
        }

    def _acknowledge(self, reports: list[str], failures: Mapping[Place, Failure]) -> None:
        report = merged(reports)
        # What an evaluation has left to others already is given back by them.
        failures = {place: failure for place, failure in failures.items() if _is_done(report, place)}
        for partition, offset in failures:
            report.done[partition].discard(offset)
        self._writer.put(nacks(self._markers_format, failures))
        for partition, offsets in report.done.items():
            self._writer.put(self._ends(partition, offsets))
        self._commit(report.next)

    def _ends(self, partition: int, offsets: OffsetRuns) -> list[Item]:
        if self._markers_format == "range":
            return [*codec.ranges_of_runs(partition, Op.END, offsets.runs())]
        return [(partition, range(first, first + count)) for first, count in offsets.runs()]

    def _commit(self, next_: Mapping[int, Place]) -> None:
        """Say how far the queue was taken: for statistics, and for who goes on with it (rule R10)."""
        places = [
            TopicPartition(self._queue.name, partition, offset, commit_metadata(at, self._ids))
            for partition, (offset, at) in next_.items()
            if offset > self._committed.get(partition, -1)
        ]
        if not places:
            return
        try:
            self._committer.commit(offsets=places, asynchronous=False)
        except KafkaException as exception:
            error = librdkafka.error_of(exception)
            if may_be_cut_off(error):
                self._committer = self._new_committer()
            _log.error(
                "commit failed; if the group has other consumers, they and Spark process every message twice",
                extra={"group": self._queue.consumer_group, "error": error.name() if error else "unknown"},
            )
            return
        self._committed.update({place.partition: place.offset for place in places})


def _is_done(report: BatchReport, place: Place) -> bool:
    partition, offset = place
    return partition in report.done and offset in report.done[partition]
