"""Who acts in a simulation: producers, clients and trackers, each as generators of single steps.

Clients and trackers are kmqpy's own code (see `stepwise`); what is written here is what surrounds it:
threads, ZooKeeper's client, users.
"""

import contextlib
import traceback
from collections.abc import Callable, Generator, Mapping
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.durations import MIN_LEASE_MS
from kmqpy.errors import Closed, KmqError, ReceiptError, TopicError, Unavailable
from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from kmqpy.kafka.client import assigned_partition
from kmqpy.kafka.message_headers import DELIVER_AT
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.kafka.topics import QueueTopics, TopicInfo
from kmqpy.telemetry.base import Telemetry
from tracker.leadership.assignment import Member, assign, next_actions
from tracker.leadership.published_view import LeadershipView
from tracker.partition.owned_partition import TrackingPhase
from tracker.settings import TrackerSettings

from .checker import History
from .kafka import Connection, LogReader, Module, QueueEnds, RepeatedReader, TrackerModule, timed_out
from .model import ZK_SESSION_MS, NoSession, Process, Steps, World
from .stepwise import stepwise

QUEUE = "q"
_RECHECK_MS = 1_000
_LEASE_OF_SESSION_MS = ZK_SESSION_MS * 2 / 3
_TAKEOVER_DELAY_S = 1.0
_TELEMETRY = Telemetry()


# --- surroundings -----------------------------------------------------------------------------------


class Topics:
    """Answers of Kafka about the topics of the queue, without waiting."""

    def __init__(self, connection: Connection, _timeout_s: float = 0.0) -> None:
        self._connection = connection

    def check(self, _queue: QueueSettings) -> Any:
        found: QueueTopics = self._connection.checked()
        if self._connection.process.client is None:
            self._connection.process.topics_of = number_of(found.queue.topic_id)
        return found

    def describe(self, _names: Any) -> dict[str, TopicInfo]:
        if self._connection.is_away():
            raise Unavailable("does not answer")
        return self._connection.describe()

    def brokers(self) -> int:
        return 3


class TrackerTopics(Topics):
    """The same, for code that waits for what it checks."""

    def check(self, _queue: QueueSettings, _partition: int) -> Steps:
        yield from self._connection.reach()
        return self._connection.checked()


def number_of(topic_id: str) -> int:
    """The number of the topics of which this is an id; see Broker.number."""
    return int(topic_id.rpartition("-")[2] or -1)


class NoWatch:
    """kmqpy.kafka.topic_identity.TopicWatch of topics that keep their ids."""

    def __init__(self, _connection: Connection, _queue: QueueSettings, ids: TopicIds, _clock: Any) -> None:
        self._ids = ids

    def look(self) -> TopicIds:
        return self._ids

    def knows_since(self, _moment: float) -> bool:
        return True


class NoMirror:
    """Clients are given their settings here."""

    def __init__(self, _connection: Connection) -> None:
        pass

    def write(self, _queues: Any) -> None:
        pass


