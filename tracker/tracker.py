"""The tracker: one main loop that reads markers and decides, and a pool that redelivers.

All state is the main loop's. What may block (fencing, transactions, ZooKeeper) runs in the pool and
hands its result back to the loop, so one stuck partition never stops another. Nor does an unexpected
exception (rule R21): it is logged, counted, reported by /readyz, and the work is tried again later.
"""

from __future__ import annotations

import itertools
import logging
import queue as queues
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from confluent_kafka import KafkaError, TopicPartition

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.forks import ForkGuard
from kmqpy.core.throttle import Throttle
from kmqpy.errors import AccessDenied, DecodeError, KmqError, TopicError, Unavailable
from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.doctor import Severity
from kmqpy.kafka.admin.registry import StoredOffset
from kmqpy.kafka.client.settings_mirror import SettingsMirror
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.entry import Entry
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.markers.replay import QueueEnd, replay_markers
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, check_connection
from kmqpy.kafka.topics import TopicIds, TopicInfo, Topics, earlier_markers_error
from kmqpy.telemetry.base import Telemetry
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.health.metrics import TrackerMetrics
from tracker.health.queue_counts import Counted, QueueCounts
from tracker.leadership.assignment import Partition
from tracker.leadership.leadership import Leadership
from tracker.leadership.offset_znodes import OffsetWriteSchedule
from tracker.leadership.published_view import LeadershipView
from tracker.membership import Membership
from tracker.owned_partition import Doubt, OwnedPartition, Phase, StartPosition, begin_at
from tracker.queue_ends import DOUBT_AGAIN_S, DOUBT_S, QueueEnds
from tracker.redelivery.originals import OriginalsReader
from tracker.redelivery.redeliverer import Redeliverer, RedeliveryResult
from tracker.redelivery.ticker import Tick, Ticker
from tracker.settings import TrackerSettings

_log = logging.getLogger(__name__)

_MAX_WAIT_S = 0.05
_BUSY_WAIT_S = 0.005
_OPEN_TIMEOUT_S = 10.0
_PROBE_EVERY_S = 2.0
_PROBE_TIMEOUT_S = 3.0
"""Short: what is to be stored or released waits behind a probe."""
_SHARED_WAIT_S = 10.0
_GROW_EVERY_S = 10.0
_MIRROR_EVERY_S = 1.0
"""How often it is looked whether the settings of a queue have changed."""
_MIRROR_AGAIN_S = 300.0
"""How often it is looked whether clients are still told of them."""
_MIRROR_RETRY_S = 5.0
_COMPLAIN_EVERY_S = 60.0
_STOP_TIMEOUT_S = 15.0
_COUNTED_AT_ONCE = 500
"""Partitions whose waiting messages are counted in one go."""
_LOOP_STUCK_S = 30.0
_READ_BATCH = 5_000
_STEP_PAUSE = Backoff(0.1, 2, 10, jitter=0)
"""Before a step of the main loop that failed is tried again."""
_ASK_PAUSE = Backoff(0.2, 2, 10, jitter=0)
"""Before the end of a queue is asked for again."""
_MAX_UNREAD = 50_000
"""Markers of a partition that may wait for the end of the queue, before fetching is paused."""

_MOST_AT_ONCE = 50_000
"""Of how many messages range markers may speak before others get their turn: about half a second."""

_SNAPSHOT_ROWS = 4_000
_SNAPSHOT_MAX_BYTES = 500_000
"""Of ZooKeeper's 1 MB in a packet."""


@dataclass(frozen=True)
class _Takeover:
    """Result of a takeover: where to begin reading, the tick to read up to, and the queue's end after it."""

    topic_ids: tuple[str, str]
    tick: Tick
    queue_end: int
    begin: StartPosition


