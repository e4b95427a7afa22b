"""Tells how far a pipeline is, and waits for the end of a micro-batch before its query is stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql.streaming.query import StreamingQuery

from kmqpy.core.clock import Clock
from kmqpy.errors import KmqError
from kmqpy.kafka.admin import stats
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

_POLL_S = 0.05
_COUNT_INTERVAL_S = 5.0
"""Seconds from one count of the queue's messages to the next: a count reads markers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run of the pipeline: messages processed, and messages left.

    messages      that this run has processed, failed ones included
    per_s         messages per second in the last micro-batch
    behind        messages waiting or in flight; None if they could not be counted
    dead_letters  of the queue, neither redriven nor purged; None if they could not be counted
    """

    messages: int = 0
    per_s: float = 0.0
    behind: int | None = None
    dead_letters: int | None = None


class ProgressWatch:
    """Follows the queries of one run, one after the other, and calls `tell` with the Progress of the run."""

    def __init__(
        self,
        connection: KafkaConnection,
        queue: QueueSettings,
        tell: Callable[[Progress], None] | None,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._tell = tell
        self._clock = clock
        self._messages = 0
        self._per_s = 0.0
        self._seen_batch_id = -math.inf
        self._counts: tuple[int | None, int | None] = None, None
        self._count_at = 0.0

    def look(self, query: StreamingQuery) -> None:
        """Add the micro-batches that `query` has finished since the last look, and call `tell`."""
        if self._tell is None:
            return
        for batch in query.recentProgress:
            if batch["batchId"] > self._seen_batch_id:
                self._seen_batch_id = batch["batchId"]
                self._messages += batch["numInputRows"]
                self._per_s = batch["processedRowsPerSecond"]
        if self._clock.monotonic() >= self._count_at:
            self._count()
        behind, dead_letters = self._counts
        self._tell(
            Progress(messages=self._messages, per_s=self._per_s, behind=behind, dead_letters=dead_letters)
        )

    def _count(self) -> None:
        try:
            found = stats.queue_stats(self._connection, self._queue)
        except KmqError:
            self._counts = None, None  # the run goes on: its query raises what is wrong
        else:
            self._counts = found.depth + found.in_flight, found.dead_letters
        self._count_at = self._clock.monotonic() + _COUNT_INTERVAL_S


def finish_batch(query: StreamingQuery, clock: Clock) -> None:
    """Wait until the micro-batch of `query` that runs now has ended; returns at once if none runs.

    If the query were stopped in the middle of it, its messages would stay in flight until their leases end.
    """
    before = _last_batch_id(query)
    while query.isActive and query.status["isTriggerActive"] and _last_batch_id(query) == before:
        clock.sleep(_POLL_S)


def _last_batch_id(query: StreamingQuery) -> int | None:
    found = query.lastProgress
    return None if found is None else int(found["batchId"])