class NoMetrics:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class Leadership:
    """tracker.leadership.leadership over the simulated ZooKeeper: the same decisions, one actor."""

    def __init__(self, zookeeper: SimpleNamespace, **settings: Any) -> None:
        self._zk, self._process, queue, partitions = zookeeper.hosts
        self._world = self._process.world
        self._id: str = settings["tracker_id"]
        self._keys = [(QUEUE, p) for p in range(partitions)]
        self._queues = MappingProxyType({QUEUE: RegisteredQueue(queue, partitions)})
        self._view = LeadershipView()
        self._session: int | None = None
        self._verified_until = 0.0
        self._verify_at = 0.0
        self._unowned_since: dict[Any, float] = {}
        self._stand_in: frozenset[Any] = frozenset()
        self._membership: Any = None
        self._releases: dict[Any, int] = {}
        self._versions: dict[Any, int] = {}
        self._actor = self._process.spawn(self._run())
        self._closed = False

    def start(self, timeout: float) -> "Leadership":
        self._zk.watchers.append(self._changed)
        return self

    def close(self) -> None:
        self.forget()
        if self._session in self._zk.sessions:
            self._zk.end(self._session)
        self._session = None
        self._view = LeadershipView()

    def forget(self) -> None:
        """Follow no more: closed, or dead."""
        if not self._closed:
            self._closed = True
            self._zk.watchers.remove(self._changed)

    def snapshot(self) -> LeadershipView:
        return self._view

    def may_redeliver(self) -> bool:
        return self._world.now < self._verified_until

    def set_kafka_ok(self, ok: bool) -> None:
        pass

    def release(self, queue: str, partition: int) -> None:
        epoch = self._view.owned.get((queue, partition))
        if epoch is not None:
            self._releases[queue, partition] = epoch
            self._publish(self._view)
            self._world.wake(self._actor)

    def verify(self, queue: str, partition: int) -> Steps:
        yield from self._reach()
        ours = self._is_ours((queue, partition))
        yield self._world.latency()
        return ours

    def read_offset(self, queue: str, partition: int) -> Steps:
        yield from self._reach()
        stored, version = self._zk.offsets.get((queue, partition), (None, 0))
        self._versions[queue, partition] = version
        yield self._world.latency()
        return stored

    def write_offsets(self, offsets: Mapping[Any, Any]) -> frozenset[Any]:
        if self._cut or self._session not in self._zk.sessions:
            raise Unavailable("ZooKeeper")
        done = set()
        for key, stored in offsets.items():
            if not self._is_ours(key):
                continue
            version = self._versions[key] = self._zk.offsets.get(key, (None, 0))[1]

            def arrive(key: Any = key, stored: Any = stored, version: int = version) -> None:
                if self._zk.offsets.get(key, (None, 0))[1] == version:
                    self._zk.offsets[key] = (stored, version + 1)
                    if self._world.tracing:
                        self._world.trace(self._process.name, f"stored {key[1]}: {stored}")

            if self._world.unlucky():  # it arrives when the partition may be another's
                self._world.at(3000 * self._world.random(), arrive)
            else:
                arrive()
                done.add(key)
        return frozenset(done)

    @property
    def _cut(self) -> bool:
        return self._process.zk_cut_until > self._world.now

    def _reach(self) -> Steps:
        yield self._world.latency()
        if self._cut or self._session not in self._zk.sessions:
            raise Unavailable("ZooKeeper")

    def _is_ours(self, key: Any) -> bool:
        return self._zk.leaders.get(key, (None, 0))[0] == self._session

    def _changed(self) -> None:
        self._world.wake(self._actor, self._world.latency())

    def _run(self) -> Steps:
        while not self._closed:
            if self._cut:
                # kazoo tells of a lost session only when it is connected again.
                yield self._world.latency() * 10
                self._verified_until = 0.0
                yield max(0.0, self._process.zk_cut_until - self._world.now)
                self._verify_at = 0.0
                continue
            try:
                yield (yield from self._pass())
            except NoSession:
                self._begin_session()
        if self._session in self._zk.sessions:
            self._zk.end(self._session)

    def _begin_session(self) -> None:
        self._verified_until = 0.0
        self._session = None
        self._releases.clear()
        self._unowned_since.clear()
        self._stand_in = frozenset()
        self._publish(LeadershipView(queues=self._queues))

    def _pass(self) -> Steps:
        zk, world = self._zk, self._world
        if self._session is None:
            yield world.latency()
            if self._closed:
                return 0.0
            self._session = zk.connect(self._process)
        session = self._session
        if world.now >= self._verify_at:
            started = world.now
            yield world.latency()
            zk.check(session)
            self._verified_until = started + _LEASE_OF_SESSION_MS
            self._verify_at = started + _LEASE_OF_SESSION_MS * 3 / 8
            world.wake(self._process.main)
        if zk.members.get(self._id) != session:
            zk.register(session, self._id)
        members = dict(zk.members)
        yield world.latency()
        zk.check(session)
        leaders = dict(zk.leaders)
        for key, epoch in list(self._releases.items()):
            if leaders.get(key) == (session, epoch):
                yield world.latency()
                zk.give_up(session, key, epoch)
                world.trace(self._process.name, f"released {key[1]}")
                leaders.pop(key)
            if self._releases.get(key) == epoch:
                del self._releases[key]
        held = {key: epoch for key, (owner, epoch) in leaders.items() if owner == session}
        if members != self._membership:
            self._membership = members
            self._unowned_since.clear()
            self._stand_in = frozenset()
        now = world.now / 1000
        self._unowned_since = {
            key: self._unowned_since.get(key, now) for key in self._keys if key not in leaders
        }
        todo = next_actions(
            self._id,
            assign(self._keys, [Member(name) for name in members]),
            held=frozenset(held),
            deleting=(),
            unowned_since=self._unowned_since,
            stand_in=self._stand_in,
            now=now,
            takeover_delay=_TAKEOVER_DELAY_S,
        )
        self._stand_in = todo.stand_in
        owned = MappingProxyType(dict(held))
        self._publish(LeadershipView(owned, todo.releasing, self._queues, connected=True))
        made = False
        for key in todo.acquire:
            yield world.latency()
            if zk.lead(session, key):
                made = True
                world.trace(self._process.name, f"leads {key[1]}")
        due = [self._verify_at, world.now + _RECHECK_MS]
        due += [todo.next_due * 1000] if todo.next_due is not None else []
        return 0.0 if made else max(0.0, min(due) - world.now)

    def _publish(self, view: LeadershipView) -> None:
        owned = {key: epoch for key, epoch in view.owned.items() if self._releases.get(key) != epoch}
        view = LeadershipView(
            MappingProxyType(owned), frozenset(view.releasing & owned.keys()), view.queues, view.connected
        )
        if view != self._view:
            self._view = view
            self._world.wake(self._process.main)


