"""Takes granted partitions over, starts their redeliveries and ticks, and gives partitions up.

A partition is granted while its leader znode belongs to this tracker's session. A tick is a marker that only
brings the broker's time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from confluent_kafka import KafkaError

from kmqpy.errors import Unavailable
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.settings import QueueSettings
from tracker.background import Pool
from tracker.context import TrackerContext, TrackerPart
from tracker.kafka_clients import KafkaClients
from tracker.leadership.assignment import Partition
from tracker.leadership.published_view import LeadershipView
from tracker.offset_keeper import OffsetKeeper
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase
from tracker.partition_redelivery import PartitionRedelivery
from tracker.redelivery.redeliverer import Redeliverer
from tracker.redelivery.tick_writer import Tick
from tracker.takeover import Takeover, TakeoverResult

_log = logging.getLogger(__name__)


class PartitionLifecycle(TrackerPart):
    """Starts takeovers and redeliveries as background jobs, one per partition at a time, and posts ticks.

    All methods are for the main loop.
    """

    def __init__(
        self,
        context: TrackerContext,
        kafka: KafkaClients,
        takeover: Takeover,
        redelivery: PartitionRedelivery,
        offsets: OffsetKeeper,
    ) -> None:
        super().__init__(context)
        self._markers = kafka.markers
        self._tick_writer = kafka.tick_writer
        self._takeover = takeover
        self._redelivery = redelivery
        self._offsets = offsets
        self._giving_up: set[Partition] = set()

    def follow(self, view: LeadershipView) -> None:
        """Add partitions that were granted, drop those that were lost, release those to be given up.

        Gives each partition the newest settings of its queue.
        """
        for key, part in list(self._partitions.items()):
            if view.owned.get(key) != part.epoch:
                self.drop(part, "leadership lost")
            elif key in view.releasing and not part.busy:
                self._release(part)
        for key, epoch in view.owned.items():
            registered = view.queues.get(key[0])
            if key in self._partitions or key in self._giving_up:
                continue
            if key in view.releasing:  # to be released before this tracker has added it
                self._leadership.release(*key)
            elif registered is not None:
                self._add(key, epoch, registered.settings)
        for part in self._partitions.values():
            if part.key[0] in view.queues:
                part.follow(view.queues[part.key[0]].settings)

    def advance(self, part: OwnedPartition, now: float) -> None:
        """Start the next action of the partition: a takeover, a redelivery or a tick, if any is due."""
        # Without a live session there is no takeover either: it could fence the partition's new owner.
        if part.busy or not self._leadership.may_redeliver():
            return
        if part.waits_in_vain(now):
            part.problems.tick = "the tick of the takeover does not come, perhaps cut away; taking over again"
            self._problems.warn("lost tick", part.key, part.problems.tick)
            part.take_over_again(now)
        if part.phase is TrackingPhase.FENCING and now >= part.retry_at:
            self._submit(part, partial(self._takeover.prepare, part), partial(self._taken_over, part))
            return
        if part.phase is not TrackingPhase.ACTIVE:
            return
        if torn := part.state.claims.torn():  # before their messages are copied a second time
            mend = partial(self._redelivery.mend, part, torn, part.log)
            self._submit(part, mend, partial(self._redelivery.mended, part, torn))
            return
        entries = part.due(self._settings.max_batch_messages * 5)
        if entries:
            state = part.state
            job = partial(
                self._redelivery.redeliver,
                *(part, entries, state.position, state.taken_late(entries), part.log, state.now_ms),
            )
            self._submit(part, job, partial(self._redelivery.redelivered, part, entries))
        elif part.wants_tick(now, self._settings.silence_s):
            self._post_tick(part, now)

    def drop(self, part: OwnedPartition, why: str) -> None:
        """Stop all work for the partition: another tracker may own it.

        A job that runs is not interrupted; its result is ignored.
        """
        _log.info("partition given up", extra={**self._problems.about(part.key), "why": why})
        self._markers.stop(part)
        part.phase = TrackingPhase.DROPPED
        if not part.busy:
            self._jobs.submit(Pool.HOUSEKEEPING, part.redeliverer.close)
        self._partitions.pop(part.key, None)
        for gauge in (self._metrics.in_flight, self._metrics.oldest):
            gauge.labels(part.key[0], str(part.number)).set(0)
        self._metrics.hide(*part.key)

    def _add(self, key: Partition, epoch: int, queue: QueueSettings) -> None:
        redeliverer = Redeliverer(self._connection, queue, key[1], self._settings, self._clock)
        lead_ms = self._settings.max_clock_lead_ms
        self._partitions[key] = OwnedPartition(key, epoch, queue, redeliverer, lead_ms)
        self._metrics.begin(key[0])

    def _submit(self, part: OwnedPartition, job: Callable[[], Any], finished: Callable[[Any], None]) -> None:
        """Run `job` in a thread; then the main loop calls `finished` with its result or exception.

        If the partition was dropped meanwhile, `finished` is not called.
        """
        part.busy = True
        self._jobs.run(Pool.REDELIVERY, job, partial(self._job_ended, part, finished))

    def _job_ended(self, part: OwnedPartition, finished: Callable[[Any], None], result: Any) -> None:
        part.busy = False
        with self._supervisor.surviving(part):
            if part.phase is TrackingPhase.DROPPED:
                self._jobs.submit(Pool.HOUSEKEEPING, part.redeliverer.close)
            else:
                finished(result)

    def _taken_over(self, part: OwnedPartition, result: TakeoverResult | Exception | None) -> None:
        if result is None:
            self.drop(part, "not the leader")
        else:
            self._takeover.begin(part, result)

    def _post_tick(self, part: OwnedPartition, now: float) -> None:
        def written(tick: Tick) -> None:  # called by any thread that polls the tick_writer
            self._jobs.hand_over(lambda: self._tick_written(part, tick))

        def failed(error: KafkaError) -> None:
            why = f"a tick could not be written: {error.str()}"
            self._jobs.hand_over(lambda: self._tick_failed(part, now, why))

        try:
            self._tick_writer.post_tick(part.queue.markers_topic, part.number, written, failed=failed)
        except Unavailable as error:
            self._tick_failed(part, now, str(error))
        part.clock.tick_sent(now)
        self._metrics.ticks.labels(part.key[0]).inc()

    def _tick_written(self, part: OwnedPartition, tick: Tick) -> None:
        ahead_s = part.tick_written(tick, self._clock.monotonic())
        if ahead_s:
            self._problems.clock_ahead(part.key, ahead_s)

    def _tick_failed(self, part: OwnedPartition, asked_at: float, why: str) -> None:
        if part.clock.has_read_since(asked_at):
            return  # another one was written since
        part.problems.tick = why
        self._problems.warn("tick", part.key, "a tick could not be written", error=why)

    def _release(self, part: OwnedPartition) -> None:
        """Drop the partition; then a background job stores its offset and deletes its leader znode."""
        make_offset = self._offsets.offset_of(part)
        self.drop(part, "released")
        self._giving_up.add(part.key)
        job = partial(self._give_up, part.key, make_offset)
        self._jobs.run(Pool.HOUSEKEEPING, job, partial(self._given_up, part.key))

    def _give_up(self, key: Partition, make_offset: Callable[[], StoredOffset] | None) -> None:
        try:
            if make_offset is not None:
                self._offsets.write({key: make_offset()})
        finally:
            self._leadership.release(*key)

    def _given_up(self, key: Partition, error: Exception | None) -> None:
        self._giving_up.discard(key)
        if error is not None:
            self._problems.warn("offsets", key, "offset not stored at release", error=str(error))
