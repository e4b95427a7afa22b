"""Looks for queue logs that were cut back, in background jobs, and tells everybody by ticks (rule R39).

A tracker changes its state only when it reads such a tick, as all readers of the markers do. kmqpy's clients
look for cuts, too, and tell them before they take messages behind a cut.
"""

from __future__ import annotations

import logging
from functools import partial

from kmqpy.errors import KmqError, Unavailable
from kmqpy.kafka.cut_search import find_cut
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.markers.inflight import CutAway
from kmqpy.kafka.markers.log_cuts import Cut, LogCuts, offset_of
from tracker.background import Pool
from tracker.context import TrackerContext, TrackerPart
from tracker.partition.owned_partition import OwnedPartition
from tracker.partition.start_position import StartPosition
from tracker.redelivery.known_log import CopySearch, LastSeen
from tracker.redelivery.lost_copies import redeliver_lost_copies
from tracker.redelivery.tick_writer import TickWriter

_log = logging.getLogger(__name__)

_PAUSE_S = 2.0
"""A partition's log is looked at again this long after the last time, at the earliest."""
_CLIENTS_TELL_S = 10.0
"""A tracker that is not sure of a cut waits so long for clients to tell it. Those that know of cuts look for
them every 5 s, and tell one before they take messages behind it."""