# --- kmqpy's code, step by step -----------------------------------------------------------------------


class _Event:
    """threading.Event, for those who wait step by step."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> Steps:
        until = CLOCK.monotonic() + timeout_s
        while not self._is_set and CLOCK.monotonic() < until:
            yield 3.0


class _Condition(contextlib.nullcontext[None]):
    """threading.Condition, where there is one thread."""

    def notify_all(self) -> None:
        pass

    def wait_for(self, condition: Callable[[], bool], _timeout: float | None) -> bool:
        return condition()


class _Thread:
    """threading.Thread, where the simulation runs what it would."""

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass


class _Threading:
    Condition = _Condition
    Event = _Event
    Lock = contextlib.nullcontext
    Thread = _Thread


class _GlobalClock:
    """kmqpy.core.clock.SYSTEM_CLOCK where it is used by name: only differences matter."""

    world: World

    def monotonic(self) -> float:
        return self.world.now / 1000


CLOCK = _GlobalClock()

_records = stepwise("kmqpy.kafka.markers.records", set())
_replay = stepwise("kmqpy.kafka.markers.replay", set(), headers_of_each=_records.headers_of_each)
_identity = stepwise("kmqpy.kafka.topic_identity", set(), librdkafka=Module)


class TopicWatch(_identity.TopicWatch):
    """The real TopicWatch, whose process is known by the topics that it was told of last."""

    def __init__(self, connection: Connection, *rest: Any) -> None:
        super().__init__(connection, *rest)
        self._process = connection.process

    def _found(self, ids: TopicIds) -> None:
        super()._found(ids)
        self._process.topics_of = number_of(self._ids.queue)


def watch(connection: Connection, *rest: Any) -> Any:
    """What notices that topics are recreated, where that happens."""
    world = connection.world
    return world.controls.watch(connection, *rest) if world.topics_change else NoWatch(connection, *rest)


_originals = stepwise(
    "tracker.redelivery.originals",
    {"fetch", "_fetch", "log_start", "read_between", "_read_between", "_read"},
    librdkafka=Module,
    SYSTEM_CLOCK=CLOCK,
)
_tick_writer = stepwise(
    "tracker.redelivery.tick_writer", {"send_tick"}, librdkafka=Module, SYSTEM_CLOCK=CLOCK
)
_transaction = stepwise(
    "kmqpy.kafka.copies.copy_transaction",
    {"open_producer", "execute", "_abort", "_write_claim"},
    librdkafka=Module,
)
_claim = stepwise("tracker.redelivery.claim", {"settle"}, Withdrawn=_transaction.Withdrawn)


def _controlled_claim(*given: Any) -> Any:
    """The claim of a redelivery, as the controls of the world have it."""
    return CLOCK.world.controls.claim(*given)


_redeliverer = stepwise(
    "tracker.redelivery.redeliverer",
    {"open", "redeliver", "_redeliver_some", "_send_all", "_transact"},
    librdkafka=Module,
    Claim=_controlled_claim,
    CopyTransaction=_transaction.CopyTransaction,
    ProducerUnusable=_transaction.ProducerUnusable,
    TransactionAborted=_transaction.TransactionAborted,
    Withdrawn=_transaction.Withdrawn,
    open_producer=_transaction.open_producer,
)
_membership = stepwise("tracker.membership", set(), Leadership=Leadership)
_problems = stepwise("tracker.health.problems", set())


INTERNAL_ERROR = "internal error"


def internal_error(what: str, error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{INTERNAL_ERROR} in {what}: {error!r} at {place.name}, line {place.lineno}"


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
_offset_keeper = stepwise("tracker.offset_keeper", {"read_offset"}, threading=_Threading)
_marker_reader = stepwise("tracker.reading.marker_reader", set(), replay_markers=_replay.replay_markers)
_topic_probe = stepwise("tracker.topic_probe", set())
_takeover = stepwise("tracker.takeover", {"prepare"})
_partition_redelivery = stepwise("tracker.partition_redelivery", {"redeliver"})
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


class PartitionRedelivery(_partition_redelivery.PartitionRedelivery):
    """tracker.partition_redelivery.PartitionRedelivery, which knows if there is a dead-letter topic."""

    def __init__(self, context: Any, *rest: Any) -> None:
        super().__init__(context, *rest)
        self._broker = context.connection.broker
        self._history = context.connection.world.history

    def redeliver(self, part: Any, entries: Any, position: int, taken_late: frozenset[int]) -> Steps:
        markers_end = self._broker.logs[part.queue.markers_topic, part.number].end
        for entry in entries:
            plans = self._history.plans[part.topic_ids[1], part.number, entry.offset]
            plans.append((markers_end, position))
        return (yield from super().redeliver(part, entries, position, taken_late))

    def _has_dead_letters(self, queue: QueueSettings) -> bool:
        return queue.dead_letter_topic not in self._broker.missing


def _controlled(name: str) -> Callable[..., Any]:
    """A part of the tracker, as the controls of its world have it."""
    return lambda context, *rest: getattr(context.connection.world.controls, name)(context, *rest)


_main_loop = stepwise(
    "tracker.main_loop",
    set(),
    MarkerReader=_controlled("marker_reader"),
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
_crash_recovery = stepwise("kmqpy.kafka.client.crash_recovery", {"find_starts"}, partition_reader=LogReader)
_leave_group = stepwise("kmqpy.kafka.client.leave_group", set(), returns_in_time=lambda call: call() is None)
_group_member = stepwise(
    "kmqpy.kafka.client.group_member",
    {
        "poll",
        "keep_alive",
        "_prepare",
        "_recover",
        "_check",
        "_find_starts",
        "_on_revoke",
        "_take_from",
        "_wait_for_outcomes",
    },
    librdkafka=Module,
    offsets_of_records=_records.offsets_of_records,
    find_starts=_crash_recovery.find_starts,
    leave_group=_leave_group.leave_group,
    returns_in_time=_leave_group.returns_in_time,
)
_start_barrier = stepwise("kmqpy.kafka.client.start_barrier", set(), librdkafka=Module)
_start_markers = stepwise(
    "kmqpy.kafka.client.start_markers",
    {"wait_until_confirmed", "start"},
    librdkafka=Module,
    StartBarrier=_start_barrier.StartBarrier,
)
_start_markers._MANY = 3  # batches are small here
_writer = stepwise(
    "kmqpy.kafka.client.marker_writer",
    {"_serve"},
    librdkafka=Module,
    StartMarkerWriter=_start_markers.StartMarkerWriter,
    threading=_Threading,
)
_topics_in_use = stepwise(
    "kmqpy.kafka.client.topics_in_use",
    set(),
    MarkerWriter=lambda connection, *rest, **more: connection.world.controls.marker_writer(
        connection, *rest, **more
    ),
    Topics=Topics,
    TopicWatch=watch,
    check_topics=lambda *_: None,
)
_late_acks = stepwise(
    "kmqpy.kafka.client.late_acks",
    {"examine", "_read"},
    partition_reader=SimpleNamespace(RepeatedReader=RepeatedReader),
)
LateAckCheck = _late_acks.LateAckCheck
_receiver = stepwise(
    "kmqpy.kafka.client.receiver",
    {"receive", "keep_alive", "_start"},
    LateAckCheck=lambda connection, *rest: connection.world.controls.late_ack_check(connection, *rest),
    GroupMember=lambda connection, *rest, **more: connection.world.controls.member(connection, *rest, **more),
    offsets_of_records=_records.offsets_of_records,
    have_headers=_records.have_headers,
)
_client = stepwise(
    "kmqpy.kafka.client.client",
    {"_receive_once", "_look_for_topics"},
    TopicsInUse=_topics_in_use.TopicsInUse,
    Receiver=_receiver.Receiver,
    settings_of=lambda queue, _connection: queue,
    check_connection=lambda connection: connection,
)
_receiver._START_TIMEOUT_S = 0.3  # less than it may take until a start marker counts as failed
STEPWISE = [
    module.__name__
    for module in (
        *(_originals, _tick_writer, _redeliverer, _transaction, _problems, _markers_consumer, _marker_reader),
        *(_offset_keeper, _topic_probe, _takeover, _partition_redelivery, _partition_lifecycle),
        *(_membership, _main_loop, _tracker),
        *(_group_member, _start_markers, _writer, _topics_in_use, _late_acks, _receiver, _client),
    )
]
"""The modules that run in here, which log by these names."""

Redeliverer = _redeliverer.Redeliverer
TrackerClaim = _claim.Claim
OriginalsReader = _originals.OriginalsReader
OffsetKeeper = _offset_keeper.OffsetKeeper
MarkerReader = _marker_reader.MarkerReader
PartitionLifecycle = _partition_lifecycle.PartitionLifecycle
broken = _transaction.ProducerUnusable
original_of = _originals.original_of


def started(partitions: Any) -> Any:
    """What a writer says that has written all start markers."""
    return _start_markers.StartOutcome(dict.fromkeys(partitions, -1), {})


class GroupMember(_group_member.GroupMember):
    """The client's GroupMember, which may stand still when it has fetched messages (rule R30)."""

    def poll(self, max_records: int, wait_s: float) -> Steps:
        polled = yield from super().poll(max_records, wait_s)
        if polled[0]:
            self._connection.world.stall_client(self._connection.process)
            yield 0.0
        return polled


