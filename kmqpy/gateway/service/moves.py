"""Moves the messages of one queue to another, as jobs that survive the gateway that runs them.

A job is a message of the queue KMQ.moves in the storage of the queue that is emptied. A gateway takes it,
extends its lease while it copies, and then makes it a dead letter whose reason is the outcome. If the gateway
dies, the job comes again, to any gateway. A message is copied before it is acknowledged, so none is lost, and
some may come twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, NamedTuple, ParamSpec, TypeVar

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, KmqError, QueueNotFound, TopicError, Unavailable
from kmqpy.gateway.service.hub import Hub, QueueName, make_queue, open_queue
from kmqpy.gateway.service.ids import InvalidId, WireIds
from kmqpy.gateway.service.pulse import PATIENCE_S, PATIENCE_WHEN_AWAY_S
from kmqpy.gateway.service.served_queue import ServedQueue, Taken, age
from kmqpy.message import Message, OutgoingMessage
from kmqpy.queue import Queue, Storage

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MOVES_QUEUE = "KMQ.moves"
DEFAULT_ROOT = "/kmq"
"""Other roots on Kafka add a digest to the name: the topics of all roots are side by side there."""
_JOB_LEASE_S = 10
_SETTINGS = {"max_redeliveries": None, "lease_ms": _JOB_LEASE_S * 1000}
_EXTEND_EVERY_S = 3.0
_LOOK_EVERY_S = 2.0
_TURN_EVERY_S = 0.5
_THREADS = 12
"""Threads for the jobs of one storage: a look, and what runs, is started or asked for."""
_AT_ONCE = 4
"""Moves of one storage that a gateway runs at a time."""
_BATCH = 100
_ARRIVAL_S = 15.0
"""Seconds without a message after which none on Kafka is still on its way to us."""
_PATIENCE_S = 30.0
"""Seconds for a batch: one that is given up was perhaps sent, and is sent again."""
_LEASE_S = 60.0
_LISTED = 10_000
"""Jobs of each state that status() looks through, the oldest first; it does not know further ones."""
_KEPT_MS = 7 * 86_400_000
"""Outcomes are kept for a week; on Kafka, as long as the topic keeps dead letters."""
_SEARCH_S = 0.3
"""Seconds until how far a move is known to be answers for it; EmoDB's clients give up after 500 ms."""
_REMEMBERED = 1_000
"""So many moves are remembered that were started or found lately."""
_REMEMBERED_S = 60.0
"""For so many seconds: on Kafka a job that ends is nowhere to be found until a tracker has copied it."""


