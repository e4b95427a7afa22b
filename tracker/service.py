"""The tracker: one main loop that reads markers and decides, and a pool that redelivers.

All state is the main loop's. What may block (fencing, transactions, ZooKeeper) runs in the pool and
hands its result back to the loop, so one stuck partition never stops another.
"""

from __future__ import annotations

import logging
import queue as queues
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from confluent_kafka import KafkaError, TopicPartition

from kmqpy import kafka
from kmqpy.admin import Admin
from kmqpy.clock import SYSTEM_CLOCK, Clock
from kmqpy.config import Connection, QueueSettings
from kmqpy.doctor import Severity
from kmqpy.errors import AccessDenied, DecodeError, KmqError, Unavailable
from kmqpy.inflight import Entry, InFlight, Row
from kmqpy.marker_log import apply_records
from kmqpy.registry import StoredOffset
from kmqpy.telemetry import Telemetry
from kmqpy.topics import Topics
from tracker.assignment import Partition
from tracker.leadership import Leadership, LeadershipView
from tracker.membership import Membership
from tracker.metrics import TrackerMetrics
from tracker.offsets import Pace
from tracker.partition import OwnedPartition, Phase, begin_at
from tracker.redelivery import OriginalsReader, Outcome, Redeliverer, Ticker
from tracker.settings import TrackerSettings

_log = logging.getLogger(__name__)

_MAX_WAIT_S = 0.05
_BUSY_WAIT_S = 0.005
_OPEN_TIMEOUT_S = 10.0
_PROBE_EVERY_S = 2.0
_PROBE_TIMEOUT_S = 3.0
"""Short: what is to be stored or released waits behind a probe."""
_SHARED_WAIT_S = 10.0
_COMPLAIN_EVERY_S = 60.0
_STOP_TIMEOUT_S = 15.0
_LOOP_STUCK_S = 30.0
_READ_BATCH = 5_000

_SNAPSHOT_ROWS = 4_000
_SNAPSHOT_MAX_BYTES = 500_000
"""Of ZooKeeper's 1 MB in a packet."""


@dataclass(frozen=True)
class _Takeover:
    """What a takeover found out: the state to read on from, and up to where (the tick)."""

    topic_ids: tuple[str, str]
    tick: int
    state: InFlight