class Claim:
    """kmqpy.kafka.client.start_markers.StartBatch that says so, true or not."""

    def __init__(self, partitions: Any, starting: Any = None) -> None:
        self._started = started(partitions)
        self._starting = starting

    def wait_until_confirmed(self) -> Steps:
        """Say it at once, or when the truth is known."""
        if self._starting is not None:
            yield from self._starting.wait_until_confirmed()
        yield 0.0
        return self._started


def aborted() -> Exception:
    """A transaction was aborted, for a reason that is over: the same can be sent again at once."""
    error: Exception = _transaction.TransactionAborted(
        KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER), QUEUE
    )
    return error


class MarkerWriter(_writer.MarkerWriter):
    """The client's MarkerWriter, whose thread is an actor that sleeps while there is nothing to do."""

    def __init__(self, connection: Connection, *rest: Any, **more: Any) -> None:
        self._world = connection.world
        self._connection = connection
        super().__init__(connection, *rest, **more)
        self._actor = connection.process.spawn(self._run())

    @property
    def idle(self) -> bool:
        return not self._unconfirmed()

    @property
    def starts(self) -> Any:
        """What writes start markers; controls override `start`."""
        return self

    def get_ready(self) -> None:
        self._starts.get_ready()

    def start(self, *what: Any) -> Steps:
        return (yield from self._starts.start(*what))

    def outcome_known(self, partition: int) -> bool:
        return self._starts.outcome_known(partition)

    def put(self, *what: Any) -> None:
        super().put(*what)
        self._wake()

    def write_assignments(self, ticks: Any, timeout_s: float) -> Steps:
        """The same, step by step."""
        waiters = {tick.partition: self._put_unflushed(tick) for tick in ticks if tick.takes_again}
        for tick in ticks:
            if not tick.takes_again:
                self._put_unflushed(tick)
        until = self._world.now + timeout_s * 1000
        while any(waiter.size() for waiter in waiters.values()) and self._world.now < until:
            yield 10.0
        return {partition for partition, waiter in waiters.items() if waiter.size()}

    def write_in_steps(self, items: Any) -> Steps:
        """write(), step by step and without a time-out."""
        waiter = self._put_apart(items)
        while waiter.size():
            yield 10.0
            if self._closing.is_set():
                raise Closed

    def _wake(self) -> None:
        self._world.wake(self._actor, self._world.latency())

    def _new_producer(self, **settings: Any) -> Any:
        producer = super()._new_producer(**settings)
        producer.wake = self._reported
        return producer

    def _reported(self) -> None:
        for actor in (self._actor, self._connection.process.main):
            self._world.wake(actor, 0.5)

    def _run(self) -> Steps:
        for delay_ms in self._serve():
            yield float("inf") if self.idle else delay_ms


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
        logs = [log for (topic, _), log in self._broker.logs.items() if topic == f"{QUEUE}__markers"]
        readers = [log.readers for log in logs]  # those of the logs that come after these
        for some in readers:
            some.append(wake)
        try:
            while not self.leaving:
                loop.turn(self._clock.monotonic())
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
        wait_s = min(0.5, max(0.0, loop._offsets._next_look - now))
        if not loop._probe._probing:
            wait_s = min(wait_s, max(0.0, loop._probe._next_probe - now))
        for part in self._parts.values():
            wait_s = min(wait_s, part.seconds_to_tick(now, self._settings.silence_s))
            if part.phase is TrackingPhase.FENCING and not part.busy:
                wait_s = min(wait_s, part.retry_at - now)
        return max(1.0, wait_s * 1000)


