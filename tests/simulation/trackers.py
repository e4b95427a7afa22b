"""The trackers of a simulation: kmqpy's own code (see `stepwise`), in single steps."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kmqpy.errors import KmqError, Unavailable
from kmqpy.kafka.settings import MARKERS_SUFFIX
from tracker.partition.owned_partition import TrackingPhase
from tracker.settings import TrackerSettings

from .clients import LateAckCheck, cut_search, find_starts
from .connection import Connection
from .journal import Planned
from .kafka import Module, TrackerModule
from .leadership import Leadership
from .log_readers import LogReader, QueueEnds
from .model import part_of
from .stepwise import stepwise
from .surroundings import (
    CLOCK,
    QUEUE,
    NoMetrics,
    NoMirror,
    NothingCutOff,
    NothingHangs,
    Threading,
    TrackerTopics,
    internal_error,
    records,
)
from .world import Process, Steps

_replay = stepwise("kmqpy.kafka.markers.replay", set(), headers_of_each=records.headers_of_each)


_originals = stepwise(
    "tracker.redelivery.originals",
    {"fetch", "_fetch", "bounds", "read_between", "_read_up_to", "_read"},
    librdkafka=Module,
    SYSTEM_CLOCK=CLOCK,
)
_tick_writer = stepwise(
    "tracker.redelivery.tick_writer", {"send_markers", "send_tick"}, librdkafka=Module, SYSTEM_CLOCK=CLOCK
)
_transaction = stepwise(
    "kmqpy.kafka.copies.copy_transaction",
    {"open_producer", "execute", "_abort", "_end", "_flush_claim"},
    librdkafka=Module,
    SYSTEM_CLOCK=CLOCK,
)
_torn_transactions = stepwise(
    "kmqpy.kafka.copies.torn_transactions",
    {"find_copies", "_wait_until_stable"},
    SYSTEM_CLOCK=CLOCK,
    headers_of_each=records.headers_of_each,
    partition_reader=LogReader,
)
_markers_since_plan = stepwise("tracker.redelivery.markers_since_plan", {"read_to"})
_claim = stepwise(
    "tracker.redelivery.claim", {"decide"}, TransactionCancelled=_transaction.TransactionCancelled
)


def _controlled_claim(*given: Any, **more: Any) -> Any:
    """The claim of a redelivery, as the controls of the world have it."""
    return CLOCK.world.controls.claim(*given, **more)


_redeliverer = stepwise(
    "tracker.redelivery.redeliverer",
    {"open", "redeliver", "mend", "_is_gone", "_redeliver_some", "_send_all", "_transact", "_transact_once"},
    librdkafka=Module,
    SYSTEM_CLOCK=CLOCK,
    find_copies=_torn_transactions.find_copies,
    Claim=_controlled_claim,
    MarkersSincePlan=_markers_since_plan.MarkersSincePlan,
    ClaimOvertaken=_transaction.ClaimOvertaken,
    CopyTransaction=_transaction.CopyTransaction,
    ProducerUnusable=_transaction.ProducerUnusable,
    TransactionAborted=_transaction.TransactionAborted,
    TransactionCancelled=_transaction.TransactionCancelled,
    open_producer=_transaction.open_producer,
)
_membership = stepwise("tracker.membership", set(), Leadership=Leadership)
_problems = stepwise("tracker.health.problems", set())


class Problems(_problems.Problems):
    """tracker.health.problems.Problems, which makes the run fail after an internal error."""

    def survived(self, what: str, error: Exception, *key: Any) -> None:
        CLOCK.world.internal_errors.append(internal_error(what, error))
        super().survived(what, error, *key)


_background = stepwise("tracker.background", set(), ThreadPoolExecutor=lambda *_, **__: None)
_markers_consumer = stepwise("tracker.reading.markers_consumer", set(), librdkafka=TrackerModule)
_kafka_clients = stepwise(
    "tracker.kafka_clients",
    set(),
    MarkersConsumer=_markers_consumer.MarkersConsumer,
    TickWriter=_tick_writer.TickWriter,
    QueueEnds=QueueEnds,
    Topics=TrackerTopics,
)
_originals_readers = stepwise(
    "tracker.redelivery.originals_readers",
    set(),
    OriginalsReader=lambda connection, clock: connection.world.controls.reader(connection, clock),
)
_offset_keeper = stepwise("tracker.offset_keeper", {"read_offset"}, threading=Threading)
_marker_reader = stepwise("tracker.reading.marker_reader", set(), replay_markers=_replay.replay_markers)
_topic_probe = stepwise("tracker.topic_probe", set())
_takeover = stepwise(
    "tracker.takeover",
    {"prepare", "_cut_since", "_markers_cut_since", "_markers_since"},
    find_cut=cut_search.find_cut,
    find_starts=find_starts,
)
_lost_copies = stepwise(
    "tracker.redelivery.lost_copies", {"redeliver_lost_copies"}, partition_reader=LogReader
)
_cut_keeper = stepwise(
    "tracker.cut_keeper",
    set(),
    find_cut=cut_search.find_cut,
    redeliver_lost_copies=_lost_copies.redeliver_lost_copies,
)
_last_attempts = stepwise("tracker.redelivery.last_attempts", {"examine"}, LateAckCheck=LateAckCheck)
_partition_redelivery = stepwise(
    "tracker.partition_redelivery", {"redeliver", "mend"}, PartitionAttempts=_last_attempts.PartitionAttempts
)
_partition_lifecycle = stepwise(
    "tracker.partition_lifecycle",
    set(),
    Redeliverer=lambda connection, *rest: connection.world.controls.redeliverer(connection, *rest),
)


class BackgroundJobs(_background.BackgroundJobs):
    """tracker.background.BackgroundJobs, whose threads are actors; `process` is set before the first job."""

    process: Process

    def run(self, _pool: str, job: Callable[[], Any], finished: Callable[[Any], None]) -> None:
        self.process.spawn(self._run(job, finished))

    def submit(self, pool: str, job: Callable[[], Any]) -> None:
        self.run(pool, job, lambda _: None)

    def _run(self, job: Callable[[], Any], finished: Callable[[Any], None]) -> Steps:
        world = self.process.world
        yield world.latency()
        try:
            result = job()
            if isinstance(result, Generator):
                result = yield from result
        except Exception as error:  # as in the real one: handed to the loop
            result = error
            if not isinstance(error, KmqError | KafkaException | _transaction.ProducerUnusable):
                world.internal_errors.append(internal_error("a background job", error))
        self.hand_over(lambda: finished(result))
        world.wake(self.process.main)


class TopicProbe(_topic_probe.TopicProbe):
    """tracker.topic_probe.TopicProbe, which does nothing where topics keep their ids."""

    def __init__(self, context: Any, *rest: Any) -> None:
        super().__init__(context, *rest)
        self._topics_change = context.connection.world.topics_change
        if not self._topics_change:
            self._next_probe = float("inf")

    def has_its_topics(self, part: Any) -> bool:
        return not self._topics_change or super().has_its_topics(part)


class Takeover(_takeover.Takeover):
    """tracker.takeover.Takeover, which diagnoses no topics."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._diagnosed.add(QUEUE)

    def _end_hanging(self, _part: Any, _stored: Any) -> bool:
        return False  # an operator does