class CutKeeper(TrackerPart):
    """Looks for cuts where there is a reason to, one job for each partition at a time. For the main loop."""

    def __init__(self, context: TrackerContext, tick_writer: TickWriter) -> None:
        super().__init__(context)
        self._tick_writer = tick_writer

    def end_told(self, part: OwnedPartition, end: LogEnd) -> None:
        """Kafka has told where the queue ends; after an election the log may have been cut."""
        if part.absence is not None:
            return  # a marker waits that names a message behind the end: it may have been cut away
        seen = part.last_known
        if seen.epoch < end.epoch and (seen.offset < 0 or seen.epoch < 0):
            part.is_intact(seen, end.epoch)
            seen = part.last_known
        taken = part.last_taken
        if taken is not None and taken.epoch < min(seen.epoch, end.epoch):
            self.look(part, taken, epoch=end.epoch)  # what clients tell of an earlier cut comes first
        elif seen.epoch < end.epoch:
            # Somebody may have written the marker of a record that ends a transaction.
            self.look(part, seen, may_be_control=not seen.claim_id, epoch=end.epoch)
        elif part.doubted_since is not None:  # clients have told since of which epoch they took last
            part.end_doubt()

    def look(
        self, part: OwnedPartition, seen: LastSeen, *, may_be_control: bool = False, epoch: int | None = None
    ) -> None:
        """Begin a job that looks whether the record that was seen is still there, unless one runs.

        epoch  if it is, no cut had happened before the partition had this leader epoch
        """
        now = self._clock.monotonic()
        if part.looks_for_cut or now < part.look_for_cut_at:
            return
        part.looks_for_cut = True
        job = partial(
            find_cut,
            self._connection,
            *part.key,
            offset=seen.offset,
            epoch=seen.epoch,
            may_be_control=may_be_control,
            claim_id=seen.claim_id,
            clock=self._clock,
        )
        self._jobs.run(
            Pool.LOGS, job, partial(self._looked, part, part.topic_ids, part.state.cuts, seen, epoch)
        )

    def cut_away(self, part: OwnedPartition, cut_away: CutAway) -> None:
        """A tick has told cuts that were not known: report it, and look for copies that they took away."""
        start = min(cut.start for cut in cut_away.cuts)
        end = max(cut_away.end, part.taken_end.offset)
        self._metrics.log_cuts.labels(part.key[0]).inc(len(cut_away.cuts))
        self._metrics.lost_to_log_cuts.labels(part.key[0]).inc(cut_away.messages)
        _log.error(
            "the log of the queue was cut back: messages are lost, and new ones have their offsets",
            extra={
                **self._problems.about(part.key),
                "from_offset": start,
                "to_offset": end,
                "in_flight_lost": cut_away.messages,
                "epochs": [cut.epoch for cut in cut_away.cuts],
            },
        )
        part.log_was_cut(start, end, cut_away.messages, self._clock.monotonic())
        self._seek_lost_copies(part, CopySearch(start))

    def not_told(self, part: OwnedPartition, begin: StartPosition) -> None:
        """Report a cut that a takeover has found, and does not tell; see StartPosition.untold."""
        assert begin.untold is not None
        start, end = begin.untold.start, begin.at.taken_end
        self._metrics.log_cuts.labels(part.key[0]).inc()
        self._metrics.lost_to_log_cuts.labels(part.key[0]).inc(begin.lost)
        _log.error(
            "the log of the queue was cut back: messages are lost, and clients have taken new ones since",
            extra={
                **self._problems.about(part.key),
                "from_offset": start,
                "to_offset": end,
                "in_flight_lost": begin.lost,
            },
        )
        part.problems.log_was_cut(
            f"the log of topic {part.queue.name} was cut back: messages from offset {start} to before {end} "
            f"are lost, {begin.lost} of them in flight; see KmqLogCut in docs/operations.md",
            self._clock.monotonic(),
        )

    def markers_cut_away(self, part: OwnedPartition, what: str) -> None:
        """The takeover has found, and logged, that the log of the markers was cut back: report it."""
        self._metrics.log_cuts.labels(part.key[0]).inc()
        shown = f"{part.queue.markers_topic}: {what}; see KmqLogCut in docs/operations.md"
        part.problems.log_was_cut(shown, self._clock.monotonic())

    def _seek_aborted_copies(self, part: OwnedPartition, last: int) -> None:
        """After an election the last known record is there. Look whether copies up to `last` were aborted.

        That is so if the record that had committed them was cut away, and nothing else that anybody has seen.
        """
        # The first search runs; of those of this kind that wait, the latest counts.
        part.searches[1:] = [one for one in part.searches[1:] if one.last is None]
        self._seek_lost_copies(part, CopySearch(last + 1, last))

    def _seek_lost_copies(self, part: OwnedPartition, search: CopySearch) -> None:
        """Look for messages whose copies were cut away, one search after the other, until each has worked."""
        part.searches.append(search)
        if len(part.searches) == 1:
            self._search(part)

    def _search(self, part: OwnedPartition, pause_s: float = 0.0) -> None:
        cuts = part.state.cuts
        job = partial(
            redeliver_lost_copies,
            *(self._connection, part.queue, part.number, cuts, part.searches[0], self._tick_writer),
            clock=self._clock,
            pause_s=pause_s,
        )
        self._jobs.run(Pool.LOGS, job, partial(self._searched, part, part.topic_ids, part.searches, cuts))

    def _searched(
        self,
        part: OwnedPartition,
        topic_ids: tuple[str, str],
        searches: list[CopySearch],
        cuts: LogCuts,
        redelivered: int | Exception,
    ) -> None:
        if self._partitions.get(part.key) is not part or part.topic_ids != topic_ids:
            return
        with self._supervisor.surviving(part):
            if part.searches is not searches:
                return  # the partition is read anew
            if cuts != part.state.cuts:
                self._search(part)  # a cut was told meanwhile, and more copies may be gone
                return
            try:
                if isinstance(redelivered, Exception):
                    raise redelivered
            except KmqError as error:
                part.problems.election = f"it is not known whether copies were cut away: {error}"
                self._problems.warn("cut", part.key, "copies cut away can't be looked for", error=str(error))
                self._search(part, _PAUSE_S)
                return
            part.problems.election = None
            if redelivered:
                _log.warning(
                    "copies were cut away; their messages are redelivered",
                    extra={**self._problems.about(part.key), "count": redelivered},
                )
            part.searches.pop(0)
            if part.searches:
                self._search(part)

    def _looked(
        self,
        part: OwnedPartition,
        topic_ids: tuple[str, str],
        cuts: LogCuts,
        seen: LastSeen,
        epoch: int | None,
        found: Cut | Exception | None,
    ) -> None:
        part.looks_for_cut = False
        if cuts != part.state.cuts:
            return  # a tick has told a cut meanwhile, which explains why the record is not there any more
        part.look_for_cut_at = self._clock.monotonic() + _PAUSE_S
        if self._partitions.get(part.key) is not part or part.topic_ids != topic_ids:
            return
        with self._supervisor.surviving(part):
            part.problems.election = None
            if isinstance(found, KmqError):
                part.problems.election = f"it is not known whether the queue's log was cut back: {found}"
                self._problems.warn("cut", part.key, "a cut log can't be looked for", error=str(found))
            elif isinstance(found, Exception):
                raise found
            elif found is not None and not part.state.cuts.knows(found):
                if seen.is_sure:
                    self._tell(part, found)
                else:
                    self._doubt(part, seen, epoch)
            elif epoch is not None:
                copy = part.state.copies.least_sure
                self._is_intact(part, seen, epoch)
                if found is None and copy is not None:
                    self._seek_aborted_copies(part, offset_of(copy.number))

    def _is_intact(self, part: OwnedPartition, seen: LastSeen, epoch: int) -> None:
        if seen in (part.last_known, part.last_taken):
            part.is_intact(seen, epoch)
        elif not seen.is_sure:  # others were taken meanwhile
            self._doubt(part, seen, epoch)

    def _doubt(self, part: OwnedPartition, seen: LastSeen, epoch: int | None) -> None:
        """Redeliver nothing until clients tell the cut, or have had the time to.

        If none does, another kind of client has taken what was seen, after an election.
        """
        now = self._clock.monotonic()
        if part.doubted_since is None:
            part.doubted_since = now
        elif now - part.doubted_since >= _CLIENTS_TELL_S and epoch is not None:
            part.is_intact(seen, epoch)
            part.give_up_doubt()
            return
        part.problems.election = "the queue's log was perhaps cut back; waiting for what its clients find"

    def _tell(self, part: OwnedPartition, cut: Cut) -> None:
        cuts = part.state.cuts.with_cut(cut)
        try:
            self._tick_writer.post_tick(part.queue.markers_topic, part.number, lambda _: None, cuts)
        except Unavailable as error:  # after a pause the same is found again
            self._problems.warn("cut", part.key, "a cut log can't be told", error=str(error))
