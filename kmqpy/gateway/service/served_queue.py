"""One queue of a storage as the gateway serves it: calls of concurrent requests are gathered into batches."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import accumulate
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.durations import MIN_LEASE_MS
from kmqpy.errors import QueueNotFound
from kmqpy.gateway.service.claims import Claims, Said
from kmqpy.gateway.service.estimate import Estimate
from kmqpy.gateway.service.ids import WireIds
from kmqpy.gateway.service.patience import be_patient
from kmqpy.gateway.service.shelf import Shelf
from kmqpy.message import Headers, Message, OutgoingMessage
from kmqpy.queue import DeadLetter, Orphan, Queue
from kmqpy.worker.batches import Batches, each_result

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Body = bytes | OutgoingMessage
Seen = Message | DeadLetter | Orphan
S = TypeVar("S", bound=Seen)

_BYTES_PER_WEIGHT = 4_096
"""Batches are limited by the weight of their items: that of a body is 1 and the number of its 4,096 bytes."""
_MAX_TAKEN_BYTES = 16 * 1024 * 1024
"""A take, or several that are done together, ends when it has taken so many bytes of bodies; a peek, too."""
_FIRST_TAKE = 100
"""The most messages of the first read of a queue, whose bodies may be of any size."""
_GROWTH = 4
"""At most so many times as many are read next, since later bodies may be larger than those before."""
_FORGOTTEN = 8
"""With each read, the largest body that is reckoned with becomes smaller by this share of it."""
_TAKE_WAIT_S = 0.1
"""See Capabilities.immediate: in seconds, how long a take waits for messages to arrive from Kafka."""
_TAKE_PATIENCE_S = 0.2
"""A poll waits no longer for such a take; what it brings is kept for the next poll."""
_MAX_RECEIPTS = 100_000
_STALE_AFTER_S = 3.1
"""Just longer than the shelf keeps messages."""
_HAND_OUT_LEASE_S = 5.0
"""The lease of messages that are handed out without a claim, until they are given back a moment later."""
_EXACT_SIZE = 10_000
"""Sizes up to this number are exact, whatever limit is asked for."""


class Taken(NamedTuple):
    """A message that was taken, perhaps by another gateway for us: then we have no receipt of that take.

    message  the same as our storage gave it; None: it is from another gateway
    """

    id: str
    body: bytes
    message: Message | None = None
    key: bytes | None = None
    headers: Headers = ()

    @classmethod
    def of(cls, message: Message) -> Taken:
        """A message that this gateway has taken, or sees."""
        return cls(message.id, message.body, message, message.key, message.headers)

    # What few need, and what is work on Kafka.
    @property
    def receipt(self) -> str | None:
        """The receipt of our take; None if it is another gateway's."""
        return None if self.message is None else self.message.receipt

    @property
    def attempts(self) -> int:
        """Message.attempts; 1 if nobody knows."""
        return 1 if self.message is None else self.message.attempts

    @property
    def sent_ms(self) -> int:
        """When it was sent (ms since 1970); 0 if nobody knows."""
        return 0 if self.message is None else self.message.first_enqueued_ms

    @property
    def queued_ms(self) -> int:
        """When it was queued last (ms since 1970); 0 if nobody knows."""
        return 0 if self.message is None else self.message.enqueued_ms

    @property
    def group(self) -> str | None:
        return None if self.message is None else self.message.group


class Elsewhere(Protocol):
    """Other gateways, which have partitions of queues on Kafka; `unique_id` tells namesakes apart."""

    async def take(self, unique_id: str, limit: int, lease_s: float) -> tuple[list[Taken], str]:
        """Ask for messages; returns them, or why there are none (empty: there are none)."""

    async def tell(self, unique_id: str, said: Said) -> set[str]:
        """Tell them what was said of messages that were not handed out here; returns those that they have."""


class _Take(NamedTuple):
    limit: int
    lease_s: float
    one_per_group: bool = False


class _Extension(NamedTuple):
    ids: Sequence[str]
    lease_s: float


