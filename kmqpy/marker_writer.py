"""Writes markers: start markers that must be confirmed, end markers that are retried until they are."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from confluent_kafka import KafkaError, KafkaException, Producer

from kmqpy import kafka, markers
from kmqpy.clock import SYSTEM_CLOCK, Clock
from kmqpy.config import Connection
from kmqpy.errors import Unavailable
from kmqpy.held import Place
from kmqpy.markers import Marker, Op

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05
"""How often the writer's own thread looks for failures while nothing else happens."""
_LOOK_WHILE_FLUSHING_S = 0.001
_COLLECT_S = 0.002
"""For how long single end markers are collected, so that they are written together."""
_MANY_COLLECTED = 100_000
_POLL_S = 0.01
_REPOST_AFTER_S = 0.2
_COMPLAIN_EVERY_S = 10.0
_CHUNK = 1_000
"""Markers given to librdkafka at once; other threads wait meanwhile."""


Report = Callable[[KafkaError | None, Any], None]
"""What takes delivery reports."""


@dataclass(frozen=True, slots=True)
class Started:
    """What became of start markers, by partition.

    last_at  the markers offset of the last one that was confirmed
    failed   the lowest queue offset that was not, where there is one
    """

    last_at: dict[int, int]
    failed: dict[int, int]


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
        self._starts_polled_at = clock.monotonic()
        self._broken = False
        self._complained_at = -_COMPLAIN_EVERY_S
        self._ended: defaultdict[int, list[Sequence[int]]] = defaultdict(list)
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
        starting = Starting(self._starts_producer(), self._clock, timeout_s, self._drop_starts_producer)
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
            report = starting.expect(partition, offsets)
            self._produce_all(offsets, markers.encode_start(lease_ms), headers, partition, report, starting)
        for (partition, offset), wait_ms in delays.items():
            key, value, more = markers.encode(Marker(partition, offset, Op.DELAY, wait_ms, counts=False))
            self._produce(key, value, more, partition, starting.expect(partition, [offset]), starting)
        return starting

    def post(self, marker: Marker) -> None:
        """Write `marker` some time soon, whatever it takes; blocks only while the queue is full."""
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
        """Flush and stop; returns how many markers stay unconfirmed. Their messages come again."""
        left = self.flush(timeout_s)
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
        if self._starts is not None:
            self._starts.flush(1)
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

    def _starts_producer(self) -> Producer:
        if self._starts is None:
            self._starts = self._new_producer(**{"linger.ms": 0, "delivery.report.only.error": False})
        self._starts_polled_at = self._clock.monotonic()
        return self._starts

    def _produce(
        self,
        key: bytes,
        value: bytes,
        headers: markers.Headers | None,
        partition: int,
        report: Report,
        starting: Starting | None = None,
    ) -> bool:
        while not self._closing.is_set():
            producer = self._producer if starting is None else starting.producer
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
                        return False
                    producer.poll(_POLL_S)
                elif threading.current_thread() is self._thread:
                    producer.poll(_POLL_S)  # nobody else makes room
                else:
                    self._clock.sleep(0.001)
            except KafkaException as exception:
                if kafka.look_again(producer, self._topic, partition, exception):
                    continue
                _log.warning("marker not accepted", extra={"topic": self._topic, "error": str(exception)})
                error = kafka.error_of(exception)
                if starting is not None:
                    starting.refuse(error)
                    return False
                self._broken = self._broken or _is_fatal(error)
                if self._broken and threading.current_thread() is self._thread:
                    self._replace_producer()  # nobody else does
                else:
                    self._clock.sleep(_REPOST_AFTER_S)
            else:
                return True
        return False

    def _produce_all(
        self,
        offsets: Sequence[int],
        value: bytes,
        headers: markers.Headers | None,
        partition: int,
        report: Report,
        starting: Starting | None = None,
    ) -> None:
        """A marker of its own for each."""
        producer = self._producer if starting is None else starting.producer
        for first in range(0, len(offsets), _CHUNK):
            keys = [markers.encode_key(partition, offset) for offset in offsets[first : first + _CHUNK]]
            if headers is None and len(keys) > 1:  # librdkafka's batches have no headers
                batch: list[dict[str, Any]] = [{"key": key, "value": value} for key in keys]
                if producer.produce_batch(self._topic, batch, partition, on_delivery=report) == len(batch):
                    continue
                keys = [one["key"] for one in batch if "_error" in one]
            for key in keys:
                self._produce(key, value, headers, partition, report, starting)

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._work.wait(_LOOK_WHILE_FLUSHING_S if self._flushing else _LOOK_EVERY_S)
            self._work.clear()
            if self._ended and not self._flushing:
                self._hurry.wait(self._collect_s)
            self._send_ends()
            self._producer.poll(0)
            self._send_again()
            if self._starts is not None and self._clock.monotonic() - self._starts_polled_at > 1:
                self._starts.poll(0)  # what it logs would heap up
            with self._changed:
                if not self._flushing:
                    self._hurry.clear()
                elif self._is_done():
                    self._changed.notify_all()

    def _send_ends(self) -> None:
        """Write the end markers that were collected."""
        with self._changed:
            ended, self._ended = self._ended, defaultdict(list)
            self._sending, self._collected = self._collected, 0
            self._changed.notify_all()
        for partition, chunks in ended.items():
            if not self._coalesces:
                for offsets in chunks:
                    self._produce_all(offsets, markers.encode_end(), None, partition, self._report)
                continue
            for marker in _ranges(partition, chunks):
                key, value, headers = markers.encode(marker)
                self._produce(key, value, headers, partition, self._report)
        self._sending = 0

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
        self._broken = self._broken or _is_fatal(error)
        self._failed.append((now + _REPOST_AFTER_S, message))

    def _replace_producer(self) -> None:
        """A fatal error (the broker lost what it had acknowledged) ends an idempotent producer."""
        _log.error("markers producer replaced after a fatal error", extra={"topic": self._topic})
        self._sending += 1  # what the broken one holds
        broken, self._producer, self._broken = self._producer, self._new_producer(), False
        broken.purge()
        broken.flush(1)  # serves the delivery reports, so that what was posted is posted again
        self._sending -= 1

    def _drop_starts_producer(self) -> None:
        """The same where nothing is sent again."""
        _log.error("markers producer replaced after a fatal error", extra={"topic": self._topic})
        broken, self._starts = self._starts, None
        if broken is not None:
            broken.purge()
            broken.flush(1)


