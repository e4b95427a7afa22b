"""What the console's tabs show of queues: sampled once for all tabs, and not at all while nobody looks.

Two rounds are at least _ROUND_S apart. The queues that a tab shows alone are sampled in each; all others one
after another, at such a pace that sampling takes _SHARE of the time. The first look is not held back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import KmqError, QueueNotFound
from kmqpy.gateway.keys.keyring import Principal
from kmqpy.gateway.keys.permissions import ACTIONS
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.gateway.service.names import is_reserved
from kmqpy.queue import QueueDescription, Storage

_log = logging.getLogger(__name__)

_ROUND_S = 2.0
_SHARE = 0.05
_AT_ONCE = 4
"""So many queues are asked for together."""
_PATIENCE_S = 10.0
_MINUTES = 60
"""The history of a queue: so many minutes."""
_MAX_TRAFFIC = 10_000
"""Queues of which messages are counted; clients choose names."""
_IN = {"send", "send-many", "sendbatch", "SendMessage", "SendMessageBatch"}
_OUT = {"ack", "DeleteMessage", "DeleteMessageBatch"}


@dataclass(slots=True)
class _Row:
    """What is known of a queue.

    version  of the last change
    depths   (minute, messages that wait) of the last hour
    """

    version: int = 0
    shown: dict[str, Any] = field(default_factory=dict)
    depths: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_MINUTES))


class Sampler:
    """Samples queues while tabs look; used on one event loop."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._rows: dict[str, _Row] = {}
        self._version = 0
        self._gone: deque[tuple[int, str]] = deque(maxlen=_MAX_TRAFFIC)
        self._missing: set[str] = set()  # of the queues that tabs show alone
        self._problem = ""
        self._tabs: Counter[str] = Counter()
        self._traffic: dict[str, deque[list[int]]] = {}  # by queue: minute, messages in, messages out
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._encoded: dict[tuple[Principal, int, int], bytes] = {}
        self._left: list[str] = []
        """The queues that this pass through all of them has not sampled yet."""
        self._rest_until_s = 0.0
        self._stopped = False

    def count(self, verb: str, queue: str, count: int) -> None:
        """Count messages that came in or went out through this gateway."""
        column = 1 if verb in _IN else 2 if verb in _OUT else 0
        if not column:
            return
        minutes = self._traffic.get(queue)
        if minutes is None:
            if len(self._traffic) >= _MAX_TRAFFIC:
                return
            minutes = self._traffic[queue] = deque(maxlen=_MINUTES)
        minute = self._minute()
        if not minutes or minutes[-1][0] != minute:
            minutes.append([minute, 0, 0])
        minutes[-1][column] += count

    def stop(self) -> None:
        """End all streams."""
        self._stopped = True
        self._changed.set()

    @contextlib.asynccontextmanager
    async def tab(self, watched: str) -> AsyncIterator[Tab]:
        """A tab that looks; `watched` is the queue that it shows alone, or empty."""
        self._tabs[watched] += 1
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        try:
            yield Tab(self, watched)
        finally:
            self._tabs[watched] -= 1
            self._tabs += Counter()  # without zeros
            if not self._tabs:
                self._running.cancel()
                self._running = None  # the next tab must not take it for one that runs

    async def next_round(self) -> bool:
        """Wait for the end of a round; False if there is none any more."""
        if not self._stopped:
            await self._changed.wait()
        return not self._stopped

    @property
    def version(self) -> int:
        """Of the last change."""
        return self._version

    def news(self, sender: Principal, since: int, watched: str) -> bytes:
        """What has changed since a version, as an event, of the queues that the sender may see."""
        if watched:
            return self._news(sender, since, [watched])
        key = (sender, since, self._version)
        if key not in self._encoded:  # tabs of one key get the same
            self._encoded[key] = self._news(sender, since, self._rows)
        return self._encoded[key]

    def _news(self, sender: Principal, since: int, names: Any) -> bytes:
        rows = []
        for name in names:
            row = self._rows.get(name)
            if row is not None and row.version > since and sender.permits("get_status", name):
                may = [action for action in ACTIONS if sender.permits(action, name)]
                rows.append({**row.shown, "may": may})
        gone = {name for at, name in self._gone if at > since} | (self._missing & set(names))
        event = {
            "now_ms": SYSTEM_CLOCK.wall_ms(),
            "rows": rows,
            "gone": [name for name in gone if sender.permits("get_status", name)],
            "whole": since < 0,
            "problem": self._problem,
        }
        return b"data: " + msgspec.json.encode(event) + b"\n\n"

    async def _run(self) -> None:
        while True:
            begun_s = SYSTEM_CLOCK.monotonic()
            try:
                await self._round(begun_s)
                self._problem = ""
            except KmqError as error:
                _log.warning("queues can't be sampled", extra={"error": str(error)})
                self._problem = "the storage does not answer"
            except Exception:
                _log.exception("queues can't be sampled")
                self._problem = "queues can't be looked at; the gateway's log says why"
            self._encoded.clear()
            self._changed.set()
            self._changed = asyncio.Event()
            await asyncio.sleep(max(0.0, _ROUND_S - (SYSTEM_CLOCK.monotonic() - begun_s)))

    async def _round(self, begun_s: float) -> None:
        """Sample the queues that tabs show alone, then some of all, and rest so long that _SHARE is kept."""
        watched = [name for name in self._tabs if name]
        await self._sample(watched)
        if not self._tabs[""] or begun_s < self._rest_until_s:
            return
        if not self._left:
            await self._list()
        is_first = any("ready" not in self._row(name).shown for name in self._left)
        while self._left and (is_first or SYSTEM_CLOCK.monotonic() - begun_s < _SHARE * _ROUND_S):
            some, self._left = self._left[:_AT_ONCE], self._left[_AT_ONCE:]
            await self._sample(some)
            if SYSTEM_CLOCK.monotonic() - begun_s > _ROUND_S:
                break
        took_s = SYSTEM_CLOCK.monotonic() - begun_s
        self._rest_until_s = begun_s + (0.0 if is_first else took_s / _SHARE - _ROUND_S / 2)

    async def _list(self) -> None:
        """Begin a pass through all queues."""
        names = [
            name
            for name in await self._hub.names()
            if not is_reserved(self._hub.stored_name(QueueName(name)))
        ]
        for name in self._rows.keys() - set(names):
            self._forget(name)
        self._left = names
        for name in names:
            if name not in self._rows:
                self._show(name, {"name": name})

    def _forget(self, name: str) -> None:
        self._missing.add(name)
        self._missing &= self._tabs.keys()
        if self._rows.pop(name, None) is not None:
            self._version += 1
            self._gone.append((self._version, name))

    async def _sample(self, names: Sequence[str]) -> None:
        results = await asyncio.gather(*map(self._look, names), return_exceptions=True)
        for name, found in zip(names, results, strict=True):
            if isinstance(found, QueueNotFound):
                self._forget(name)
            elif isinstance(found, KmqError):
                self._show(name, {**self._row(name).shown, "name": name, "error": str(found)[:500]})
            elif isinstance(found, BaseException):
                raise found
            else:
                self._note(name, *found)

    async def _look(self, name: str) -> tuple[QueueDescription, int | None]:
        return await self._hub.administer(QueueName(name), _seen, patience_s=_PATIENCE_S)

    def _note(self, name: str, found: QueueDescription, oldest_ms: int | None) -> None:
        minute = self._minute()
        self._missing.discard(name)
        row = self._row(name)
        depth = found.ready + found.delayed
        if row.depths and row.depths[-1][0] == minute:
            row.depths.pop()
        row.depths.append((minute, depth))
        traffic = [one for one in self._traffic.get(name, ()) if minute - one[0] < _MINUTES]
        last = [one for one in traffic if one[0] >= minute - 1]  # the present minute has just begun, perhaps
        self._show(
            name,
            {
                "name": name,
                "ready": found.ready,
                "delayed": found.delayed,
                "in_flight": found.in_flight,
                "dead": found.dead,
                "held_groups": found.held_groups,
                "oldest_ms": oldest_ms,
                "in": max((one[1] for one in last), default=0),
                "out": max((one[2] for one in last), default=0),
                "depths": [(at - minute, count) for at, count in row.depths if minute - at < _MINUTES],
                "partitions": _partitions(found) if name in self._tabs else [],
            },
        )

    def _row(self, name: str) -> _Row:
        return self._rows.setdefault(name, _Row())

    def _show(self, name: str, shown: dict[str, Any]) -> None:
        """Give the row a new version if it has changed, so that tabs get it."""
        row = self._row(name)
        if row.shown != shown:
            self._version += 1
            row.version, row.shown = self._version, shown

    def _minute(self) -> int:
        return SYSTEM_CLOCK.wall_ms() // 60_000