class ServedQueue:
    """Serves one queue; used on one event loop.

    Ids are those of the storage (Message.id), for the whole life of a message: ack(), extend() and release()
    act whoever has it at the moment. Every method raises QueueNotFound after the queue was deleted.

    elsewhere  other gateways, which have partitions of the queue; None where all see all messages
    claims     on Kafka, what is known of claims beyond what is written there
    """

    def __init__(
        self,
        queue: Queue,
        threads: Executor,
        *,
        elsewhere: Elsewhere | None = None,
        claims: Claims | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.unique_id = queue.unique_id
        self.ids = WireIds(queue.name, queue.unique_id)
        self.is_grouped = getattr(queue.settings, "order", "") == "group"
        """True if messages of a group go out in order: then takers don't share a receive()."""
        self.settings = queue.settings
        self.capabilities = queue.capabilities
        self._queue = queue
        self._threads = threads
        self._elsewhere = elsewhere
        self._claims = claims
        self._clock = clock
        self._last_take_s: float | None = None
        self._sends: Batches[Sequence[Body], list[str]] = Batches(threads, self._send_all, weigh=_weight)
        self._takes: Batches[_Take, list[Message]] = Batches(
            threads, self._take_all, weigh=lambda take: take.limit, unclaimed=self._give_back_later
        )
        self._acks: Batches[Sequence[str], None] = Batches(
            threads, lambda given: each_result(self._ack_all, given), weigh=len
        )
        self._extensions: Batches[_Extension, None] = Batches(
            threads, lambda given: each_result(self._extend_all, given), weigh=lambda one: len(one.ids)
        )
        # Where a take must wait for what is on its way, a short wait; EmoDB's clients give up after 500 ms.
        self._take_wait_s = 0.0 if queue.capabilities.immediate else _TAKE_WAIT_S
        self._shelf = Shelf()
        self._shelf_clearings = 0
        self._known_receipts: dict[str, str] = {}
        self._running = 0
        self._closing = False
        self._largest_body = 0
        self._size = Estimate(lambda limit: self._call(self._count, limit))
        self._in_flight = Estimate(lambda limit: self._call(self._queue.in_flight, limit))

    @property
    def busy(self) -> bool:
        """True while a call has not ended."""
        batches = (self._sends, self._takes, self._acks, self._extensions)
        return bool(self._running or self._shelf) or not all(one.idle for one in batches)

    @property
    def late(self) -> int:
        """How many messages are kept that came when their poll had been answered."""
        return len(self._shelf)

    def follow(self, former: ServedQueue) -> None:
        """Know the numbers that were counted when this queue was open before."""
        self._size.follow(former._size)
        self._in_flight.follow(former._in_flight)

    # --- messages ---------------------------------------------------------------------------------

    async def send(self, bodies: Sequence[Body]) -> list[str]:
        """Send bodies, or messages; returns the ids of the messages when the storage has them."""
        self._largest_body = max(self._largest_body, *map(size_of, bodies), 0)
        ids = await self._sends.submit(bodies) if bodies else []
        self._size.change(len(ids))
        return ids

    @property
    def unasked_s(self) -> float | None:
        """For how many seconds no client of ours has asked for messages; None: none ever has."""
        return None if self._last_take_s is None else self._clock.monotonic() - self._last_take_s

    async def take(
        self, limit: int, lease_s: float, *, one_per_group: bool = False
    ) -> tuple[list[Taken], str]:
        """Take up to `limit` ready messages; if the call is cancelled, they are given back uncounted.

        Also returns why there may be messages that nobody can give us; empty as a rule.
        """
        self._last_take_s = self._clock.monotonic()
        messages = await self.take_here(limit, lease_s, one_per_group=one_per_group)
        if messages or self._elsewhere is None:
            return messages, ""
        be_patient()  # it is no longer our storage that is waited for
        found, why_none = await self._elsewhere.take(self.unique_id, limit, lease_s)
        self._note_handed_out(found, lease_s)
        return found, why_none

    async def take_here(self, limit: int, lease_s: float, *, one_per_group: bool = False) -> list[Taken]:
        """Like take(), but asks no other gateway."""
        lease_s = min(lease_s, self._queue.max_lease)
        if late := self._shelf.take(limit, self._clock.monotonic()):
            return await self._hand_out_late(late, lease_s)
        taking = self._takes.submit(_Take(limit, lease_s, one_per_group))
        try:
            if self._take_wait_s:
                await asyncio.wait([taking], timeout=_TAKE_PATIENCE_S)
                if not taking.done():  # a consumer that just joins may take seconds
                    clearings = self._shelf_clearings
                    taking.add_done_callback(lambda done: self._keep_late(done, lease_s, clearings))
                    return []
            messages = await taking
        except asyncio.CancelledError:
            if not taking.done():
                taking.cancel()
            elif not taking.cancelled() and taking.exception() is None:
                self._give_back_later(taking.result())
            raise
        self._know(messages)
        taken = [*map(Taken.of, messages)]
        self._note_handed_out(taken, lease_s)
        return taken

    async def hand_out(self, limit: int) -> list[Taken]:
        """Take up to `limit` messages that are ready, and give them back at once, uncounted."""

        def take_and_release() -> list[Message]:
            messages = self._take_up_to(limit, min(_HAND_OUT_LEASE_S, self._queue.max_lease))
            if messages:
                self._queue.nack(messages, count=False, confirmed=True)
            return messages

        self._last_take_s = self._clock.monotonic()
        return [Taken(one.id, one.body) for one in await self._call(take_and_release)]

    async def ack(self, ids: Sequence[str], receipts: Sequence[str] = ()) -> None:
        """Acknowledge messages; returns when that is durable. Unknown ids do nothing.

        receipts  what receipts() has returned for the ids, if the caller asked it before
        """
        if ids:
            await self.ack_receipts(receipts or self.receipts(ids))
            await self._say(Said(ids, None))

    async def ack_receipts(self, receipts: Sequence[str]) -> None:
        """The same by receipts; raises ReceiptError."""
        await self._acks.submit(receipts)
        self._size.change(-len(receipts))
        self._in_flight.change(-len(receipts))

    async def extend(self, ids: Sequence[str], lease_s: float) -> None:
        """Let leases end after `lease_s`, or later if they do; takes the messages that nobody has."""
        if ids:
            lease_s = min(lease_s, self._queue.max_lease)
            if self._claims is not None:  # Kafka would let the leases end sooner
                ids = self._claims.shorter_than(ids, self._clock.monotonic() + lease_s)
            await self._extensions.submit(_Extension(ids, lease_s))
            await self._say(Said(ids, lease_s))

    async def change(self, receipt: str, lease_s: float) -> bool:
        """Let the lease of one take end `lease_s` from now; 0: give the message back, as an attempt.

        Returns False if the message is no longer in flight, or taken anew; always True for 0.
        """
        if lease_s:
            return not await self._call(lambda: self._queue.extend(receipt, lease=lease_s, confirmed=True))
        await self._call(lambda: self._queue.nack(receipt, confirmed=True))
        return True

    def receipt(self, message_id: str) -> str:
        """A receipt for whoever has the message, for one that another gateway has taken for us."""
        return self._queue.receipt(message_id)

    def receipts(self, ids: Sequence[str]) -> list[str]:
        """Receipts for whoever has these messages."""
        return [self._known_receipts.get(one) or self._queue.receipt(one) for one in ids]

    async def call(self, function: Callable[[Queue], T]) -> T:
        """Call a function with the queue, in a thread."""
        return await self._call(function, self._queue)

    async def is_ready(self) -> bool:
        """True if a take would find a message now."""
        return bool(await self._call(lambda: self._queue.peek(1)))

    async def release(self, ids: Sequence[str]) -> None:
        """Give messages back at once, uncounted."""
        if ids:
            await self._call(lambda: self._queue.nack(self.receipts(ids), count=False, confirmed=True))
            self._in_flight.change(-len(ids))
            await self._say(Said(ids, 0.0))

    async def give_back(self, messages: Sequence[Taken]) -> None:
        """Give back messages that were taken and not handed out, uncounted."""
        if messages:
            await self._call(
                lambda: self._give_back([one.receipt or self._queue.receipt(one.id) for one in messages])
            )

    async def release_all(self) -> None:
        """Give back all messages that are taken, uncounted."""
        await self._call(self._queue.release_all)
        self._clear_whole_shelf()
        self._in_flight.become(0)
        if self._claims is not None:
            self._claims.end()

    async def purge(self) -> None:
        """Remove all messages but dead letters."""
        await self._call(self._queue.purge)
        self._clear_whole_shelf()
        self._size.become(0)
        self._in_flight.become(0)

    def stop_taking(self) -> None:
        """Give back at once what a take brings from now on, since nobody will be there to have it."""
        self._closing = True

    def close(self) -> None:
        """Give back what nobody was handed, and close the queue; called in a thread, when no call runs."""
        self._give_back(self._shelf.clear())
        self._queue.close()

    # --- looking ----------------------------------------------------------------------------------

    async def peek(self, limit: int) -> list[Taken]:
        """The oldest messages, those that are taken included."""

        def look(asked: int) -> Sequence[Message]:
            ready = self._queue.peek(asked)
            seen = {message.id: message for message in (*ready, *self._orphans(asked))}  # one may be both
            return sorted(seen.values(), key=age)[:asked]

        found = await self._call(self._seen_up_to, limit, look)
        return [Taken(one.id, one.body) for one in found]

    async def taken(self, limit: int) -> list[Taken]:
        """The oldest messages that are taken, by whomever."""
        return [*map(Taken.of, await self._call(self._seen_up_to, limit, self._orphans))]

    async def size(self, limit: int | None) -> int:
        """How many messages there are, taken ones included; exact up to `limit`, as far as time allows."""
        return await self._size.get(None if limit is None else max(limit, _EXACT_SIZE))

    async def count(self) -> int:
        """The same exactly, however long it takes."""
        return await self._call(self._count, None)

    async def in_flight(self) -> int:
        """How many messages are taken and not finished, as far as time allows."""
        early = 0 if self._claims is None else self._claims.count_early(self._clock.monotonic())
        return await self._in_flight.get() + early

    # --- in threads -------------------------------------------------------------------------------

    def _send_all(self, given: Sequence[Sequence[Body]]) -> list[list[str] | BaseException]:
        return each_result(self._send_each, given)

    def _send_each(self, given: Sequence[Sequence[Body]]) -> list[list[str]]:
        ids = iter(self._queue.send_many([body for bodies in given for body in bodies]))
        return [[next(ids) for _ in bodies] for bodies in given]

    def _take_all(self, takes: Sequence[_Take]) -> list[list[Message] | BaseException]:
        by_terms: defaultdict[_Take, list[int]] = defaultdict(list)
        for index, take in enumerate(takes):
            by_terms[take._replace(limit=0)].append(index)
        results: dict[int, list[Message] | BaseException] = {}
        if self.is_grouped:  # messages of one group must not be shared out
            together = [(take, [index]) for index, take in enumerate(takes)]
        else:
            together = list(by_terms.items())
        for terms, indexes in together:
            limits = [takes[index].limit for index in indexes]
            try:
                shares: Sequence[list[Message] | BaseException] = dealt(
                    self._take_up_to(sum(limits), terms.lease_s, one_per_group=terms.one_per_group), limits
                )
            except BaseException as error:
                shares = [error] * len(indexes)
            results.update(zip(indexes, shares, strict=True))
        return [results[index] for index in range(len(takes))]

    def _take_up_to(self, limit: int, lease_s: float, *, one_per_group: bool = False) -> list[Message]:
        how: dict[str, Any] = {"one_per_group": True} if one_per_group else {}
        taken: list[Message] = []
        left = _MAX_TAKEN_BYTES
        while len(taken) < limit and left > 0:
            asked = self._next_read(limit - len(taken), len(taken), left)
            try:
                wait_s = 0.0 if taken else self._take_wait_s
                found = self._queue.receive(asked, wait=wait_s, lease=lease_s, **how)
            except BaseException:
                self._give_back(taken)
                raise
            good = self._heeded(found)
            taken += good
            if len(found) < asked and len(good) == len(found):
                break
            left -= self._note_sizes(found)
        if self._closing:
            self._give_back(taken)
            return []
        return taken

    async def look(self, limit: int, look: Callable[[Queue, int], Sequence[S]]) -> Sequence[S]:
        """What a function finds in the queue, up to `limit`, as many as may be in memory together."""
        return await self._call(self._seen_up_to, limit, lambda asked: look(self._queue, asked))

    def _seen_up_to(self, limit: int, look: Callable[[int], Sequence[S]]) -> Sequence[S]:
        """What `look` finds, up to `limit` messages, as many as may be in memory together."""
        asked = self._next_read(limit, 0, _MAX_TAKEN_BYTES)
        while True:
            found = look(asked)
            shown = _fitting(found, _MAX_TAKEN_BYTES)
            left = _MAX_TAKEN_BYTES - self._note_sizes(found)
            if len(found) < asked or asked == limit or len(shown) < len(found) or left <= 0:
                return shown
            asked += self._next_read(limit - asked, asked, left)

    def _orphans(self, limit: int) -> list[Message]:
        return [one.message for one in self._queue.orphans(limit=limit) if one.message is not None]

    def _heeded(self, found: Sequence[Message]) -> Sequence[Message]:
        """The messages to hand out; the others were acknowledged or claimed before they were taken."""
        if self._claims is None or not found:
            return found
        heeded = self._claims.heed(found, self._clock.monotonic())
        if heeded.ended:
            self._queue.ack(heeded.ended)
        for message, lease_s in heeded.claimed:
            self._queue.extend(message, lease=max(lease_s, MIN_LEASE_MS / 1000))
        return heeded.good

    def _next_read(self, wanted: int, so_far: int, left: int) -> int:
        """How many of `wanted` messages to read at once, if `left` bytes may come; sizes show only then."""
        likely = max(_FIRST_TAKE, _GROWTH * so_far)
        if self._largest_body:
            likely = min(max(likely, _GROWTH * _FIRST_TAKE), left // self._largest_body)
        return min(wanted, max(1, likely))

    def _note_sizes(self, found: Sequence[Seen]) -> int:
        """Learn from bodies that were read; returns their bytes."""
        sizes = [*map(_bytes_of, found)]
        self._largest_body = max(*sizes, self._largest_body - self._largest_body // _FORGOTTEN, 1)
        return sum(sizes)

    def _ack_all(self, given: Sequence[Sequence[str]]) -> list[None]:
        self._queue.ack([one for receipts in given for one in receipts], confirmed=True)
        return [None] * len(given)

    def _extend_all(self, given: Sequence[_Extension]) -> list[None]:
        by_lease: defaultdict[float, list[str]] = defaultdict(list)
        for one in given:
            by_lease[one.lease_s] += one.ids
        for lease_s, ids in by_lease.items():
            self._queue.extend(self.receipts(ids), lease=lease_s, confirmed=True)
        return [None] * len(given)

    def _know(self, messages: Sequence[Message]) -> None:
        """Remember receipts, in a queue on Kafka that can't make them of ids (without late_acks)."""
        if not self._queue.capabilities.receipts_by_id:
            self._known_receipts.update((one.id, one.receipt) for one in messages)
            while len(self._known_receipts) > _MAX_RECEIPTS:
                del self._known_receipts[next(iter(self._known_receipts))]

    def _count(self, limit: int | None) -> int:
        return self._queue.size(limit) + self._queue.in_flight(limit)

    def _extended(self, late: list[Message], lease_s: float) -> list[Taken]:
        late[:] = self._heeded(late)
        lost = set(self._queue.extend(*late, lease=lease_s, confirmed=True))
        self._know(late)
        return [Taken.of(one) for one in late if one.receipt not in lost]

    def _give_back_later(self, messages: list[Message]) -> None:
        if messages:
            self._threads.submit(self._give_back, messages)

    def _give_back(self, messages: Sequence[Message | str]) -> None:
        try:
            if messages:
                self._queue.nack(messages, count=False)
        except QueueNotFound:  # they went with it
            pass
        except Exception:  # nobody waits for it; the messages come again when their leases end
            _log.warning("messages could not be given back", extra={"count": len(messages)}, exc_info=True)

    # --- messages that came too late ----------------------------------------------------------------

    def _keep_late(self, taking: asyncio.Future[list[Message]], lease_s: float, clearings: int) -> None:
        if taking.cancelled() or taking.exception() is not None or clearings != self._shelf_clearings:
            return
        if taking.result():
            self._shelf.put(taking.result(), lease_s, self._clock.monotonic())
            asyncio.get_running_loop().call_later(_STALE_AFTER_S, self._clear_shelf)

    async def _hand_out_late(self, late: list[Message], lease_s: float) -> list[Taken]:
        extending = asyncio.ensure_future(self._call(self._extended, late, lease_s))
        try:
            kept = await asyncio.shield(extending)
        except BaseException:  # nobody gets them
            extending.add_done_callback(lambda _: self._give_back_later(late))
            raise
        self._note_handed_out(kept, lease_s)
        return kept

    def _clear_whole_shelf(self) -> None:
        """Forget late messages: what was taken is no longer ours, nor is what a take brings that runs now.

        What of that was sent after the purge comes again when its lease ends.
        """
        self._shelf.clear()
        self._shelf_clearings += 1

    def _clear_shelf(self) -> None:
        self._give_back_later(self._shelf.stale(self._clock.monotonic()))

    # --- messages that nobody was handed yet --------------------------------------------------------

    async def _say(self, said: Said) -> None:
        if self._claims is None:
            return
        unknown = self._claims.note(said, self._clock.monotonic())
        if unknown and self._elsewhere is not None:
            be_patient()
            self._claims.forget_early(await self._elsewhere.tell(self.unique_id, said._replace(ids=unknown)))

    def _note_handed_out(self, messages: Sequence[Taken], lease_s: float) -> None:
        self._in_flight.change(len(messages))
        if self._claims is not None:
            self._claims.hand_out((one.id for one in messages), self._clock.monotonic() + lease_s)

    # --- helpers ----------------------------------------------------------------------------------

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._running += 1
        try:
            return await asyncio.wrap_future(self._threads.submit(function, *args, **kwargs))
        finally:
            self._running -= 1


def dealt(messages: Sequence[Message], limits: Sequence[int]) -> list[list[Message]]:
    """Share messages out among takers in turns, one each, so that few messages do not all go to the first."""
    shares: list[list[Message]] = [[] for _ in limits]
    open_shares = [index for index, limit in enumerate(limits) if limit]
    left = iter(messages)
    while open_shares:
        for index in open_shares:
            message = next(left, None)
            if message is None:
                return shares
            shares[index].append(message)
        open_shares = [index for index in open_shares if len(shares[index]) < limits[index]]
    return shares


def _bytes_of(seen: Seen) -> int:
    message = seen.message if isinstance(seen, Orphan) else seen
    return 0 if message is None else len(message.body)


def _fitting(messages: Sequence[S], most: int) -> Sequence[S]:
    """The first messages, as many as have `most` bytes together; at least one."""
    for count, total in enumerate(accumulate(map(_bytes_of, messages))):
        if total > most:
            return messages[: max(1, count)]
    return messages


def _weight(bodies: Sequence[Body]) -> int:
    return sum(1 + size_of(body) // _BYTES_PER_WEIGHT for body in bodies)


def size_of(body: Body) -> int:
    """How many bytes its body has."""
    return len(body.body if isinstance(body, OutgoingMessage) else body)


def age(message: Message) -> tuple[int, tuple[int, ...]]:
    """Sorts messages by when they were sent; ids tell those of one ms apart."""
    numbers = message.id.split("-")
    return message.first_enqueued_ms, (*map(int, numbers),) if all(map(str.isdecimal, numbers)) else ()