class Tracker:
    """Redelivers what clients took and did not acknowledge in time, for the partitions it owns.

    Any number of trackers share the partitions through ZooKeeper. `run` blocks until `stop`;
    `start` runs it in a thread. Raises Unavailable when ZooKeeper is away at the start.
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
        self._zookeeper = zookeeper
        self._settings = settings or TrackerSettings()
        self._clock = clock
        self.metrics = TrackerMetrics()
        self._telemetry = Telemetry()
        if self._settings.tracing:
            from kmqpy.telemetry.opentelemetry import TracingTelemetry  # an extra

            self._telemetry = TracingTelemetry()
        self._parts: dict[Partition, OwnedPartition] = {}
        self._by_topic: dict[tuple[str, int], OwnedPartition] = {}
        self._results: queues.SimpleQueue[Callable[[], None]] = queues.SimpleQueue()
        self._readers: queues.LifoQueue[OriginalsReader] = queues.LifoQueue()
        self._pool = ThreadPoolExecutor(self._settings.workers, thread_name_prefix="kmq-redelivery")
        # Not among the redeliveries: it must get its turn when all of those are stuck.
        self._background = ThreadPoolExecutor(1, thread_name_prefix="kmq-background")
        # Nor behind those: markers wait for what it finds out.
        self._asking = ThreadPoolExecutor(2, thread_name_prefix="kmq-ends")
        self._asked: set[bool] = set()
        """Which are being asked for: those for which that failed, and the others."""
        # And nobody waits for this.
        self._counting = ThreadPoolExecutor(1, thread_name_prefix="kmq-counting")
        self._counts = QueueCounts(self._connection, clock)
        self._counted_at: dict[Partition, float] = {}
        self._is_counting = False
        self._next_count = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._leadership: Leadership | None = None
        self._member: Membership | None = None
        self._beat = clock.monotonic()
        self._next_probe = 0.0
        self._probing = False
        self._next_offsets = 0.0
        self._storing = False
        self._pace = OffsetWriteSchedule(
            self._settings.offset_interval_ms / 1000, self._settings.offset_writes_per_s
        )
        self._giving_up: set[Partition] = set()
        self._diagnosed: set[str] = set()
        self._mirror = SettingsMirror(connection)
        self._mirrored: dict[str, tuple[QueueSettings, tuple[str, str] | None]] = {}
        self._mirroring = False
        self._next_mirror = self._mirror_again = 0.0
        self._mirror_problem = ""
        self._offsets_turn = threading.Lock()  # Leadership's offset calls are for one thread at a time
        self._complaints = Throttle(_COMPLAIN_EVERY_S, clock)
        self._unready: dict[str, str] = {}
        self._faults: dict[str, tuple[int, float]] = {}
        """By step of the main loop that fails: how often in a row, and the time of the next try."""
        self._dead_letters_seen: dict[str, float] = {}
        self._grow_at: dict[str, float] = {}

    @property
    def http_port(self) -> int | None:
        """Where /metrics, /livez and /readyz are served; None when they are not."""
        return self._member.http_port if self._member is not None else None

    def owned(self) -> list[Partition]:
        """The partitions being redelivered by this tracker now."""
        self._guard.raise_if_inherited()
        return sorted(key for key, part in self._parts.copy().items() if part.phase is Phase.ACTIVE)

    def start(self) -> Self:
        """Run in a thread of its own."""
        self._connect()
        self._thread = threading.Thread(target=self._run, name="kmq-tracker")
        self._thread.start()
        return self

    def run(self) -> None:
        """Run until `stop` is called."""
        self._connect()
        self._run()

    def request_stop(self) -> None:
        """Ask `run` to end; returns at once, so that signal handlers can call it."""
        if not self._guard.inherited:
            self._stopping.set()

    def stop(self) -> None:
        """Finish what is being redelivered, store offsets, give up leadership; nothing in a forked child."""
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

    # --- health -----------------------------------------------------------------------------------

    def alive(self) -> bool:
        """Whether it works, or will without a restart: the main loop and the leadership thread run."""
        turning = self._clock.monotonic() - self._beat < _LOOP_STUCK_S
        return turning and (self._member is None or self._member.alive())

    def problems(self) -> list[str]:
        """Why it is not ready; empty when it is."""
        self._guard.raise_if_inherited()
        found = list(self._unready.copy().values())
        found += ["not started"] if self._member is None else self._member.problems()
        for (queue, partition), part in self._parts.copy().items():
            name = f"queue {queue}, partition {partition}"
            problems = part.problems()
            if part.state.pinned and not part.has_failed_markers:
                problems.append("markers of a newer kmqpy; update this tracker")
            found += [f"{name}: {text}" for text in problems]
        return found

    # --- the main loop ----------------------------------------------------------------------------

    def _connect(self) -> None:
        self._guard.raise_if_inherited()
        # First: it fails at once where the HTTP port is taken, and serves the health of what follows.
        member = self._member = Membership(
            self,
            self._connection,
            self._zookeeper,
            self._settings,
            queues=frozenset(self._settings.queues) or None,
            clock=self._clock,
        )
        self._leadership = member.leadership
        with ExitStack() as undo:
            undo.callback(member.leave)
            self._consumer = librdkafka.new_consumer(self._connection, {"fetch.wait.max.ms": 100})
            undo.callback(self._disconnect)
            self._ticker = Ticker(self._connection, self._clock)
            self._ends = QueueEnds(self._connection)
            self._topics = Topics(self._connection)
            self._probed_topics = Topics(self._connection, _PROBE_TIMEOUT_S)
            try:
                self._topics.brokers()
                member.kafka_probed(answered=True)
            except AccessDenied:
                raise
            except KmqError as error:
                _log.warning("Kafka does not answer; waiting for it", extra={"error": str(error)})
                member.kafka_probed(answered=False)
            member.join()
            undo.pop_all()

    def _disconnect(self) -> None:
        """Give back threads and connections at once; producers and admin clients have no close()."""
        self._consumer.close()
        if ends := self.__dict__.get("_ends"):
            ends.close()
        for name in ("_ticker", "_ends", "_topics", "_probed_topics"):
            self.__dict__.pop(name, None)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
            self._drain()
        finally:
            self._close()

    def _turn(self) -> None:
        self._beat = now = self._clock.monotonic()
        self._step("follow", now, lambda: self._follow(self._view()))
        for part in list(self._parts.values()):
            with self._surviving(part):
                self._advance(part, now)
        self._step("ticks", now, self._ticker.poll)
        self._step("offsets", now, lambda: self._store_offsets(now))
        self._step("probe", now, lambda: self._probe(now))
        self._step("ends", now, lambda: self._ask_for_ends(now))
        self._step("mirror", now, lambda: self._keep_mirror(now))
        self._step("counts", now, lambda: self._count(now))
        if not self._step("read", now, lambda: self._read(self._wait_s(now))):
            self._stopping.wait(_MAX_WAIT_S)
        self._take_results()

    def _take_results(self) -> None:
        while not self._results.empty():
            take = self._results.get()
            try:
                take()
            except Exception as error:  # those of one partition are handled by _surviving
                self._survived("result", error)

    # --- faults -------------------------------------------------------------------------------------

    def _step(self, name: str, now: float, do: Callable[[], None]) -> bool:
        """Run one step of the main loop; False if it failed, or is put off after a failure."""
        failures, rests_until = self._faults.get(name, (0, 0.0))
        if now < rests_until:
            return False
        try:
            do()
        except Exception as error:
            failures += 1
            self._faults[name] = failures, now + _STEP_PAUSE.delay(failures)
            self._unready[name] = f"{name}: {type(error).__name__}: {error}"
            self._survived(name, error)
            return False
        if failures:
            del self._faults[name]
            self._unready.pop(name, None)
        return True

    @contextmanager
    def _surviving(self, part: OwnedPartition) -> Iterator[None]:
        """After any exception in the block, take the partition over again, after a pause."""
        try:
            yield
        except Exception as error:
            part.problem = f"{type(error).__name__}: {error}; taking over again"
            self._survived("partition", error, part)
            with suppress(Exception):
                self._stop_reading(part)
            if part.phase is not Phase.DROPPED:
                self._reopen(part, part.back_off(self._clock.monotonic()))

    def _survived(self, what: str, error: Exception, part: OwnedPartition | None = None) -> None:
        key = part.key if part is not None else ("", -1)
        self.metrics.internal_errors.labels(key[0]).inc()
        if self._is_news(f"fault in {what}", key):
            _log.error(
                "%s failed; trying again", what, exc_info=error, extra=self._about(part) if part else None
            )

    def _in_background(
        self, executor: ThreadPoolExecutor, job: Callable[[], Any], finished: Callable[[Any], None]
    ) -> None:
        """Run `job` in `executor`, then `finished` with its result, or its exception, in the loop."""
        claims = itertools.count()  # the executor keeps what it could start no thread for

        def work() -> None:
            if next(claims):
                return
            try:
                result: Any = job()
            except Exception as error:  # handed to the loop
                result = error
            self._results.put(lambda: finished(result))

        try:
            executor.submit(work)
        except RuntimeError as error:
            if not next(claims):
                self._results.put(partial(finished, error))

    def _view(self) -> LeadershipView:
        assert self._leadership is not None
        return self._leadership.snapshot()

    def _wait_s(self, now: float) -> float:
        if False in self._asked or any(part.busy for part in self._parts.values()):
            return _BUSY_WAIT_S
        assert self._leadership is not None
        if not self._leadership.may_redeliver():
            return _MAX_WAIT_S  # what is due stays so
        silence_s = self._silence_s
        wait_s = min((part.seconds_to_tick(now, silence_s) for part in self._parts.values()), default=1.0)
        return max(0.001, min(_MAX_WAIT_S, wait_s))

    @property
    def _silence_s(self) -> float:
        return self._settings.use_now_for_redeliver_despite_no_marker_seen_for_ms / 1000

    def _follow(self, view: LeadershipView) -> None:
        """Take over what was granted, let go of what was lost or is to be released."""
        for key, part in list(self._parts.items()):
            if view.owned.get(key) != part.epoch:
                self._drop(part, "leadership lost")
            elif key in view.releasing and not part.busy:
                self._release(part)
        for key, epoch in view.owned.items():
            registered = view.queues.get(key[0])
            if key in self._parts or key in self._giving_up:
                continue
            if key in view.releasing:  # asked for again before we had begun
                assert self._leadership is not None
                self._leadership.release(*key)
            elif registered is not None:
                redeliverer = Redeliverer(self._connection, registered.settings, key[1], self._settings)
                self._parts[key] = OwnedPartition(
                    key, epoch, registered.settings, redeliverer, self._settings.max_clock_lead_ms
                )
                self.metrics.begin(key[0])
        for part in self._parts.values():
            if part.key[0] in view.queues:
                part.follow(view.queues[part.key[0]].settings)

    def _advance(self, part: OwnedPartition, now: float) -> None:
        assert self._leadership is not None
        # Asked before a takeover, too, or whoever has the partition by now would be fenced for nothing.
        if part.busy or not self._leadership.may_redeliver():
            return
        if part.phase is Phase.FENCING and now >= part.retry_at:
            self._submit(part, lambda: self._take_over(part), lambda found: self._taken_over(part, found))
            return
        if part.phase is not Phase.ACTIVE:
            return
        entries = part.due(self._settings.max_batch_messages * 5)
        if entries:
            self._submit(
                part,
                lambda: self._redeliver(part, entries),
                lambda outcome: self._redelivered(part, entries, outcome),
            )
        elif part.wants_tick(now, self._silence_s):
            try:
                self._ticker.post_tick(
                    part.queue.markers_topic,
                    part.number,
                    lambda tick: self._results.put(lambda: self._tick_written(part, tick)),
                )
            except Unavailable as error:
                part.tick_problem = str(error)
                self._complain("tick", part.key, "a tick could not be written", error=str(error))
            part.tick_sent(now)
            self.metrics.ticks.labels(part.key[0]).inc()

    def _tick_written(self, part: OwnedPartition, tick: Tick) -> None:
        ahead_s = part.tick_written(tick, self._clock.monotonic())
        if ahead_s:
            self._clock_was_ahead(part, ahead_s)

    def _clock_was_ahead(self, part: OwnedPartition, ahead_s: float) -> None:
        self.metrics.clock_leads.labels(part.key[0]).inc()
        self._complain("clock", part.key, "a clock is ahead of the broker's", ahead_s=ahead_s)

    def _submit(self, part: OwnedPartition, job: Callable[[], Any], finished: Callable[[Any], None]) -> None:
        """Run `job` in the pool, then `finished` with its result, or its exception, in the loop."""
        part.busy = True

        def in_loop(result: Any) -> None:
            part.busy = False
            with self._surviving(part):
                finished(result)

        self._in_background(self._pool, job, in_loop)

    # --- takeover (in the pool, then in the loop) ---------------------------------------------------

    def _take_over(self, part: OwnedPartition) -> _Takeover | None:
        """Fence, verify, and find out where to read markers; None when the partition is not ours."""
        assert self._leadership is not None
        queue, number = part.queue, part.number
        topics = self._topics.check(queue, number)
        topic_ids = (topics.queue.topic_id, topics.markers.topic_id)
        if part.has_topics and TopicIds(*topic_ids).beside_earlier_markers(TopicIds(*part.topic_ids)):
            raise earlier_markers_error(queue)
        part.redeliverer.open(_OPEN_TIMEOUT_S)
        if not self._leadership.verify(queue.name, number):
            return None
        with self._offsets_turn:
            stored = self._leadership.read_offset(queue.name, number)
        if stored is not None and stored.is_of_earlier_queue(*topic_ids):
            raise earlier_markers_error(queue)
        # Written after the fencing: when it has been read, so has everything before it.
        tick = self._ticker.send_tick(queue.markers_topic, number, _OPEN_TIMEOUT_S)
        with self._reader() as reader:
            low = reader.log_start(queue.markers_topic, number)
        begin = begin_at(stored, topics.markers.topic_id, low, tick.at)
        queue_end = self._ends.end_beyond((queue.name, number), begin.highest)
        begin = begin.believable(tick.now_ms, queue, queue_end, self._settings.max_clock_lead_ms)
        if begin.problem is not None:
            _log.error(begin.problem, extra=self._about(part))
        if begin.markers_lost:
            self.metrics.markers_lost.labels(queue.name).inc()
        return _Takeover(topic_ids, tick, queue_end, begin)

    def _taken_over(self, part: OwnedPartition, found: _Takeover | Exception | None) -> None:
        if part.phase is Phase.DROPPED:
            self._background.submit(part.redeliverer.close)
        elif found is None:
            self._drop(part, "not the leader")
        elif isinstance(found, Exception):
            part.back_off(self._clock.monotonic())
            part.problem = f"takeover failed: {found}"
            self.metrics.failures.labels(part.key[0]).inc()
            self._complain("takeover", part.key, "takeover failed; trying again", error=str(found))
        elif (other := self._by_topic.get((part.queue.markers_topic, part.number), part)) is not part:
            part.problem = f"its markers topic is also that of queue {other.key[0]}; give each its own"
            self._complain("topics", part.key, part.problem)
            self._reopen(part, _SHARED_WAIT_S)
        else:
            part.problem = None
            if part.reading and found.topic_ids != part.topic_ids:
                self._stop_reading(part)
            if not part.reading:
                self._start_reading(part, found)
            part.catch_up_to(found.tick, found.queue_end)
            self.metrics.takeovers.labels(part.key[0]).inc()

    def _start_reading(self, part: OwnedPartition, found: _Takeover) -> None:
        if part.key[0] not in self._diagnosed:
            self._diagnosed.add(part.key[0])
            self._pool.submit(self._diagnose, part.key[0])
        part.topic_ids = found.topic_ids
        part.stored_offset = part.stored_position = None
        now = self._clock.monotonic()
        part.start_reading(found.begin.state(), now)
        if found.begin.ahead_s:
            part.tell_of_clock(str(found.begin.problem), now)
            self._clock_was_ahead(part, found.begin.ahead_s)
        topic = part.queue.markers_topic
        self._by_topic[topic, part.number] = part
        self._consumer.incremental_assign([TopicPartition(topic, part.number, part.state.position)])

    def _diagnose(self, queue: str) -> None:
        """Warn of what the queue's topics are not as they should be; in the pool, once a queue."""
        try:
            with Admin(self._connection, self._zookeeper) as admin:
                findings = admin.diagnose(queue)
        except Exception as error:
            _log.warning("queue can't be checked", extra={"queue": queue, "error": str(error)})
            return
        for finding in findings:
            if finding.severity is not Severity.OK:
                _log.warning(finding.what, extra={"queue": queue, "to_do": finding.to_do})

    def _stop_reading(self, part: OwnedPartition) -> None:
        topic = part.queue.markers_topic
        if part.reading and self._by_topic.get((topic, part.number)) is part:
            del self._by_topic[topic, part.number]
            self._resume(part)
            self._consumer.incremental_unassign([TopicPartition(topic, part.number)])
        part.reading = False

    # --- reading markers ----------------------------------------------------------------------------

    def _read(self, wait_s: float) -> None:
        try:
            records = self._consumer.consume(1, wait_s)
            if records:
                records += self._consumer.consume(_READ_BATCH - 1, 0)
        except Exception:
            self._read_again("markers can't be read")  # what was fetched may be lost
            raise
        now = self._clock.monotonic()
        batches: dict[OwnedPartition, list[Any]] = {}
        for record in records:
            part = self._by_topic.get((record.topic(), record.partition()))  # type: ignore[arg-type]
            if part is None:
                continue
            error = record.error()
            if error is None:
                batches.setdefault(part, []).append(record)
            else:
                with self._surviving(part):
                    self._read_failed(part, error)
        for part, batch in batches.items():
            if part.reading:
                with self._surviving(part):
                    self._take_in(part, batch, now)

    def _take_in(self, part: OwnedPartition, records: list[Any], now: float) -> None:
        """Apply markers, up to the first for which it is not known whether its message exists (rule R22)."""
        state, name, now_before_ms = part.state, part.key[0], part.state.now_ms
        waited = bool(part.unread)
        if not waited:
            part.ask_at = now
        part.unread += records
        if waited and records:
            self._hold_back(part)
            return
        part.believe(now)
        applied = replay_markers(state, part.number, part.unread, part.queue_end, most=_MOST_AT_ONCE)
        done, part.unread = part.unread[: applied.records], part.unread[applied.records :]
        self._hold_back(part)
        self.metrics.markers.labels(name).inc(len(done))
        part.redeliverer.ranges = part.redeliverer.ranges or applied.in_ranges > 0
        if part.phase is Phase.ACTIVE:
            self.metrics.late_acks.labels(name).inc(applied.late_acks)
        if applied.newer:
            self.metrics.unsupported_markers.labels(name).inc(len(applied.newer))
            self._complain("newer", part.key, "marker of a newer kmqpy", **_first(applied.newer))
        if applied.undecodable:
            self.metrics.undecodable_markers.labels(name).inc(len(applied.undecodable))
            self._complain(
                "undecodable", part.key, "undecodable marker skipped", **_first(applied.undecodable)
            )
        for at, error in applied.failed:
            part.marker_failed(at, error)
            self.metrics.failed_markers.labels(name).inc()
            self._survived("applying a marker", error, part)
        if done and part.read(done[-1].offset(), now_before_ms, now):
            # By then every message whose take was missed has been acknowledged or has had its time.
            part.missed_until_ms = state.now_ms + max(part.queue.max_hold_ms, part.queue.max_delay_ms)
            _log.info("partition active", extra={**self._about(part), "in_flight": len(state)})

    def _hold_back(self, part: OwnedPartition) -> None:
        """Fetch no more while many markers wait."""
        if len(part.unread) > _MAX_UNREAD and not part.paused:
            part.paused = True
            self._consumer.pause([TopicPartition(part.queue.markers_topic, part.number)])
        elif not part.unread:
            self._resume(part)

    def _resume(self, part: OwnedPartition) -> None:
        if part.paused:
            part.paused = False
            self._consumer.resume([TopicPartition(part.queue.markers_topic, part.number)])

    def _ask_for_ends(self, now: float) -> None:
        """Ask where the queues end whose markers wait for that.

        Those for which that failed, or is in doubt, are asked for apart, so that they keep up no others.
        """
        waiting = [part for part in self._parts.values() if part.reading and part.unread]
        for failing in (False, True):
            some = [
                part
                for part in waiting
                if (part.ask_failures > 0 or part.doubt is not None) is failing and part.ask_at <= now
            ]
            if some and failing not in self._asked:
                self._ask_for_ends_of(some, failing)

    def _ask_for_ends_of(self, parts: list[OwnedPartition], failing: bool) -> None:
        # These markers are in their logs by now; later ones may name messages that are not there yet.
        asked = {part: (part.unread[-1].offset() + 1, part.topic_ids) for part in parts}
        places = [(part.queue.name, part.number) for part in parts]
        self._asked.add(failing)

        def answered(found: dict[tuple[str, int], int | KmqError] | Exception) -> None:
            self._asked.discard(failing)
            for part, (below, topic_ids) in asked.items():
                if self._parts.get(part.key) is part and part.reading and part.topic_ids == topic_ids:
                    with self._surviving(part):
                        end = found if isinstance(found, Exception) else found[part.queue.name, part.number]
                        self._ends_found(part, below, end)

        self._in_background(self._asking, lambda: self._ends.each_of(places, anew=failing), answered)

    def _ends_found(self, part: OwnedPartition, below: int, end: int | Exception) -> None:
        now = self._clock.monotonic()
        if isinstance(end, Exception):
            part.ask_failures += 1
            part.ask_at = now + _ASK_PAUSE.delay(part.ask_failures)
            part.ask_problem = f"markers wait until it is known where the queue ends: {end}"
            self._complain("ends", part.key, "markers wait for the end of the queue", error=str(end))
            return
        part.ask_failures, part.ask_at, part.ask_problem = 0, now, None
        if part.doubt is not None and part.unread and part.unread[0].offset() >= part.doubt.below:
            part.doubt = None
        doubt = part.doubt or Doubt(now, below, end)
        decided = now - doubt.since >= DOUBT_S
        end = max(end, doubt.end)
        part.queue_end = QueueEnd(end, doubt.below if decided else 0)
        part.doubt = None
        self._take_in(part, [], now)
        if part.unread and part.unread[0].offset() < doubt.below and _is_beyond(part.unread[0], end):
            part.doubt, part.ask_at = doubt._replace(end=end), now + DOUBT_AGAIN_S

    def _read_again(self, problem: str) -> None:
        """Read the markers of all partitions from where they were taken in."""
        for part in self._parts.values():
            if part.reading:
                part.problem = problem
                with suppress(Exception):
                    self._stop_reading(part)
                self._reopen(part, part.back_off(self._clock.monotonic()))

    def _read_failed(self, part: OwnedPartition, error: KafkaError) -> None:
        part.problem = f"markers can't be read: {error.name()}"
        self._complain("read", part.key, "markers can't be read", error=error.name())
        # From the log start or a new topic, whichever it is: a takeover finds out.
        self._stop_reading(part)
        self._reopen(part, 1.0)

    # --- redelivery (in the pool, then in the loop) -------------------------------------------------

    def _redeliver(self, part: OwnedPartition, entries: list[Entry]) -> RedeliveryResult:
        assert self._leadership is not None
        leadership = self._leadership
        with self._reader() as reader:
            return part.redeliverer.redeliver(
                entries,
                reader,
                lambda: leadership.may_redeliver() and self._has_its_topics(part),
                lambda: self._has_dead_letters(part.queue),
            )

    def _has_its_topics(self, part: OwnedPartition) -> bool:
        """Whether the topics are still those that the entries are of (rule R24)."""
        queue = part.queue
        try:
            found = self._probed_topics.describe([queue.name, queue.markers_topic])
        except KmqError:
            return False  # nobody could say; they are tried again soon
        if _ids(found, queue) == part.topic_ids:
            return True
        self._next_probe = 0.0  # it starts anew
        return False

    @contextmanager
    def _reader(self) -> Iterator[OriginalsReader]:
        """A reader for one thread; there are as many as were ever needed at the same time."""
        try:
            reader = self._readers.get_nowait()
        except queues.Empty:
            reader = OriginalsReader(self._connection, self._clock)
        try:
            yield reader
        finally:
            self._readers.put(reader)

    def _has_dead_letters(self, queue: QueueSettings) -> bool:
        """Whether the dead-letter topic exists; asked so that no broker creates it by itself."""
        topic = queue.dead_letter_topic
        if self._clock.monotonic() - self._dead_letters_seen.get(topic, -100.0) < _PROBE_EVERY_S * 5:
            return True
        try:
            exists = topic in self._topics.describe([topic])
        except KmqError:
            return topic in self._dead_letters_seen  # nobody could say; if it is gone, sending fails
        if exists:
            self._dead_letters_seen[topic] = self._clock.monotonic()
        else:
            self._dead_letters_seen.pop(topic, None)
        return exists

    def _redelivered(
        self, part: OwnedPartition, entries: list[Entry], outcome: RedeliveryResult | Exception
    ) -> None:
        if part.phase is Phase.DROPPED:
            self._background.submit(part.redeliverer.close)
            return
        if isinstance(outcome, Exception):
            raise outcome  # with unknown outcome: the partition is taken over again (rule R1)
        name, now = part.key[0], self._clock.monotonic()
        self.metrics.redelivered.labels(name).inc(len(outcome.redelivered))
        self.metrics.dead_lettered.labels(name).inc(len(outcome.dead_lettered))
        self.metrics.undecodable_counts.labels(name).inc(outcome.undecodable_counts)
        lateness = self.metrics.lateness.labels(name)
        for copy in outcome.copies:
            lateness.observe(part.lateness_s(copy.entry, now))
            self._telemetry.moved(name, copy.headers, dead_letter=copy.dead_letter)
        if outcome.gone:
            self.metrics.lost_to_retention.labels(name).inc(len(outcome.gone))
            _log.error(
                "messages in flight are gone from the queue topic; raise its retention",
                extra={**self._about(part), "count": len(outcome.gone), "offsets": outcome.gone[:10]},
            )
        problems = [text for text in (outcome.problem, outcome.dead_letter_problem) if text]
        part.redelivered(entries, outcome.failed, "; ".join(problems))
        problems += outcome.refused[:1]  # the redeliverer itself names them all
        for problem in problems:
            self.metrics.failures.labels(name).inc()
            self._complain("redelivery", part.key, "redelivery failed; trying again", error=problem)
        if outcome.broken:
            self._reopen(part, 0.0)
            return
        for offset, delay_s in outcome.failed.items():
            part.state.retry(offset, int(delay_s * 1000))

    def _reopen(self, part: OwnedPartition, delay_s: float) -> None:
        """Take over again before anything else: nothing is retried from memory (rule R1)."""
        part.phase = Phase.FENCING
        part.retry_at = self._clock.monotonic() + delay_s

    # --- giving up ----------------------------------------------------------------------------------

    def _drop(self, part: OwnedPartition, why: str) -> None:
        _log.info("partition given up", extra={**self._about(part), "why": why})
        self._stop_reading(part)
        part.phase = Phase.DROPPED
        if not part.busy:
            self._background.submit(part.redeliverer.close)
        self._parts.pop(part.key, None)
        for gauge in (self.metrics.in_flight, self.metrics.oldest):
            gauge.labels(part.key[0], str(part.number)).set(0)
        self.metrics.hide(*part.key)

    def _release(self, part: OwnedPartition) -> None:
        """Store the offset, then let the next owner in; it continues within a second."""
        assert self._leadership is not None
        leadership, stored = self._leadership, self._offset_of(part)
        self._drop(part, "released")
        self._giving_up.add(part.key)

        def give_up() -> None:
            try:
                if stored is not None:
                    with self._offsets_turn:
                        leadership.write_offset(*part.key, stored())
            finally:
                leadership.release(*part.key)

        def given_up(result: Exception | None) -> None:
            self._giving_up.discard(part.key)
            if result is not None:
                self._complain("offsets", part.key, "offset not stored at release", error=str(result))

        self._in_background(self._background, give_up, given_up)

    def _drain(self) -> None:
        assert self._leadership is not None
        self._leadership.set_kafka_ok(False)  # so that it takes no more partitions
        deadline = self._clock.monotonic() + _STOP_TIMEOUT_S
        while any(part.busy for part in self._parts.values()) and self._clock.monotonic() < deadline:
            now = self._clock.monotonic()
            if not self._step("read", now, lambda: self._read(_BUSY_WAIT_S)):
                self._clock.sleep(_BUSY_WAIT_S)
            self._step("ticks", now, self._ticker.poll)
            self._take_results()
        offsets: dict[Partition, StoredOffset] = {}
        for part in list(self._parts.values()):
            with self._surviving(part):
                made = self._offset_of(part)
                if made is not None:
                    offsets[part.key] = made()
            with self._surviving(part):
                self._drop(part, "stopping")
        try:
            with self._offsets_turn:
                self._leadership.write_offsets(offsets)
        except Exception as error:
            _log.warning("offsets not stored at the stop", extra={"error": str(error)})
        # All leader znodes vanish at once; released one by one they would come straight back.
        self._leadership.close()

    def _close(self) -> None:
        assert self._leadership is not None
        assert self._member is not None
        self._leadership.close()
        self._pool.shutdown(wait=True)
        self._asking.shutdown(wait=True)
        self._counting.shutdown(wait=True, cancel_futures=True)
        self._background.shutdown(wait=True)
        self._member.leave()
        while not self._readers.empty():
            self._readers.get().close()
        self._consumer.close()
        self._ends.close()
        self._counts.close()
        self._ticker.close()
        _log.info("tracker stopped", extra={"tracker": self._settings.tracker_id})

    # --- in the background --------------------------------------------------------------------------

    def _offset_of(self, part: OwnedPartition) -> Callable[[], StoredOffset] | None:
        """A function, for any thread, that makes the offset to store; None if there is nothing new."""
        if part.phase not in (Phase.ACTIVE, Phase.FENCING) or not part.reading or part.caught_up_at is None:
            return None
        state, oldest = part.state, part.state.oldest()
        if (state.now_ms if oldest is None else oldest.since_ms) > part.missed_until_ms:
            state.missed_markers = False
        if state.position == part.stored_position:
            return None  # nothing was read since, so the state is the same
        (queue_id, topic_id), missed = part.topic_ids, state.missed_markers
        safe = StoredOffset(state.safe_offset(), topic_id, state.safe_now_ms(), missed, queue_id=queue_id)
        if state.position - safe.offset <= self._settings.snapshot_after_markers:
            return None if safe.offset == part.stored_offset else lambda: safe
        offset, now_ms, rows = state.snapshot(_SNAPSHOT_ROWS)

        def stored() -> StoredOffset:
            made = StoredOffset(offset, topic_id, now_ms, missed, tuple(rows), queue_id)
            return made if len(made.to_json()) <= _SNAPSHOT_MAX_BYTES else safe

        return stored

    def _store_offsets(self, now: float) -> None:
        if now < self._next_offsets or self._storing:
            return
        self._next_offsets = now + self._settings.offset_interval_ms / 1000
        due: dict[Partition, tuple[int, Callable[[], StoredOffset]]] = {}
        owned = Counter(part.key[0] for part in self._parts.values())
        queues = self._view().queues
        for name in queues:
            self.metrics.owned.labels(name).set(owned[name])
        if self._view().connected:
            self.metrics.keep_only(queues)
        partitions = sum(queue.partitions for queue in queues.values())
        self._pace.forget(self._parts)
        for part in self._parts.values():
            with self._surviving(part):
                self._show(part, now)
                part.forget_ended(now)
                unread = part.state.position - (part.stored_offset or 0)
                if part.phase is Phase.ACTIVE and self._pace.is_due(part.key, unread, partitions, now):
                    made = self._offset_of(part)
                    if made is not None:
                        due[part.key] = part.state.position, made
        if not due:
            return
        self._storing = True
        assert self._leadership is not None
        leadership = self._leadership

        def store() -> dict[Partition, StoredOffset]:
            offsets = {key: make() for key, (_, make) in due.items()}
            with self._offsets_turn:
                written = leadership.write_offsets(offsets)
            return {key: offsets[key] for key in written}

        def stored(written: dict[Partition, StoredOffset] | Exception) -> None:
            self._storing = False
            if isinstance(written, KmqError):
                _log.warning("offsets not stored; trying again", extra={"error": str(written)})
            elif isinstance(written, Exception):
                raise written
            else:
                self._pace.written(written, now)
                for key in written.keys() & self._parts.keys():
                    part = self._parts[key]
                    part.stored_offset, part.stored_position = written[key].offset, due[key][0]

        self._in_background(self._background, store, stored)

    def _show(self, part: OwnedPartition, now: float) -> None:
        labels = (part.key[0], str(part.number))
        oldest = part.state.oldest()
        self.metrics.in_flight.labels(*labels).set(len(part.state))
        self.metrics.oldest.labels(*labels).set(0.0 if oldest is None else part.age_s(oldest, now))

    def _count(self, now: float) -> None:
        """Count waiting messages and dead letters for /metrics, in the background."""
        if now < self._next_count or self._is_counting or self._settings.http_port < 0:
            return
        active = [key for key, part in self._parts.items() if part.phase is Phase.ACTIVE]
        self._counted_at = {key: self._counted_at.get(key, 0.0) for key in active}
        # First those that were counted longest ago.
        chosen = sorted(active, key=self._counted_at.__getitem__)[:_COUNTED_AT_ONCE]
        if not chosen:
            return
        wanted = {key: self._parts[key].queue for key in chosen}
        self._counted_at.update(dict.fromkeys(chosen, now))
        self._is_counting = True
        self._next_count = now + self._settings.count_interval_ms / 1000
        delayed: dict[Partition, int] = {}
        for key in chosen:  # known also while Kafka is away
            delayed[key], overdue = self._parts[key].delayed_and_overdue(now)
            self.metrics.show(*key, overdue=overdue)

        def counted(found: dict[Partition, Counted] | Exception) -> None:
            self._is_counting = False
            done = self._clock.monotonic()
            if isinstance(found, Exception):
                if self._is_news("count", ("", -1)):
                    _log.warning("waiting messages are not counted", extra={"error": str(found)})
                return
            for key, counts in found.items():
                part = self._parts.get(key)
                if part is not None and part.phase is Phase.ACTIVE:
                    self._show_counts(part, counts, delayed[key], done)

        self._in_background(
            self._counting, lambda: self._counts.count(wanted, active, self._stopping.is_set), counted
        )

    def _show_counts(self, part: OwnedPartition, counts: Counted, delayed: int, now: float) -> None:
        self.metrics.show(*part.key, dead_letters=counts.dead_letters)
        if counts.more is not None:
            waiting = [enqueued_ms for offset, enqueued_ms in counts.waiting if offset not in part.state]
            age_s = (part.now_ms(now) - min(waiting)) / 1000 if waiting else 0.0
            depth = len(waiting) + counts.more + delayed
            self.metrics.show(*part.key, depth=depth, oldest_waiting_seconds=max(0.0, age_s))

    def _probe(self, now: float) -> None:
        """See whether Kafka answers and the topics are still the ones we know (rules R8, R13)."""
        if now < self._next_probe or self._probing:
            return
        self._probing = True
        self._next_probe = now + _PROBE_EVERY_S
        wanted = {part.queue.name: part.queue for part in self._parts.values() if part.reading}
        names = [name for q in wanted.values() for name in (q.name, q.markers_topic)]

        def probe() -> dict[str, TopicInfo]:
            # Any broker can answer this; that no controller does is no reason to withdraw.
            self._probed_topics.brokers()
            return self._probed_topics.describe(names) if names else {}

        def probed(found: dict[str, TopicInfo] | Exception) -> None:
            self._probing = False
            assert self._member is not None
            answered = not isinstance(found, Exception)
            self._member.kafka_probed(answered=answered)
            if isinstance(found, Exception):
                if not isinstance(found, KmqError):
                    raise found
                _log.debug("Kafka does not answer: %s", found)
                return
            for part in self._parts.values():
                known = part.phase in (Phase.CATCHING_UP, Phase.ACTIVE)
                if not found or not known or part.queue.name not in wanted:
                    continue
                if _ids(found, part.queue) != part.topic_ids:
                    part.problem = "a topic was deleted or created anew"
                    self._complain("topics", part.key, part.problem)
                    self._stop_reading(part)
                    self._reopen(part, 0.0)
                elif part.number == 0 and part.phase is Phase.ACTIVE:  # one tracker of each queue
                    self._see_partitions(part.queue.name, found[part.queue.name].partitions)

        self._in_background(self._background, probe, probed)

    def _see_partitions(self, name: str, there: int) -> None:
        """Have partitions registered that were added with Kafka's own tools; nobody tracks them before."""
        registered = self._view().queues.get(name)
        problem = f"partitions of {name}"
        if registered is None or registered.deleting or there <= registered.partitions:
            self._unready.pop(problem, None)
            return
        now = self._clock.monotonic()
        if now < self._grow_at.get(name, 0.0):
            return
        self._grow_at[name] = now + _GROW_EVERY_S
        tracked = registered.partitions

        def grow() -> None:
            with Admin(self._connection, self._zookeeper) as admin:
                admin.follow_topic(name)

        def grown(result: Exception | None) -> None:
            if result is None:
                _log.info("partitions added to a queue", extra={"queue": name, "partitions": there})
                return
            self._unready[problem] = (
                f"queue {name}: of its {there} partitions those from {tracked} on can't all be tracked: "
                f"{result}; run: kmq queue alter {name} --partitions {there}"
            )
            if not isinstance(result, KmqError):
                raise result

        self._in_background(self._pool, grow, grown)

    def _keep_mirror(self, now: float) -> None:
        """Tell clients the settings of the queues whose first partition is ours; none is taken away (R25).

        And which topics these have, as soon as that is known here.
        """
        if now < self._next_mirror or self._mirroring:
            return
        self._next_mirror = now + _MIRROR_EVERY_S
        queues = self._view().queues
        mine = {
            name: (queues[name].settings, part.topic_ids if part.reading else None)
            for (name, number), part in self._parts.items()
            if number == 0 and name in queues and not queues[name].deleting
            if part.reading or part.problem is not None
        }
        if not mine or (now < self._mirror_again and mine.items() <= self._mirrored.items()):
            return
        self._mirroring = True
        told = [
            settings if ids is None else settings.with_topic_ids(_by_name(settings, ids))
            for settings, ids in mine.values()
        ]

        def mirrored(result: Exception | None) -> None:
            self._mirroring = False
            self._unready.pop("topics", None)
            if isinstance(result, TopicError):
                self._unready["topics"] = str(result)
            if result is None:
                self._mirrored, self._mirror_again, self._mirror_problem = mine, now + _MIRROR_AGAIN_S, ""
                return
            self._next_mirror = self._clock.monotonic() + _MIRROR_RETRY_S
            if not isinstance(result, KmqError):
                raise result
            if self._mirror_problem != str(result):
                self._mirror_problem = str(result)
                _log.warning("clients can't be told of queues", extra={"error": self._mirror_problem})

        self._in_background(self._pool, lambda: self._mirror.write(told), mirrored)

    def _about(self, part: OwnedPartition) -> dict[str, Any]:
        return {"queue": part.key[0], "partition": part.number, "tracker": self._settings.tracker_id}

    def _complain(self, kind: str, key: Partition, text: str, **more: Any) -> None:
        """Log a warning, once per partition and minute."""
        if self._is_news(kind, key):
            _log.warning(text, extra={"queue": key[0], "partition": key[1], **more})

    def _is_news(self, kind: str, key: Partition) -> bool:
        return self._complaints.lets_through((kind, key))


def _ids(found: Mapping[str, TopicInfo], queue: QueueSettings) -> tuple[str, str]:
    """The ids of the queue topic and the markers topic; empty where there is no such topic."""
    topics = (found.get(name) for name in (queue.name, queue.markers_topic))
    queue_id, markers_id = ("" if topic is None else topic.topic_id for topic in topics)
    return queue_id, markers_id


def _by_name(queue: QueueSettings, topic_ids: tuple[str, str]) -> dict[str, str]:
    """The reverse of _ids()."""
    return dict(zip((queue.name, queue.markers_topic), topic_ids, strict=True))


def _is_beyond(record: Any, queue_end: int) -> bool:
    """Whether it is a marker that takes messages at or beyond the end of the queue."""
    try:
        marker = read_marker(record)
    except DecodeError:
        return False
    return marker.op is not Op.END and marker.highest >= queue_end


def _first(found: Sequence[tuple[int, Exception]]) -> dict[str, Any]:
    """What the log says of the first of them."""
    at, error = found[0]
    return {"error": str(error), "at": at}
