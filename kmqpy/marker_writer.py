"""Writes markers: start markers that must be confirmed, end markers that are retried until they are."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
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

_POLL_S = 0.05
_REPOST_AFTER_S = 0.2
_COMPLAIN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Started:
    """What became of start markers, by partition.

    last_at  the markers offset of the last one that was confirmed
    failed   the lowest queue offset that was not, where there is one
    """

    last_at: dict[int, int]
    failed: dict[int, int]


class MarkerWriter:
    """An idempotent producer for the markers topic of one queue; safe to use from any thread.

    `start` waits until the markers are confirmed; `post` and `end` return at once, and what they
    write is sent again until it is confirmed or the writer is closed. `delivery_timeout_ms` bounds
    one try. With `coalesce_ms`, takes and ends are written as ranges, ends collected for so long.
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
        self._poll_s = _POLL_S if coalesce_ms is None else max(0.001, coalesce_ms / 1000)
        self._ended: defaultdict[int, list[int]] = defaultdict(list)
        self._clock = clock
        self._producer = self._new_producer()
        self._broken = False
        self._complained_at = -_COMPLAIN_EVERY_S
        self._posted = self._confirmed = 0
        self._failed: deque[tuple[float, Any]] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kmq-markers", daemon=True)
        self._thread.start()

    def start(
        self,
        takes: Mapping[int, Sequence[int]],
        delays: Mapping[Place, int],
        lease_ms: int,
        holder: str | None,
        timeout_s: float,
    ) -> Started:
        """Write the start markers of messages taken, and of those not yet due, by their ms.

        Waits until they are confirmed, at most `timeout_s`. One that is reported as failed may have
        been written all the same.
        """
        started = _Starting()
        deadline = self._clock.monotonic() + timeout_s
        headers = markers.encode(Marker(0, 0, Op.TAKE, holder=holder))[2] or None
        value = markers.encode_start(lease_ms)
        for partition, offsets in takes.items():
            report = started.reporter(partition)
            if self._coalesces:
                fields = {"redeliver_after_ms": lease_ms, "holder": holder}
                for marker in markers.ranges(partition, Op.TAKE, offsets, **fields):
                    key, range_value, _ = markers.encode(marker)
                    started.expect(partition, marker.offset)
                    self._produce(key, range_value, headers, partition, report, deadline)
                continue
            for offset in offsets:
                started.expect(partition, offset)
                self._produce(
                    markers.encode_key(partition, offset), value, headers, partition, report, deadline
                )
        for (partition, offset), wait_ms in delays.items():
            key, delay, more = markers.encode(Marker(partition, offset, Op.DELAY, wait_ms, counts=False))
            started.expect(partition, offset)
            self._produce(key, delay, more, partition, started.reporter(partition), deadline)
        return started.wait(max(0.0, deadline - self._clock.monotonic()))

    def post(self, marker: Marker) -> None:
        """Write `marker` some time soon, whatever it takes; blocks only while the queue is full."""
        key, value, headers = markers.encode(marker)
        with self._changed:
            self._posted += 1
        if not self._produce(key, value, headers, marker.partition, self._report):
            self._forget()
            raise Unavailable(f"markers topic {self._topic}: the writer is closed")

    def end(self, partition: int, offsets: Sequence[int]) -> None:
        """Write the end markers of these messages some time soon, whatever it takes."""
        if self._coalesces:
            with self._changed:
                self._ended[partition].extend(offsets)
            return
        with self._changed:
            self._posted += len(offsets)
        value = markers.encode_end()
        for offset in offsets:
            if not self._produce(markers.encode_key(partition, offset), value, None, partition, self._report):
                self._forget()
                raise Unavailable(f"markers topic {self._topic}: the writer is closed")

    def flush(self, timeout_s: float) -> int:
        """Wait until all posted markers are confirmed; returns how many were not in time."""
        with self._changed:
            self._changed.wait_for(self._is_done, timeout_s)
            return max(0, self._posted - self._confirmed) + sum(map(len, self._ended.values()))

    def _is_done(self) -> bool:
        return not self._ended and self._confirmed >= self._posted

    def close(self, timeout_s: float = 10.0) -> int:
        """Flush and stop; returns how many markers stay unconfirmed. Their messages come again."""
        left = self.flush(timeout_s)
        self._closing.set()
        self._thread.join()
        if left:
            self._producer.purge()
            _log.error("end markers unconfirmed at close", extra={"topic": self._topic, "count": left})
        self._producer.flush(1)
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_producer(self) -> Producer:
        return kafka.producer(
            self._connection,
            {
                "linger.ms": 1,
                "message.timeout.ms": self._delivery_timeout_ms,
                "queue.buffering.max.messages": 200_000,
            },
        )

    def _produce(
        self,
        key: bytes,
        value: bytes,
        headers: markers.Headers | None,
        partition: int,
        report: Any,
        deadline: float | None = None,
    ) -> bool:
        while not self._closing.is_set():
            try:
                self._producer.produce(
                    self._topic,
                    value,
                    key,
                    partition,
                    on_delivery=report,
                    headers=headers,  # type: ignore[arg-type]
                )
            except BufferError:
                if deadline is not None and self._clock.monotonic() >= deadline:
                    return False
                if threading.current_thread() is self._thread:
                    self._producer.poll(0.01)  # nobody else makes room
                else:
                    self._clock.sleep(0.001)
            except KafkaException as exception:
                if kafka.look_again(self._producer, self._topic, partition, exception):
                    continue
                _log.warning("marker not accepted", extra={"topic": self._topic, "error": str(exception)})
                if deadline is not None:
                    return False
                self._clock.sleep(_REPOST_AFTER_S)
            else:
                return True
        return False

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._producer.poll(self._poll_s)
            if self._is_done():
                with self._changed:
                    self._changed.notify_all()
            self._send_ends()
            if self._broken:
                self._replace_producer()
            while self._failed and self._failed[0][0] <= self._clock.monotonic():
                message = self._failed.popleft()[1]
                self._produce(
                    message.key(), message.value(), message.headers() or [], message.partition(), self._report
                )

    def _send_ends(self) -> None:
        """Write the end markers that were collected."""
        if not self._ended:
            return
        with self._changed:
            ended, self._ended = self._ended, defaultdict(list)
            batch = [
                marker
                for partition, offsets in ended.items()
                for marker in markers.ranges(partition, Op.END, sorted(set(offsets)))
            ]
            self._posted += len(batch)
        for marker in batch:
            key, value, headers = markers.encode(marker)
            if not self._produce(key, value, headers, marker.partition, self._report):
                self._forget()

    def _report(self, error: KafkaError | None, message: Any) -> None:
        if error is None:
            self._confirmed += 1  # in the writer's own thread only
        elif not self._closing.is_set():
            now = self._clock.monotonic()
            if now - self._complained_at >= _COMPLAIN_EVERY_S:
                self._complained_at = now
                _log.warning("markers are sent again", extra={"topic": self._topic, "error": error.name()})
            self._broken = self._broken or error.fatal() or error.code() == KafkaError._FATAL
            self._failed.append((self._clock.monotonic() + _REPOST_AFTER_S, message))

    def _replace_producer(self) -> None:
        """A fatal error (the broker lost what it had acknowledged) ends an idempotent producer."""
        _log.error("markers producer replaced after a fatal error", extra={"topic": self._topic})
        broken, self._producer, self._broken = self._producer, self._new_producer(), False
        broken.purge()
        broken.flush(1)  # serves the delivery reports, so that what was posted is posted again

    def _forget(self) -> None:
        """One that was counted could not be posted."""
        with self._changed:
            self._posted -= 1