class LastAttempts(_last_attempts.LastAttempts):
    """tracker.redelivery.last_attempts.LastAttempts; the history notes what could not be read in time."""

    def examine(self, queue: Any, partition: int, *rest: Any) -> Steps:
        checked = yield from super().examine(queue, partition, *rest)
        unread = ((part_of(queue.name, where), offset) for where, offset in checked.unread)
        self._connection.world.history.unread.update(unread)
        return checked


class PartitionRedelivery(_partition_redelivery.PartitionRedelivery):
    """tracker.partition_redelivery.PartitionRedelivery, which knows if there is a dead-letter topic."""

    def __init__(self, context: Any, *rest: Any) -> None:
        super().__init__(context, *rest)
        self._broker = context.connection.broker
        self._world = context.connection.world
        self._history = self._world.history
        self._tracker_name = context.connection.process.name

    def redeliver(
        self, part: Any, entries: Any, position: int, taken_late: frozenset[int], log: Any, now_ms: int
    ) -> Steps:
        markers_end = self._broker.logs[part.queue.markers_topic, part.number].end
        for entry in entries:
            plans = self._history.plans[part.topic_ids[1], part.number, entry.offset]
            plans.append((markers_end, position))
        offsets = [entry.offset for entry in entries]
        name = self._tracker_name
        self._world.journal.append(Planned(name, part.number, offsets, position, taken_late))
        return (yield from super().redeliver(part, entries, position, taken_late, log, now_ms))

    def _has_topic(self, _part: Any, topic: str) -> bool:
        return topic not in self._broker.missing


