"""Checks that the messages which markers name exist, by asking Kafka for the end offsets of queues.

A start marker counts only if its message lies below an end offset that was asked for after the marker was
read (rule R22 of docs/rules.md). Until Kafka has answered, the marker and all after it wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from kmqpy.core.backoff import Backoff
from kmqpy.errors import DecodeError, KmqError
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.markers.replay import QueueEnd
from tracker.background import Pool
from tracker.context import TrackerContext, TrackerPart
from tracker.cut_keeper import CutKeeper
from tracker.leadership.assignment import Partition
from tracker.partition.owned_partition import OwnedPartition, UnconfirmedAbsence
from tracker.reading.marker_reader import MarkerReader
from tracker.reading.queue_ends import ABSENCE_CONFIRMED_S, ABSENCE_RECHECK_S, QueueEnds

_RETRY_PAUSE = Backoff(0.2, 2, 10, jitter=0)
"""The pause after Kafka did not tell an end: 0.2 s, doubled by each failure in a row, up to 10 s."""
_EPOCH_EVERY_S = 1.0
"""While markers come that need no answer, Kafka is asked for leader epochs once in this time."""


class _Question(NamedTuple):
    """A request for the end of a queue partition.

    below      markers below this markers offset were fetched before; the answer decides about them
    topic_ids  the partition's topic ids at the request; the answer counts only while these are the same
    highest    the highest message that was taken by the markers which were applied before
    """

    below: int
    topic_ids: tuple[str, str]
    highest: int


class ExistenceCheck(TrackerPart):
    """Asks for ends of queues in background jobs; with each answer the main loop applies waiting markers."""

    def __init__(
        self, context: TrackerContext, ends: QueueEnds, reader: MarkerReader, cuts: CutKeeper
    ) -> None:
        super().__init__(context)
        self._ends = ends
        self._cuts = cuts
        self._reader = reader
        self._running = {False: False, True: False}
        """Whether a job runs: by False one with first requests, by True one with repeated requests."""

    @property
    def expects_answer(self) -> bool:
        """True while a job with first requests runs: its answer should come soon."""
        return self._running[False]

    def ask(self, now: float) -> None:
        """Begin jobs that ask for the ends of the queues whose markers wait.

        Queues whose last request failed, or whose answer is not believed yet, are asked for in a job of their
        own, so that they don't delay others.
        """
        waiting = [part for part in self._partitions.values() if part.reading and self._asks(part, now)]
        for repeated in (False, True):
            parts = [
                part
                for part in waiting
                if (part.ask_failures > 0 or part.absence is not None) is repeated and part.ask_at <= now
            ]
            if parts and not self._running[repeated]:
                self._ask_for(parts, repeated)

    def _ask_for(self, parts: list[OwnedPartition], repeated: bool) -> None:
        # Kafka's answer decides about these markers only: later ones may name messages that are sent later.
        asked = {
            part: _Question(
                part.unread[-1].offset() + 1 if part.unread else part.state.position,
                part.topic_ids,
                part.state.highest_taken,
            )
            for part in parts
        }
        queues = [(part.queue.name, part.number) for part in parts]
        self._running[repeated] = True
        job = partial(self._ends.with_epochs, queues, anew=repeated)
        self._jobs.run(Pool.ENDS, job, partial(self._answered, asked, repeated))

    def _answered(
        self,
        asked: Mapping[OwnedPartition, _Question],
        repeated: bool,
        found: Mapping[Partition, LogEnd | KmqError] | Exception,
    ) -> None:
        self._running[repeated] = False
        for part, question in asked.items():
            if (
                self._partitions.get(part.key) is part
                and part.reading
                and part.topic_ids == question.topic_ids
            ):
                with self._supervisor.surviving(part):
                    end = found if isinstance(found, Exception) else found[part.queue.name, part.number]
                    if isinstance(end, Exception):
                        self._end_unknown(part, end)
                    else:
                        self._end_known(part, question, end)

    def _end_unknown(self, part: OwnedPartition, error: Exception) -> None:
        part.ask_failures += 1
        part.ask_at = self._clock.monotonic() + _RETRY_PAUSE.delay(part.ask_failures)
        part.problems.ends = f"markers wait until it is known where the queue ends: {error}"
        self._problems.warn("ends", part.key, "markers wait for the end of the queue", error=str(error))

    def _asks(self, part: OwnedPartition, now: float) -> bool:
        """Whether markers wait for an end, applied ones for an epoch, or a log for a look at it."""
        if part.unread:
            return True
        if part.last_known.offset < 0 and part.state.highest_taken < 0:
            return False
        if part.told_below >= part.state.position and not part.may_be_cut:
            return False
        part.ask_at = max(part.ask_at, part.asked_at + _EPOCH_EVERY_S)
        return part.ask_at <= now

    def _end_known(self, part: OwnedPartition, question: _Question, end: LogEnd) -> None:
        now = self._clock.monotonic()
        part.ask_failures, part.ask_at, part.problems.ends = 0, now, None
        if part.absence is not None and part.unread and part.unread[0].offset() >= part.absence.below:
            part.absence = None
        absence = part.absence or UnconfirmedAbsence(now, question.below, end)
        confirmed = now - absence.since >= ABSENCE_CONFIRMED_S
        end = end.or_newer(absence.end)
        part.queue_end = QueueEnd(end.offset, absence.below if confirmed else 0, end.epoch)
        part.absence = None
        part.asked_at = now
        part.epoch_told(end.epoch, question.below, question.highest)
        self._reader.apply(part, [], now)
        if part.state.position <= question.below:  # all that are applied were written before the question
            part.epoch_told(end.epoch, question.below, part.state.highest_taken)
        if (
            part.unread
            and part.unread[0].offset() < absence.below
            and _is_beyond(part.unread[0], part.queue_end, part.state.cuts)
        ):
            part.absence, part.ask_at = absence._replace(end=end), now + ABSENCE_RECHECK_S
        self._cuts.end_told(part, end)


def _is_beyond(record: Any, queue_end: QueueEnd, cuts: LogCuts) -> bool:
    """True if the record is a marker that tells of what did not exist when Kafka told this end."""
    try:
        marker = read_marker(record)
    except DecodeError:
        return False
    return queue_end.is_beyond(marker, cuts)
