"""StoredQueue, the queue over any `Engine`: it does checks, receipts, waiting, codecs and telemetry.

An engine is a storage's own part: it keeps messages as rows, and changes rows in atomic steps. It neither
checks arguments nor knows receipts, which are texts that name one delivery of a message. An orphan is a
message that was taken and not finished, perhaps by a process that is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from kmqpy.core.clock import Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.durations import DAY_MS, Duration, duration_ms, lease_duration_ms
from kmqpy.core.forks import ForkGuard
from kmqpy.core.settings import check_limit
from kmqpy.errors import Closed, ConfigError, MessageError, NotSupported, ReceiptError, shown
from kmqpy.message import (
    MAX_PRIORITY,
    Headers,
    HeadersLike,
    Message,
    MessagesLike,
    OutgoingMessage,
    as_bytes,
    check_bodies,
    each_of,
    headers_from,
)
from kmqpy.queue import Capabilities, Codec, DeadLetter, DeadLetters, Orphan
from kmqpy.queue.arguments import check_age, check_flag
from kmqpy.queue.canonical import body_digest
from kmqpy.queue.storage import encode_body
from kmqpy.queue_policy import bounded
from kmqpy.storages.dedup import key_of_body, key_of_id
from kmqpy.storages.engine import ANY_TAKE, Engine, MessageRow, NewRow, QueueRow, TakeRef
from kmqpy.storages.receipts import Receipts, parse_number
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.stored_dead_letters import StoredDeadLetters
from kmqpy.storages.stored_message import StoredMessage, TakeContext
from kmqpy.telemetry.base import Telemetry, operation

_ORPHANS_PER_READ = 1_000
"""orphans() reads at most this many rows by one taken_rows() of the engine, until it has read all."""


_MAX_NAME = 200
"""The most characters of a group and of a dedup id."""


class StoredQueue(Closeable):
    """A queue in a storage; see kmqpy.queue.Queue. Made by StoredStorage.open().

    Its only state is whether it is closed, so threads share it without a lock. Any number of queues share one
    engine. close() calls `on_close` at its end.
    """

    def __init__(
        self,
        engine: Engine,
        queue: QueueRow,
        *,
        clock: Clock,
        telemetry: Telemetry | None = None,
        codec: Codec | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._queue = queue
        self._settings = queue.settings
        self._clock = clock
        self._telemetry = telemetry or Telemetry()
        self._is_traced = telemetry is not None
        self._capabilities = engine.capabilities
        self._codec = codec
        self._on_close = on_close
        self._receipts = Receipts(engine.storage_id, queue)
        self._guard = ForkGuard(f"the queue {queue.name!r}")
        self._closed = False
        self._dead_letters = StoredDeadLetters(engine, queue, self._check_open)

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._queue.name

    @property
    def unique_id(self) -> str:
        """See Queue.unique_id."""
        return f"{self._engine.storage_id}/{self._queue.generation}"

    @property
    def settings(self) -> StoredQueueSettings:
        """The queue's settings when it was opened."""
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

    @property
    def max_in_flight(self) -> None:
        """See Queue.max_in_flight."""
        return None

    @property
    def dead_letters(self) -> DeadLetters:
        """See Queue.dead_letters."""
        return self._dead_letters

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
        self._check_open()
        row = NewRow(self._encoded(body), *self._terms(key, headers, delay, priority, group))
        if dedup_id is not None:
            row = row._replace(dedup=self._dedup_key(dedup_id))
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
        self._check_open()
        terms = self._terms(key, headers, delay, priority, group)
        rows = [
            self._row(body) if isinstance(body, OutgoingMessage) else NewRow(self._encoded(body), *terms)
            for body in bodies
        ]
        return self._send(rows, transaction)

    def decode(self, message: Message | DeadLetter) -> Any:
        """See Queue.decode."""
        return message.body if self._codec is None else self._codec.decode(message.body)

    def flush(self, timeout: Duration = 30) -> None:
        """See Queue.flush. It waits for nothing: send(), ack() and others return when the storage is done."""
        duration_ms(timeout, "timeout")
        self._check_open()

    def _send(self, rows: Sequence[NewRow], transaction: Any) -> list[str]:
        self._check_transaction(transaction)
        if not rows:
            return []
        if self._settings.collapse:
            rows = [row._replace(digest=body_digest(row.body)) for row in rows]
        if self._settings.dedup_by == "body":
            rows = [row if row.dedup else row._replace(dedup=key_of_body(row.body)) for row in rows]
        if self._is_traced:
            with ExitStack() as stack:
                rows = [
                    row._replace(headers=stack.enter_context(self._telemetry.sending(self.name, row.headers)))
                    for row in rows
                ]
                ids = self._engine.put(self._queue, rows, transaction)
        else:
            ids = self._engine.put(self._queue, rows, transaction)
        self._telemetry.finished(self.name, "send", len(ids))
        return [*map(str, ids)]

    def _row(self, message: OutgoingMessage) -> NewRow:
        terms = self._terms(message.key, message.headers, message.delay, message.priority, message.group)
        dedup = None if message.dedup_id is None else self._dedup_key(message.dedup_id)
        return NewRow(self._encoded(message.body), *terms, dedup)

    def _dedup_key(self, dedup_id: str) -> str:
        self._check_can("dedup_id", self._capabilities.dedup)
        return key_of_id(checked_name(dedup_id, "dedup_id"))

    def _terms(
        self,
        key: bytes | str | None,
        headers: HeadersLike | None,
        delay: Duration,
        priority: int,
        group: str | None,
    ) -> Terms:
        """The fields of a NewRow after its body; send_many() computes them once for all plain bodies."""
        return message_terms(
            self.name, self._settings, self._capabilities, (key, headers, delay, priority, group)
        )

    def _encoded(self, value: Any) -> bytes:
        return encoded(self._codec, value, self._capabilities.max_body_bytes)

    # --- taking -----------------------------------------------------------------------------------

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
        how = {"one_per_group": True} if one_per_group and self._settings.in_groups else {}
        deadline = self._clock.monotonic() + wait_ms / 1000
        lease_ms = self._settings.lease_ms
        if lease is not None:
            lease_ms = bounded(lease_duration_ms(lease), "lease", "max_lease_ms", self._settings)
        while True:
            self._check_open()
            asked_ms, asked_s = self._clock.wall_ms(), self._clock.monotonic()
            taken = self._engine.take(self._queue, max_messages, lease_ms, **how)
            now = self._clock.monotonic()
            if taken.rows and not self.at_most_once and (now - asked_s) * 2000 > lease_ms:
                # The answer took so long that less than half of the lease is left.
                self._give_back(_takes(taken.rows), delay_ms=0, count=False, reason=None)
                self._telemetry.failed(self.name, "receive", len(taken.rows))
            elif taken.rows:
                # Clocks differ, but the rest of a lease is as long by the storage's clock as by ours.
                messages = self._messages(taken.rows, ahead_ms=asked_ms - taken.now_ms)
                self._telemetry.received(self.name, messages)
                return messages
            if now >= deadline:
                return []
            self._check_open()  # a close() before take() woke nobody: no thread waited yet
            if not taken.rows and not self._engine.wait(self._queue, taken, deadline - now):
                self._check_open()
                return []

    def _messages(self, rows: Iterable[MessageRow], *, ahead_ms: int = 0) -> list[Message]:
        context = TakeContext(self, self._receipts, ahead_ms)
        return [StoredMessage(row, context) for row in rows]

    # --- finishing --------------------------------------------------------------------------------

    @operation("ack")
    def ack(self, *messages: MessagesLike, confirmed: bool = False, transaction: Any = None) -> None:  # noqa: ARG002
        """See Queue.ack."""
        takes = self._parsed(each_of(messages))
        self._check_transaction(transaction)
        if takes and not self.at_most_once:
            done = self._engine.finish(self._queue, takes, transaction)
            self._note("ack", len(takes), done)
            if transaction is not None and done < len(takes):
                raise ReceiptError(
                    f"queue {self.name!r}: {len(takes) - done} of {len(takes)} messages were taken by others "
                    "or finished before; roll the transaction back"
                )
        elif takes:
            self._note("ack", len(takes), len(takes))

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
        takes, gone = self._parsed_with_gone(messages)
        delay_ms = None
        if delay is not None:
            delay_ms = bounded(duration_ms(delay, "delay"), "delay", "max_delay_ms", self._settings)
        check_flag(count, "count")
        if delay_ms:
            self._check_can("delay", self.capabilities.delay)
        self._give_back(takes, delay_ms=delay_ms, count=count, reason=_reason("nack", reason), gone=gone)

    @operation("extend")
    def extend(self, *messages: MessagesLike, lease: Duration, confirmed: bool = False) -> list[str]:  # noqa: ARG002
        """See Queue.extend."""
        takes = self._parsed(each_of(messages))
        if self.at_most_once:
            raise NotSupported(
                f"queue {self.name!r} forgets a message when it is taken (delivery='at-most-once'), "
                "so no lease can be extended"
            )
        lease_ms = bounded(lease_duration_ms(lease), "lease", "max_lease_ms", self._settings)
        if not takes:
            return []
        lost = self._engine.extend(self._queue, takes, lease_ms)
        self._note("extend", len(takes), len(takes) - len(lost))
        return [self._receipts.make(*take) for take in lost]

    @operation("dead-letter")
    def dead_letter(
        self,
        *messages: MessagesLike,
        reason: str | None = None,
        confirmed: bool = False,  # noqa: ARG002
    ) -> None:
        """See Queue.dead_letter."""
        takes, gone = self._parsed_with_gone(messages)
        if takes:
            done = self._engine.bury(self._queue, takes, _reason("rejected", reason), gone=gone)
            self._note("dead-letter", len(takes), done)

    def _give_back(
        self,
        takes: Sequence[TakeRef],
        *,
        delay_ms: int | None,
        count: bool,
        reason: str | None,
        gone: Sequence[MessageRow] = (),
    ) -> None:
        if takes:
            done = self._engine.give_back(
                self._queue, takes, delay_ms=delay_ms, count=count, reason=reason, gone=gone
            )
            self._note("nack", len(takes), done)

    def _parsed_with_gone(
        self, messages: tuple[MessagesLike, ...]
    ) -> tuple[Sequence[TakeRef], Sequence[MessageRow]]:
        """The takes, and in an at-most-once queue the rows, which only the messages themselves hold."""
        given = each_of(messages)
        takes = self._parsed(given)
        if not self.at_most_once:
            return takes, ()
        rows = {TakeRef(one.row.id, one.row.take): one.row for one in given if isinstance(one, StoredMessage)}
        if any(take not in rows for take in takes):
            raise ReceiptError(
                f"queue {self.name!r} forgets a message when it is taken (delivery='at-most-once'): only the "
                "message that receive() returned can put it back, no receipt and no copy"
            )
        return takes, [rows[take] for take in takes]

    def _parsed(self, messages: Sequence[Message | str]) -> list[TakeRef]:
        self._check_open()
        found: dict[TakeRef, None] = {}
        for one in messages:
            # A message that was received from here needs no parsing.
            take = one.take_of(self) if isinstance(one, StoredMessage) else None
            if take is None:
                take = self._receipts.parse(one.receipt if isinstance(one, Message) else one)
            if not take.take:
                raise ReceiptError(
                    f"receipt: message {take.id} of queue {self.name!r} was not taken, only seen"
                )
            found[take] = None  # a message that is named twice is finished once
        return list(found)

    def _note(self, op: str, asked: int, done: int) -> None:
        if done:
            self._telemetry.finished(self.name, op, done)
        if asked > done:  # others were taken again by somebody else, or finished before
            self._telemetry.failed(self.name, f"late {op}", asked - done)

    # --- looking ----------------------------------------------------------------------------------

    def receipt(self, message_id: str) -> str:
        """See Queue.receipt."""
        self._check_open()
        number = parse_number(message_id)
        if not number:
            raise ReceiptError(f"id: {shown(message_id)} is not that of a message; they look like 42")
        return self._receipts.make(number, ANY_TAKE)

    def peek(self, limit: int = 10) -> list[Message]:
        """See Queue.peek. The receipts of the messages name no take, so ack() refuses them."""
        self._check_open()
        rows = self._engine.peek(self._queue, check_limit(limit, "limit"))
        return self._messages(row._replace(take=0) for row in rows)

    def size(self, limit: int | None = None) -> int:
        """See Queue.size."""
        self._check_open()
        counts = self._engine.counts(self._queue, None if limit is None else check_limit(limit, "limit"))
        size = counts.ready + counts.delayed
        return size if limit is None else min(size, limit)

    def in_flight(self, limit: int | None = None) -> int:
        """See Queue.in_flight."""
        self._check_open()
        counts = self._engine.counts(self._queue, None if limit is None else check_limit(limit, "limit"))
        return counts.in_flight if limit is None else min(counts.in_flight, limit)

    def orphans(
        self,
        older_than: Duration | None = None,
        *,
        queued_before_ms: int | None = None,
        limit: int | None = None,
    ) -> list[Orphan]:
        """See Queue.orphans."""
        self._check_open()
        taken_for_ms = check_age(older_than, queued_before_ms)
        left = math.inf if limit is None else check_limit(limit, "limit")
        rows: list[MessageRow] = []
        while left:
            asked = int(min(left, _ORPHANS_PER_READ))
            page = self._engine.taken_rows(
                self._queue,
                limit=asked,
                after=rows[-1].id if rows else 0,
                taken_for_ms=taken_for_ms,
                queued_before_ms=queued_before_ms,
            )
            rows += page
            left -= len(page)
            if len(page) < asked:
                break
        rows.sort(key=lambda row: (row.since_ms, row.id))
        return [
            Orphan(
                receipt=message.receipt,
                holder=None,
                since_ms=row.since_ms,
                lease_until_ms=row.until_ms,
                message=message,
            )
            for row, message in zip(rows, self._messages(rows), strict=True)
        ]

    # --- administration ---------------------------------------------------------------------------

    def purge(self) -> int:
        """See Queue.purge."""
        self._check_open()
        return self._engine.purge(self._queue)

    def release_all(self) -> int:
        """See Queue.release_all."""
        self._check_open()
        return self._engine.release_all(self._queue)

    def close(self) -> None:
        """See Queue.close. A receive() that waits in another thread raises Closed."""
        if self._closed or self._guard.inherited:
            return
        self._closed = True
        try:
            self._engine.wake(self._queue)
        finally:
            if self._on_close is not None:
                self._on_close()

    # --- checks -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        self._guard.raise_if_inherited()
        if self._closed:
            raise Closed(f"queue {self.name!r}: it is closed")

    def _check_can(self, what: str, can: bool) -> None:
        check_can(self.name, what, can)

    def _check_transaction(self, transaction: Any) -> None:
        if transaction is not None:
            self._check_can("transaction", self.capabilities.transactions)


