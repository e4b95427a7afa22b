"""The tracker: redelivers messages whose lease has ended, and shares the partitions with other trackers.

An unexpected exception does not stop a tracker (rule R21 of docs/rules.md): the tracker logs and counts the
exception, /readyz shows it, and the work is tried again later. The work itself is in `main_loop`.
"""

from __future__ import annotations

import gc
import logging
import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.forks import ForkGuard
from kmqpy.errors import AccessDenied, KmqError
from kmqpy.kafka.settings import KafkaConnection, check_connection
from kmqpy.telemetry.base import Telemetry
from kmqpy.zookeeper.settings import ZooKeeperConnection, check_zookeeper
from tracker.background import BackgroundJobs
from tracker.context import TrackerContext
from tracker.health.metrics import TrackerMetrics
from tracker.health.problems import Problems
from tracker.kafka_clients import KafkaClients
from tracker.leadership.assignment import Partition
from tracker.main_loop import MainLoop
from tracker.membership import Membership
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase
from tracker.settings import TrackerSettings
from tracker.supervisor import Supervisor

_log = logging.getLogger(__name__)

_LOOP_STUCK_S = 30.0
"""When no iteration of the main loop has begun for this long, `alive` returns False."""
_OBJECTS_BEFORE_COLLECTION = 100_000


def relax_garbage_collection() -> None:
    """Have Python look for garbage less often; for a process that runs nothing but a tracker.

    A redelivery makes many objects that are no garbage. Scanning them again and again took a fifth of
    its time.
    """
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION, 20, 20)


class Tracker:
    """Redelivers messages that clients received and did not acknowledge in time, in the partitions it owns.

    Any number of trackers share the partitions through ZooKeeper. `run` blocks until `stop`; `start` runs the
    tracker in a thread. Both raise Unavailable when ZooKeeper does not answer within 10 s, and ConfigError
    when the HTTP port can't be opened. Both go on when Kafka does not answer.

    Args:
        connection: Where Kafka is.
        zookeeper: Where ZooKeeper is.
        settings: Of this tracker.
        clock: For tests.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection,
        settings: TrackerSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._guard = ForkGuard("the tracker")
        self._connection = check_connection(connection)
        self._zookeeper = check_zookeeper(zookeeper)
        self._settings = settings or TrackerSettings()
        self._clock = clock
        self.metrics = TrackerMetrics()
        self._problems = Problems(self.metrics, self._settings.tracker_id, clock)
        self._telemetry = Telemetry()
        if self._settings.tracing:
            from kmqpy.telemetry.opentelemetry import TracingTelemetry  # an extra

            self._telemetry = TracingTelemetry()
        self._partitions: dict[Partition, OwnedPartition] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._member: Membership | None = None
        self._ran_at = clock.monotonic()

    @property
    def http_port(self) -> int | None:
        """The port that serves /metrics, /backlog, /livez and /readyz; None where no port does."""
        return self._member.http_port if self._member is not None else None

    def owned(self) -> list[Partition]:
        """The partitions whose messages this tracker redelivers now: owned, and caught up."""
        self._guard.raise_if_inherited()
        return sorted(
            key for key, part in self._partitions.copy().items() if part.phase is TrackingPhase.ACTIVE
        )

    def start(self) -> Self:
        """Connect, then run the main loop in a thread."""
        loop = self._connect()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="kmq-tracker")
        self._thread.start()
        return self

    def run(self) -> None:
        """Connect, then run the main loop until `stop` or `request_stop` is called."""
        self._run(self._connect())

    def request_stop(self) -> None:
        """Ask `run` to end; returns at once, so that signal handlers can call it."""
        if not self._guard.inherited:
            self._stopping.set()

    def stop(self) -> None:
        """Have the main loop finish running redeliveries, store offsets and give up all partitions.

        Waits for the thread of `start`. Does nothing in a forked child.
        """
        self.request_stop()
        if self._thread is not None and not self._guard.inherited:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def alive(self) -> bool:
        """True if the main loop and the leadership's thread run; else only a restart helps."""
        runs = self._clock.monotonic() - self._ran_at < _LOOP_STUCK_S
        return runs and (self._member is None or self._member.alive())

    def problems(self) -> list[str]:
        """Why the tracker is not ready; empty when it is."""
        self._guard.raise_if_inherited()
        found = self._problems.shown()
        found += ["not started"] if self._member is None else self._member.problems()
        for (queue, partition), part in self._partitions.copy().items():
            found += [f"queue {queue}, partition {partition}: {text}" for text in part.problem_texts()]
        return found

    def _connect(self) -> MainLoop:
        self._guard.raise_if_inherited()
        # First: a taken HTTP port fails at once, and probes are answered while the rest connects.
        member = self._member = Membership(
            self, self._connection, self._zookeeper, self._settings, self._clock
        )
        with ExitStack() as undo:
            undo.callback(member.leave)
            kafka = KafkaClients(self._connection, self._clock)
            undo.callback(kafka.close)
            try:
                kafka.topics.brokers()
                member.kafka_probed(answered=True)
            except AccessDenied:
                raise
            except KmqError as error:
                _log.warning("Kafka does not answer; waiting for it", extra={"error": str(error)})
                member.kafka_probed(answered=False)
            member.join()
            loop = self._main_loop(member, kafka)
            undo.pop_all()
        return loop

    def _main_loop(self, member: Membership, kafka: KafkaClients) -> MainLoop:
        context = TrackerContext(
            connection=self._connection,
            zookeeper=self._zookeeper,
            settings=self._settings,
            clock=self._clock,
            metrics=self.metrics,
            problems=self._problems,
            jobs=BackgroundJobs(self._settings.workers, self._problems),
            leadership=member.leadership,
            supervisor=Supervisor(kafka.markers.stop, self._problems, self._clock),
            partitions=self._partitions,
        )
        return MainLoop(context, member, kafka, self._telemetry, self._stopping)

    def _run(self, loop: MainLoop) -> None:
        try:
            while not self._stopping.is_set():
                self._ran_at = self._clock.monotonic()
                loop.run_once(self._ran_at)
            loop.drain()
        finally:
            loop.close()