class Tab:
    """One tab that looks."""

    def __init__(self, sampler: Sampler, watched: str) -> None:
        self._sampler = sampler
        self._watched = watched

    async def events(self, sender: Principal) -> AsyncIterator[bytes]:
        """All rows, then after each round what has changed."""
        since = -1
        while True:
            version = self._sampler.version
            yield self._sampler.news(sender, since, self._watched)
            since = version
            if not await self._sampler.next_round():
                return


def _seen(storage: Storage, stored: str) -> tuple[QueueDescription, int | None]:
    """A queue's settings and counts, and since when the message waits that is next; called in a thread."""
    found = storage.describe(stored)
    counts = getattr(found, "counts", None)  # on Kafka, where a look makes connections
    if counts is not None:
        return found, counts.oldest_ms
    if not found.ready or not storage.capabilities.immediate:
        return found, None
    with storage.open(stored) as queue:
        return found, next((one.enqueued_ms for one in queue.peek(1)), None)


def _partitions(found: QueueDescription) -> list[dict[str, Any]]:
    """Of a queue on Kafka: what each partition has, and which tracker has it."""
    counts = getattr(found, "counts", None)
    return [
        {
            "partition": one.partition,
            "waiting": one.depth - one.delayed,
            "in_flight": one.in_flight - one.released,
            "dead": one.dead_letters,
            "oldest_ms": one.oldest_ms,
            "tracker": one.owner,
        }
        for one in (() if counts is None else counts.partitions)
    ]
