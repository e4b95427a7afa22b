"""SQS's actions on messages."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import NotSupported, ReceiptError
from kmqpy.gateway.dialects.sqs import batches, shapes, values
from kmqpy.gateway.dialects.sqs.addresses import queue_of_arn
from kmqpy.gateway.dialects.sqs.asked import Asked
from kmqpy.gateway.dialects.sqs.attempts import Attempts
from kmqpy.gateway.dialects.sqs.attributes import FIFO_SUFFIX, NUMBERS, VISIBILITY, Redrive, Sheet
from kmqpy.gateway.dialects.sqs.catalog import Catalog
from kmqpy.gateway.dialects.sqs.errors import (
    BATCH_TOO_LONG,
    OVER_LIMIT,
    UNSUPPORTED,
    SqsError,
    invalid,
    missing,
    raise_no_such_queue,
)
from kmqpy.gateway.dialects.sqs.messages import (
    FirstTakes,
    Handle,
    Origin,
    Prepared,
    Received,
    check_id,
    check_ids,
    check_visibility,
    foreign_handle,
    message_id,
    parse_handle,
    prepared,
    sequence_number,
    size_of,
)
from kmqpy.gateway.dialects.sqs.room import Room
from kmqpy.gateway.limits import Overloaded
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.gateway.service.polls import Polls
from kmqpy.gateway.service.served_queue import ServedQueue, Taken
from kmqpy.message import OutgoingMessage

_MAX_RECEIVED = 10
_MAX_WAIT_S = 20
_MAX_VISIBILITY_S = NUMBERS[VISIBILITY].most
_MAX_BATCH_BYTES = 1_048_576
_SHOWN_LEASE_S = 5.0
"""The lease of messages that are received with a visibility timeout of 0, until they are given back."""
_TRIES = 100
"""A receive that only finds messages whose time is over, or dead letters, tries so often."""
_REMEMBERED = 100_000
"""So many messages are remembered that were deleted, or received."""
_TRACE_ID = "x-amzn-trace-id"
_GONE = "Message does not exist or is not available for visibility timeout change."
_OVER_LIMIT = (
    "Too many messages have been received without being deleted. Please delete your received messages or let "
    "them timeout before receiving more."
)


class _Terms(NamedTuple):
    """How messages are received; `attempt` is None where a retry is another receive."""

    most: int
    visibility: int
    wait_s: float
    system: Sequence[str]
    names: Sequence[str]
    attempt: str | None


class MessageActions:
    """Sends, receives, deletes messages, and changes their visibility."""

    def __init__(self, hub: Hub, catalog: Catalog, polls: Polls) -> None:
        self._hub = hub
        self._catalog = catalog
        self._polls = polls
        self._first_takes = FirstTakes()
        self._deleted: OrderedDict[str, str] = OrderedDict()
        self._latest: OrderedDict[str, str] = OrderedDict()  # receipts of standard queues, by wire id
        self._room = Room()
        self._attempts = Attempts()

    # --- sending ----------------------------------------------------------------------------------

    async def send(self, asked: Asked, given: shapes.SendMessageRequest) -> dict[str, Any]:
        name = asked.queue(given.QueueUrl)
        trace = asked.call.header(_TRACE_ID)
        one = prepared(given, await self._catalog.get(name), SYSTEM_CLOCK.wall_ms(), trace)
        asked.call.count = 1
        (ids,) = await self._send(name, [one])
        return {**one.answer, **ids}

    async def send_batch(self, asked: Asked, given: shapes.SendMessageBatchRequest) -> dict[str, Any]:
        """Send messages, of which some may be refused."""
        name = asked.queue(given.QueueUrl)
        entries = batches.checked("SendMessageBatchRequestEntry", given.Entries or ())
        sheet = await self._catalog.get(name)
        size = sum(map(size_of, entries.values()))
        if size > _MAX_BATCH_BYTES:
            raise SqsError(
                BATCH_TOO_LONG,
                f"Batch requests cannot be longer than {_MAX_BATCH_BYTES} bytes. You have sent {size} bytes.",
            )
        if sheet.is_fifo:
            for one in entries.values():
                check_ids(one, sheet)
        now_ms, trace = SYSTEM_CLOCK.wall_ms(), asked.call.header(_TRACE_ID)
        found = {id_: _tried(one, sheet, now_ms, trace) for id_, one in entries.items()}
        good = {id_: one for id_, one in found.items() if isinstance(one, Prepared)}
        asked.call.count = len(good)
        ids = dict(zip(good, await self._send(name, list(good.values())), strict=True)) if good else {}
        return batches.outcome(
            {
                id_: one if isinstance(one, SqsError) else {**ids[id_], **one.answer}
                for id_, one in found.items()
            }
        )

    async def _send(self, name: str, messages: Sequence[Prepared]) -> list[dict[str, str]]:
        """Send messages; returns their ids for clients, and in FIFO queues their numbers."""

        async def send(served: ServedQueue) -> list[dict[str, str]]:
            ids = await served.send([one.message for one in messages])
            found = [{"MessageId": message_id(served.unique_id, one)} for one in ids]
            if name.endswith(FIFO_SUFFIX):
                found = [
                    {**one, "SequenceNumber": sequence_number(id_)}
                    for one, id_ in zip(found, ids, strict=True)
                ]
            return found

        try:
            ids: list[dict[str, str]] = await self._hub.with_queue(
                QueueName(name), send, missing=raise_no_such_queue
            )
        except NotSupported as error:
            raise SqsError(UNSUPPORTED, str(error)) from None
        self._polls.note(name, sum(not one.message.delay for one in messages))
        return ids

    # --- receiving --------------------------------------------------------------------------------

    async def receive(self, asked: Asked, given: shapes.ReceiveMessageRequest) -> dict[str, Any]:
        """Receive messages, or wait for some."""
        name = asked.queue(given.QueueUrl)
        terms = _terms(given, await self._catalog.get(name))
        asked.call.share.add(0)  # refused sooner if there is no room for an answer
        until_s = SYSTEM_CLOCK.monotonic() + terms.wait_s
        while True:
            arrival = self._polls.expect(name)
            try:
                shown = await self._receive(asked, name, terms)
                left_s = until_s - SYSTEM_CLOCK.monotonic()
                if shown or left_s <= 0 or self._polls.stopped or await asked.call.is_gone():
                    return {"Messages": shown} if shown else {}
                with asked.call.waiting():  # it takes no place of those that run
                    await self._polls.wait(name, arrival, left_s)
            finally:
                self._polls.forget(name, arrival)

    async def _receive(self, asked: Asked, name: str, terms: _Terms) -> list[dict[str, Any]]:
        """The messages that are there, as they are shown."""
        sheet = await self._catalog.get(name)

        async def take(served: ServedQueue) -> list[dict[str, Any]]:
            if again := await self._repeated(asked, served, terms):
                return again
            room = await self._room.left(served.unique_id, served.in_flight)
            if not room and not sheet.is_fifo:
                raise SqsError(OVER_LIMIT, _OVER_LIMIT)
            if not room:  # so does AWS
                return []
            lease_s = terms.visibility or _SHOWN_LEASE_S
            for _ in range(_TRIES):
                messages, _ = await served.take(min(room, terms.most), lease_s)
                good = await self._sorted_out(asked, name, sheet, served, messages)
                if good or not messages:
                    break
            if good and await asked.call.is_gone():
                await served.give_back([one.taken for one in good])
                self._polls.note(name, len(good))
                return []
            if sheet.is_fifo:
                good = _by_group(good)
            try:
                self._room.use(served.unique_id, len(good))
                return self._shown(asked, served, good, terms)
            except Overloaded:
                await served.give_back([one.taken for one in good])
                raise
            finally:
                if good and not terms.visibility:
                    await asyncio.gather(*(served.change(_receipt(served, one.taken), 0) for one in good))

        return await self._hub.with_queue(QueueName(name), take, missing=raise_no_such_queue)

    async def _repeated(self, asked: Asked, served: ServedQueue, terms: _Terms) -> list[dict[str, Any]]:
        """What this attempt was answered before, hidden for so long from now; empty: it is a new one."""
        if terms.attempt is None:
            return []
        key = (served.unique_id, terms.attempt)
        found = self._attempts.find(key, SYSTEM_CLOCK.monotonic())
        if found is None:
            return []
        if not found.shown:
            raise invalid(
                terms.attempt,
                "ReceiveRequestAttemptId",
                "The receiveRequestAttemptId is not valid anymore since the receive call is not retryable.",
            )
        handles = [parse_handle(one["ReceiptHandle"]) for one in found.shown]
        if all([await served.change(one.receipt, terms.visibility) for one in handles]):
            asked.call.share.add(found.size)
            asked.spend(found.size)
            asked.call.count = len(handles)
            return list(found.shown)
        self._attempts.forget(key)  # their time is over
        return []

    async def _sorted_out(
        self, asked: Asked, name: str, sheet: Sheet, served: ServedQueue, messages: Sequence[Taken]
    ) -> list[Received]:
        """The messages to hand out; without those that are too old, or were received too often."""
        now_ms = SYSTEM_CLOCK.wall_ms()
        oldest_ms = now_ms - sheet.number("MessageRetentionPeriod") * 1000
        redrive = sheet.redrive
        good: list[Received] = []
        old: list[Received] = []
        dead: list[Received] = []
        for one in (Received.of(taken, served.unique_id) for taken in messages):
            if 0 < one.sent_ms < oldest_ms:
                old.append(one)
            elif redrive is not None and one.taken.attempts > redrive.most:
                dead.append(one)
            else:
                good.append(one)
        if dead and redrive is not None and not await self._bury(asked, name, served, redrive, dead):
            good, dead = [*dead, *good], []  # there is no queue for them
        await served.ack([one.taken.id for one in (*old, *dead)])
        return good

    async def _bury(
        self, asked: Asked, name: str, served: ServedQueue, redrive: Redrive, dead: Sequence[Received]
    ) -> bool:
        """Send messages to the queue for dead letters; returns False if there is none."""
        target = queue_of_arn(redrive.arn, "RedrivePolicy")
        messages = []
        now_ms, is_fifo = SYSTEM_CLOCK.wall_ms(), name.endswith(FIFO_SUFFIX)
        for one in dead:
            sent_ms = now_ms if is_fifo else one.sent_ms  # as on AWS: here retention begins anew
            headers = [(key, value) for key, value in one.taken.headers if key != values.MOVED]
            headers.append(Origin(one.id, sent_ms, one.count - 1, asked.addresses.arn(name)).header())
            # Unlike any client's, as it has a space, and another one each time that the message is buried.
            again = f"{message_id(served.unique_id, one.taken.id)} dead"
            group, dedup_id = one.taken.group, again if is_fifo else None
            message = OutgoingMessage(one.taken.body, key=one.taken.key, headers=headers)
            messages.append(replace(message, group=group, dedup_id=dedup_id))
        send = methodcaller("send", messages)
        sent = await self._hub.with_queue(QueueName(target), send, missing=lambda: None)
        if sent is not None:
            self._polls.note(target, len(dead))
        return sent is not None

    def _shown(
        self, asked: Asked, served: ServedQueue, messages: Sequence[Received], terms: _Terms
    ) -> list[dict[str, Any]]:
        now_ms = SYSTEM_CLOCK.wall_ms()
        found = []
        for one in messages:
            first_ms = self._first_takes.note(
                one.id, is_first=one.taken.attempts == 1, now_ms=now_ms, else_ms=one.taken.queued_ms
            )
            handle = Handle(served.ids.make(one.taken.id), _receipt(served, one.taken), now_ms)
            if not served.is_grouped:
                _remember(self._latest, handle.wire_id, handle.receipt)
            sender = asked.addresses.account
            found.append(
                one.shown(handle.text(), terms.system, terms.names, first_ms=first_ms, sender=sender)
            )
        size = sum(one.size for one in messages)
        asked.call.share.add(size)
        asked.spend(size)
        asked.call.count = len(found)
        if terms.attempt is not None and found and terms.visibility:
            wire_ids = [served.ids.make(one.taken.id) for one in messages]
            key = (served.unique_id, terms.attempt)
            self._attempts.keep(key, found, wire_ids, size, SYSTEM_CLOCK.monotonic())
        return found

    # --- what was received ------------------------------------------------------------------------

    async def delete(self, asked: Asked, given: shapes.DeleteMessageRequest) -> None:
        """Delete a message, by the handle of any of its receives."""
        name = asked.queue(given.QueueUrl)
        await self._on_one(asked, name, given.ReceiptHandle, partial(self._delete, name))

    async def delete_batch(self, asked: Asked, given: shapes.DeleteMessageBatchRequest) -> dict[str, Any]:
        name = asked.queue(given.QueueUrl)
        entries = batches.checked("DeleteMessageBatchRequestEntry", given.Entries or ())
        handles = {id_: one.ReceiptHandle for id_, one in entries.items()}
        return batches.outcome(await self._on_each(asked, name, handles, partial(self._delete, name)))

    async def _delete(
        self, name: str, served: ServedQueue, handles: Mapping[str, Handle]
    ) -> dict[str, SqsError]:
        errors: dict[str, SqsError] = {}
        if served.is_grouped:
            late = {id_: one for id_, one in handles.items() if one.wire_id not in self._deleted}
            errors = await _each(dict.fromkeys(late, _check_current))(served, late)
        good: dict[str, tuple[str, str]] = {}
        for id_, handle in handles.items():
            if id_ not in errors:
                try:
                    good[handle.wire_id] = _stored(served, handle)
                    self._attempts.touch(handle.wire_id)
                except SqsError as error:
                    errors[id_] = error
        stored = dict(good.values())
        await served.ack([*stored], [*stored.values()])
        if served.is_grouped:  # what is behind them may come
            self._polls.note(name, len(stored))
        for wire_id in good:
            self._latest.pop(wire_id, None)
            _remember(self._deleted, wire_id)
        return errors

    async def change(self, asked: Asked, given: shapes.ChangeMessageVisibilityRequest) -> None:
        """Let a message be hidden for so long from now."""
        name = asked.queue(given.QueueUrl)
        change = self._changing(
            given.VisibilityTimeout or 0, name, f"Must be between 0 and {_MAX_VISIBILITY_S}."
        )
        await self._on_one(asked, name, given.ReceiptHandle, _each({"": change}))

    async def change_batch(
        self, asked: Asked, given: shapes.ChangeMessageVisibilityBatchRequest
    ) -> dict[str, Any]:
        """The same for several messages."""
        name = asked.queue(given.QueueUrl)
        entries = batches.checked("ChangeMessageVisibilityBatchRequestEntry", given.Entries or ())
        reason = f"VisibilityTimeout must be an integer between 0 and {_MAX_VISIBILITY_S}."
        changes = {
            id_: self._changing(one.VisibilityTimeout, name, reason, number)
            for number, (id_, one) in enumerate(entries.items(), 1)
        }
        handles = {id_: one.ReceiptHandle for id_, one in entries.items()}
        return batches.outcome(await self._on_each(asked, name, handles, _each(changes)))

    def _changing(self, seconds: int | None, name: str, reason: str, number: int = 0) -> _One:
        async def change(served: ServedQueue, handle: Handle) -> None:
            if seconds is None:
                raise missing(f"ChangeMessageVisibilityBatchRequestEntry.{number}.{VISIBILITY}")
            given_s = check_visibility(seconds, reason)
            most = _MAX_VISIBILITY_S
            passed_s = (SYSTEM_CLOCK.wall_ms() - handle.taken_ms) / 1000
            if given_s and passed_s + given_s > most + 1:
                raise invalid(
                    given_s,
                    VISIBILITY,
                    f"Total VisibilityTimeout for the message is beyond the limit [{most} seconds]",
                )
            if handle.wire_id in self._deleted:
                raise invalid(handle.text(), "ReceiptHandle", _GONE)
            # AWS documents MessageNotInflight, and takes handles whose time is over in silence. In standard
            # queues an older handle changes what the latest receive has. The handle may be later than the one
            # that we know, by another gateway: so it is tried first.
            latest = self._latest.get(handle.wire_id, handle.receipt)  # before others take it again
            is_changed = await served.change(handle.receipt, given_s)
            if latest != handle.receipt and not (is_changed and given_s):
                is_changed = await served.change(latest, given_s)
            if not is_changed and served.is_grouped:
                raise invalid(handle.text(), "ReceiptHandle", _GONE)
            self._attempts.touch(handle.wire_id)
            if not given_s:
                self._polls.note(name)

        return change

    async def _on_one(self, asked: Asked, name: str, handle: str | None, do: _All) -> None:
        for result in (await self._on_each(asked, name, {"": handle}, do)).values():
            if isinstance(result, SqsError):
                raise result

    async def _on_each(
        self, asked: Asked, name: str, given: Mapping[str, str | None], do: _All
    ) -> dict[str, dict[str, Any] | SqsError]:
        """Do something with messages, whose handles are given by the ids of entries of a batch."""
        await self._catalog.get(name)  # a queue that does not exist is told first
        asked.call.count = len(given)
        handles: dict[str, Handle] = {}
        errors: dict[str, SqsError] = {}
        for id_, text in given.items():
            try:
                handles[id_] = parse_handle(text or "")
            except SqsError as error:
                errors[id_] = error
        if handles:
            errors |= await self._hub.with_queue(
                QueueName(name), partial(_with, do, handles), missing=raise_no_such_queue
            )
        return {id_: errors.get(id_, {}) for id_ in given}


_All = Callable[[ServedQueue, Mapping[str, Handle]], Awaitable[dict[str, SqsError]]]
"""Does something with messages, by the ids of their entries; returns the errors."""
_One = Callable[[ServedQueue, Handle], Awaitable[None]]


async def _with(do: _All, handles: Mapping[str, Handle], served: ServedQueue) -> dict[str, SqsError]:
    return await do(served, handles)


def _each(doing: Mapping[str, _One]) -> _All:
    async def do(served: ServedQueue, handles: Mapping[str, Handle]) -> dict[str, SqsError]:
        done = await asyncio.gather(*(_tried_on(doing[id_], served, one) for id_, one in handles.items()))
        return {id_: error for id_, error in zip(handles, done, strict=True) if error is not None}

    return do


async def _tried_on(do: _One, served: ServedQueue, handle: Handle) -> SqsError | None:
    try:
        await do(served, handle)
    except SqsError as error:
        return error
    except ReceiptError:
        return foreign_handle(handle.text())
    return None


async def _check_current(served: ServedQueue, handle: Handle) -> None:
    """Raise SqsError if what is behind the message in its group may be with others."""
    _stored(served, handle)
    if not await served.change(handle.receipt, _SHOWN_LEASE_S):  # the message must be received again
        raise invalid(handle.text(), "ReceiptHandle", "The receipt handle has expired.")


def _stored(served: ServedQueue, handle: Handle) -> tuple[str, str]:
    """The storage's id and receipt of the message; raises SqsError for what is none of this queue."""
    with suppress(ReceiptError):  # who makes handles up may name what is not a message
        id_ = served.ids.parse(handle.wire_id)
        if id_ is not None:  # else of an earlier queue of this name
            return id_, served.receipts([id_])[0]
    raise foreign_handle(handle.text())


