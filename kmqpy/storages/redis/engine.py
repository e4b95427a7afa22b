"""Implements Engine over Redis and Valkey: its methods call functions of functions.lua."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from kmqpy.core.pieces import pieces
from kmqpy.errors import AccessDenied, ConfigError, MessageError, QueueNotFound, Unavailable
from kmqpy.queue import Capabilities
from kmqpy.storages.engine import Counts, MessageRow, NewRow, QueueRow, Taken, TakeRef
from kmqpy.storages.redis.arrival_subscriber import ArrivalSubscriber
from kmqpy.storages.redis.rows import (
    gone_rows,
    put_digests,
    put_groups,
    put_keys,
    put_options,
    read_rows,
    row_bytes,
    take_refs,
)
from kmqpy.storages.redis.server import Server
from kmqpy.storages.settings import StoredQueueSettings

_FORMAT = 1
"""The format of the keys. A storage with a larger one is of a newer kmqpy, and is refused."""
_MAX_BODY_BYTES = 2**26
_MAX_PUT_BYTES = 2**29
"""The most bytes that one call stores, with keys and headers; for more, it raises MessageError."""
_NUMBERS_PER_BLOCK = 2**16
"""A queue gets numbers, for ids and places of messages, from the storage in blocks of at least this size."""
_REDRIVEN_PER_CALL = 1000
"""The most dead letters that one call of the Lua function `redrive` moves; the rest need further calls."""


class RedisEngine:
    """Implements Engine. All keys begin with `prefix`; functions.lua describes them.

    The names of the queues are in one hash slot (of Redis Cluster), and each queue is in its own. So making
    and deleting a queue take several steps. A queue exists once its name is registered. If a process dies
    before that step, Redis removes the queue's key within the hour. If a process dies between the two steps
    of a deletion, the next find_queue() removes the name.

    RedisEngine() raises ConfigError for a server that may evict keys, and messages with them, or is too old,
    and for keys of a newer kmqpy or of another program.
    """

    def __init__(self, server: Server, *, prefix: str = "kmq") -> None:
        self._server = server
        self._prefix = prefix
        self._registry = (f"{prefix}:{{queues}}", f"{prefix}:{{queues}}:names")
        self._arrivals = ArrivalSubscriber(server.connection)
        facts = _checked_info(server)
        self.storage_id = self._open()
        lossy = _lossy_setting(facts, server)
        self.capabilities = Capabilities(
            durable=not lossy,
            lossy_setting=lossy,
            collapse=True,
            groups=True,
            fair=True,
            dedup=True,
            retry_delays=True,
            blocking_take=True,
            max_body_bytes=_MAX_BODY_BYTES,
        )

    # --- queues -----------------------------------------------------------------------------------

    def create_queue(self, settings: StoredQueueSettings) -> bool:
        generation = uuid.uuid4().hex
        key, first = (
            self._key(generation),
            int(self._storage_function("allot", _NUMBERS_PER_BLOCK, 0)) - _NUMBERS_PER_BLOCK,
        )
        fields: dict[str, object] = {
            "number": first,
            "last_number": first + _NUMBERS_PER_BLOCK,
            "arrivals": 0,
            "largest": 1,
            "max_redeliveries": _limit(settings)[0],
            "to_front": int(settings.to_front),
            "is_manual": int(settings.is_manual),
            "at_most_once": int(settings.at_most_once),
            "more": _more(settings),
        }
        self._server.function("make", (key,), *(part for pair in fields.items() for part in pair))
        made = self._storage_function("register", settings.name, generation, settings.to_json())
        if not made:
            self._server.function("delete", (key,))
        elif not self._server.function("settle", (key,)):
            self._forget(settings.name, generation)
            raise Unavailable(f"{self._server.name}: it forgot the queue {settings.name!r} while it was made")
        return bool(made)

    def find_queue(self, name: str) -> QueueRow | None:
        found = self._server.call("HGET", self._registry[1], name)
        if found is None:
            return None
        generation, _, settings = found.decode(errors="replace").partition(" ")
        key = self._key(generation)
        settled = self._server.function("settle", (key,))
        if settled < 0:
            raise ConfigError(
                f"queue {name!r}: somebody deleted its key {key!r}, and its messages are still there; "
                f"restore the key from a backup, or delete all keys {key + ':*'!r} and create the queue anew"
            )
        if not settled:
            self._forget(name, generation)  # the process that made or deleted it died halfway
            return None
        return QueueRow(generation, StoredQueueSettings.from_json(settings, name))

    def alter_queue(self, queue: QueueRow, settings: StoredQueueSettings) -> bool:
        before = self._server.call("HGET", self._registry[1], queue.name) or b""
        generation, _, text = before.decode(errors="replace").partition(" ")
        if generation != queue.generation:
            raise _not_found(queue)
        if StoredQueueSettings.from_json(text, queue.name) != queue.settings:
            return False
        if not self._storage_function("alter", queue.name, before, f"{generation} {settings.to_json()}"):
            return False
        limit = None
        while limit != _limit(settings):  # others may alter the queue before its limit is set, or after
            limit = _limit(settings)
            self._server.function("limit", (self._key(generation),), *limit)
            found = self.find_queue(queue.name)
            if found is None or found.generation != generation:
                break
            settings = found.settings
        if settings.shares:
            self._call(queue, "settle_busy")
        return True

    def queue_names(self) -> list[str]:
        return [name.decode(errors="replace") for name in self._server.call("HKEYS", self._registry[1])]

    def delete_queue(self, queue: QueueRow) -> None:
        there = self._server.function("delete", (self._key(queue.generation),))
        if not self._forget(queue.name, queue.generation) and not there:
            raise _not_found(queue)

    # --- messages ---------------------------------------------------------------------------------

    def put(self, queue: QueueRow, rows: Sequence[NewRow], connection: Any = None) -> list[int]:  # noqa: ARG002
        if not rows:
            return []
        stored = _checked_bytes([*map(row_bytes, rows)])
        how = (put_options(rows), put_digests(rows), put_groups(rows), put_keys(rows, queue.settings))
        ids = self._call(queue, "put", *how, *stored, repeatable=False)
        if how[-1]:
            return [*map(int, ids.split())]
        return list(range(int(ids), int(ids) + len(rows)))

    def take(
        self,
        queue: QueueRow,
        limit: int,
        lease_ms: int,
        *,
        one_per_group: bool = False,
    ) -> Taken:
        wakes = self._arrivals.wakes
        now_ms, due_ms, arrivals, rows = self._call(queue, "take", limit, lease_ms, int(one_per_group))
        return Taken(read_rows(rows), now_ms, due_ms if due_ms >= 0 else None, _SeenArrivals(arrivals, wakes))

    def finish(self, queue: QueueRow, takes: Sequence[TakeRef], connection: Any = None) -> int:  # noqa: ARG002
        return int(self._call(queue, "finish", take_refs(takes)))

    def give_back(
        self,
        queue: QueueRow,
        takes: Sequence[TakeRef],
        *,
        delay_ms: int | None,
        count: bool,
        reason: str | None,
        gone: Sequence[MessageRow] = (),
    ) -> int:
        how = ("" if delay_ms is None else delay_ms, int(count), int(reason is not None), reason or "")
        rows = _checked_bytes(gone_rows(gone))
        return int(self._call(queue, "give_back", take_refs(takes), *how, *rows, repeatable=not gone))

    def extend(self, queue: QueueRow, takes: Sequence[TakeRef], lease_ms: int) -> list[TakeRef]:
        lost = self._call(queue, "extend", take_refs(takes), lease_ms)
        return [takes[number - 1] for number in lost]

    def bury(
        self, queue: QueueRow, takes: Sequence[TakeRef], reason: str, *, gone: Sequence[MessageRow] = ()
    ) -> int:
        rows = _checked_bytes(gone_rows(gone))
        return int(self._call(queue, "bury", take_refs(takes), reason, *rows, repeatable=not gone))

    def release_all(self, queue: QueueRow) -> int:
        """See Engine. Many rows are released in several steps."""
        released: int = 0
        after = b""
        while True:
            done, after = self._call(queue, "release", after)
            released += done
            if not after:
                return released

    def peek(self, queue: QueueRow, limit: int) -> list[MessageRow]:
        """See Engine. Large rows are read in several steps."""
        found: list[MessageRow] = []
        offset = 0
        while len(found) < limit:
            done, rows = self._call(queue, "peek", offset, limit - len(found))
            if not done:
                break
            offset += done
            found += read_rows(rows)
        return found

    def counts(self, queue: QueueRow, limit: int | None = None) -> Counts:  # noqa: ARG002 - counting costs nothing
        return Counts(*self._call(queue, "counts"))

    def taken_rows(
        self,
        queue: QueueRow,
        *,
        limit: int,
        after: int = 0,
        taken_for_ms: int | None = None,
        queued_before_ms: int | None = None,
    ) -> list[MessageRow]:
        """See Engine. Many or large rows are read in several steps."""
        filters = ["" if one is None else one for one in (taken_for_ms, queued_before_ms)]
        found: list[MessageRow] = []
        last: bytes | int = after or b""
        while len(found) < limit:
            last, rows = self._call(queue, "taken", last, limit - len(found), *filters)
            found += read_rows(rows)
            if not last:
                break
        return found

    def purge(self, queue: QueueRow) -> int:
        return int(self._call(queue, "purge"))

    # --- dead letters -----------------------------------------------------------------------------

    def dead_rows(self, queue: QueueRow, limit: int, *, with_bodies: bool) -> list[MessageRow]:
        """See Engine. Many or large rows are read in several steps."""
        found: list[MessageRow] = []
        while len(found) < limit:
            data = self._call(queue, "dead", len(found), limit - len(found), int(with_bodies))
            page = read_rows(data)
            if not page:
                break
            found += page
        return found

    def redrive(self, queue: QueueRow, *, ids: Sequence[int] | None, limit: int | None) -> int:
        """See Engine. Many rows are redriven in several steps."""
        if ids is not None:
            chosen = list(dict.fromkeys(ids))[:limit]
            parts = pieces(chosen, _REDRIVEN_PER_CALL)
            return sum(int(self._call(queue, "redrive", ",".join(map(str, part)), 0)) for part in parts)
        left = self.counts(queue).dead if limit is None else limit
        redriven = 0
        while left > 0:
            done = int(self._call(queue, "redrive", "", min(left, _REDRIVEN_PER_CALL)))
            if not done:
                break
            redriven += done
            left -= done
        return redriven

    def purge_dead(self, queue: QueueRow) -> int:
        return int(self._call(queue, "purge_dead"))

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, queue: QueueRow, taken: Taken, seconds: float) -> bool:
        until_due = None if taken.next_due_ms is None else (taken.next_due_ms - taken.now_ms) / 1000 + 0.001
        is_due_first = until_due is not None and until_due < seconds
        patience = until_due if until_due is not None and is_due_first else seconds
        wakes = taken.seen.wakes if isinstance(taken.seen, _SeenArrivals) else 0
        key = self._key(queue.generation).encode()
        return self._arrivals.wait(key, taken.seen, wakes, patience) or is_due_first

    def wake(self, queue: QueueRow) -> None:
        self._arrivals.wake(self._key(queue.generation).encode())

    def close(self) -> None:
        self._arrivals.close()
        self._server.close()

    # --- calls ------------------------------------------------------------------------------------

    def _key(self, generation: str) -> str:
        return f"{self._prefix}:{{{generation}}}"

    def _call(self, queue: QueueRow, name: str, *arguments: Any, repeatable: bool = True) -> Any:
        """Call a function on a queue; get the queue more numbers if it runs out of them."""
        keys = (self._key(queue.generation),)
        while True:
            try:
                return self._server.function(name, keys, *arguments, repeatable=repeatable)
            except ResponseError as error:
                kind, *numbers = str(error).split()
            if kind == "KMQNOTFOUND":
                raise _not_found(queue)
            if kind != "KMQNUMBERS":
                raise Unavailable(f"{self._server.name}: {kind} {' '.join(numbers)}")
            size = _NUMBERS_PER_BLOCK + int(numbers[1])
            last = int(self._storage_function("allot", size, numbers[0]))
            self._server.function("number", keys, last - size, last)

    def _storage_function(self, name: str, *arguments: Any) -> Any:
        """Call a function on the keys of the storage; make these anew if somebody has emptied the server."""
        while True:
            try:
                return self._server.function(name, self._registry, *arguments)
            except ResponseError as error:
                if not str(error).startswith("KMQEMPTIED"):
                    raise Unavailable(f"{self._server.name}: {error}") from None
            self.storage_id = self._open()

    def _forget(self, name: str, generation: str) -> bool:
        return bool(self._server.function("forget", self._registry, name, generation))

    def _open(self) -> str:
        found, storage_id, _ = self._server.function("open", self._registry, _FORMAT, uuid.uuid4().hex)
        if int(found) > _FORMAT:
            raise ConfigError(
                f"{self._server.name}: the keys {self._prefix}:* are of a newer kmqpy (format {int(found)}, "
                f"this one knows {_FORMAT}); update kmqpy"
            )
        return str(storage_id.decode())


def _checked_bytes(stored: list[bytes]) -> list[bytes]:
    """Return the rows as they will be stored; raise MessageError if they are too many bytes for one call."""
    if sum(map(len, stored)) > _MAX_PUT_BYTES:
        raise MessageError(
            f"messages: Redis takes at most {_MAX_PUT_BYTES} bytes at once; send fewer of them"
        )
    return stored


class _SeenArrivals(int):
    """The number of the last arrival that a take has seen, and how often wake() was called before."""

    wakes: int

    def __new__(cls, arrivals: int, wakes: int) -> _SeenArrivals:
        made = super().__new__(cls, arrivals)
        made.wakes = wakes
        return made


def _checked_info(server: Server) -> dict[str, str]:
    """The answer to INFO; raises ConfigError if the server is too old or may evict keys."""
    lines = (line.partition(":") for line in server.call("INFO").decode().splitlines())
    facts = {name: value for name, _, value in lines}
    version = facts.get("redis_version", "0")
    if int(version.partition(".")[0]) < 7:
        raise ConfigError(f"{server.name}: it is version {version}; kmqpy needs Redis 7, or any Valkey")
    policy = facts.get("maxmemory_policy", "")
    if policy.startswith("allkeys") and facts.get("maxmemory") != "0":
        raise ConfigError(
            f"{server.name}: when its memory is full it evicts keys ({policy}), and messages with them; "
            "set maxmemory-policy to noeviction"
        )
    return facts


def _lossy_setting(facts: dict[str, str], server: Server) -> str:
    if (enabled := facts.get("aof_enabled")) != "1":
        return f"appendonly={'unknown' if enabled is None else 'no'}"
    if facts.get("aof_rewrite_in_progress") == "1" and facts.get("aof_current_size") == "0":
        return "aof_rewrite_in_progress=1"  # just switched on: until the first file is whole, there is none
    wanted = {"appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
    for name, value in wanted.items():
        if (found := _setting(server, name)) != value:
            return f"{name}={found or 'unknown'}"
    return ""


def _setting(server: Server, name: str) -> str:
    try:
        found = server.call("CONFIG", "GET", name)
    except (AccessDenied, ResponseError):
        return ""  # a hosted server that does not tell its settings
    return found[1].decode() if len(found) == 2 else ""


def _limit(settings: StoredQueueSettings) -> tuple[int | str, str]:
    """The settings that can change, as the functions keep them."""
    return "" if settings.max_redeliveries is None else settings.max_redeliveries, _more(settings)


def _more(settings: StoredQueueSettings) -> str:
    """What few queues have, in one field: whether groups are in order, or held; retries; shares."""
    retries = settings.retries
    if not (settings.keeps_groups or retries.delays_ms):
        return ""
    numbers = f"{settings.in_groups:d} {settings.holds:d} {round(retries.jitter * 1000)}"
    shares = (
        f" {settings.fair + settings.by_noise} {settings.max_in_flight_per_group or ''}"
        if settings.shares
        else ""
    )
    return f"{numbers} {','.join(map(str, retries.delays_ms))}{shares}"


def _not_found(queue: QueueRow) -> QueueNotFound:
    return QueueNotFound(f"queue {queue.name!r} was deleted")