class MoveStatus(enum.Enum):
    """How far a move is."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETE = "COMPLETE"
    ERROR = "ERROR"


class UnknownMove(KmqError):
    """There is no move of this reference, or it was forgotten."""


@dataclass(frozen=True, slots=True)
class Move:
    """From which queue to which."""

    origin: QueueName
    target: QueueName


class _Known(NamedTuple):
    """How far a move was, and when that was known (s of the monotonic clock)."""

    move: Move
    status: MoveStatus
    since_s: float


@dataclass(slots=True)
class _Job:
    """A job that this gateway has taken; `lost` if its lease ended, so that another gateway may run it."""

    storage: Storage
    queue: Queue
    message: Message
    lost: bool = False


class Moves:
    """Starts, runs and finds moves.

    Has threads of its own for each storage, so that one that does not answer holds no move of another.

    roots   of storages on Kafka: kmqpy's znode, which tells apart those that share a Kafka
    on_end  called with "complete", "error" or "postponed" when this gateway has run one
    """

    def __init__(
        self,
        hub: Hub,
        storages: Sequence[Storage],
        *,
        roots: Mapping[Storage, str] | None = None,
        on_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._hub = hub
        self._storages = storages
        self._names = {one: _named((roots or {}).get(one, DEFAULT_ROOT)) for one in storages}
        self._threads = {one: ThreadPoolExecutor(_THREADS, "kmq-gateway-moves") for one in storages}
        self._on_end = on_end
        self._open_jobs: dict[Storage, Queue] = {}
        self._look_now = {storage: asyncio.Event() for storage in storages}
        self._stopping = False
        self._moving: set[tuple[Storage, str]] = set()  # the queues that are emptied, by their stored names
        self._remembered: OrderedDict[tuple[str, str], _Known] = OrderedDict()

    async def start(self, service: str, move: Move) -> str:
        """Start a move for the clients of a service; returns its reference. Raises Unavailable."""
        storage = self._hub.storage_of(move.origin)
        reference = await self._in_time(storage, self._store, service, move)
        self._remember(service, reference, move, MoveStatus.IN_PROGRESS)
        self._look_now[storage].set()
        return reference

    async def status(self, service: str, reference: str) -> tuple[Move, MoveStatus]:
        """The move and how far it is; raises UnknownMove, also for a reference of another service.

        If that takes long, as on a busy Kafka, the answer is how far it was known to be.
        """
        searches = (self._in_time(one, self._find, one, service, reference) for one in self._storages)
        searching = asyncio.gather(*searches, return_exceptions=True)
        known = self._remembered.get((service, reference))
        if known is not None and not any(map(self._hub.is_silent, self._storages)):
            await asyncio.wait([searching], timeout=_SEARCH_S)
            if not searching.done():
                return known.move, known.status
        answers = await searching
        for found in answers:
            if isinstance(found, tuple):  # then it does not matter that another storage is away
                self._remember(service, reference, *found)
                return found
        for error in answers:
            if isinstance(error, BaseException):
                raise error
        if known is None or SYSTEM_CLOCK.monotonic() - known.since_s > _REMEMBERED_S:
            raise UnknownMove("move: there is none of this reference")
        return known.move, known.status

    def _remember(self, service: str, reference: str, move: Move, status: MoveStatus) -> None:
        self._remembered[service, reference] = _Known(move, status, SYSTEM_CLOCK.monotonic())
        self._remembered.move_to_end((service, reference))
        if len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)

    async def run(self) -> None:
        """Run the moves that nobody runs, until stop() was called and the last batch is done."""
        async with asyncio.TaskGroup() as tasks:
            for storage in self._storages:
                tasks.create_task(self._run_in(storage, tasks))

    def stop(self) -> None:
        """Let running moves end after their batch, and give their jobs back, to other gateways."""
        self._stopping = True
        for look_now in self._look_now.values():
            look_now.set()

    def warm_up(self, storage: Storage) -> None:
        """Make the queue of jobs, and what a send needs; called in a thread."""
        self._jobs(storage, make=True).send_many([])

    async def probe(self) -> bool:
        """Return when all storages have answered; False if one can't."""

        def ask(storage: Storage) -> None:
            with contextlib.suppress(QueueNotFound):
                self._jobs(storage).size(1)

        asked = (self._run(storage, ask, storage) for storage in self._storages)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return not any(isinstance(one, BaseException) for one in answers)

    def close(self) -> None:
        """Wait for running calls; called in a thread, when run() has ended."""
        for threads in self._threads.values():
            threads.shutdown()

    async def _run_in(self, storage: Storage, tasks: asyncio.TaskGroup) -> None:
        """Run the moves of a storage, each in a task of its own: a long one must not let others wait."""
        look_now, places = self._look_now[storage], asyncio.Semaphore(_AT_ONCE)
        while not self._stopping:
            look_now.clear()
            taken = None
            await places.acquire()
            try:
                taking = self._run(storage, self._take_job, storage)
                is_watched = storage.capabilities.immediate
                taken = await (self._hub.watch(storage, taking) if is_watched else taking)
            except Exception as error:  # the storage is away, and so are its queues
                _log.warning("moves wait", extra={"error": str(error)})
            if taken is not None:
                tasks.create_task(self._run_job(taken)).add_done_callback(lambda _: places.release())
                continue
            places.release()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await look_now.wait()

    async def _run_job(self, job: _Job) -> None:
        try:
            await self._run_and_end(job)
        except Exception as error:  # it comes again when its lease is over
            _log.warning(
                "what ends a move was not stored", extra={"job": job.message.id, "error": str(error)}
            )

    async def _run_and_end(self, job: _Job) -> None:
        jobs, message = job.queue, job.message
        keeping = asyncio.ensure_future(self._keep_lease(job))
        try:
            if _is_old(message):
                await self._run(job.storage, lambda: jobs.ack(message, confirmed=True))
                return
            _, move = _parsed(message.body)
            self._check_names(message.body, move)
            async with self._turn(job, move):
                moved = await self._move(job, move)
        except Unavailable as error:
            _log.warning("a move has to wait", extra={"job": message.id, "error": str(error)})
            await self._run(job.storage, lambda: jobs.nack(message, delay=1, count=False))
            self._on_end("postponed")
        except Exception as error:  # whatever is wrong with this job, other jobs must go on
            _log.exception("a move failed", extra={"job": message.id})
            reason = f"{error}: {MoveStatus.ERROR.value}"
            await self._run(job.storage, lambda: jobs.dead_letter(message, reason=reason, confirmed=True))
            self._on_end("error")
        else:
            if job.lost:
                _log.warning("a move is left to others: its lease has ended", extra={"job": message.id})
            elif moved is None:
                await self._run(job.storage, lambda: jobs.nack(message, count=False))  # this gateway stops
            else:
                _log.info("a move is complete", extra={"job": message.id, "count": moved})
                reason = MoveStatus.COMPLETE.value
                await self._run(job.storage, lambda: jobs.dead_letter(message, reason=reason, confirmed=True))
                self._on_end("complete")
        finally:
            keeping.cancel()
        await self._run(job.storage, self._forget_old, jobs)

    @contextlib.asynccontextmanager
    async def _turn(self, job: _Job, move: Move) -> AsyncIterator[None]:
        """Wait until no other move empties the queue: it would move, too, what this one has taken.

        Of those that wait, the oldest is the next. On Kafka those of other gateways may show late.
        """
        origin = job.storage, self._hub.stored_name(move.origin)
        while not self._must_leave(job) and (
            await self._run(job.storage, self._older_runs, job, move) or origin in self._moving
        ):
            await asyncio.sleep(_TURN_EVERY_S)
        is_ours = origin not in self._moving
        self._moving.add(origin)
        try:
            yield
        finally:
            if is_ours:
                self._moving.discard(origin)

    def _must_leave(self, job: _Job) -> bool:
        return self._stopping or job.lost

    async def _keep_lease(self, job: _Job) -> None:
        def extend() -> Sequence[str]:
            return job.queue.extend(job.message, lease=_JOB_LEASE_S, confirmed=True)

        while not job.lost:
            await asyncio.sleep(_EXTEND_EVERY_S)
            try:
                job.lost = bool(await self._run(job.storage, extend))
            except Exception as error:  # the next try may succeed in time
                _log.warning("the lease of a move could not be extended", extra={"error": str(error)})

    async def _move(self, job: _Job, move: Move) -> int | None:
        """Move what is there now; returns how many messages, or None if this gateway must leave the rest."""
        if self._must_leave(job):
            return None
        left = await self._with_origin(move, methodcaller("count")) or 0
        moved, empty_since_s = 0, None
        while left > 0:
            if self._must_leave(job):
                return None
            taken, batch = await self._with_origin(move, _next_batch) or ([], [])
            if batch:
                has_groups = self._hub.storage_of(move.target).capabilities.groups
                messages = [
                    OutgoingMessage(
                        one.body, key=one.key, headers=one.headers, group=one.group if has_groups else None
                    )
                    for one in batch
                ]
                ids = [one.id for one in batch]
                try:
                    send = methodcaller("send", messages)
                    await self._hub.with_made(move.target, send, patience_s=_PATIENCE_S)
                except Exception:  # the queue's clients must not wait for the end of our lease
                    with contextlib.suppress(KmqError):
                        await self._with_origin(move, methodcaller("give_back", taken))
                    raise
                await self._with_origin(move, methodcaller("ack", ids))
                moved += len(batch)
                left -= len(batch)
                empty_since_s = None
            elif self._hub.storage_of(move.origin).capabilities.immediate:
                break  # what is left is delayed
            else:
                now_s = SYSTEM_CLOCK.monotonic()
                empty_since_s = empty_since_s or now_s
                if now_s - empty_since_s > _ARRIVAL_S:
                    if await self._with_origin(move, methodcaller("count")):
                        raise TopicError(
                            "some messages did not come: they are delayed, or their partitions away"
                        )
                    break
        return moved

    async def _with_origin(self, move: Move, use: Callable[[ServedQueue], Awaitable[T]]) -> T | None:
        return await self._hub.with_queue(move.origin, use, missing=lambda: None, patience_s=_PATIENCE_S)

    def _check_names(self, job: bytes, move: Move) -> None:
        """Raise Unavailable for a job of a gateway that knows the storages by other names than this one.

        By its names, other queues would be meant here.
        """
        for end, name in (("from", move.origin), ("to", move.target)):
            try:
                stored = self._hub.stored_name(name)
            except ConfigError:  # all storages have names here, and none this one
                stored = None
            if stored is None or json.loads(job)[end].get("stored", stored) != stored:
                raise Unavailable(f"this gateway has no storage of the name that {name.name!r} begins with")

    # --- in threads -------------------------------------------------------------------------------

    def _store(self, service: str, move: Move) -> str:
        storage = self._hub.storage_of(move.origin)
        body = {
            "service": service,
            **{
                end: {
                    "name": name.name,
                    "prefix": name.prefix,
                    "settings": dict(name.settings),
                    "stored": self._hub.stored_name(name),
                }
                for end, name in (("from", move.origin), ("to", move.target))
            },
        }
        try:
            jobs = self._jobs(storage, make=True)
            message_id = jobs.send(json.dumps(body))
        except QueueNotFound:  # somebody has deleted it since we opened it
            self._open_jobs.pop(storage, None)
            jobs = self._jobs(storage, make=True)
            message_id = jobs.send(json.dumps(body))
        return WireIds(jobs.name, jobs.unique_id).make(message_id)

    def _find(self, storage: Storage, service: str, reference: str) -> tuple[Move, MoveStatus] | None:
        try:
            return self._find_in(self._jobs(storage), service, reference)
        except QueueNotFound:
            self._open_jobs.pop(storage, None)
            return None

    def _find_in(self, jobs: Queue, service: str, reference: str) -> tuple[Move, MoveStatus] | None:
        try:
            message_id = WireIds(jobs.name, jobs.unique_id).parse(reference)
        except InvalidId:
            return None
        if message_id is None:  # a job in another storage, for example
            return None
        # In the order in which a job passes from state to state, so that it is not missed in between.
        waiting = [(one.id, one.body, MoveStatus.IN_PROGRESS) for one in jobs.peek(_LISTED)]
        running = [
            (one.message.id, one.message.body, MoveStatus.IN_PROGRESS)
            for one in jobs.orphans()
            if one.message is not None
        ]
        ended = [(one.id, one.body, _outcome(one.reason)) for one in jobs.dead_letters.peek(_LISTED)]
        for found_id, body, status in (*ended, *running, *waiting):
            if found_id == message_id:
                found, move = _parsed(body)
                return (move, status) if found == service else None
        return None

    def _older_runs(self, job: _Job, move: Move) -> bool:
        """True if somebody runs, or waits to run, an older move of this origin."""
        origin = self._hub.stored_name(move.origin)
        for one in job.queue.orphans():
            if one.message is not None and age(one.message) < age(job.message):
                with contextlib.suppress(ConfigError):
                    if self._hub.stored_name(_parsed(one.message.body)[1].origin) == origin:
                        return True
        return False

    def _take_job(self, storage: Storage) -> _Job | None:
        try:
            jobs = self._jobs(storage)
            wait_s = 0 if jobs.capabilities.immediate else _LOOK_EVERY_S
            taken = jobs.receive(1, wait=wait_s, lease=_JOB_LEASE_S)  # whoever made the queue
        except QueueNotFound:  # there never was a move, or somebody has deleted the queue
            self._open_jobs.pop(storage, None)
            return None
        return _Job(storage, jobs, taken[0]) if taken else None

    def _forget_old(self, jobs: Queue) -> None:
        before_ms = SYSTEM_CLOCK.wall_ms() - _KEPT_MS
        old = [letter.id for letter in jobs.dead_letters.list(_BATCH) if letter.dead_since_ms < before_ms]
        if old and jobs.capabilities.immediate:
            jobs.dead_letters.redrive(old)  # one that is taken now, or after our end, is not run: _is_old()
            jobs.ack([jobs.receipt(one) for one in old], confirmed=True)

    def _jobs(self, storage: Storage, *, make: bool = False) -> Queue:
        """The queue of jobs in a storage; raises QueueNotFound if it is missing, and not to be made."""
        jobs = self._open_jobs.get(storage)
        if jobs is None:
            jobs = (_opened if make else open_queue)(storage, self._names[storage], _SETTINGS)
            jobs = self._open_jobs.setdefault(storage, jobs)
        return jobs

    async def _in_time(
        self, storage: Storage, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        is_silent = self._hub.is_silent(storage)
        try:
            async with asyncio.timeout(PATIENCE_WHEN_AWAY_S if is_silent else PATIENCE_S):
                return await self._run(storage, function, *args, **kwargs)
        except TimeoutError:
            raise Unavailable("the storage does not answer in time") from None

    async def _run(self, storage: Storage, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._threads[storage].submit(function, *args, **kwargs))


async def _next_batch(queue: ServedQueue) -> tuple[list[Taken], list[Taken]]:
    """Ready messages, which we take, so that nobody else does; without any, those that others have.

    Returns what was taken, and what is to be moved.
    """
    ready, _ = await queue.take(_BATCH, _LEASE_S)
    return ready, ready or await queue.taken(_BATCH)


def _named(root: str) -> str:
    digest = "" if root == DEFAULT_ROOT else f".{hashlib.sha256(root.encode()).hexdigest()[:16]}"
    return f"{MOVES_QUEUE}{digest}"


def _is_old(job: Message) -> bool:
    """True for a move that has ended: _forget_old() has put it back, a week later."""
    return job.enqueued_ms - job.first_enqueued_ms > _KEPT_MS


def _opened(storage: Storage, stored: str, settings: Mapping[str, Any]) -> Queue:
    """Open a queue; makes it if it is missing."""
    try:
        return open_queue(storage, stored, settings)
    except QueueNotFound:
        pass
    make_queue(storage, stored, settings)
    return storage.open(stored)


def _outcome(reason: str | None) -> MoveStatus:
    """What the reason of a job's dead letter says: storages may put words of their own before it."""
    is_complete = (reason or "").endswith(MoveStatus.COMPLETE.value)
    return MoveStatus.COMPLETE if is_complete else MoveStatus.ERROR


def _parsed(body: bytes) -> tuple[str, Move]:
    """The service and move of a job; raises ConfigError."""
    try:
        job = json.loads(body)
        ends = [
            QueueName(str(job[end]["name"]), str(job[end]["prefix"]), dict(job[end]["settings"]))
            for end in ("from", "to")
        ]
        return str(job["service"]), Move(*ends)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError("move: what is stored is not a job") from None
