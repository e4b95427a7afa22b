"""Writes markers: start markers that must be confirmed, end markers that are retried until they are."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
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


class MarkerWriter:
    """An idempotent producer for the markers topic of one queue; safe to use from any thread.

    `write` waits until the markers are confirmed; `post` and `end` return at once, and what they
    write is sent again until it is confirmed or the writer is closed. `delivery_timeout_ms` bounds
    one try. With `coalesce_ms`, end markers are collected for so long and written as ranges.
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
        self._unconfirmed = 0
        self._failed: deque[tuple[float, Any]] = deque()
        self._confirmed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kmq-markers", daemon=True)
        self._thread.start()

    def write(self, batch: Sequence[Marker], timeout_s: float) -> dict[Place, int]:
        """Write `batch`; returns the markers offset of each marker confirmed within `timeout_s`.

        One that is not in the result may have been written all the same.
        """
        waiting = _Batch(len(batch))
        deadline = self._clock.monotonic() + timeout_s
        for marker in batch:
            key, value, headers = markers.encode(marker)
            place = (marker.partition, marker.offset)
            if not self._produce(key, value, headers, marker.partition, waiting.reporter(place), deadline):
                waiting.failed()
        waiting.done.wait(max(0.0, deadline - self._clock.monotonic()))
        return dict(waiting.offsets)

    def post(self, marker: Marker) -> None:
        """Write `marker` some time soon, whatever it takes; blocks only while the queue is full."""
        key, value, headers = markers.encode(marker)
        with self._confirmed:
            self._unconfirmed += 1
        if not self._produce(key, value, headers, marker.partition, self._posted):
            self._forget()
            raise Unavailable(f"markers topic {self._topic}: the writer is closed")

    def end(self, partition: int, offsets: Sequence[int]) -> None:
        """Write the end markers of these messages some time soon, whatever it takes."""
        if self._coalesces:
            with self._confirmed:
                self._ended[partition].extend(offsets)
            return
        with self._confirmed:
            self._unconfirmed += len(offsets)
        value = markers.encode_end()
        for offset in offsets:
            if not self._produce(markers.encode_key(partition, offset), value, None, partition, self._posted):
                self._forget()
                raise Unavailable(f"markers topic {self._topic}: the writer is closed")

    def flush(self, timeout_s: float) -> int:
        """Wait until all posted markers are confirmed; returns how many were not in time."""
        self._send_ends()
        with self._confirmed:
            self._confirmed.wait_for(lambda: self._unconfirmed == 0, timeout_s)
            return self._unconfirmed

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
            self._send_ends()
            if self._broken:
                self._replace_producer()
            while self._failed and self._failed[0][0] <= self._clock.monotonic():
                message = self._failed.popleft()[1]
                self._produce(
                    message.key(), message.value(), message.headers() or [], message.partition(), self._posted
                )

    def _send_ends(self) -> None:
        """Write the end markers that were collected."""
        if not self._ended:
            return
        with self._confirmed:
            ended, self._ended = self._ended, defaultdict(list)
            batch = [
                marker
                for partition, offsets in ended.items()
                for marker in markers.ranges(partition, Op.END, sorted(set(offsets)))
            ]
            self._unconfirmed += len(batch)
        for marker in batch:
            key, value, headers = markers.encode(marker)
            if not self._produce(key, value, headers, marker.partition, self._posted):
                self._forget()

    def _posted(self, error: KafkaError | None, message: Any) -> None:
        if error is None:
            self._forget()
        elif not self._closing.is_set():
            _log.warning("marker sent again", extra={"topic": self._topic, "error": error.name()})
            self._broken = self._broken or error.fatal() or error.code() == KafkaError._FATAL
            self._failed.append((self._clock.monotonic() + _REPOST_AFTER_S, message))

    def _replace_producer(self) -> None:
        """A fatal error (the broker lost what it had acknowledged) ends an idempotent producer."""
        _log.error("markers producer replaced after a fatal error", extra={"topic": self._topic})
        broken, self._producer, self._broken = self._producer, self._new_producer(), False
        broken.purge()
        broken.flush(1)  # serves the delivery reports, so that what was posted is posted again

    def _forget(self) -> None:
        with self._confirmed:
            self._unconfirmed -= 1
            if self._unconfirmed == 0:
                self._confirmed.notify_all()


class _Batch:
    """Waits for the delivery reports of some markers."""

    def __init__(self, size: int) -> None:
        self._pending = size
        self._lock = threading.Lock()
        self.offsets: dict[Place, int] = {}
        self.done = threading.Event()
        if size == 0:
            self.done.set()

    def reporter(self, place: Place) -> Any:
        def report(error: KafkaError | None, message: Any) -> None:
            if error is None:
                self.offsets[place] = message.offset()
            self._finish_one()

        return report

    def failed(self) -> None:
        self._finish_one()

    def _finish_one(self) -> None:
        with self._lock:
            self._pending -= 1
            if self._pending == 0:
                self.done.set()