Terms = tuple[bytes | None, Headers, int, int, None, str | None]
"""What belongs to a message beside its body: key, headers, delay in ms, priority, no digest, group."""


def message_terms(
    queue: str,
    settings: StoredQueueSettings,
    capabilities: Capabilities,
    given: tuple[bytes | str | None, HeadersLike | None, Duration, int, str | None],
) -> Terms:
    """Check what send() was given beside the body: key, headers, delay, priority and group."""
    key, headers, delay, priority, group = given
    delay_ms = duration_ms(delay, "delay")
    if delay_ms > settings.max_delay_ms:
        raise MessageError(f"delay: {delay!r} is longer than max_delay_ms, {settings.max_delay_ms}")
    if delay_ms:
        check_can(queue, "delay", capabilities.delay)
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= MAX_PRIORITY:
        raise MessageError(f"priority: {shown(priority)} is no whole number from 0 to {MAX_PRIORITY}")
    if priority:
        check_can(queue, "priority", capabilities.priority and not settings.keeps_groups)
    if group is not None:
        check_can(queue, "group", capabilities.groups)
        checked_name(group, "group")
    key = None if key is None else as_bytes(key, "key")
    return key, headers_from(headers), delay_ms, priority, None, group


def encoded(codec: Codec | None, value: Any, most: int | None) -> bytes:
    """The body for what send() was given, at most so many bytes."""
    body = as_bytes(value, "body") if codec is None else encode_body(codec, value)
    if most is not None and len(body) > most:
        raise MessageError(f"body: {len(body)} bytes are more than this storage takes, {most}")
    return body


def check_can(queue: str, what: str, can: bool) -> None:
    """Raise NotSupported for what the storage of a queue can't do."""
    if not can:
        raise NotSupported(f"{what}: the storage of queue {queue!r} can't do it")


def checked_name(value: object, argument: str) -> str:
    """`value`; raises MessageError unless it is text that a storage can keep as a name."""
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_NAME or "\0" in value:
        raise MessageError(
            f"{argument}: {shown(value)} is no text of 1 to {_MAX_NAME} characters without NUL"
        )
    as_bytes(value, argument)  # raises for lone surrogates
    return value


def _takes(rows: Iterable[MessageRow]) -> list[TakeRef]:
    return [TakeRef(row.id, row.take) for row in rows]


def _reason(kind: str, reason: str | None) -> str:
    """The reason as it is stored: `kind`, or `kind: reason`, as on Kafka.

    Replaces NUL and lone surrogates, which not every storage can keep.
    """
    if reason is None:
        return kind
    if not isinstance(reason, str):
        raise ConfigError(f"reason: an object of type {type(reason).__name__} is not text")
    clean = reason.encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
    return f"{kind}: {clean}"
