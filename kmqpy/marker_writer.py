"""Writes markers: start markers that must be confirmed, end markers that are retried until they are."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from confluent_kafka import KafkaError, KafkaException, Producer

from kmqpy import kafka, markers
from kmqpy.clock import SYSTEM_CLOCK, Clock
from kmqpy.config import Connection
from kmqpy.errors import Unavailable
from kmqpy.held import Place
from kmqpy.markers import Marker, Op
from kmqpy.starting import POLL_S, Fence, Report, Starting, is_fatal

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05
"""How often the writer's own thread looks for failures while nothing else happens."""
_LOOK_WHILE_FLUSHING_S = 0.001
_COLLECT_S = 0.002
"""For how long single end markers are collected, so that they are written together."""
_MANY_COLLECTED = 100_000
_MANY = 200
"""From so many start markers on for one partition, they are written without a report of each."""
_REPOST_AFTER_S = 0.2
_COMPLAIN_EVERY_S = 10.0
_CHUNK = 1_000
"""Markers given to librdkafka at once; other threads wait meanwhile."""


class MarkerWriter:
    """Idempotent producers for the markers topic of one queue.

    `start` begins to write start markers, and what it returns waits until they are confirmed; one
    thread at a time may do so. `post` and `end` return at once, from any thread, and what they write
    is sent again until it is confirmed or the writer is closed. `delivery_timeout_ms` bounds one try.
    With `coalesce_ms`, takes and ends are written as ranges, ends collected for so long.

    Start markers have a producer of their own: they are waited for, and would stand in the line
    behind end markers otherwise. The other one reports failures only; what it was given is confirmed
    when it holds nothing any more.
    """

    def __init__(
        self,
        connection: Connection,
        markers_topic: str,
        *,
        delivery_timeout_ms: int = 10_000,
        coalesce_ms: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._connection = connection
        self._topic = markers_topic
        self._delivery_timeout_ms = delivery_timeout_ms
        self._coalesces = coalesce_ms is not None
        self._collect_s = _COLLECT_S if coalesce_ms is None else coalesce_ms / 1000
        self._clock = clock
        self._producer = self._new_producer()
        self._starts: Producer | None = None
        self._bulk: Producer | None = None
        self._unsettled: dict[int, Fence] = {}
        self._starts_polled_at = clock.monotonic()
        self._broken = False
        self._complained_at = -_COMPLAIN_EVERY_S
        self._ended: defaultdict[int, list[Sequence[int] | Marker]] = defaultdict(list)
        """By partition, what is to be ended; and markers that were posted behind it."""
        self._collected = 0
        self._sending = 0
        self._failed: deque[tuple[float, Any]] = deque()
        self._changed = threading.Condition()
        self._flushing = 0
        self._work = threading.Event()
        self._hurry = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kmq-markers", daemon=True)
        self._thread.start()

    def get_ready(self) -> None:
        """Connect what writes start markers, so that the first one does not wait for that."""
        self._starts_producer()

    def start(
        self,
        takes: Mapping[int, Sequence[int]],
        delays: Mapping[Place, int],
        lease_ms: int,
        holder: str | None,
        timeout_s: float,
    ) -> Starting:
        """Begin to write the start markers of messages taken, and of those not yet due, by their ms.

        The offsets ascend. To be followed by `confirmed()` of what it returns, within `timeout_s`.
        """
        producer = self._starts_producer()
        starting = Starting(producer, self._clock, timeout_s, self._drop_starts_producers, self._settle)
        for partition in {*takes, *(partition for partition, _ in delays)}:
            self._unsettled.setdefault(partition, Fence(self._topic, partition, self._clock)).add(producer)
        headers = markers.encode(Marker(0, 0, Op.TAKE, holder=holder))[2] or None
        for partition, offsets in takes.items():
            if self._coalesces:
                fields = {"redeliver_after_ms": lease_ms, "holder": holder}
                for marker in markers.ranges(partition, Op.TAKE, offsets, **fields):
                    key, value, _ = markers.encode(marker)
                    self._produce(
                        key, value, headers, partition, starting.expect(partition, [marker.offset]), starting
                    )
                continue
            value = markers.encode_start(lease_ms)
            if len(offsets) >= _MANY and headers is None:
                # A report of each would take as long as writing it; that of the last says where they are.
                bulk = self._bulk_producer()
                self._unsettled[partition].add(bulk)
                report = starting.expect_quietly(bulk, partition, offsets[:-1])
                self._produce_all(offsets[:-1], value, None, partition, report, starting, quiet=True)
                offsets = offsets[-1:]
            report = starting.expect(partition, offsets)
            self._produce_all(offsets, value, headers, partition, report, starting)
        for (partition, offset), wait_ms in delays.items():
            key, value, more = markers.encode(Marker(partition, offset, Op.DELAY, wait_ms, counts=False))
            self._produce(key, value, more, partition, starting.expect(partition, [offset]), starting)
        return starting

    def settled(self, partition: int) -> bool:
        """Whether the log of markers holds every start of this partition that it ever will.

        It may not after starts of unknown outcome. Then a tick is written behind them; to be called
        again, by the thread that calls `start`, until it has come through. Does not wait.
        """
        fence = self._unsettled.get(partition)
        if fence is not None and fence.passed():
            del self._unsettled[partition]
        return partition not in self._unsettled

    def all_settled(self) -> bool:
        """The same of all partitions."""
        return not [partition for partition in list(self._unsettled) if not self.settled(partition)]

    def post(self, marker: Marker) -> None:
        """Write `marker` some time soon, whatever it takes; blocks only while the queue is full."""
        with self._changed:
            # It must not overtake the end marker of the same message (case F14).
            waits = not self._closing.is_set() and (self._sending or marker.partition in self._ended)
            if waits:
                self._ended[marker.partition].append(marker)
                self._collected += 1
        if waits:
            self._work.set()
            return
        key, value, headers = markers.encode(marker)
        if not self._produce(key, value, headers, marker.partition, self._report):
            raise Unavailable(f"markers topic {self._topic}: the writer is closed")

    def end(self, partition: int, offsets: Sequence[int]) -> None:
        """Write the end markers of these messages some time soon, whatever it takes.

        Blocks only while very many wait to be written.
        """
        with self._changed:
            if self._closing.is_set():
                raise Unavailable(f"markers topic {self._topic}: the writer is closed")
            self._ended[partition].append(offsets)
            self._collected += len(offsets)
            if self._collected > _MANY_COLLECTED:
                self._changed.wait_for(self._has_room, None)
        self._work.set()

    def _has_room(self) -> bool:
        return self._collected <= _MANY_COLLECTED or self._closing.is_set()

    def flush(self, timeout_s: float) -> int:
        """Wait until all posted markers are confirmed; returns how many were not in time."""
        with self._changed:
            self._flushing += 1
            self._hurry.set()
            self._work.set()
            self._changed.wait_for(self._is_done, timeout_s)
            self._flushing -= 1
            return self._collected + self._sending + len(self._failed) + len(self._producer)

    def _is_done(self) -> bool:
        return not (self._collected or self._sending or self._failed or len(self._producer))

    def close(self, timeout_s: float = 10.0) -> int:
        """Flush and stop; returns how many markers stay unconfirmed. Their messages come again.

        For the thread that calls `start`.
        """
        deadline = self._clock.monotonic() + timeout_s
        left = self.flush(timeout_s)
        # Whoever has the partitions next reads what was started, and must not do so too early.
        while not self.all_settled() and self._clock.monotonic() < deadline:
            self._clock.sleep(POLL_S)
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._hurry.set()
        self._work.set()
        self._thread.join()
        if left:
            self._producer.purge()
            _log.error("end markers unconfirmed at close", extra={"topic": self._topic, "count": left})
        self._producer.flush(1)
        for producer in (self._starts, self._bulk):
            if producer is not None:
                producer.flush(1)
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_producer(self, **settings: Any) -> Producer:
        return kafka.producer(
            self._connection,
            {
                "linger.ms": 1,
                "message.timeout.ms": self._delivery_timeout_ms,
                "queue.buffering.max.messages": 200_000,
                "delivery.report.only.error": True,
                **settings,
            },
        )

    def _settle(self, partition: int) -> None:
        self._unsettled.pop(partition, None)

    def _starts_producer(self) -> Producer:
        if self._starts is None:
            self._starts = self._new_producer(**{"linger.ms": 0, "delivery.report.only.error": False})
        self._starts_polled_at = self._clock.monotonic()
        return self._starts

    def _bulk_producer(self) -> Producer:
        if self._bulk is None:
            self._bulk = self._new_producer(**{"linger.ms": 0})
        return self._bulk

    def _produce(
        self,
        key: bytes,
        value: bytes,
        headers: markers.Headers | None,
        partition: int,
        report: Report,
        starting: Starting | None = None,
        *,
        quiet: bool = False,
    ) -> bool:
        error: KafkaError | None = None
        while not self._closing.is_set():
            producer = self._producer if starting is None else starting.producer_of(quiet=quiet)
            try:
                producer.produce(
                    self._topic,
                    value,
                    key,
                    partition,
                    on_delivery=report,
                    headers=headers,  # type: ignore[arg-type]
                )
            except BufferError:
                if starting is not None:
                    if starting.left_s() <= 0:
                        break
                    producer.poll(POLL_S)
                elif threading.current_thread() is self._thread:
                    producer.poll(POLL_S)  # nobody else makes room
                else:
                    self._clock.sleep(0.001)
            except KafkaException as exception:
                if kafka.look_again(producer, self._topic, partition, exception):
                    continue
                _log.warning("marker not accepted", extra={"topic": self._topic, "error": str(exception)})
                error = kafka.error_of(exception)
                if starting is not None:
                    break
                self._broken = self._broken or is_fatal(error)
                if self._broken and threading.current_thread() is self._thread:
                    self._replace_producer()  # nobody else does
                else:
                    self._clock.sleep(_REPOST_AFTER_S)
            else:
                return True
        if starting is not None:
            starting.refuse(error, key, quiet=quiet)
        return False

    def _produce_all(
        self,
        offsets: Sequence[int],
        value: bytes,
        headers: markers.Headers | None,
        partition: int,
        report: Report,
        starting: Starting | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        """A marker of its own for each."""
        producer = self._producer if starting is None else starting.producer_of(quiet=quiet)
        for first in range(0, len(offsets), _CHUNK):
            keys = markers.encode_keys(partition, offsets[first : first + _CHUNK])
            if headers is None and len(keys) > 1:  # librdkafka's batches have no headers
                batch: list[dict[str, Any]] = [{"key": key, "value": value} for key in keys]
                if producer.produce_batch(self._topic, batch, partition, on_delivery=report) == len(batch):
                    continue
                keys = [one["key"] for one in batch if "_error" in one]
            for key in keys:
                self._produce(key, value, headers, partition, report, starting, quiet=quiet)

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._work.wait(_LOOK_WHILE_FLUSHING_S if self._flushing else _LOOK_EVERY_S)
            self._work.clear()
            if self._ended and not self._flushing:
                self._hurry.wait(self._collect_s)
            self._send_ends()
            self._producer.poll(0)
            self._send_again()
            starts, bulk = self._starts, self._bulk  # another thread may drop them at any moment
            if starts is not None and self._clock.monotonic() - self._starts_polled_at > 1:
                starts.poll(0)  # what it logs would heap up
                if bulk is not None:
                    bulk.poll(0)
            with self._changed:
                if not self._flushing:
                    self._hurry.clear()
                elif self._is_done():
                    self._changed.notify_all()

    def _send_ends(self) -> None:
        """Write the end markers that were collected, and what was posted behind them."""
        with self._changed:
            ended, self._ended = self._ended, defaultdict(list)
            self._sending, self._collected = self._collected, 0
            self._changed.notify_all()
        for partition, items in ended.items():
            chunks: list[Sequence[int]] = []
            for item in items:
                if isinstance(item, Marker):
                    self._send_chunks(partition, chunks)
                    chunks = []
                    self._produce(*markers.encode(item), partition, self._report)
                else:
                    chunks.append(item)
            self._send_chunks(partition, chunks)
        self._sending = 0

    def _send_chunks(self, partition: int, chunks: list[Sequence[int]]) -> None:
        if self._coalesces:
            for marker in _ranges(partition, chunks):
                self._produce(*markers.encode(marker), partition, self._report)
            return
        for offsets in chunks:
            self._produce_all(offsets, markers.encode_end(), None, partition, self._report)

    def _send_again(self) -> None:
        """Write again what failed a while ago."""
        if self._broken:
            self._replace_producer()
        while self._failed and self._failed[0][0] <= self._clock.monotonic():
            message = self._failed[0][1]
            self._produce(
                message.key(), message.value(), message.headers() or [], message.partition(), self._report
            )
            self._failed.popleft()

    def _report(self, error: KafkaError | None, message: Any) -> None:
        if error is None or self._closing.is_set():
            return
        now = self._clock.monotonic()
        if now - self._complained_at >= _COMPLAIN_EVERY_S:
            self._complained_at = now
            _log.warning("markers are sent again", extra={"topic": self._topic, "error": error.name()})
        self._broken = self._broken or is_fatal(error)
        self._failed.append((now + _REPOST_AFTER_S, message))

    def _replace_producer(self) -> None:
        """A fatal error (the broker lost what it had acknowledged) ends an idempotent producer."""
        _log.error("markers producer replaced after a fatal error", extra={"topic": self._topic})
        self._sending += 1  # what the broken one holds
        broken, self._producer, self._broken = self._producer, self._new_producer(), False
        broken.purge()
        broken.flush(1)  # serves the delivery reports, so that what was posted is posted again
        self._sending -= 1

    def _drop_starts_producers(self) -> None:
        """The same for start markers, of which nothing is sent again; also when they don't get through."""
        _log.error("start markers' producers replaced", extra={"topic": self._topic})
        for broken in (self._starts, self._bulk):
            if broken is not None:
                broken.purge()
                broken.flush(1)
        self._starts = self._bulk = None


def _ranges(partition: int, chunks: Iterable[Sequence[int]]) -> list[Marker]:
    """The end markers of what was acknowledged at various times and in any order."""
    found: list[Marker] = []
    single: set[int] = set()
    for offsets in chunks:
        if isinstance(offsets, range):
            found += markers.ranges(partition, Op.END, offsets)
        else:
            single.update(offsets)
    if single:
        found += markers.ranges(partition, Op.END, sorted(single))
    return found
