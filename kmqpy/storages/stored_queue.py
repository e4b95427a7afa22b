"""StoredQueue, the queue over any `Engine`: it does checks, receipts, waiting, codecs and telemetry.

An engine is a storage's own part: it keeps messages as rows, and changes rows in atomic steps. It neither
checks arguments nor knows receipts, which are texts that name one delivery of a message. An orphan is a
message that was taken and not finished, perhaps by a process that is gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Unpack

from kmqpy.core.durations import Duration
from kmqpy.core.settings import check_limit
from kmqpy.errors import ReceiptError, shown
from kmqpy.message import (
    Message,
    MessagesLike,
    each_of,
)
from kmqpy.queue import DeadLetters, Orphan
from kmqpy.queue.arguments import check_age
from kmqpy.queue.canonical import body_digest
from kmqpy.storages.base_queue import BaseQueue, QueueOptions
from kmqpy.storages.dedup import key_of_body, key_of_id
from kmqpy.storages.engine import ANY_TAKE, Engine, MessageRow, NewRow, QueueRow, TakeRef
from kmqpy.storages.receipts import Receipts, parse_number
from kmqpy.storages.stored_dead_letters import StoredDeadLetters
from kmqpy.storages.stored_message import StoredMessage, TakeContext
from kmqpy.telemetry.base import operation, sending

_ORPHANS_PER_READ = 1_000
"""orphans() reads at most this many rows by one taken_rows() of the engine, until it has read all."""


class StoredQueue(BaseQueue):
    """A queue in a storage; see kmqpy.queue.Queue. Made by StoredStorage.open().

    Any number of queues share one engine.
    """

    def __init__(self, engine: Engine, queue: QueueRow, **options: Unpack[QueueOptions]) -> None:
        super().__init__(queue.settings, engine.capabilities, **options)
        self._engine = engine
        self._queue = queue
        self._receipts = Receipts(engine.storage_id, queue)
        self._dead_letters = StoredDeadLetters(engine, queue, self.check_open)

    @property
    def unique_id(self) -> str:
        """See Queue.unique_id."""
        return f"{self._engine.storage_id}/{self._queue.generation}"

    @property
    def max_in_flight(self) -> None:
        """See Queue.max_in_flight."""
        return None

    @property
    def dead_letters(self) -> DeadLetters:
        """See Queue.dead_letters."""
        return self._dead_letters

    # --- sending ----------------------------------------------------------------------------------

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
                    row._replace(
                        headers=stack.enter_context(sending(self._telemetry, self.name, row.headers))
                    )
                    for row in rows
                ]
                ids = self._engine.put(self._queue, rows, transaction)
        else:
            ids = self._engine.put(self._queue, rows, transaction)
        self._telemetry.finished(self.name, "send", len(ids))
        return [*map(str, ids)]

    def _dedup_key(self, dedup_id: str) -> str:
        return key_of_id(dedup_id)

    # --- taking -----------------------------------------------------------------------------------

    def _receive(
        self, max_messages: int, deadline: float, lease_ms: int | None, *, one_per_group: bool
    ) -> list[Message]:
        if lease_ms is None:
            lease_ms = self._settings.lease_ms
        how = {"one_per_group": True} if one_per_group else {}
        while True:
            self.check_open()
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
            self.check_open()  # a close() before take() woke nobody: no thread waited yet
            if not taken.rows and not self._engine.wait(self._queue, taken, deadline - now):
                self.check_open()
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

    def _nack(
        self, messages: tuple[MessagesLike, ...], delay_ms: int | None, count: bool, reason: str | None
    ) -> None:
        takes, gone = self._parsed_with_gone(messages)
        self._give_back(takes, delay_ms=delay_ms, count=count, reason=_reason("nack", reason), gone=gone)

    def _extend(self, messages: tuple[MessagesLike, ...], lease_ms: int) -> list[str]:
        takes = self._parsed(each_of(messages))
        if not takes:
            return []
        lost = self._engine.extend(self._queue, takes, lease_ms)
        self._note("extend", len(takes), len(takes) - len(lost))
        return [self._receipts.make(*take) for take in lost]

    def _dead_letter(self, messages: tuple[MessagesLike, ...], reason: str | None) -> None:
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
        self.check_open()
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

    # --- looking ----------------------------------------------------------------------------------

    def receipt(self, message_id: str) -> str:
        """See Queue.receipt."""
        self.check_open()
        number = parse_number(message_id)
        if not number:
            raise ReceiptError(f"id: {shown(message_id)} is not that of a message; they look like 42")
        return self._receipts.make(number, ANY_TAKE)

    def peek(self, limit: int = 10) -> list[Message]:
        """See Queue.peek. The receipts of the messages name no take, so ack() refuses them."""
        self.check_open()
        rows = self._engine.peek(self._queue, check_limit(limit, "limit"))
        return self._messages(row._replace(take=0) for row in rows)

    def size(self, limit: int | None = None) -> int:
        """See Queue.size."""
        self.check_open()
        counts = self._engine.counts(self._queue, None if limit is None else check_limit(limit, "limit"))
        size = counts.ready + counts.delayed
        return size if limit is None else min(size, limit)

    def in_flight(self, limit: int | None = None) -> int:
        """See Queue.in_flight."""
        self.check_open()
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
        self.check_open()
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
        self.check_open()
        return self._engine.purge(self._queue)

    def release_all(self) -> int:
        """See Queue.release_all."""
        self.check_open()
        return self._engine.release_all(self._queue)

    def _wake(self) -> None:
        self._engine.wake(self._queue)

    def _check_transaction(self, transaction: Any) -> None:
        if transaction is not None:
            self._check_can("transaction", self.capabilities.transactions)


def _takes(rows: Iterable[MessageRow]) -> list[TakeRef]:
    return [TakeRef(row.id, row.take) for row in rows]


def _reason(kind: str, reason: str | None) -> str:
    """The reason as it is stored: `kind`, or `kind: reason`, as on Kafka."""
    return kind if reason is None else f"{kind}: {reason}"
