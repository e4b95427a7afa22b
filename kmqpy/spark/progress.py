"""How far a query is, and how to end it between two micro-batches."""

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
_COUNT_EVERY_S = 5.0
"""Counting what a queue holds reads markers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run of the pipeline: rows done, and rows left.

    messages      that this run has processed, failed ones included
    per_s         messages per second in the last micro-batch
    behind        messages waiting or in flight; None while it was not counted
    dead_letters  of the queue, neither redriven nor purged; None while it was not counted
    """

    messages: int = 0
    per_s: float = 0.0
    behind: int | None = None
    dead_letters: int | None = None


class ProgressWatch:
    """Follows the queries of one run, one after the other, and tells how far they are."""

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
        self._last_batch = -math.inf
        self._counts: tuple[int | None, int | None] = None, None
        self._count_at = 0.0

    def look(self, query: StreamingQuery) -> None:
        """Take in what `query` has done since, and tell."""
        if self._tell is None:
            return
        for batch in query.recentProgress:
            if batch["batchId"] > self._last_batch:
                self._last_batch = batch["batchId"]
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
            self._counts = None, None  # of no consequence: the query says what is wrong
        else:
            self._counts = found.depth + found.in_flight, found.dead_letters
        self._count_at = self._clock.monotonic() + _COUNT_EVERY_S


def finish_batch(query: StreamingQuery, clock: Clock) -> None:
    """Wait until the micro-batch of `query` that runs now has ended; returns at once if none runs.

    If the query were stopped in the middle of it, its messages would stay in flight until their leases end.
    """
    before = _last_batch(query)
    while query.isActive and query.status["isTriggerActive"] and _last_batch(query) == before:
        clock.sleep(_POLL_S)


def _last_batch(query: StreamingQuery) -> int | None:
    found = query.lastProgress
    return None if found is None else int(found["batchId"])
