"""Looks for hanging transactions in the topics of a tracker's partitions, in a background job.

A transaction hangs that nobody ends: kmqpy.kafka.hanging explains how that happens. In a queue topic or
dead-letter topic its readers stand still, in a markers topic also the tracker does.
"""

from __future__ import annotations

import logging
from functools import partial

from kmqpy.kafka import hanging
from kmqpy.kafka.hanging import HangingTransaction, HangingTransactions
from kmqpy.kafka.log_ends import TopicPlace
from kmqpy.kafka.topic_names import topics_of
from tracker.background import Pool
from tracker.context import TrackerContext, TrackerPart
from tracker.leadership.assignment import Partition
from tracker.partition.owned_partition import TrackingPhase

_log = logging.getLogger(__name__)


class HangingKeeper(TrackerPart):
    """Shows hanging transactions in /readyz and /metrics, and logs them."""

    def __init__(self, context: TrackerContext) -> None:
        super().__init__(context)
        self._search = HangingTransactions(context.connection, context.clock)
        self._found: dict[TopicPlace, HangingTransaction] = {}
        self._taken_over: dict[TopicPlace, int] = {}
        """Offsets at which a transaction stood still when a takeover was begun because of it."""
        self._looking = False
        self._next_look = 0.0

    def look(self, now: float) -> None:
        """Begin a job that looks at the topics of all partitions, if that is due and no such job runs."""
        if now < self._next_look or self._looking:
            return
        self._next_look = now + hanging.LOOK_EVERY_S
        wanted = {
            (topic, number): (queue, number)
            for (queue, number), part in self._partitions.items()
            for topic in topics_of(part.queue)
        }
        if not wanted:
            self._looked({}, [])
            return
        self._looking = True
        self._jobs.run(Pool.COUNTING, partial(self._search.look, wanted), partial(self._looked, wanted))

    def held_back(self, place: TopicPlace) -> int:
        """About how many records of a partition wait for the end of a hanging transaction."""
        found = self._found.get(place)
        return 0 if found is None else found.waiting

    def _looked(
        self, wanted: dict[TopicPlace, Partition], found: list[HangingTransaction] | Exception
    ) -> None:
        self._looking = False
        if isinstance(found, Exception):
            raise found
        before, self._found = self._found, {one.place: one for one in found}
        for place in before.keys() - self._found.keys():
            self._problems.clear(_problem(place))
        for place, key in wanted.items():
            if key not in self._partitions:
                continue
            self._take_over_again(place, key)
            one = self._found.get(place)
            lasts_s = None if one is None else one.lasts_s(self._clock)
            self._metrics.show_hanging(*key, place[0], lasts_s)
            if one is None:
                continue
            self._problems.show(
                _problem(place),
                f"topic {one.topic}, partition {one.partition}: a transaction that nobody ends has held back "
                f"readers at offset {one.offset} for {lasts_s} s; kmq doctor {key[0]} says how to end it",
            )
            self._problems.warn(
                _problem(place),
                key,
                "a transaction that nobody ends holds back readers",
                topic=one.topic,
                offset=one.offset,
                lasts_s=lasts_s,
            )

    def _take_over_again(self, place: TopicPlace, key: Partition) -> None:
        """A takeover ends transactions of trackers that hang, for example where their end was cut away."""
        stands_at = self._search.stands_still_at(place)
        part = self._partitions[key]
        if (
            stands_at is None
            or stands_at == self._taken_over.get(place)
            or part.phase is TrackingPhase.FENCING
        ):
            return
        if place[0] in (part.queue.name, part.queue.markers_topic):
            self._taken_over[place] = stands_at
            part.copies_hang_at = stands_at if place[0] == part.queue.name else part.copies_hang_at
            part.take_over_again(self._clock.monotonic())


def _problem(place: TopicPlace) -> str:
    """The name under which Problems shows a hanging transaction."""
    return f"hanging transaction in {place[0]}-{place[1]}"
