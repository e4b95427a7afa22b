"""The main loop of a tracker: reads markers, starts takeovers and redeliveries, and applies their results.

Only the main loop changes the state of partitions. Calls that may block (opening producers, transactions,
requests to ZooKeeper) run in background jobs, which hand their results back to the loop. So a partition whose
job is stuck never stops another.
"""

from __future__ import annotations

import logging
import threading

from kmqpy.telemetry.base import Telemetry
from tracker.context import TrackerContext, TrackerPart
from tracker.cut_keeper import CutKeeper
from tracker.cut_off_keeper import CutOffKeeper
from tracker.hanging_keeper import HangingKeeper
from tracker.health_keeper import HealthKeeper
from tracker.kafka_clients import KafkaClients
from tracker.membership import Membership
from tracker.mirror_keeper import MirrorKeeper
from tracker.offset_keeper import OffsetKeeper
from tracker.partition_lifecycle import PartitionLifecycle
from tracker.partition_redelivery import PartitionRedelivery
from tracker.reading.existence_check import ExistenceCheck
from tracker.reading.marker_reader import MarkerReader
from tracker.redelivery.last_attempts import LastAttempts
from tracker.redelivery.originals_readers import OriginalsReaders
from tracker.takeover import Takeover
from tracker.topic_probe import TopicProbe

_log = logging.getLogger(__name__)

_MAX_WAIT_S = 0.05
"""An iteration waits for markers for at most this many seconds."""
_BUSY_WAIT_S = 0.005
"""An iteration waits for markers for at most this long while a job runs whose result the loop should apply
soon."""
_DRAIN_TIMEOUT_S = 15.0
"""A tracker that stops waits for at most this long for the running jobs of its partitions."""


class MainLoop(TrackerPart):
    """Creates the parts of a tracker and runs each of them in every iteration. For one thread.

    `context.leadership` must be the Leadership of `member`. The caller sets `stopping` to stop the tracker.
    """

    def __init__(
        self,
        context: TrackerContext,
        member: Membership,
        kafka: KafkaClients,
        telemetry: Telemetry,
        stopping: threading.Event,
    ) -> None:
        super().__init__(context)
        self._member = member
        self._kafka = kafka
        self._stopping = stopping
        self._originals = OriginalsReaders(context.connection, context.clock)
        self._last_attempts = LastAttempts(context.connection, context.clock, context.settings.workers)
        self._offsets = OffsetKeeper(context)
        cuts = CutKeeper(context, kafka.tick_writer)
        self._reader = MarkerReader(context, kafka.markers, cuts)
        self._existence = ExistenceCheck(context, kafka.ends, self._reader, cuts)
        self._probe = TopicProbe(context, kafka.probed_topics, member, kafka.markers)
        self._cut_off = CutOffKeeper(context, kafka)
        self._mirror = MirrorKeeper(context, kafka.topics)
        self._hanging = HangingKeeper(context)
        self._health = HealthKeeper(context, self._hanging.held_back, stopping.is_set)
        takeover = Takeover(context, kafka, self._offsets, self._originals, cuts)
        redelivery = PartitionRedelivery(
            *(context, kafka.topics, self._probe, self._originals, self._last_attempts, telemetry),
            *(kafka.ends, cuts),
        )
        self._lifecycle = PartitionLifecycle(context, kafka, takeover, redelivery, self._offsets)

    def run_once(self, now: float) -> None:
        """Run one iteration at the monotonic time `now`; waits for markers, at most `_MAX_WAIT_S`."""
        step = self._supervisor.step
        step("follow", now, lambda: self._lifecycle.follow(self._leadership.snapshot()))
        for part in list(self._partitions.values()):
            with self._supervisor.surviving(part):
                self._lifecycle.advance(part, now)
        step("ticks", now, self._kafka.tick_writer.poll)
        step("health", now, lambda: self._health.refresh(now))
        step("offsets", now, lambda: self._offsets.store_due(now))
        step("probe", now, lambda: self._probe.probe(now))
        step("cut off", now, self._cut_off.check_silent_consumers)
        step("ends", now, lambda: self._existence.ask(now))
        step("mirror", now, lambda: self._mirror.mirror(now))
        step("counts", now, lambda: self._health.count(now))
        step("hanging", now, lambda: self._hanging.look(now))
        if not step("read", now, lambda: self._reader.read(self._wait_s(now))):
            self._stopping.wait(_MAX_WAIT_S)
        self._jobs.take_results()

    def drain(self) -> None:
        """Wait until the jobs of partitions have ended, store all offsets, give all partitions up.

        The wait takes `_DRAIN_TIMEOUT_S` at most. Offsets that can't be stored are logged.
        """
        self._leadership.set_kafka_ok(False)  # so that no more partitions are assigned to this tracker
        deadline = self._clock.monotonic() + _DRAIN_TIMEOUT_S
        while self._is_busy() and self._clock.monotonic() < deadline:
            now = self._clock.monotonic()
            if not self._supervisor.step("read", now, lambda: self._reader.read(_BUSY_WAIT_S)):
                self._clock.sleep(_BUSY_WAIT_S)
            self._supervisor.step("ticks", now, self._kafka.tick_writer.poll)
            self._jobs.take_results()
        offsets = self._offsets.all_offsets()
        for part in list(self._partitions.values()):
            with self._supervisor.surviving(part):
                self._lifecycle.drop(part, "stopping")
        try:
            self._offsets.write(offsets)
        except Exception as error:
            _log.warning("offsets not stored at the stop", extra={"error": str(error)})
        # All leader znodes vanish at once. Partitions released one by one would be assigned to us again.
        self._leadership.close()

    def close(self) -> None:
        """End the ZooKeeper session at once, wait for background jobs, close all connections."""
        self._leadership.close()
        self._jobs.close()
        self._member.leave()
        self._originals.close()
        self._last_attempts.close()
        self._kafka.close()
        self._health.close()
        _log.info("tracker stopped", extra={"tracker": self._settings.tracker_id})

    def _is_busy(self) -> bool:
        return any(part.busy for part in self._partitions.values())

    def _wait_s(self, now: float) -> float:
        """How many seconds to wait for markers until a tick may be due, or a job may have ended."""
        if self._existence.expects_answer or self._is_busy():
            return _BUSY_WAIT_S
        if not self._leadership.may_redeliver():
            return _MAX_WAIT_S  # no tick is written without a session
        silence_s = self._settings.silence_s
        wait_s = min(
            (part.seconds_to_tick(now, silence_s) for part in self._partitions.values()), default=1.0
        )
        return max(0.001, min(_MAX_WAIT_S, wait_s))