def _controlled(name: str) -> Callable[..., Any]:
    """A part of the tracker, as the controls of its world have it."""
    return lambda context, *rest: getattr(context.connection.world.controls, name)(context, *rest)


def _controlled_attempts(connection: Connection, *rest: Any) -> Any:
    return connection.world.controls.last_attempts(connection, *rest)


_main_loop = stepwise(
    "tracker.main_loop",
    set(),
    LastAttempts=_controlled_attempts,
    MarkerReader=_controlled("marker_reader"),
    CutKeeper=_cut_keeper.CutKeeper,
    CutOffKeeper=NothingCutOff,
    HangingKeeper=NothingHangs,
    MirrorKeeper=stepwise("tracker.mirror_keeper", set(), SettingsMirror=NoMirror).MirrorKeeper,
    OffsetKeeper=_controlled("offset_keeper"),
    OriginalsReaders=_originals_readers.OriginalsReaders,
    PartitionLifecycle=_controlled("lifecycle"),
    PartitionRedelivery=_controlled("redelivery"),
    Takeover=_controlled("takeover"),
    TopicProbe=_controlled("topic_probe"),
)
_tracker = stepwise(
    "tracker.tracker",
    set(),
    BackgroundJobs=BackgroundJobs,
    KafkaClients=_kafka_clients.KafkaClients,
    MainLoop=_main_loop.MainLoop,
    Membership=_membership.Membership,
    Problems=Problems,
    TrackerMetrics=NoMetrics,
    check_connection=lambda connection: connection,
)


_redeliverer._LANE_AWAY_S = 1.0
Redeliverer = _redeliverer.Redeliverer
TrackerClaim = _claim.Claim
OriginalsReader = _originals.OriginalsReader
OffsetKeeper = _offset_keeper.OffsetKeeper
MarkerReader = _marker_reader.MarkerReader
PartitionLifecycle = _partition_lifecycle.PartitionLifecycle
broken = _transaction.ProducerUnusable
original_of = _originals.original_of


def aborted() -> Exception:
    """A transaction was aborted, for a reason that is over: the same can be sent again at once."""
    error: Exception = _transaction.TransactionAborted(
        KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER), QUEUE
    )
    return error


class Tracker(_tracker.Tracker):
    """tracker.tracker.Tracker, whose threads are actors."""

    def __init__(self, connection: Connection, settings: TrackerSettings) -> None:
        super().__init__(connection, connection.zookeeper, settings, connection.process)
        self._process = connection.process
        self._world = connection.world
        self._broker = connection.broker
        self.leaving = False

    def steps(self) -> Steps:
        loop = self._connect()
        loop._jobs.process = self._process
        wake = lambda: self._world.wake(self._process.main, self._world.latency())  # noqa: E731
        logs = [log for (topic, _), log in self._broker.logs.items() if topic.endswith(MARKERS_SUFFIX)]
        readers = [log.readers for log in logs]  # those of the logs that come after these
        for some in readers:
            some.append(wake)
        try:
            while not self.leaving:
                loop.run_once(self._clock.monotonic())
                yield self._idle_ms(loop)
            while loop._is_busy():
                loop._reader.read(0)
                loop._jobs.take_results()
                yield 50.0
            with contextlib.suppress(Unavailable):
                loop.drain()
        finally:
            for some in readers:
                some.remove(wake)
            loop._leadership.forget()

    def _idle_ms(self, loop: Any) -> float:
        """How long until something is to be done that nobody wakes us for."""
        now = self._clock.monotonic()
        wait_s = min(0.5, max(0.0, loop._offsets._next_store_at - now))
        if not loop._probe._probing:
            wait_s = min(wait_s, max(0.0, loop._probe._next_probe - now))
        for part in self._partitions.values():
            wait_s = min(wait_s, part.seconds_to_tick(now, self._settings.silence_s))
            if part.phase is TrackingPhase.FENCING and not part.busy:
                wait_s = min(wait_s, part.retry_at - now)
        return max(1.0, wait_s * 1000)


STEPWISE = (
    *(
        _last_attempts,
        _originals,
        _tick_writer,
        _redeliverer,
        _torn_transactions,
        _transaction,
        _problems,
        _markers_consumer,
        _marker_reader,
        _cut_keeper,
    ),
    *(_offset_keeper, _topic_probe, _takeover, _partition_redelivery, _partition_lifecycle),
    *(_membership, _main_loop, _tracker),
)
"""The modules that run in here, which log by their names."""