class _Starting:
    """Waits for the delivery reports of start markers."""

    def __init__(self) -> None:
        # What is expected is written by the caller's thread only, the rest by the writer's own.
        self._expected: dict[int, list[int]] = {}
        self._confirmed: dict[int, list[bytes]] = {}
        self._last_at: dict[int, int] = {}
        self._size: int | None = None
        self._reported = 0
        self._done = threading.Event()

    def expect(self, partition: int, offset: int) -> None:
        """There is a marker whose lowest offset this is."""
        self._expected.setdefault(partition, []).append(offset)

    def reporter(self, partition: int) -> Any:
        """What takes the delivery reports of a partition."""
        confirmed = self._confirmed.setdefault(partition, [])

        def report(error: KafkaError | None, message: Any) -> None:
            if error is None:
                confirmed.append(message.key())
                self._last_at[partition] = message.offset()
            self._reported += 1
            if self._reported == self._size:
                self._done.set()

        return report

    def wait(self, timeout_s: float) -> Started:
        """What became of them by now."""
        self._size = sum(map(len, self._expected.values()))
        if self._reported < self._size:
            self._done.wait(timeout_s)
        failed: dict[int, int] = {}
        for partition, offsets in self._expected.items():
            keys = list(self._confirmed[partition])
            if len(keys) < len(offsets):
                confirmed = {markers.decode_key(key)[1] for key in keys}
                failed[partition] = min(offset for offset in offsets if offset not in confirmed)
        return Started(dict(self._last_at), failed)
