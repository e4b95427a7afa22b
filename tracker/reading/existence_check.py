"""Checks that the messages named by markers exist, by asking Kafka for the end of the queue (rule R22)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from kmqpy.core.backoff import Backoff
from kmqpy.errors import DecodeError, KmqError
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.markers.replay import QueueEnd
from tracker.background import Pool
from tracker.context import TrackerContext
from tracker.leadership.assignment import Partition
from tracker.partition.owned_partition import OwnedPartition, UnconfirmedAbsence
from tracker.reading.marker_reader import MarkerReader
from tracker.reading.queue_ends import ABSENCE_CONFIRMED_S, ABSENCE_RECHECK_S, QueueEnds

_PAUSE = Backoff(0.2, 2, 10, jitter=0)
"""Before the end of a queue is asked for again, after that has failed."""


class _Question(NamedTuple):
    """The moment at which the end of a queue partition was asked for.

    below      markers below this markers offset were in their log by then
    topic_ids  those of the partition then; if it has others later, the answer is of no use
    """

    below: int
    topic_ids: tuple[str, str]


class ExistenceCheck:
    """Asks for the ends of queues in the background, then has the markers applied that waited for that."""

    def __init__(self, context: TrackerContext, ends: QueueEnds, reader: MarkerReader) -> None:
        self._ends = ends
        self._reader = reader
        self._clock = context.clock
        self._parts = context.parts
        self._jobs = context.jobs
        self._problems = context.problems
        self._supervisor = context.supervisor
        self._under_way = {False: False, True: False}
        """True while an answer is under way: to first questions (False), to questions asked again (True)."""

    @property
    def expects_answer(self) -> bool:
        """True while an answer is under way that should come soon."""
        return self._under_way[False]

    def ask(self, now: float) -> None:
        """Ask where the queues end whose markers wait for that.

        Those for which that failed, or is in doubt, are asked for apart, so that they delay no others.
        """
        waiting = [part for part in self._parts.values() if part.reading and part.unread]
        for again in (False, True):
            parts = [
                part
                for part in waiting
                if (part.ask_failures > 0 or part.absence is not None) is again and part.ask_at <= now
            ]
            if parts and not self._under_way[again]:
                self._ask_for(parts, again)

    def _ask_for(self, parts: list[OwnedPartition], again: bool) -> None:
        # These markers are in their logs by now; later ones may name messages that are not there yet.
        asked = {part: _Question(part.unread[-1].offset() + 1, part.topic_ids) for part in parts}
        queues = [(part.queue.name, part.number) for part in parts]
        self._under_way[again] = True
        job = partial(self._ends.each_of, queues, anew=again)
        self._jobs.run(Pool.ENDS, job, partial(self._answered, asked, again))

    def _answered(
        self,
        asked: Mapping[OwnedPartition, _Question],
        again: bool,
        found: Mapping[Partition, int | KmqError] | Exception,
    ) -> None:
        self._under_way[again] = False
        for part, question in asked.items():
            if self._parts.get(part.key) is part and part.reading and part.topic_ids == question.topic_ids:
                with self._supervisor.surviving(part):
                    end = found if isinstance(found, Exception) else found[part.queue.name, part.number]
                    if isinstance(end, Exception):
                        self._not_found(part, end)
                    else:
                        self._found(part, question.below, end)

    def _not_found(self, part: OwnedPartition, error: Exception) -> None:
        part.ask_failures += 1
        part.ask_at = self._clock.monotonic() + _PAUSE.delay(part.ask_failures)
        part.problems.ends = f"markers wait until it is known where the queue ends: {error}"
        self._problems.warn("ends", part.key, "markers wait for the end of the queue", error=str(error))

    def _found(self, part: OwnedPartition, below: int, end: int) -> None:
        now = self._clock.monotonic()
        part.ask_failures, part.ask_at, part.problems.ends = 0, now, None
        if part.absence is not None and part.unread and part.unread[0].offset() >= part.absence.below:
            part.absence = None
        absence = part.absence or UnconfirmedAbsence(now, below, end)
        decided = now - absence.since >= ABSENCE_CONFIRMED_S
        end = max(end, absence.end)
        part.queue_end = QueueEnd(end, absence.below if decided else 0)
        part.absence = None
        self._reader.apply(part, [], now)
        if part.unread and part.unread[0].offset() < absence.below and _is_beyond(part.unread[0], end):
            part.absence, part.ask_at = absence._replace(end=end), now + ABSENCE_RECHECK_S


def _is_beyond(record: Any, queue_end: int) -> bool:
    """True if it is a marker that takes messages at or beyond the end of the queue."""
    try:
        marker = read_marker(record)
    except DecodeError:
        return False
    return marker.op is not Op.END and marker.highest >= queue_end
