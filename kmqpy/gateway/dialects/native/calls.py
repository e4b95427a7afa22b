"""What the native calls do: the operations of `Queue` and `Storage`, in their words."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from kmqpy.core.clock import Clock
from kmqpy.core.durations import lease_duration_ms
from kmqpy.errors import ConfigError, MessageError, NotSupported, QueueNotFound
from kmqpy.gateway.dialects.native.asked import Asked, Endpoint
from kmqpy.gateway.dialects.native.problems import Refused, problem
from kmqpy.gateway.limits import Overloaded
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.gateway.service.names import is_reserved
from kmqpy.gateway.service.polls import Polls
from kmqpy.gateway.service.pulse import PATIENCE_S
from kmqpy.gateway.service.served_queue import Body, ServedQueue, Taken, size_of
from kmqpy.message import Message, OutgoingMessage
from kmqpy.queue import Queue, Storage, shapes
from kmqpy.queue_policy import bounded

T = TypeVar("T")

_LONG_S = 60.0
"""Seconds that a call may take that changes a queue, or very many messages."""
_MAX_WAIT_S = 60.0
_MAX_NAME = 200


class Calls:
    """The native calls, over the queues of a hub."""

    def __init__(self, hub: Hub, polls: Polls, clock: Clock) -> None:
        self._hub = hub
        self._polls = polls
        self._clock = clock

    def endpoints(self) -> list[Endpoint]:
        """All of them."""

        def one(
            call: str, do: Callable[[Asked], Awaitable[Any]], action: str | None, **more: Any
        ) -> Endpoint:
            method, path = call.split()
            name = do.__name__.replace("_", "-")
            return Endpoint(method=method, path=path, name=name, do=do, action=action, **more)

        counted, limit, count = shapes.Counted, shapes.Limit, shapes.CountQuery
        at, letters = "/queues/{queue}", "/queues/{queue}/dead-letters"
        return [
            one("GET /capabilities", self.capabilities, None, answer=shapes.Capable),
            one("GET /queues", self.list_queues, None, answer=shapes.Queues),
            one(f"PUT {at}", self.create, "post", body=shapes.Settings),
            one(f"PATCH {at}", self.alter, "manage", body=shapes.Settings),
            one(f"GET {at}", self.describe, "get_status", answer=shapes.Description),
            one(f"DELETE {at}", self.delete, "manage"),
            one(f"GET {at}/handle", self.handle, "get_status", answer=shapes.Handle),
            one(
                f"POST {at}/messages",
                self.send,
                "post",
                query=shapes.SendQuery,
                body=bytes,
                answer=shapes.Id,
            ),
            one(f"POST {at}/batch", self.send_many, "post", body=shapes.Batch, answer=shapes.Ids),
            one(
                f"POST {at}/receive",
                self.receive,
                "poll",
                query=shapes.ReceiveQuery,
                answer=shapes.Received,
            ),
            one(f"POST {at}/ack", self.ack, "poll", body=shapes.Finish),
            one(f"POST {at}/nack", self.nack, "poll", body=shapes.Nack),
            one(f"POST {at}/extend", self.extend, "poll", body=shapes.Extend, answer=shapes.Lost),
            one(f"POST {at}/dead-letter", self.dead_letter, "poll", body=shapes.Reject),
            one(f"GET {at}/peek", self.peek, "poll", query=limit, answer=shapes.Messages),
            one(f"GET {at}/size", self.size, "get_status", query=count, answer=counted),
            one(f"GET {at}/in-flight", self.in_flight, "get_status", query=count, answer=counted),
            one(f"GET {at}/orphans", self.orphans, "poll", query=shapes.OrphansQuery, answer=shapes.Orphans),
            one(f"GET {at}/receipt", self.receipt, "poll", query=shapes.ReceiptQuery, answer=shapes.Receipt),
            one(f"GET {at}/trace", self.trace, "poll", query=shapes.TraceQuery, answer=shapes.Life),
            one(f"POST {at}/purge", self.purge, "poll", answer=counted),
            one(f"POST {at}/release-all", self.release_all, "poll", answer=counted),
            one(f"GET {letters}", self.list_dead_letters, "get_status", query=limit, answer=shapes.Letters),
            one(f"GET {letters}/peek", self.peek_dead_letters, "poll", query=limit, answer=shapes.Letters),
            one(f"POST {letters}/redrive", self.redrive, "poll", body=shapes.Redrive, answer=counted),
            one(f"POST {letters}/purge", self.purge_dead_letters, "poll", answer=counted),
        ]

    # --- sending ----------------------------------------------------------------------------------

    async def send(self, asked: Asked) -> shapes.Id:
        """Send the body as one message; Content-Type becomes a header, Idempotency-Key is the dedup id."""
        query: shapes.SendQuery = asked.query
        headers = []
        for text in query.header:
            name, is_pair, value = text.partition("=")
            if not is_pair:
                raise ConfigError(f"header: {text[:_MAX_NAME]!r} is not NAME=VALUE")
            headers.append((name, value))
        if content_type := asked.call.header("content-type"):
            headers.append(("content-type", content_type))
        message = OutgoingMessage(
            asked.body,
            key=query.key,
            headers=headers,
            delay=query.delay,
            priority=query.priority,
            group=query.group,
            dedup_id=asked.call.header("idempotency-key") or None,
        )
        (message_id,) = await self._send(asked, [message])
        return shapes.Id(message_id)

    async def send_many(self, asked: Asked) -> shapes.Ids:
        """Send messages, or none of them if one is wrong."""
        messages = [one.outgoing() for one in asked.body.messages]
        return shapes.Ids(await self._send(asked, messages) if messages else [])

    async def _send(self, asked: Asked, messages: Sequence[Body]) -> list[str]:
        most = asked.call.limits.max_message_bytes
        for one in messages:
            if (size := size_of(one)) > most:
                raise MessageError(f"body: {size} bytes are more than this gateway takes, {most}")
        asked.call.count = len(messages)
        ids = await self._with_queue(asked, lambda served: served.send(messages))
        self._polls.note(asked.queue, sum(isinstance(one, bytes) or not one.delay for one in messages))
        return ids

    # --- receiving --------------------------------------------------------------------------------

    async def receive(self, asked: Asked) -> msgspec.Raw:
        """Take messages, or wait for some."""
        query: shapes.ReceiveQuery = asked.query
        asked.call.share.add(0)  # refused sooner if there is no room for an answer
        begun_s = self._clock.monotonic()
        until_s = begun_s + min(query.wait, _MAX_WAIT_S)
        while True:
            arrival = self._polls.expect(asked.queue)
            try:
                waited_ms = round((self._clock.monotonic() - begun_s) * 1000)
                take = partial(self._take, asked, waited_ms)
                found = await self._with_queue(asked, take)
                left_s = until_s - self._clock.monotonic()
                if asked.call.count or left_s <= 0 or self._polls.stopped or await asked.call.is_gone():
                    return found
                with asked.call.waiting():  # it takes no place of those that run
                    await self._polls.wait(asked.queue, arrival, left_s)
            finally:
                self._polls.forget(asked.queue, arrival)

    async def _take(self, asked: Asked, waited_ms: int, served: ServedQueue) -> msgspec.Raw:
        query: shapes.ReceiveQuery = asked.query
        lease_ms = served.settings.lease_ms
        if query.lease is not None:
            lease_ms = bounded(lease_duration_ms(query.lease), "lease", "max_lease_ms", served.settings)
        until_ms = self._clock.wall_ms() + lease_ms
        taken, _ = await served.take(query.max_messages, lease_ms / 1000, one_per_group=query.one_per_group)
        if taken and await asked.call.is_gone():
            await served.give_back(taken)
            self._polls.note(asked.queue, len(taken))
            taken = []
        try:
            messages = [
                shapes.sent_message(
                    asked.queue,
                    one.receipt or served.receipt(one.id),
                    one.message or _of_other_gateway(one, until_ms),
                )
                for one in taken
            ]
            found = shapes.Received(messages=messages, waited_ms=waited_ms, lease_ms=lease_ms)
            return _shown(asked, found, len(taken))
        except (Overloaded, NotSupported):
            await served.give_back(taken)
            raise

    # --- finishing --------------------------------------------------------------------------------

    async def ack(self, asked: Asked) -> None:
        """Acknowledge messages; a late acknowledgement does no harm."""

        async def ack(served: ServedQueue) -> None:
            if receipts := _receipts(asked, served):
                await served.ack_receipts(receipts)
                if served.is_grouped:  # what is behind them may come
                    self._polls.note(asked.queue, len(receipts))

        await self._with_queue(asked, ack)

    async def nack(self, asked: Asked) -> None:
        """Give messages back."""
        body: shapes.Nack = asked.body
        await self._finish(
            asked,
            lambda queue, receipts: queue.nack(
                receipts, delay=body.delay, count=body.count, reason=body.reason, confirmed=True
            ),
        )
        if not body.delay:
            self._polls.note(asked.queue, asked.call.count)

    async def extend(self, asked: Asked) -> shapes.Lost:
        """Let leases end so many seconds from now; answers which could not be extended."""
        lease = asked.body.lease
        return shapes.Lost(
            await self._finish(
                asked, lambda queue, receipts: queue.extend(receipts, lease=lease, confirmed=True)
            )
        )

    async def dead_letter(self, asked: Asked) -> None:
        """Make messages dead letters."""
        reason = asked.body.reason
        await self._finish(
            asked, lambda queue, receipts: queue.dead_letter(receipts, reason=reason, confirmed=True)
        )

    async def _finish(self, asked: Asked, do: Callable[[Queue, list[str]], T]) -> T:
        async def finish(served: ServedQueue) -> T:
            receipts = _receipts(asked, served)
            return await served.call(lambda queue: do(queue, receipts))

        return await self._with_queue(asked, finish)

    async def receipt(self, asked: Asked) -> shapes.Receipt:
        """A receipt for whoever has the message with this id, or nobody yet."""
        (found,) = await self._with_queue(
            asked, lambda served: served.call(lambda _: served.receipts([asked.query.id]))
        )
        return shapes.Receipt(found)

    # --- looking ----------------------------------------------------------------------------------

    async def peek(self, asked: Asked) -> msgspec.Raw:
        """The oldest messages that can be taken, without taking them."""
        found = await self._look(asked, lambda queue, limit: queue.peek(limit))
        messages = [shapes.sent_message(asked.queue, one.receipt, one) for one in found]
        return _shown(asked, shapes.Messages(messages), len(found))

    async def size(self, asked: Asked) -> shapes.Counted:
        """How many messages are neither in flight nor dead letters."""
        return await self._count(asked, lambda queue: queue.size(asked.query.limit))

    async def in_flight(self, asked: Asked) -> shapes.Counted:
        """How many messages are taken and not finished."""
        return await self._count(asked, lambda queue: queue.in_flight(asked.query.limit))

    async def orphans(self, asked: Asked) -> msgspec.Raw:
        """The messages that are taken and not finished."""
        query: shapes.OrphansQuery = asked.query
        found = await self._look(
            asked,
            lambda queue, limit: queue.orphans(
                query.older_than, queued_before_ms=query.queued_before_ms, limit=limit
            ),
        )
        taken = [
            shapes.Taken(
                receipt=one.receipt,
                holder=one.holder,
                since_ms=one.since_ms,
                lease_until_ms=one.lease_until_ms,
                message=None
                if one.message is None
                else shapes.sent_message(asked.queue, one.receipt, one.message),
            )
            for one in found
        ]
        return _shown(asked, shapes.Orphans(taken), len(found))

    async def trace(self, asked: Asked) -> shapes.Life:
        """The life of a message: every delivery, redelivery and end."""

        def trace(queue: Queue) -> dict[str, Any]:
            of_storage = getattr(queue, "trace", None)
            if of_storage is None:
                raise NotSupported(f"trace: the storage of queue {asked.queue!r} can't do it")
            life = of_storage(asked.query.message)
            return life if isinstance(life, dict) else dataclasses.asdict(life)  # another gateway's

        return shapes.Life(
            await self._with_queue(asked, lambda served: served.call(trace), patience_s=_LONG_S)
        )

    async def _look(self, asked: Asked, look: Callable[[Queue, int], Any]) -> Any:
        asked.call.share.add(0)
        return await self._with_queue(asked, lambda served: served.look(asked.query.limit, look))

    async def _count(self, asked: Asked, count: Callable[[Queue], int]) -> shapes.Counted:
        return shapes.Counted(
            await self._with_queue(asked, lambda served: served.call(count), patience_s=_LONG_S)
        )

    # --- dead letters and administration ----------------------------------------------------------

    async def list_dead_letters(self, asked: Asked) -> msgspec.Raw:
        """Dead letters without their bodies and headers."""
        found = await self._look(asked, lambda queue, limit: queue.dead_letters.list(limit))
        return _shown(
            asked, shapes.Letters([shapes.letter_of(one, whole=False) for one in found]), len(found)
        )

    async def peek_dead_letters(self, asked: Asked) -> msgspec.Raw:
        """Dead letters with their bodies and headers."""
        found = await self._look(asked, lambda queue, limit: queue.dead_letters.peek(limit))
        return _shown(asked, shapes.Letters([shapes.letter_of(one, whole=True) for one in found]), len(found))

    async def redrive(self, asked: Asked) -> shapes.Counted:
        """Put dead letters back in the queue."""
        ids, limit = asked.body.ids, asked.body.limit
        found = await self._count(asked, lambda queue: queue.dead_letters.redrive(ids, limit=limit))
        self._polls.note(asked.queue, found.count)
        return found

    async def purge_dead_letters(self, asked: Asked) -> shapes.Counted:
        """Remove all dead letters."""
        return await self._count(asked, lambda queue: queue.dead_letters.purge())

    async def purge(self, asked: Asked) -> shapes.Counted:
        """Remove all messages except dead letters."""
        return await self._count(asked, lambda queue: queue.purge())

    async def release_all(self, asked: Asked) -> shapes.Counted:
        """Give back the messages in flight of all clients."""
        found = await self._count(asked, lambda queue: queue.release_all())
        self._polls.note(asked.queue, found.count)
        return found

    async def capabilities(self, asked: Asked) -> shapes.Capable:
        """What the storage of queues without a storage's name before them can do."""
        return shapes.Capable(_capabilities(self._hub.storage_of(QueueName("x")).capabilities, asked))

    async def list_queues(self, asked: Asked) -> shapes.Queues:
        """The names of the queues that the key may ask about."""
        names = await self._hub.names()
        may = asked.sender.permits
        return shapes.Queues(
            [
                name
                for name in names
                if may("get_status", name) and not is_reserved(self._hub.stored_name(QueueName(name)))
            ]
        )

    async def create(self, asked: Asked) -> None:
        """Make a queue."""
        await self._administer(asked, lambda storage, name: storage.create(name, **_settings(asked)))
        self._hub.forget(asked.name)

    async def alter(self, asked: Asked) -> None:
        """Change settings of a queue."""
        changes = _settings(asked)
        for key in asked.body.expected:
            if key in changes:
                changes[key] = _unless_changed(key, asked.body.expected[key], changes[key])
        await self._administer(asked, lambda storage, name: storage.alter(name, **changes))
        self._hub.forget(asked.name)

    async def describe(self, asked: Asked) -> shapes.Description:
        """The settings of a queue, and how many messages it holds."""
        found = await self._administer(asked, lambda storage, name: storage.describe(name))
        settings = _plain({**found.settings, "name": asked.queue})
        described = msgspec.convert(found, shapes.Description, from_attributes=True)
        return msgspec.structs.replace(described, name=asked.queue, settings=settings)

    async def delete(self, asked: Asked) -> None:
        """Delete a queue with all its messages."""
        await self._administer(asked, lambda storage, name: storage.delete(name))
        self._hub.forget(asked.name)

    async def handle(self, asked: Asked) -> shapes.Handle:
        """What clients must know of a queue before they use it."""

        def opened(storage: Storage, name: str) -> shapes.Handle:
            with storage.open(name) as queue:
                return shapes.Handle(
                    unique_id=queue.unique_id,
                    default_lease=queue.default_lease,
                    max_lease=queue.max_lease,
                    at_most_once=queue.at_most_once,
                    delays_retries=queue.delays_retries,
                    in_groups=queue.in_groups,
                    max_in_flight=queue.max_in_flight,
                    settings=_plain({**dataclasses.asdict(queue.settings), "name": asked.queue}),
                    capabilities=_capabilities(queue.capabilities, asked),
                )

        found = await self._administer(asked, opened)
        self._hub.forget(asked.name)  # its settings may have changed
        return found

    # --- helpers ----------------------------------------------------------------------------------

    async def _administer(self, asked: Asked, do: Callable[[Storage, str], T]) -> T:
        if len(asked.queue) > _MAX_NAME:
            raise ConfigError(f"queue: {asked.queue[:40]!r}… has more than {_MAX_NAME} characters")
        return await self._hub.administer(asked.name, do, patience_s=_LONG_S)

    async def _with_queue(
        self,
        asked: Asked,
        use: Callable[[ServedQueue], Awaitable[T]],
        *,
        patience_s: float = PATIENCE_S,
    ) -> T:
        opened = asked.call.header(shapes.QUEUE_ID)

        async def use_if_same(served: ServedQueue) -> T:
            if opened and served.capabilities.bound_handles and quote(served.unique_id) != opened:
                await served.call(lambda queue: queue.size(1))  # raises if ours is the one that is gone
                raise Refused(_missing(asked.queue, "was deleted; another has its name now"))
            return await use(served)

        def missing() -> T:
            raise Refused(_missing(asked.queue, "is not there; make it with PUT, or look for its name"))

        return await self._hub.with_queue(asked.name, use_if_same, missing=missing, patience_s=patience_s)


