"""Opens and makes the queues of the gateway's storages, when a request names them."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import Closed, ConfigError, QueueNotFound, Unavailable
from kmqpy.gateway.service.claims import Claims, Said
from kmqpy.gateway.service.names import stored_name
from kmqpy.gateway.service.on_loop import OnLoop
from kmqpy.gateway.service.patience import Patience
from kmqpy.gateway.service.pulse import PATIENCE_S, QUICK_S, Pulse
from kmqpy.gateway.service.served_queue import Elsewhere, ServedQueue, Taken
from kmqpy.gateway.service.watched_queue import watched, watched_queue
from kmqpy.queue import Queue, Storage

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MISSING_S = 0.25
"""For so long, in seconds, a queue that is missing is not looked for again."""
_REOPEN_AFTER_S = 60.0
"""The first call so many seconds after a queue was opened opens it again, unless others run: its settings may
have changed."""
_LEAVE_AFTER_S = 10.0
"""When another gateway asks, a queue that no client of ours has asked for messages in this time is closed."""
_TRIES = 4
"""A call is tried so often with queues that are deleted meanwhile."""
_THREADS = 32
"""Threads for the calls of one storage; each call is a batch."""
_MAX_OPEN = 2_000
"""Of more queues, those that were used longest ago are closed when they have no calls."""


Place = tuple[str, str]
"""The name of a storage, and the name of a queue in it."""


@dataclass(frozen=True, slots=True)
class QueueName:
    """The name of a queue in a dialect.

    name      the name as clients write it
    prefix    tells kinds of queues apart that may share names
    settings  settings of the queue, for when it is made
    """

    name: str
    prefix: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)


@dataclass(slots=True)
class _Entry:
    """An open queue, and when it was opened."""

    queue: ServedQueue
    since_s: float


class Hub:
    """Gives dialects the queues of storages; used on one event loop.

    A name `other:rest` is queue `rest` of the storage that was given under the name `other`, if there is one;
    all other names are queues of the default storage, the one under the name "". If that has its own
    name, too, all have names; then `unknown:rest` is mistyped (ConfigError), and `rest` is `own:rest`.

    elsewhere  other gateways, which are asked for messages of queues on Kafka; None: there are none
    quick_s    requests are given up when their storage has answered nobody for so many seconds
    """

    def __init__(
        self,
        storages: Mapping[str, Storage],
        *,
        elsewhere: Elsewhere | None = None,
        quick_s: float = QUICK_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._storages = dict(storages)
        self._first_names = {
            name: next(first for first, other in storages.items() if other is one)
            for name, one in storages.items()
        }
        self._all_named = any(name and one is storages[""] for name, one in storages.items())
        self._elsewhere = elsewhere
        self._claims: OrderedDict[str, Claims] = OrderedDict()
        # Threads of its own for each storage, so that one that does not answer holds none of another's.
        self._threads = {storage: _executor(storage) for storage in storages.values()}
        self._pulses = {storage: Pulse(quick_s) for storage in storages.values()}
        self._clock = clock
        self._entries: OrderedDict[Place, _Entry] = OrderedDict()
        self._places: dict[str, Place] = {}  # of the open queues on Kafka, by their unique ids
        self._missing_since_s: dict[Place, float] = {}  # apart: whoever asks for names must close no queue
        self._opening: dict[tuple[Place, bool], asyncio.Task[ServedQueue | None]] = {}

    @property
    def open_queues(self) -> int:
        """How many queues are open."""
        return len(self._entries)

    @property
    def late_messages(self) -> int:
        """How many messages are kept that came when their poll had been answered."""
        return sum(entry.queue.late for entry in self._entries.values())

    def storage_of(self, name: QueueName) -> Storage:
        """The storage that has the queue of this name, or would have it."""
        return self._storages[self._place(name)[0]]

    def stored_name(self, name: QueueName) -> str:
        return self._place(name)[1]

    def is_one(self, name: QueueName, other: QueueName) -> bool:
        """True if both are names of one queue."""
        return self._place(name) == self._place(other)

    async def with_queue(
        self,
        name: QueueName,
        use: Callable[[ServedQueue], Awaitable[T]],
        *,
        missing: Callable[[], T],
        patience_s: float = PATIENCE_S,
    ) -> T:
        """The result of `use` with the queue of this name; that of `missing` if the queue does not exist.

        Raises Unavailable when that takes longer than `patience_s` seconds. Unless these are more than as a
        rule, it is raised much sooner if the storage does not answer others, either.
        """
        place = self._place(name)
        async with self._patience(place, patience_s) as patience:
            return await self._use(name, place, use, missing, patience)

    async def with_made(
        self, name: QueueName, use: Callable[[ServedQueue], Awaitable[T]], *, patience_s: float = PATIENCE_S
    ) -> T:
        """The result of `use` with the queue of this name, which is made if it does not exist."""
        place = self._place(name)
        async with self._patience(place, patience_s) as patience:
            return await self._use(name, place, use, None, patience)

    async def administer(
        self, name: QueueName, do: Callable[[Storage, str], T], *, patience_s: float = PATIENCE_S
    ) -> T:
        """The result of `do`, called in a thread with the queue's storage and its name there.

        Raises QueueNotFound when `do` does, and Unavailable as with_queue().
        """
        place = self._place(name)
        storage = self._storages[place[0]]
        async with self._patience(place, patience_s):
            return await self._run(storage, do, storage, place[1])

    def forget(self, name: QueueName) -> None:
        """The queue was made, changed or deleted: it is opened again as soon as no call of it runs."""
        place = self._place(name)
        self._missing_since_s.pop(place, None)
        if (entry := self._entries.get(place)) is not None:
            entry.since_s = -math.inf

    async def names(self) -> list[str]:
        """The names of all queues, as storage_of() understands them."""
        found = []
        for first, storage in self._storages.items():
            if self._first_names[first] == first:
                prefix = "" if storage is self._storages[""] else f"{first}:"
                listed = await self.administer(QueueName(f"{prefix}x"), lambda one, _: one.list())
                found += [prefix + name for name in listed]
        return sorted(found)

    def silent_storages(self) -> list[str]:
        """The names of the storages that do not answer."""
        return [name for name, storage in self._storages.items() if self.is_silent(storage)]

    def note(self, storage: Storage, *, answered: bool) -> None:
        """Note that a storage has answered, or not; called in any thread."""
        pulse = self._pulses[storage]
        (pulse.answer if answered else pulse.fail)(self._clock.monotonic())

    def is_silent(self, storage: Storage) -> bool:
        """True for a storage that does not answer."""
        return self._pulses[storage].is_away(self._clock.monotonic())

    async def watch(self, storage: Storage, answer: Awaitable[T]) -> T:
        """Await a short call of a storage, which shows whether that answers, as requests of clients do."""
        pulse = self._pulses[storage]
        call = object()
        pulse.begin(call, self._clock.monotonic())
        try:
            result = await answer
        except Unavailable:
            self.note(storage, answered=False)
            raise
        finally:
            pulse.end(call)
        self.note(storage, answered=True)
        return result

    def _patience(self, place: Place, patience_s: float) -> Patience:
        return Patience(self._pulses[self._storages[place[0]]], patience_s, self._clock)

    async def _use(
        self,
        name: QueueName,
        place: Place,
        use: Callable[[ServedQueue], Awaitable[T]],
        missing: Callable[[], T] | None,
        patience: Patience,
    ) -> T:
        """The result of `use`, again if the queue was deleted since it was opened; None: it is made."""
        is_quick = self._storages[place[0]].capabilities.immediate
        for _ in range(_TRIES):
            if not is_quick and place not in self._entries:
                patience.be_long()  # what opens a queue on Kafka makes connections, and perhaps topics
            queue = await self._find(place, name.settings, make=missing is None)
            if queue is None and missing is not None:
                return missing()
            if queue is not None:
                try:
                    return await use(queue)
                except (QueueNotFound, Closed):
                    self._close(place, queue)
        raise Unavailable("the queue is deleted and made again all the time")

    async def take_for_other(self, unique_id: str, limit: int, lease_s: float) -> list[Taken]:
        """Take for another gateway, if we have partitions of the queue.

        If none of our clients has asked for messages lately, we leave the partitions to others.
        """
        place = self._places.get(unique_id)
        if place is None:
            return []
        queue = self._entries[place].queue
        if queue.unasked_s is None:
            return []
        messages = await queue.take_here(limit, lease_s)
        if queue.unasked_s > _LEAVE_AFTER_S and not queue.busy:
            self._close(place, queue)
        return messages

    def hear(self, unique_id: str, said: Said) -> list[str]:
        """Heed what a client has said to another gateway of messages; returns those that we handed out."""
        unknown = set(self._claims_of(unique_id).note(said, self._clock.monotonic()))
        return [one for one in said.ids if one not in unknown]

    async def give_back(self, unique_id: str, messages: Sequence[Taken]) -> None:
        """Give back what take_for_other() returned, if the other gateway did not get it."""
        if (place := self._places.get(unique_id)) is not None:
            await self._entries[place].queue.give_back(messages)

    def close(self) -> None:
        """Wait for running calls, then close queues and storages; called in a thread, without requests."""
        for entry in self._entries.values():
            entry.queue.stop_taking()
        for threads in self._threads.values():
            threads.shutdown()
        with ThreadPoolExecutor(_THREADS, "kmq-gateway-close") as threads:  # each leaves a group on Kafka
            closing = [threads.submit(entry.queue.close) for entry in self._entries.values()]
        with ExitStack() as all_of_them:
            for storage in self._storages.values():
                all_of_them.callback(storage.close)
            for closed in closing:
                closed.result()

    async def _find(self, place: Place, settings: Mapping[str, Any], *, make: bool) -> ServedQueue | None:
        entry = self._entries.get(place)
        if entry is not None and self._is_usable(entry):
            self._entries.move_to_end(place)
            return entry.queue
        missing_since_s = self._missing_since_s.get(place)
        if (
            not make
            and missing_since_s is not None
            and self._clock.monotonic() - missing_since_s < _MISSING_S
        ):
            return None
        # One opens for all who ask meanwhile. Who wants the queue made can't wait for one who does not.
        opening = self._opening.get((place, make))
        if opening is None:
            opening = asyncio.ensure_future(self._open_or_make(place, settings, make=make))
            self._opening[place, make] = opening
            opening.add_done_callback(lambda _: self._opening.pop((place, make), None))
            opening.add_done_callback(_heed_error)
        return await asyncio.shield(opening)

    async def _open_or_make(
        self, place: Place, settings: Mapping[str, Any], *, make: bool
    ) -> ServedQueue | None:
        queue = await self._open(place, settings)
        if queue is None and make:
            storage = self._storages[place[0]]
            making = watched(make_queue, self._pulses[storage], self._clock, is_short=False)
            await self._run(storage, making, storage, place[1], settings)
            queue = await self._open(place, settings)
        return queue

    def _is_usable(self, entry: _Entry) -> bool:
        """False if the queue is to be opened again: its settings may have changed, and nobody uses it now."""
        return self._clock.monotonic() - entry.since_s < _REOPEN_AFTER_S or entry.queue.busy

    async def _open(self, place: Place, settings: Mapping[str, Any]) -> ServedQueue | None:
        storage, stored = self._storages[place[0]], place[1]
        pulse = self._pulses[storage]
        before = self._clock.monotonic()
        try:
            is_short = storage.capabilities.immediate
            opening = watched(open_queue, pulse, self._clock, is_short=is_short)
            queue = await self._run(storage, opening, storage, stored, settings)
        except QueueNotFound:
            former = self._entries.get(place)
            if former is None or not self._is_usable(former):
                if former is not None:
                    self._close(place, former.queue)
                self._missing_since_s.pop(place, None)
                self._missing_since_s[place] = before
                self._trim_missing()
            return None
        has_owners = not storage.capabilities.immediate  # of its partitions: on Kafka
        claims = self._claims_of(queue.unique_id) if has_owners else None
        if claims is not None:
            claims.collapses = getattr(queue.settings, "collapse", False)
        served = ServedQueue(
            watched_queue(queue, pulse, self._clock),
            self._threads[storage],
            elsewhere=self._elsewhere if has_owners else None,
            claims=claims,
            clock=self._clock,
        )
        former = self._entries.get(place)
        if former is not None and self._is_usable(former):
            self._threads[storage].submit(queue.close)  # opened by another request meanwhile, and in use
            return former.queue
        self._missing_since_s.pop(place, None)
        if former is not None:
            if former.queue.unique_id == queue.unique_id:
                served.follow(former.queue)
            self._close(place, former.queue)
        self._entries[place] = _Entry(served, before)
        if has_owners:
            self._places[queue.unique_id] = place
        self._evict()
        return served

    def _close(self, place: Place, queue: ServedQueue) -> None:
        """Close this queue; not one that another request has opened since."""
        entry = self._entries.get(place)
        if entry is not None and entry.queue is queue:
            del self._entries[place]
            self._places.pop(queue.unique_id, None)
            self._threads[self._storages[place[0]]].submit(queue.close)

    def _trim_missing(self) -> None:
        now_s = self._clock.monotonic()
        while self._missing_since_s:
            oldest, since_s = next(iter(self._missing_since_s.items()))
            if now_s - since_s < _MISSING_S:
                return
            del self._missing_since_s[oldest]

    def _evict(self) -> None:
        for place, entry in list(self._entries.items()):
            if len(self._entries) <= _MAX_OPEN:
                return
            if not entry.queue.busy:
                self._close(place, entry.queue)

    def _claims_of(self, unique_id: str) -> Claims:
        """Kept apart from the open queue, which is opened again now and then."""
        claims = self._claims.setdefault(unique_id, Claims())
        self._claims.move_to_end(unique_id)
        if len(self._claims) > _MAX_OPEN:
            self._claims.popitem(last=False)
        return claims

    def _place(self, name: QueueName) -> Place:
        """The first name of the storage, and the queue's name in it."""
        storage, colon, rest = name.name.partition(":")
        if not (colon and rest and storage in self._storages):
            if colon and self._all_named:
                names = ", ".join(sorted(filter(None, self._storages)))
                raise ConfigError(
                    f"queue: there is no storage {storage!r}; names begin with one of {names}, and :"
                )
            storage, rest = "", name.name
        any_name = self._storages[storage].capabilities.any_name
        return self._first_names[storage], stored_name(rest, prefix=name.prefix, any_name=any_name)

    async def _run(self, storage: Storage, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.wrap_future(self._threads[storage].submit(functools.partial(function, *args)))


def _heed_error(opening: asyncio.Task[Any]) -> None:
    """Nobody may wait for it any more; asyncio would log its error as one that was never retrieved."""
    if not opening.cancelled():
        opening.exception()


def _executor(storage: Storage) -> Executor:
    capabilities = storage.capabilities
    if capabilities.shared or capabilities.durable:
        return ThreadPoolExecutor(_THREADS, "kmq-gateway")
    return OnLoop()  # in memory


def open_queue(storage: Storage, stored: str, settings: Mapping[str, Any]) -> Queue:
    """Open a queue; one that was made halfway is completed first. Raises QueueNotFound."""
    queue = storage.open(stored)
    capabilities = queue.capabilities
    if not capabilities.immediate and not capabilities.receipts_by_id and stored not in storage.list():
        # Kafka has its topics, but the registry does not know it: no tracker would redeliver its messages.
        queue.close()
        make_queue(storage, stored, settings)
        queue = storage.open(stored)
    return queue


def make_queue(storage: Storage, stored: str, settings: Mapping[str, Any]) -> None:
    """Make a queue, unless somebody has just made it.

    Its messages keep their places, and receipts by id work, where the storage leaves that to a setting.
    """
    capabilities = storage.capabilities
    own = {"requeue_to": "front"} if capabilities.requeue_to_front else {}
    by_id = {} if capabilities.receipts_by_id else {"late_acks": True}  # on Kafka
    try:
        storage.create(stored, **own, **by_id, **settings)
    except ConfigError:
        if stored not in storage.list():
            raise
    else:
        _log.info("made a queue", extra={"queue": stored})
