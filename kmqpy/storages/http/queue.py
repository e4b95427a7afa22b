"""RemoteQueue, a queue behind a gateway: encodes arguments, and asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, TypeVar, Unpack
from urllib.parse import quote

import msgspec

from kmqpy.core.durations import Duration
from kmqpy.core.pieces import pieces
from kmqpy.core.settings import check_limit
from kmqpy.errors import KmqError, MessageError, ReceiptError, Unfinished
from kmqpy.message import (
    Headers,
    LazyMessage,
    Message,
    MessagesLike,
    each_of,
)
from kmqpy.queue import Capabilities, DeadLetter, DeadLetters, Orphan, shapes
from kmqpy.queue.arguments import check_age, check_redrive
from kmqpy.storages.base_queue import BaseQueue, QueueOptions
from kmqpy.storages.engine import NewRow
from kmqpy.storages.http.gateways import Gateways
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.telemetry.base import operation, sending

T = TypeVar("T")

_POLL_S = 1.0
"""A receive() that waits asks the gateway so often, in seconds, so that close() ends it soon."""
_MAX_BYTES = 4 * 1024 * 1024
"""A request has so many bytes of bodies, or one body."""

_PLAIN = NewRow(b"")

Listed = list[DeadLetter]


def path_of(queue: str) -> str:
    """The path of a queue."""
    return f"/v1/queues/{quote(queue, safe='')}"


class RemoteMessage(LazyMessage):
    """A Message whose fields are read from what the gateway has answered."""

    __slots__ = ("_queue", "_shape", "_until_ms")
    _queue: RemoteQueue
    _shape: shapes.SentMessage
    _until_ms: int

    def __init__(self, queue: RemoteQueue, shape: shapes.SentMessage, until_ms: int) -> None:
        self._queue = queue
        self._shape = shape
        self._until_ms = until_ms

    def ack(self, *, confirmed: bool = False) -> None:
        """See Message.ack."""
        self._queue.ack(self, confirmed=confirmed)

    queue = property(attrgetter("_queue.name"))
    id = property(attrgetter("_shape.id"))
    key = property(lambda self: self._shape.key_bytes())
    body = property(lambda self: self._shape.body_bytes())
    headers = property(lambda self: self._shape.all_headers())
    group = property(attrgetter("_shape.group"))
    attempts = property(attrgetter("_shape.attempts"))
    enqueued_ms = property(attrgetter("_shape.enqueued_ms"))
    first_enqueued_ms = property(attrgetter("_shape.first_enqueued_ms"))
    lease_until_ms = property(attrgetter("_until_ms"))
    receipt = property(attrgetter("_shape.receipt"))


class RemoteQueue(BaseQueue):
    """A queue behind a gateway; see kmqpy.queue.Queue. Made by RemoteStorage.open()."""

    def __init__(
        self,
        gateways: Gateways,
        handle: shapes.Handle,
        settings: StoredQueueSettings,
        capabilities: Capabilities,
        **options: Unpack[QueueOptions],
    ) -> None:
        super().__init__(settings, capabilities, **options)
        self._gateways = gateways
        self._path = path_of(settings.name)
        self._handle = handle
        self._headers = {shapes.QUEUE_ID: quote(handle.unique_id)}
        self._dead_letters = _RemoteDeadLetters(self)

    @property
    def unique_id(self) -> str:
        """See Queue.unique_id."""
        return self._handle.unique_id

    @property
    def max_in_flight(self) -> int | None:
        """See Queue.max_in_flight."""
        return self._handle.max_in_flight

    @property
    def dead_letters(self) -> DeadLetters:
        """See Queue.dead_letters."""
        return self._dead_letters

    # --- sending ----------------------------------------------------------------------------------

    def _send(self, rows: Sequence[NewRow], transaction: Any) -> list[str]:
        """Send messages, up to 1,000 or 4 MiB in a request."""
        self._check_no_transaction(transaction)
        ids: list[str] = []
        with ExitStack() as stack:
            shown = [
                _shape(
                    row,
                    stack.enter_context(sending(self._telemetry, self.name, row.headers))
                    if self._is_traced
                    else row.headers,
                )
                for row in rows
            ]
            for piece in _pieces(shown):
                batch = shapes.Batch(piece)
                repeatable = all(one.dedup_id is not None for one in batch.messages)
                try:
                    found = self.ask("POST", "batch", shapes.Ids, body=batch, repeatable=repeatable)
                except MessageError as error:
                    if ids:
                        raise Unfinished(
                            f"{error}; {len(ids)} messages before it were sent", len(ids)
                        ) from None
                    raise
                ids += found.ids
        self._note("send", len(ids), len(ids))
        return ids

    def _dedup_key(self, dedup_id: str) -> str:
        return dedup_id

    def _check_no_transaction(self, transaction: Any) -> None:
        self._check_can("transaction", transaction is None)

    # --- taking -----------------------------------------------------------------------------------

    def _receive(
        self, max_messages: int, deadline: float, lease_ms: int | None, *, one_per_group: bool
    ) -> list[Message]:
        while True:
            self.check_open()
            query = shapes.ReceiveQuery(
                max_messages=min(max_messages, shapes.MOST),
                wait=max(0.0, min(_POLL_S, deadline - self._clock.monotonic())),
                lease=None if lease_ms is None else lease_ms / 1000,
                one_per_group=one_per_group,
            )
            found, took_s = self._call("POST", "receive", shapes.Received, query=query, wait_s=query.wait)
            # A lease begins with the take, of which the answer says how long the request waited before.
            gone_ms = max(0, round(took_s * 1000) - found.waited_ms)
            until_ms = self._clock.wall_ms() + found.lease_ms - gone_ms
            messages: list[Message] = [RemoteMessage(self, one, until_ms) for one in found.messages]
            if messages and (self._closed or gone_ms * 2 > found.lease_ms):
                self._give_back(messages)
                self._telemetry.failed(self.name, "receive", len(messages))
            elif messages:
                self._telemetry.received(self.name, messages)
                return messages
            self.check_open()
            if self._clock.monotonic() >= deadline:
                return []

    def _give_back(self, messages: Sequence[Message]) -> None:
        body = shapes.Nack(receipts=[one.receipt for one in messages], count=False)
        self._call("POST", "nack", type(None), body=body)

    # --- finishing --------------------------------------------------------------------------------

    @operation("ack")
    def ack(self, *messages: MessagesLike, confirmed: bool = False, transaction: Any = None) -> None:  # noqa: ARG002
        """See Queue.ack; it is always confirmed."""
        receipts = self._receipts(messages)
        self._check_no_transaction(transaction)
        for piece in pieces(receipts, shapes.MOST):
            self.ask("POST", "ack", type(None), body=shapes.Finish(receipts=piece))
            self._note("ack", len(piece), len(piece))

    def _nack(
        self, messages: tuple[MessagesLike, ...], delay_ms: int | None, count: bool, reason: str | None
    ) -> None:
        delay_s = None if delay_ms is None else delay_ms / 1000
        for piece in pieces(self._receipts(messages), shapes.MOST):
            body = shapes.Nack(receipts=piece, delay=delay_s, count=count, reason=reason)
            self.ask("POST", "nack", type(None), body=body)
            self._note("nack", len(piece), len(piece))

    def _extend(self, messages: tuple[MessagesLike, ...], lease_ms: int) -> list[str]:
        lost: list[str] = []
        for piece in pieces(self._receipts(messages), shapes.MOST):
            body = shapes.Extend(receipts=piece, lease=lease_ms / 1000)
            found = self.ask("POST", "extend", shapes.Lost, body=body).lost
            lost += found
            self._note("extend", len(piece), len(piece) - len(found))
        return lost

    def _dead_letter(self, messages: tuple[MessagesLike, ...], reason: str | None) -> None:
        for piece in pieces(self._receipts(messages), shapes.MOST):
            self.ask("POST", "dead-letter", type(None), body=shapes.Reject(receipts=piece, reason=reason))
            self._note("dead-letter", len(piece), len(piece))

    def _receipts(self, messages: tuple[MessagesLike, ...]) -> list[str]:
        self.check_open()
        found: dict[str, None] = {}
        for one in each_of(messages):
            receipt = one.receipt if isinstance(one, Message) else one
            if not isinstance(receipt, str):
                raise ReceiptError(f"receipt: an object of type {type(receipt).__name__} is not a receipt")
            found[receipt] = None  # a message that is named twice is finished once
        return list(found)

    # --- looking ----------------------------------------------------------------------------------

    def receipt(self, message_id: str) -> str:
        """See Queue.receipt; here it takes a request."""
        self.check_open()
        if not isinstance(message_id, str):
            raise ReceiptError(f"id: an object of type {type(message_id).__name__} is not that of a message")
        return self.ask("GET", "receipt", shapes.Receipt, query=shapes.ReceiptQuery(id=message_id)).receipt

    def peek(self, limit: int = 10) -> list[Message]:
        """See Queue.peek; the receipts of the messages name no take, so ack() refuses them."""
        found = self.ask("GET", "peek", shapes.Messages, query=_limit(limit))
        return [self._seen(one) for one in found.messages]

    def size(self, limit: int | None = None) -> int:
        """See Queue.size."""
        return self._count("GET", "size", query=_counted(limit))

    def in_flight(self, limit: int | None = None) -> int:
        """See Queue.in_flight."""
        return self._count("GET", "in-flight", query=_counted(limit))

    def orphans(
        self,
        older_than: Duration | None = None,
        *,
        queued_before_ms: int | None = None,
        limit: int | None = None,
    ) -> list[Orphan]:
        """See Queue.orphans."""
        taken_for_ms = check_age(older_than, queued_before_ms)
        most = shapes.MOST_SEEN if limit is None else min(check_limit(limit), shapes.MOST_SEEN)
        query = shapes.OrphansQuery(
            older_than=None if taken_for_ms is None else taken_for_ms / 1000,
            queued_before_ms=queued_before_ms,
            limit=most,
        )
        found = self.ask("GET", "orphans", shapes.Orphans, query=query).orphans
        return [one.orphan(None if one.message is None else self._seen(one.message)) for one in found]

    def trace(self, message: Message | str) -> Mapping[str, Any]:
        """The life of a message, by its receipt or id, as `kmq trace -o json` prints it.

        Raises NotSupported unless the gateway's storage is Kafka, and ReceiptError.
        """
        named = message.receipt if isinstance(message, Message) else message
        return self.ask("GET", "trace", shapes.Life, query=shapes.TraceQuery(message=named)).life

    def _seen(self, shape: shapes.SentMessage) -> Message:
        return RemoteMessage(self, shape, shape.lease_until_ms)

    # --- administration ---------------------------------------------------------------------------

    def purge(self) -> int:
        """See Queue.purge."""
        return self._count("POST", "purge")

    def release_all(self) -> int:
        """See Queue.release_all."""
        return self._count("POST", "release-all")

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, method: str, call: str, answer: type[T], **more: Any) -> T:
        """Ask the gateway, and return its answer; raises Closed after close()."""
        self.check_open()
        return self._call(method, call, answer, **more)[0]

    def _call(self, method: str, call: str, answer: type[T], **more: Any) -> tuple[T, float]:
        try:
            return self._gateways.call(method, f"{self._path}/{call}", answer, headers=self._headers, **more)
        except KmqError:
            self.check_open()
            raise

    def _count(self, method: str, call: str, **more: Any) -> int:
        return self.ask(method, call, shapes.Counted, **more).count


class _RemoteDeadLetters:
    """Implements kmqpy.queue.DeadLetters."""

    def __init__(self, queue: RemoteQueue) -> None:
        self._queue = queue

    def list(self, limit: int = 100) -> Listed:
        """See DeadLetters.list."""
        return self._letters("dead-letters", limit)

    def peek(self, limit: int = 100) -> Listed:
        """See DeadLetters.peek."""
        return self._letters("dead-letters/peek", limit)

    def redrive(self, ids: Iterable[str] | None = None, *, limit: int | None = None) -> int:
        """See DeadLetters.redrive."""
        self._queue.check_open()
        check_redrive(ids, limit)
        if ids is None:
            return self._count("redrive", shapes.Redrive(limit=limit))
        named = [one for one in ids if isinstance(one, str)]
        return sum(self._count("redrive", shapes.Redrive(ids=piece)) for piece in pieces(named, shapes.MOST))

    def purge(self) -> int:
        """See DeadLetters.purge."""
        return self._count("purge", None)

    def _count(self, call: str, body: msgspec.Struct | None) -> int:
        return self._queue.ask("POST", f"dead-letters/{call}", shapes.Counted, body=body).count

    def _letters(self, call: str, limit: int) -> Listed:
        found = self._queue.ask("GET", call, shapes.Letters, query=_limit(limit))
        return [one.letter() for one in found.dead_letters]


def _limit(limit: int) -> shapes.Limit:
    return shapes.Limit(limit=min(check_limit(limit, "limit"), shapes.MOST_SEEN))


def _counted(limit: int | None) -> shapes.CountQuery:
    return shapes.CountQuery(limit=None if limit is None else check_limit(limit, "limit"))


def _shape(row: NewRow, headers: Headers) -> shapes.NewMessage:
    """The message as it is sent, with these headers."""
    if not headers and row[1:] == _PLAIN[1:]:
        return shapes.new_message(row.body, None, headers)
    more: dict[str, Any] = {"priority": row.priority, "group": row.group, "dedup_id": row.dedup}
    if row.delay_ms:  # msgspec leaves out a default only if it is the same object
        more["delay"] = row.delay_ms / 1000
    return shapes.new_message(row.body, row.key, headers, **more)


def _pieces(messages: list[shapes.NewMessage]) -> Iterator[list[shapes.NewMessage]]:
    """Messages as they go in requests."""
    begun, size = 0, 0
    for index, one in enumerate(messages):
        more = len(one.body or b"") + len(one.body_base64 or b"")
        if index > begun and (index - begun == shapes.MOST or size + more > _MAX_BYTES):
            yield messages[begun:index]
            begun, size = index, 0
        size += more
    if messages:
        yield messages[begun:]