class Tracker:
    """Redelivers what clients took and did not acknowledge in time, for the partitions it owns.

    Any number of trackers share the partitions through ZooKeeper. `run` blocks until `stop`;
    `start` runs it in a thread. Raises Unavailable when ZooKeeper is away at the start.
    """

    def __init__(
        self, connection: Connection, settings: TrackerSettings | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._connection = connection
        self._settings = settings or TrackerSettings()
        self._clock = clock
        self.metrics = TrackerMetrics()
        self._telemetry = Telemetry()
        if self._settings.tracing:
            from kmqpy.tracing import TracingTelemetry  # an extra

            self._telemetry = TracingTelemetry()
        self._parts: dict[Partition, OwnedPartition] = {}
        self._by_topic: dict[tuple[str, int], OwnedPartition] = {}
        self._results: queues.SimpleQueue[Callable[[], None]] = queues.SimpleQueue()
        self._readers: queues.LifoQueue[OriginalsReader] = queues.LifoQueue()
        self._pool = ThreadPoolExecutor(self._settings.workers, thread_name_prefix="kmq-redelivery")
        # Not among the redeliveries: it must get its turn when all of those are stuck.
        self._background = ThreadPoolExecutor(1, thread_name_prefix="kmq-background")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._leadership: Leadership | None = None
        self._member: Membership | None = None
        self._beat = clock.monotonic()
        self._next_probe = 0.0
        self._probing = False
        self._next_offsets = 0.0
        self._storing = False
        self._pace = Pace(self._settings.offset_interval_ms / 1000, self._settings.offset_writes_per_s)
        self._giving_up: set[Partition] = set()
        self._diagnosed: set[str] = set()
        self._offsets_turn = threading.Lock()  # Leadership's offset calls are for one thread at a time
        self._complained: dict[tuple[str, Partition], float] = {}
        self._unready: dict[str, str] = {}
        self._dead_letters_seen: dict[str, float] = {}

    @property
    def http_port(self) -> int | None:
        """Where /metrics, /livez and /readyz are served; None when they are not."""
        return self._member.http_port if self._member is not None else None

    def owned(self) -> list[Partition]:
        """The partitions being redelivered by this tracker now."""
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
        self._stopping.set()

    def stop(self) -> None:
        """Finish what is being redelivered, store offsets, give up leadership."""
        self.request_stop()
        if self._thread is not None:
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
        """Whether the main loop still turns."""
        return self._clock.monotonic() - self._beat < _LOOP_STUCK_S

    def problems(self) -> list[str]:
        """Why it is not ready; empty when it is."""
        found = list(self._unready.copy().values())
        found += ["not started"] if self._member is None else self._member.problems()
        for (queue, partition), part in self._parts.copy().items():
            name = f"queue {queue}, partition {partition}"
            if part.state.pinned:
                found.append(f"{name}: markers of a newer kmqpy; update this tracker")
            found += [f"{name}: {text}" for text in part.problems()]
        return found

    # --- the main loop ----------------------------------------------------------------------------

    def _connect(self) -> None:
        # First: it fails at once where the HTTP port is taken, and serves the health of what follows.
        member = self._member = Membership(
            self,
            self._connection,
            self._settings,
            queues=frozenset(self._settings.queues) or None,
            clock=self._clock,
        )
        self._leadership = member.leadership
        with ExitStack() as undo:
            undo.callback(member.leave)
            self._consumer = kafka.consumer(self._connection, {"fetch.wait.max.ms": 100})
            undo.callback(self._disconnect)
            self._ticker = Ticker(self._connection)
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
        for name in ("_ticker", "_topics", "_probed_topics"):
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
        self._follow(self._view())
        for part in list(self._parts.values()):
            self._advance(part, now)
        self._ticker.poll()
        self._store_offsets(now)
        self._probe(now)
        self._read(self._wait_s(now))
        while not self._results.empty():
            self._results.get()()

    def _view(self) -> LeadershipView:
        assert self._leadership is not None
        return self._leadership.snapshot()

    def _wait_s(self, now: float) -> float:
        if any(part.busy for part in self._parts.values()):
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
            grant = view.owned.get(key)
            if grant is None or grant.epoch != part.epoch:
                self._drop(part, "leadership lost")
            elif key in view.releasing and not part.busy:
                self._release(part)
        for key, grant in view.owned.items():
            registered = view.queues.get(key[0])
            if key in self._parts or key in self._giving_up:
                continue
            if key in view.releasing:  # asked for again before we had begun
                assert self._leadership is not None
                self._leadership.release(*key)
            elif registered is not None:
                redeliverer = Redeliverer(self._connection, registered.settings, key[1], self._settings)
                self._parts[key] = OwnedPartition(key, grant.epoch, registered.settings, redeliverer)
                self.metrics.begin(key[0])
        for part in self._parts.values():
            if part.key[0] in view.queues:
                part.queue = part.redeliverer.queue = view.queues[part.key[0]].settings

    def _advance(self, part: OwnedPartition, now: float) -> None:
        assert self._leadership is not None
        # Asked before a takeover, too, or whoever has the partition by now would be fenced for nothing.
        if part.busy or not self._leadership.may_redeliver():
            return
        if part.phase is Phase.OPENING and now >= part.retry_at:
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
                self._ticker.post_tick(part.queue.markers_topic, part.number)
            except Unavailable as error:
                part.tick_problem = str(error)
                self._complain("tick", part.key, "a tick could not be written", error=str(error))
            part.tick_sent(now)
            self.metrics.ticks.labels(part.key[0]).inc()

    def _submit(self, part: OwnedPartition, job: Callable[[], Any], finished: Callable[[Any], None]) -> None:
        """Run `job` in the pool and `finished` with its result, or with its error, in the loop."""
        part.busy = True

        def work() -> None:
            try:
                result: Any = job()
            except Exception as error:  # handed to the loop, which retries with back-off
                result = error

            def in_loop() -> None:
                part.busy = False
                finished(result)

            self._results.put(in_loop)

        self._pool.submit(work)

    # --- takeover (in the pool, then in the loop) ---------------------------------------------------

    def _take_over(self, part: OwnedPartition) -> _Takeover | None:
        """Fence, verify, and find out where to read markers; None when the partition is not ours."""
        assert self._leadership is not None
        queue, number = part.queue, part.number
        topics = self._topics.check(queue)
        part.redeliverer.open(_OPEN_TIMEOUT_S)
        if not self._leadership.verify(queue.name, number):
            return None
        with self._offsets_turn:
            stored = self._leadership.read_offset(queue.name, number)
        # Written after the fencing: when it has been read, so has everything before it.
        tick = self._ticker.send_tick(queue.markers_topic, number, _OPEN_TIMEOUT_S)
        with self._reader() as reader:
            low = reader.log_start(queue.markers_topic, number)
        topic_ids = (topics.queue.topic_id, topics.markers.topic_id)
        begin = begin_at(stored, topics.markers.topic_id, low, tick)
        if begin.problem is not None:
            _log.error(begin.problem, extra=self._about(part))
        if begin.markers_lost:
            self.metrics.markers_lost.labels(queue.name).inc()
        return _Takeover(topic_ids, tick, begin.state())

    def _taken_over(self, part: OwnedPartition, found: _Takeover | Exception | None) -> None:
        if part.phase is Phase.DROPPED:
            self._background.submit(part.redeliverer.close)
        elif found is None:
            self._drop(part, "not the leader")
        elif isinstance(found, Exception):
            part.opens += 1
            part.retry_at = self._clock.monotonic() + min(10.0, 0.2 * 2 ** min(part.opens, 8))
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
            part.catch_up_to(found.tick)
            self.metrics.takeovers.labels(part.key[0]).inc()

    def _start_reading(self, part: OwnedPartition, found: _Takeover) -> None:
        if part.key[0] not in self._diagnosed:
            self._diagnosed.add(part.key[0])
            self._pool.submit(self._diagnose, part.key[0])
        part.topic_ids = found.topic_ids
        part.stored_offset = None
        part.start_reading(found.state, self._clock.monotonic())
        topic = part.queue.markers_topic
        self._by_topic[topic, part.number] = part
        self._consumer.incremental_assign([TopicPartition(topic, part.number, found.state.position)])

    def _diagnose(self, queue: str) -> None:
        """Warn of what the queue's topics are not as they should be; in the pool, once a queue."""
        try:
            with Admin(self._connection) as admin:
                findings = admin.doctor(queue)
        except KmqError as error:
            _log.warning("queue can't be checked", extra={"queue": queue, "error": str(error)})
            return
        for finding in findings:
            if finding.severity is not Severity.OK:
                _log.warning(finding.what, extra={"queue": queue, "to_do": finding.to_do})

    def _stop_reading(self, part: OwnedPartition) -> None:
        topic = part.queue.markers_topic
        if part.reading and self._by_topic.get((topic, part.number)) is part:
            del self._by_topic[topic, part.number]
            self._consumer.incremental_unassign([TopicPartition(topic, part.number)])
        part.reading = False

    # --- reading markers ----------------------------------------------------------------------------

    def _read(self, wait_s: float) -> None:
        records = self._consumer.consume(1, wait_s)
        if records:
            records += self._consumer.consume(_READ_BATCH - 1, 0)
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
                self._read_failed(part, error)
        for part, batch in batches.items():
            if part.reading:
                self._take_in(part, batch, now)

    def _take_in(self, part: OwnedPartition, records: list[Any], now: float) -> None:
        state, name, now_before_ms = part.state, part.key[0], part.state.now_ms
        applied = apply_records(state, part.number, records)
        self.metrics.markers.labels(name).inc(len(records))
        part.redeliverer.ranges = part.redeliverer.ranges or applied.ranges
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
        if part.read(records[-1].offset(), now_before_ms, now):
            # By then every message whose take was missed has been acknowledged or has had its time.
            part.missed_until_ms = state.now_ms + max(part.queue.max_hold_ms, part.queue.max_delay_ms)
            _log.info("partition active", extra={**self._about(part), "in_flight": len(state)})

    def _read_failed(self, part: OwnedPartition, error: KafkaError) -> None:
        part.problem = f"markers can't be read: {error.name()}"
        self._complain("read", part.key, "markers can't be read", error=error.name())
        # From the log start or a new topic, whichever it is: a takeover finds out.
        self._stop_reading(part)
        self._reopen(part, 1.0)

    # --- redelivery (in the pool, then in the loop) -------------------------------------------------

    def _redeliver(self, part: OwnedPartition, entries: list[Entry]) -> Outcome:
        assert self._leadership is not None
        with self._reader() as reader:
            return part.redeliverer.redeliver(
                entries, reader, self._leadership.may_redeliver, lambda: self._has_dead_letters(part.queue)
            )

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

    def _redelivered(self, part: OwnedPartition, entries: list[Entry], outcome: Outcome | Exception) -> None:
        if part.phase is Phase.DROPPED:
            self._background.submit(part.redeliverer.close)
            return
        if isinstance(outcome, Exception):
            _log.error("redelivery failed", exc_info=outcome, extra=self._about(part))
            outcome = Outcome(failed={entry.offset: 1.0 for entry in entries}, problem=str(outcome))
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
        part.phase = Phase.OPENING
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
                        leadership.write_offset(*part.key, stored)
            except KmqError as error:
                self._complain("offsets", part.key, "offset not stored at release", error=str(error))
            leadership.release(*part.key)
            self._results.put(lambda: self._giving_up.discard(part.key))

        self._background.submit(give_up)

    def _drain(self) -> None:
        assert self._leadership is not None
        self._leadership.set_kafka_ok(False)  # so that it takes no more partitions
        deadline = self._clock.monotonic() + _STOP_TIMEOUT_S
        while any(part.busy for part in self._parts.values()) and self._clock.monotonic() < deadline:
            self._read(_BUSY_WAIT_S)
            self._ticker.poll()
            while not self._results.empty():
                self._results.get()()
        offsets = {key: stored for key, part in self._parts.items() if (stored := self._offset_of(part))}
        for part in list(self._parts.values()):
            self._drop(part, "stopping")
        assert self._leadership is not None
        try:
            with self._offsets_turn:
                self._leadership.write_offsets(offsets)
        except KmqError as error:
            _log.warning("offsets not stored at the stop", extra={"error": str(error)})
        # All leader znodes vanish at once; released one by one they would come straight back.
        self._leadership.close()

    def _close(self) -> None:
        assert self._leadership is not None
        assert self._member is not None
        self._leadership.close()
        self._pool.shutdown(wait=True)
        self._background.shutdown(wait=True)
        self._member.leave()
        while not self._readers.empty():
            self._readers.get().close()
        self._consumer.close()
        self._ticker.close()
        _log.info("tracker stopped", extra={"tracker": self._settings.tracker_id})

    # --- in the background --------------------------------------------------------------------------

    def _offset_of(self, part: OwnedPartition) -> StoredOffset | None:
        """What to store; None while the state is not complete."""
        if part.phase not in (Phase.ACTIVE, Phase.OPENING) or not part.reading or part.caught_up_at is None:
            return None
        state, oldest = part.state, part.state.oldest()
        if (state.now_ms if oldest is None else oldest.since_ms) > part.missed_until_ms:
            state.missed_markers = False
        rows: list[Row] = []
        offset, now_ms = state.safe_offset(), state.safe_now_ms()
        if state.position - offset > self._settings.snapshot_after_markers:
            offset, now_ms, rows = state.snapshot(_SNAPSHOT_ROWS)
        if offset == part.stored_offset:
            return None
        stored = StoredOffset(offset, part.topic_ids[1], now_ms, state.missed_markers, tuple(rows))
        if rows and len(stored.to_json()) > _SNAPSHOT_MAX_BYTES:
            return replace(stored, offset=state.safe_offset(), now_ms=state.safe_now_ms(), in_flight=())
        return stored

    def _store_offsets(self, now: float) -> None:
        if now < self._next_offsets or self._storing:
            return
        self._next_offsets = now + self._settings.offset_interval_ms / 1000
        due: dict[Partition, StoredOffset] = {}
        owned = Counter(part.key[0] for part in self._parts.values())
        queues = self._view().queues
        for name in queues:
            self.metrics.owned.labels(name).set(owned[name])
        if self._view().connected:
            self.metrics.keep_only(queues)
        partitions = sum(queue.partitions for queue in queues.values())
        self._pace.forget(self._parts)
        for part in self._parts.values():
            self._show(part, now)
            part.forget_ended()
            unread = part.state.position - (part.stored_offset or 0)
            if part.phase is Phase.ACTIVE and self._pace.is_due(part.key, unread, partitions, now):
                offset = self._offset_of(part)
                if offset is not None:
                    due[part.key] = offset
        if not due:
            return
        self._storing = True
        assert self._leadership is not None
        leadership = self._leadership

        def store() -> None:
            try:
                with self._offsets_turn:
                    written = leadership.write_offsets(due)
            except KmqError as error:
                _log.warning("offsets not stored; trying again", extra={"error": str(error)})
                written = frozenset()
            self._results.put(lambda: stored(written))

        def stored(written: frozenset[Partition]) -> None:
            self._storing = False
            self._pace.written(written, now)
            for key in written & self._parts.keys():
                self._parts[key].stored_offset = due[key].offset

        self._background.submit(store)

    def _show(self, part: OwnedPartition, now: float) -> None:
        labels = (part.key[0], str(part.number))
        oldest = part.state.oldest()
        self.metrics.in_flight.labels(*labels).set(len(part.state))
        self.metrics.oldest.labels(*labels).set(0.0 if oldest is None else part.age_s(oldest, now))

    def _probe(self, now: float) -> None:
        """See whether Kafka answers and the topics are still the ones we know (rules R8, R13)."""
        if now < self._next_probe or self._probing:
            return
        self._probing = True
        self._next_probe = now + _PROBE_EVERY_S
        wanted = {part.queue.name: part.queue for part in self._parts.values() if part.reading}
        names = [name for q in wanted.values() for name in (q.name, q.markers_topic)]

        def probe() -> None:
            found: dict[str, str] | None = None
            try:
                # Any broker can answer this; that no controller does is no reason to withdraw.
                self._probed_topics.brokers()
                found = {}
                if names:
                    found = {n: t.topic_id for n, t in self._probed_topics.describe(names).items()}
            except KmqError as error:
                _log.debug("Kafka does not answer: %s", error)
            finally:
                self._results.put(lambda: probed(found))

        def probed(found: dict[str, str] | None) -> None:
            self._probing = False
            assert self._member is not None
            self._member.kafka_probed(answered=found is not None)
            for part in self._parts.values():
                if not found or part.phase is not Phase.ACTIVE or part.queue.name not in wanted:
                    continue
                if (found.get(part.queue.name), found.get(part.queue.markers_topic)) != part.topic_ids:
                    part.problem = "a topic was deleted or created anew"
                    self._complain("topics", part.key, part.problem)
                    self._stop_reading(part)
                    self._reopen(part, 0.0)

        self._background.submit(probe)

    def _about(self, part: OwnedPartition) -> dict[str, Any]:
        return {"queue": part.key[0], "partition": part.number, "tracker": self._settings.tracker_id}

    def _complain(self, kind: str, key: Partition, text: str, **more: Any) -> None:
        """Log a warning, once per partition and minute."""
        now = self._clock.monotonic()
        if now - self._complained.get((kind, key), -_COMPLAIN_EVERY_S) < _COMPLAIN_EVERY_S:
            return
        self._complained[kind, key] = now
        _log.warning(text, extra={"queue": key[0], "partition": key[1], **more})


def _first(found: Sequence[tuple[int, DecodeError]]) -> dict[str, Any]:
    """What the log says of the first of them."""
    at, error = found[0]
    return {"error": str(error), "at": at}