def client(
    connection: Connection, queue: QueueSettings, history: History, *, lease_ms: int, batch: int, fmt: str
) -> Steps:
    """A process that takes messages and does with them what users do."""
    process, world = connection.process, connection.world
    while True:
        try:
            own = _client.KmqClient(queue, connection, holder=process.name, markers=fmt, clock=process)
            break
        except TopicError:
            yield 200.0
    own._housekeeper = _Thread()  # what it does is done below
    member = own._receiver.join()
    process.client = own
    logs = [connection.broker.logs[QUEUE, p] for p in range(connection.broker.partitions)]
    readers = [log.readers for log in logs]
    wake = lambda: world.wake(process.main, world.latency())  # noqa: E731
    for some in readers:
        some.append(wake)

    def use(message: Any, lease: int) -> None:
        history.handed_out(process, message)
        process.spawn(_use(connection, own, message, lease, history), 30 * world.random())

    try:
        while not process.leaving:
            lease = int(lease_ms * (0.5 + world.random())) if world.random() < 0.3 else lease_ms
            lease = max(MIN_LEASE_MS, lease)
            asked = process.monotonic()
            try:
                messages = yield from own._receive_once(1 + int(batch * world.random()), 0.0, lease)
            except TopicError:
                yield 200 * world.random()
                continue
            if lease == lease_ms and world.random() < 0.2:  # `for message in client`: one after the other
                until = asked + lease_ms / 1000
                own._read_ahead.extend(messages[1:], until)
                messages = messages[:1]
            for message in messages:
                use(message, lease)
            if messages and world.faults and world.random() < (0.4 if queue.late_acks else 0.05):
                for _ in range(3):  # the user's code is busy, the housekeeper goes on
                    yield 600.0
                    own._follow_topics()
                    yield from own._receiver.keep_alive()
                    own._release_stale()
            while own._read_ahead:
                own._release_stale()
                yield 40 * world.random()
                # KmqClient.__iter__ must look, too: we may have stood still.
                if (message := own._read_ahead.pop()) is not None and until > process.monotonic():
                    use(message, lease)
            partitions = member._partitions.values()
            waiting = member._commit_schedule.uncommitted or any(
                known.phase is not assigned_partition.ReceivePhase.ACTIVE for known in partitions
            )
            yield 20 * world.random() if messages else 100.0 if waiting else 400.0
        for _ in range(20):
            if not (own._topics.writer.idle and own._topics.writer._starts.all_outcomes_known()):
                yield 100.0
        own._topics.writer._starts._barriers.clear()  # a close() that waits in vain comes to its end
        own.close()
        world.trace(process.name, "closed")
    finally:
        for some in readers:
            some.remove(wake)