class Starting:
    """Start markers on their way; used by one thread."""

    def __init__(
        self, producer: Producer, clock: Clock, timeout_s: float, on_fatal: Callable[[], None]
    ) -> None:
        self.producer = producer
        self._clock = clock
        self._deadline = clock.monotonic() + timeout_s
        self._on_fatal = on_fatal
        self._expected: dict[int, list[int]] = {}
        self._size = 0
        # Written by whoever polls the producer.
        self._written: dict[int, list[Any]] = {}
        self._refused: list[KafkaError | None] = []

    def left_s(self) -> float:
        """Seconds until the time-out."""
        return self._deadline - self._clock.monotonic()

    def expect(self, partition: int, offsets: Sequence[int]) -> Report:
        """There are markers of which these are the lowest offsets; returns what takes their reports."""
        self._expected.setdefault(partition, []).extend(offsets)
        self._size += len(offsets)
        written = self._written.setdefault(partition, [])

        def report(error: KafkaError | None, message: Any) -> None:
            if error is None:
                written.append(message)
            else:
                self.refuse(error)

        return report

    def refuse(self, error: KafkaError | None) -> None:
        """One of them failed."""
        self._refused.append(error)

    def confirmed(self) -> Started:
        """Wait until they are confirmed, until the time-out at most.

        One that counts as failed may have been written all the same, or be so later.
        """
        while self._pending() and (left_s := self.left_s()) > 0:
            # Another thread may have polled what this one waits for.
            self.producer.poll(min(left_s, _POLL_S))
        if any(map(_is_fatal, self._refused)):
            self._on_fatal()
        failed: dict[int, int] = {}
        last_at: dict[int, int] = {}
        for partition, offsets in self._expected.items():
            written = self._written[partition][:]
            if written:
                last_at[partition] = written[-1].offset()
            if len(written) < len(offsets):
                done = {markers.decode_key(message.key())[1] for message in written}
                failed[partition] = min(offset for offset in offsets if offset not in done)
        return Started(last_at, failed)

    def _pending(self) -> bool:
        return len(self._refused) + sum(map(len, self._written.values())) < self._size


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


def _is_fatal(error: KafkaError | None) -> bool:
    return error is not None and (error.fatal() or error.code() == KafkaError._FATAL)