def _capabilities(of_storage: Any, asked: Asked) -> dict[str, Any]:
    """What the storage can do through this gateway."""
    found = dataclasses.asdict(of_storage)
    most, own = of_storage.max_body_bytes, asked.call.limits.max_message_bytes
    return {**found, "max_body_bytes": own if most is None else min(most, own)}


def _shown(asked: Asked, answer: msgspec.Struct, count: int) -> msgspec.Raw:
    """An answer with bodies, encoded; raises Overloaded if there is no room for it."""
    encoded = msgspec.json.encode(answer)
    asked.call.share.add(len(encoded))
    asked.spend(len(encoded))
    asked.call.count = count
    return msgspec.Raw(encoded)


def _missing(queue: str, why: str) -> Any:
    return problem(QueueNotFound.__name__, 404, f"queue: {queue[:_MAX_NAME]!r} {why}", field="queue")


def _receipts(asked: Asked, served: ServedQueue) -> list[str]:
    body: shapes.Finish = asked.body
    receipts = [*body.receipts, *served.receipts(body.ids)]
    asked.call.count = len(receipts)
    return receipts


def _of_other_gateway(taken: Taken, until_ms: int) -> Message:
    """A message that another gateway has taken for us."""
    return Message(
        queue="",
        id=taken.id,
        body=taken.body,
        headers=taken.headers,
        key=taken.key,
        attempts=taken.attempts,
        enqueued_ms=taken.queued_ms,
        first_enqueued_ms=taken.sent_ms,
        lease_until_ms=until_ms,
        receipt="",
    )


def _settings(asked: Asked) -> dict[str, Any]:
    """The settings in a body; lists as tuples, as settings have them."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in asked.body.settings.items()
    }


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (str, int, float, list, tuple, dict)
    return {
        key: value if value is None or isinstance(value, kinds) else str(value)
        for key, value in settings.items()
    }


def _unless_changed(key: str, expected: Any, value: Any) -> Callable[[Any], Any]:
    def change(present: Any) -> Any:
        if (list(present) if isinstance(present, tuple) else present) != expected:
            raise Refused(problem("Changed", 409, f"{key}: others have changed it meanwhile", field=key))
        return value

    return change