def _use(connection: Connection, own: Any, message: Any, lease: int, history: History) -> Steps:
    """What a user does with one message, unless the client is closed before."""
    with contextlib.suppress(Closed):
        try:
            yield from _use_open(connection, own, message, lease, history)
        except (ReceiptError, TopicError, Unavailable) as error:
            if not connection.world.topics_change:
                raise
            connection.world.trace(connection.process.name, f"refused: {error}")


def _use_open(connection: Connection, own: Any, message: Any, lease: int, history: History) -> Steps:
    world, process = connection.world, connection.process
    if world.faults and message.body in history.poison:
        yield 20 * world.random()
        world.kill(process)
        return

    def ack() -> None:
        own.ack(message)
        history.acks(process, message)

    if world.faults and own.queue.late_acks and world.random() < 0.4:  # while the copy waits, with luck
        yield lease * (1 + world.random())
        ack()
        return
    luck = world.random() if world.faults else 0.0
    if luck < 0.15:  # as ack(wait=True)
        own._check_open()
        writer, places = own._topics.writer, own._places.offsets_of([message])
        history.acks(process, message)
        yield from writer.write_in_steps(places.items())
        history.written(process, message)
        own._finished(places, "ack")
    elif luck < 0.45:
        ack()
    elif luck < 0.55:  # in time or late
        yield lease * 1.5 * world.random()
        ack()
    elif luck < 0.65:
        yield lease * world.random()
        own.extend(message, lease=max(MIN_LEASE_MS, lease * (0.5 + world.random())) / 1000)
        yield lease * 1.3 * world.random()
        ack()
    elif luck < 0.74:
        yield lease * 0.5 * world.random()
        delay = 0 if world.random() < 0.5 else world.random()
        counts = world.random() < 0.7
        own.nack(message, delay=delay, count=counts, reason="simulated")
    elif luck < 0.78:
        own.dead_letter(message, reason="simulated")
        history.rejected.add((message.partition, message.offset))
    elif luck < 0.88:  # F14: what comes after an ack changes nothing
        ack()
        yield 300 * world.random()
        if world.random() < 0.5:
            own.extend(message, lease=lease / 1000)
        else:
            own.nack(message)
    elif luck < 0.93:  # another process has the receipt
        yield 200 * world.random()
        others = [other for other in world.clients if other.alive and other.client]
        if others:
            yield from _look_for_topics(others[0], message)
            others[0].client.ack(message.receipt)
            history.acks(others[0], message)
    yield 0.0


