"""BaseQueue: what queues of any storage but Kafka do alike with arguments, before they do their own part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Required, TypedDict

from kmqpy.core.clock import Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.durations import DAY_MS, Duration, duration_ms, lease_duration_ms
from kmqpy.core.forks import ForkGuard
from kmqpy.core.settings import check_limit
from kmqpy.errors import Closed, MessageError, NotSupported, shown
from kmqpy.message import (
    MAX_PRIORITY,
    Headers,
    HeadersLike,
    Message,
    MessagesLike,
    OutgoingMessage,
    as_bytes,
    check_bodies,
    headers_from,
)
from kmqpy.queue import Capabilities, Codec, DeadLetter
from kmqpy.queue.arguments import check_flag, clean_reason
from kmqpy.queue.storage import encode_body
from kmqpy.queue_policy import bounded
from kmqpy.storages.engine import NewRow
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.telemetry.base import Telemetry, operation

_MAX_NAME = 200
"""The most characters of a group and of a dedup id."""

_Terms = tuple[bytes | None, Headers, int, int, None, str | None]
"""The fields of a NewRow after its body, without its dedup key."""


class QueueOptions(TypedDict, total=False):
    """The keyword arguments of BaseQueue, `clock` among them."""

    clock: Required[Clock]
    telemetry: Telemetry | None
    codec: Codec | None
    on_close: Callable[[], None] | None


class BaseQueue(Closeable):
    """Checks and converts arguments; see kmqpy.queue.Queue, most of whose methods it has.

    Its only state is whether it is closed, so threads share it without a lock. close() calls `on_close` at
    its end.
    """

    def __init__(
        self,
        settings: StoredQueueSettings,
        capabilities: Capabilities,
        *,
        clock: Clock,
        telemetry: Telemetry | None = None,
        codec: Codec | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._settings = settings
        self._capabilities = capabilities
        self._clock = clock
        self._telemetry = telemetry or Telemetry()
        self._is_traced = telemetry is not None
        self._codec = codec
        self._on_close = on_close
        self._guard = ForkGuard(f"the queue {settings.name!r}")
        self._closed = False

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._settings.name

    @property
    def settings(self) -> StoredQueueSettings:
        """The queue's settings when it was opened; of those that only Kafka has, none."""
        return self._settings

    @property
    def capabilities(self) -> Capabilities:
        """See Queue.capabilities."""
        return self._capabilities

    @property
    def default_lease(self) -> float:
        """See Queue.default_lease."""
        return self._settings.lease_ms / 1000

    @property
    def max_lease(self) -> float:
        """See Queue.max_lease."""
        return self._settings.max_lease_ms / 1000

    @property
    def at_most_once(self) -> bool:
        """See Queue.at_most_once."""
        return self._settings.at_most_once

    @property
    def delays_retries(self) -> bool:
        """See Queue.delays_retries."""
        return bool(self._settings.retry_delays)

    @property
    def in_groups(self) -> bool:
        """See Queue.in_groups."""
        return self._settings.in_groups

    # --- sending ----------------------------------------------------------------------------------

    def send(
        self,
        body: Any,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
        priority: int = 0,
        group: str | None = None,
        dedup_id: str | None = None,
        transaction: Any = None,
    ) -> str:
        """See Queue.send."""
        self.check_open()
        terms = self._terms(key, headers, delay, priority, group)
        row = NewRow(self._encoded(body), *terms, self._dedup(dedup_id))
        return self._send([row], transaction)[0]

    def send_many(
        self,
        bodies: Iterable[Any],
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
        priority: int = 0,
        group: str | None = None,
        transaction: Any = None,
    ) -> list[str]:
        """See Queue.send_many."""
        check_bodies(bodies)
        self.check_open()
        terms = self._terms(key, headers, delay, priority, group)
        rows = [
            self._row(body) if isinstance(body, OutgoingMessage) else NewRow(self._encoded(body), *terms)
            for body in bodies
        ]
        return self._send(rows, transaction)

    @abstractmethod
    def _send(self, rows: Sequence[NewRow], transaction: Any) -> list[str]: ...

    @abstractmethod
    def _dedup_key(self, dedup_id: str) -> str:
        """What NewRow.dedup is for this id."""

    def _row(self, message: OutgoingMessage) -> NewRow:
        terms = self._terms(message.key, message.headers, message.delay, message.priority, message.group)
        return NewRow(self._encoded(message.body), *terms, self._dedup(message.dedup_id))

    def _dedup(self, dedup_id: str | None) -> str | None:
        if dedup_id is None:
            return None
        self._check_can("dedup_id", self._capabilities.dedup)
        return self._dedup_key(_checked_name(dedup_id, "dedup_id"))

    def _terms(
        self,
        key: bytes | str | None,
        headers: HeadersLike | None,
        delay: Duration,
        priority: int,
        group: str | None,
    ) -> _Terms:
        """See _Terms; send_many() computes them once for all plain bodies."""
        delay_ms = duration_ms(delay, "delay")
        if delay_ms > self._settings.max_delay_ms:
            raise MessageError(f"delay: {delay!r} is longer than max_delay_ms, {self._settings.max_delay_ms}")
        if delay_ms:
            self._check_can("delay", self._capabilities.delay)
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= MAX_PRIORITY:
            raise MessageError(f"priority: {shown(priority)} is not a whole number from 0 to {MAX_PRIORITY}")
        if priority:
            if self._settings.keeps_groups:
                raise NotSupported(
                    "priority: queues with groups in order, with fair shares or caps have none"
                )
            self._check_can("priority", self._capabilities.priority)
        if group is not None:
            self._check_can("group", self._capabilities.groups)
            _checked_name(group, "group")
        key = None if key is None else as_bytes(key, "key")
        return key, headers_from(headers), delay_ms, priority, None, group

    def _encoded(self, value: Any) -> bytes:
        body = as_bytes(value, "body") if self._codec is None else encode_body(self._codec, value)
        most = self._capabilities.max_body_bytes
        if most is not None and len(body) > most:
            raise MessageError(f"body: {len(body)} bytes are more than this storage takes, {most}")
        return body

    def decode(self, message: Message | DeadLetter) -> Any:
        """See Queue.decode."""
        return message.body if self._codec is None else self._codec.decode(message.body)

    def flush(self, timeout: Duration = 30) -> None:
        """See Queue.flush. It waits for nothing: send(), ack() and others return when the storage is done."""
        duration_ms(timeout, "timeout")
        self.check_open()

    # --- taking and finishing ---------------------------------------------------------------------

    @operation("receive")
    def receive(
        self,
        max_messages: int = 100,
        *,
        wait: Duration = 1.0,
        lease: Duration | None = None,
        one_per_group: bool = False,
    ) -> list[Message]:
        """See Queue.receive; a wait of more than a day ends after a day."""
        check_limit(max_messages, "max_messages")
        # Every operating system and driver can wait for a day.
        wait_ms = min(duration_ms(wait, "wait"), DAY_MS)
        check_flag(one_per_group, "one_per_group")
        lease_ms = None
        if lease is not None:
            lease_ms = bounded(lease_duration_ms(lease), "lease", "max_lease_ms", self._settings)
        deadline = self._clock.monotonic() + wait_ms / 1000
        return self._receive(max_messages, deadline, lease_ms, one_per_group=one_per_group and self.in_groups)

    @abstractmethod
    def _receive(
        self, max_messages: int, deadline: float, lease_ms: int | None, *, one_per_group: bool
    ) -> list[Message]: ...

    @operation("nack")
    def nack(
        self,
        *messages: MessagesLike,
        delay: Duration | None = None,
        count: bool = True,
        reason: str | None = None,
        confirmed: bool = False,  # noqa: ARG002
    ) -> None:
        """See Queue.nack."""
        self.check_open()
        delay_ms = None
        if delay is not None:
            delay_ms = bounded(duration_ms(delay, "delay"), "delay", "max_delay_ms", self._settings)
        check_flag(count, "count")
        if delay_ms:
            self._check_can("delay", self._capabilities.delay)
        self._nack(messages, delay_ms, count, clean_reason(reason))

    @abstractmethod
    def _nack(
        self, messages: tuple[MessagesLike, ...], delay_ms: int | None, count: bool, reason: str | None
    ) -> None: ...

    @operation("extend")
    def extend(self, *messages: MessagesLike, lease: Duration, confirmed: bool = False) -> list[str]:  # noqa: ARG002
        """See Queue.extend."""
        self.check_open()
        if self.at_most_once:
            raise NotSupported(
                f"queue {self.name!r} forgets a message when it is taken (delivery='at-most-once'), "
                "so no lease can be extended"
            )
        lease_ms = bounded(lease_duration_ms(lease), "lease", "max_lease_ms", self._settings)
        return self._extend(messages, lease_ms)

    @abstractmethod
    def _extend(self, messages: tuple[MessagesLike, ...], lease_ms: int) -> list[str]: ...

    @operation("dead-letter")
    def dead_letter(
        self,
        *messages: MessagesLike,
        reason: str | None = None,
        confirmed: bool = False,  # noqa: ARG002
    ) -> None:
        """See Queue.dead_letter."""
        self.check_open()
        self._dead_letter(messages, clean_reason(reason))

    @abstractmethod
    def _dead_letter(self, messages: tuple[MessagesLike, ...], reason: str | None) -> None: ...

    def _note(self, op: str, asked: int, done: int) -> None:
        if done:
            self._telemetry.finished(self.name, op, done)
        if asked > done:  # others were taken again by somebody else, or finished before
            self._telemetry.failed(self.name, f"late {op}", asked - done)

    # --- closing and checks -----------------------------------------------------------------------

    def close(self) -> None:
        """See Queue.close. A receive() that waits in another thread raises Closed."""
        if self._closed or self._guard.inherited:
            return
        self._closed = True
        try:
            self._wake()
        finally:
            if self._on_close is not None:
                self._on_close()

    def _wake(self) -> None:
        """Let calls that wait in other threads notice the end."""

    def check_open(self) -> None:
        """Raise Closed after close()."""
        self._guard.raise_if_inherited()
        if self._closed:
            raise Closed(f"queue {self.name!r}: it is closed")

    def _check_can(self, what: str, can: bool) -> None:
        """Raise NotSupported for what the storage can't do."""
        if not can:
            raise NotSupported(f"{what}: the storage of queue {self.name!r} can't do it")


def _checked_name(value: object, argument: str) -> str:
    """`value`; raises MessageError unless it is text that a storage can keep as a name."""
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_NAME or "\0" in value:
        raise MessageError(
            f"{argument}: {shown(value)} is not a text of 1 to {_MAX_NAME} characters without NUL"
        )
    as_bytes(value, argument)  # raises for lone surrogates
    return value