def _remember(kept: OrderedDict[str, str], wire_id: str, receipt: str = "") -> None:
    kept[wire_id] = receipt
    kept.move_to_end(wire_id)
    if len(kept) > _REMEMBERED:
        kept.popitem(last=False)


def _receipt(served: ServedQueue, taken: Taken) -> str:
    return taken.receipt or served.receipt(taken.id)


def _by_group(messages: Sequence[Received]) -> list[Received]:
    """Those of a group behind each other, as AWS has them."""
    first: dict[str | None, int] = {}
    for index, one in enumerate(messages):
        first.setdefault(one.taken.group, index)
    return sorted(messages, key=lambda one: first[one.taken.group])


def _tried(
    given: shapes.SendMessageBatchRequestEntry, sheet: Sheet, now_ms: int, trace: str
) -> Prepared | SqsError:
    try:
        return prepared(given, sheet, now_ms, trace)
    except SqsError as error:
        return error


def _terms(given: shapes.ReceiveMessageRequest, sheet: Sheet) -> _Terms:
    """How messages are to be received; raises SqsError."""
    count = 1 if given.MaxNumberOfMessages is None else given.MaxNumberOfMessages
    if not 1 <= count <= _MAX_RECEIVED:
        raise invalid(count, "MaxNumberOfMessages", f"Must be between 1 and {_MAX_RECEIVED}, if provided.")
    wait_s = given.WaitTimeSeconds
    if wait_s is None:
        wait_s = sheet.number("ReceiveMessageWaitTimeSeconds")
    elif not 0 <= wait_s <= _MAX_WAIT_S:
        raise invalid(wait_s, "WaitTimeSeconds", f"Must be >= 0 and <= {_MAX_WAIT_S}, if provided.")
    visibility = given.VisibilityTimeout
    if visibility is None:
        visibility = sheet.visibility
    else:
        visibility = check_visibility(visibility, f"Must be >= 0 and <= {_MAX_VISIBILITY_S}, if provided.")
    system = [*(given.AttributeNames or ()), *(given.MessageSystemAttributeNames or ())]
    values.check_system_names(system)
    attempt = given.ReceiveRequestAttemptId if sheet.is_fifo else None  # standard queues do nothing with it
    check_id("ReceiveRequestAttemptId", attempt)
    return _Terms(count, visibility, wait_s, system, given.MessageAttributeNames or (), attempt)