def _look_for_topics(process: Process, message: Any) -> Steps:
    """KmqClient._look_for_topics, which waits: its thread that receives is who looks."""
    topic_id = Receipt.parse(message.receipt).topic_id
    until = process.monotonic() + 3.0
    while process.client._topics.ids.queue != topic_id and process.monotonic() < until:
        process.world.wake(process.main)
        yield 100.0


def producer(
    connection: Connection,
    history: History,
    *,
    name: str,
    count: int,
    gap_ms: float,
    delays: bool,
    forwards: Random | None = None,
) -> Steps:
    """Sends `count` messages and records which sends were acknowledged.

    `forwards`: every third message has the headers of one that is there, as some programs forward them.
    """
    world, process = connection.world, connection.process
    broker = connection.broker
    for number in range(count):
        body = f"{name}-{number}".encode()
        headers: list[tuple[str, bytes | None]] = [("h", b"1")]
        if delays and world.random() < 0.15:
            due = process.wall_ms() + int(1500 * world.random())
            headers.append((DELIVER_AT, b"%d" % due))
        history.attempted.add(body)
        try:
            yield from connection.reach()
            place = (QUEUE, int(broker.partitions * world.random()))
            if QUEUE in broker.missing:
                raise timed_out()
            if forwards is not None and forwards.random() < 0.3:
                copies = [one for one in broker.logs[place].records if one.is_data and one.copied]
                if copies:
                    headers = list(forwards.choice(copies[-5:]).headers())
            broker.logs[place].append(b"k", body, headers, process.name)
            history.sent_to[body] = broker.number
            if world.unlucky():
                raise timed_out()
            history.sent.add(body)
        except Exception:  # the outcome is unknown, and the user does not send again
            world.trace(name, f"send of {body!r} of unknown outcome")
        yield gap_ms * world.random()
