"""Implements Engine over a SQL database: its methods run statements of statements.py in transactions."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.retries import Retries
from kmqpy.errors import ConfigError, KmqError, QueueNotFound, Unavailable
from kmqpy.storages.engine import Counts, MessageRow, NewRow, QueueRow, Taken, TakeRef
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.sql.arrivals import ArrivalCounts, ArrivalListener, Notifier, Watcher
from kmqpy.storages.sql.connections import Connections
from kmqpy.storages.sql.dedup_keys import are_distinct, clean, cleans, put_new, put_unique
from kmqpy.storages.sql.dialect import (
    CHUNK,
    Cursor,
    Dialect,
    Picked,
    headers_bytes,
    message_row,
    take_collapsed,
)
from kmqpy.storages.sql.groups import (
    FIRST,
    change_grouped,
    check_isolation,
    finish_at_once,
    go_on,
    groups_in,
    groups_of,
    look_grouped,
    pass_time_grouped,
    stranded_groups,
    take_first,
    take_grouped,
    waiting_groups,
)
from kmqpy.storages.sql.schema import Schema
from kmqpy.storages.sql.shares import lock_free, take_shared
from kmqpy.storages.sql.statements import NO_LIMIT, RETRY_DIGITS, Names

T = TypeVar("T")
_BY_POLICY = -1
"""As :delay_ms, it means the delay of the queue's retries."""
_LOOKS_EACH_S = 5.0
"""An engine looks once in so many seconds for altered settings of a queue, and for stranded groups."""
_READ_AT_ONCE = 500
"""read_all() reads so many messages by one statement, so that none takes as long as a minute."""


class SqlEngine:
    """Implements Engine over the database of a dialect, in the tables of `names`.

    timeout_s  a failed transaction is repeated for at most this many seconds; then Unavailable is raised
    patience   wait() returns after this many seconds of real time at most; for tests, whose clock stands
               still. None: wait() waits for the seconds that its caller gives
    """

    def __init__(
        self, dialect: Dialect, names: Names, *, timeout_s: float = 10.0, patience: float | None = None
    ) -> None:
        self._dialect = dialect
        self._sql = dialect.sql
        self._patience = patience
        self._arrivals = ArrivalCounts()
        self._looks: dict[str, tuple[float, tuple[int, int]]] = {}
        self._settings: dict[str, StoredQueueSettings] = {}  # as they were read last, by generation
        self._connections = Connections(dialect, timeout_s)
        self._run = self._connections.run
        self._listener: ArrivalListener | None = None
        self._notifier: Notifier | None = None
        self._watcher: Watcher | None = None
        if dialect.name == "postgresql":
            channel = dialect.defaults()["channel"]
            self._listener = ArrivalListener(self._connections, channel, self._arrivals)
            self._notifier = Notifier(self._connections, self._sql["notify"], channel)
        elif dialect.name == "sqlite":
            self._watcher = Watcher(self._connections, self._sql["changes"], self._arrivals)
        try:
            lossy = self._run(dialect.lossy_setting)  # first, since it may refuse the server
            self.storage_id = Schema(self._connections, names).prepare()
            self.capabilities = replace(dialect.capabilities, durable=not lossy, lossy_setting=lossy)
        except BaseException:
            self._connections.close()
            raise

    def unchecked_setting(self) -> str:
        return self._run(self._dialect.unchecked_setting)

    def read_all(self) -> str:
        """See DamageChecks. Indexes are read in SQLite only."""
        after = 0

        def check(cursor: Cursor) -> str:
            cursor.execute(self._sql["check_all"])
            ((found,),) = cursor.fetchall()
            return "" if found == "ok" else str(found)

        def read(cursor: Cursor) -> Sequence[Any]:
            cursor.execute(self._sql["read_some"], {"after": after, "limit": _READ_AT_ONCE})
            found: Sequence[Any] = cursor.fetchall()
            return found

        try:
            if "check_all" in self._sql:
                return self._run(check)
            while rows := self._run(read, repeatable=False):  # what ends the server would end it again
                after = rows[-1][0]
        except Unavailable as error:
            if not self._dialect.is_damage(error.__cause__):
                raise
            return str(error)
        return ""

    # --- queues -----------------------------------------------------------------------------------

    def create_queue(self, settings: StoredQueueSettings) -> bool:
        """See Engine. The generation is random: unique over all storages."""
        parameters = {"queue": secrets.randbelow(2**62) + 1, "name": settings.name}
        text = settings.to_json()

        def create(cursor: Cursor) -> bool:
            cursor.execute(self._sql["create_queue"], {**parameters, "settings": text})
            return bool(cursor.rowcount)

        # Not repeatable: a second attempt would find the name taken by the first.
        return self._run(create, repeatable=False)

    def find_queue(self, name: str) -> QueueRow | None:
        def find(cursor: Cursor) -> tuple[int, str] | None:
            cursor.execute(self._sql["find_queue"], {"name": name})
            found: tuple[int, str] | None = cursor.fetchone()
            return found

        found = self._run(find)
        if found is None:
            return None
        row = QueueRow(str(found[0]), StoredQueueSettings.from_json(found[1], name))
        self._settings[row.generation] = row.settings
        return row

    def alter_queue(self, queue: QueueRow, settings: StoredQueueSettings) -> bool:
        parameters = self._parameters(queue)

        def alter(cursor: Cursor) -> bool:
            cursor.execute(self._sql["lock_settings"], parameters)
            found = cursor.fetchone()
            if found is None:
                raise _not_found(queue)
            if StoredQueueSettings.from_json(found[0], queue.name) != queue.settings:
                return False
            cursor.execute(self._sql["alter_queue"], {**parameters, "settings": settings.to_json()})
            if settings.shares:
                shares = {"fair": int(settings.fair), "by_noise": int(settings.by_noise)}
                given = self._parameters(queue, **shares)
                go_on(self._dialect, cursor, groups_in(self._dialect, cursor, "busy_groups", given), given)
            return True

        if altered := self._run(alter, several=True):
            self._settings[queue.generation] = settings
        return altered

    def queue_names(self) -> list[str]:
        def names(cursor: Cursor) -> list[str]:
            cursor.execute(self._sql["queue_names"])
            return [name for (name,) in cursor.fetchall()]

        return self._run(names)

    def delete_queue(self, queue: QueueRow) -> None:
        parameters = self._parameters(queue)

        def delete(cursor: Cursor) -> None:
            if not self._dialect.change(cursor, "delete_queue", parameters):
                raise _not_found(queue)
            for name in ("purge_ready", "purge_unready", "purge_dead", "forget_turn", "forget_all_keys"):
                if name in self._sql:
                    self._dialect.change(cursor, name, parameters)

        self._run(delete, several=True, repeatable=False)
        for known in (self._settings, self._looks):
            known.pop(queue.generation, None)
        self._arrived(queue)

    # --- messages ---------------------------------------------------------------------------------

    def put(self, queue: QueueRow, rows: Sequence[NewRow], connection: Any = None) -> list[int]:
        is_unique = any(row.dedup for row in rows)
        if is_unique and queue.settings.until_acknowledged and connection is None:
            self._look_around(queue)  # how many redeliveries there are tells which rows keep their keys
        parameters = self._parameters(queue)
        if any(row.delay_ms > NO_LIMIT for row in rows):
            rows = [row._replace(delay_ms=min(row.delay_ms, NO_LIMIT)) for row in rows]

        cleaning = is_unique and cleans()
        # Within a transaction of the application's, which may be long, others would wait for keys of theirs.
        apart = cleaning and connection is not None and self._dialect.name != "sqlite"

        def put(cursor: Cursor) -> list[int]:
            if is_unique:
                ids = put_unique(self._dialect, cursor, parameters, rows, cleaning=cleaning and not apart)
            else:
                ids = self._dialect.put(cursor, parameters, rows)
            if not ids:
                raise _not_found(queue)
            return ids

        def put_and_tell(cursor: Cursor) -> list[int]:
            if is_unique and queue.settings.until_acknowledged:  # it must see what has ended meanwhile
                check_isolation(self._dialect, cursor, "unique jobs")
            ids = put(cursor)
            self._tell(cursor, queue)
            return ids

        if connection is not None:
            if apart:
                count = len(rows)
                self._connections.try_now(lambda cursor: clean(self._dialect, cursor, parameters, count))
            return self._connections.within(connection, put_and_tell)
        several = is_unique or not self._dialect.is_one_statement
        ids: list[int] = []
        if is_unique and not cleaning and "put_new" in self._sql and are_distinct(rows):
            ids = self._run(lambda cursor: put_new(self._dialect, cursor, parameters, rows), repeatable=False)
        ids = ids or self._run(put, several=several, repeatable=False)
        self._arrived(queue)
        return ids

    def take(self, queue: QueueRow, limit: int, lease_ms: int, *, one_per_group: bool = False) -> Taken:
        """See Engine."""
        seen = self._arrivals.seen(queue.generation)
        self._look_around(queue)
        pick = partial(self._pick, queue, limit, lease_ms, one_per_group=one_per_group)
        picked = pick(late=False)
        if picked.is_due:
            self._pass_time(queue)
        if picked.is_due or picked.has_ready:
            # A lease that ends only now is left to the next take: in a busy queue some lease always ends.
            picked = pick(late=True)
        while queue.settings.keeps_groups and picked.has_ready and not picked.rows:
            picked = pick(late=True)  # each finds out of many more that they wait
        return Taken(picked.rows, picked.now_ms, picked.due_ms, seen)

    def finish(self, queue: QueueRow, takes: Sequence[TakeRef], connection: Any = None) -> int:
        return self._change(queue, "finish", takes, connection=connection)

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
        if delay_ms is None:
            delay_ms = _BY_POLICY if count and self._current(queue).retry_delays else 0
        given = {"delay_ms": min(delay_ms, NO_LIMIT), "counted": int(count), "reason": reason}
        return self._change(queue, "give_back", takes, gone=gone, asked=len(takes), **given)

    def extend(self, queue: QueueRow, takes: Sequence[TakeRef], lease_ms: int) -> list[TakeRef]:
        """See Engine. If some takes are lost, a second statement finds out which; they stay lost."""
        lease_ms = min(lease_ms, NO_LIMIT)
        if self._change(queue, "extend", takes, lease_ms=lease_ms, asked=len(takes)) == len(takes):
            return []
        parameters = self._parameters(queue, **self._dialect.refs(takes))

        def still_taken(cursor: Cursor) -> set[TakeRef]:
            cursor.execute(self._sql["still_taken"], parameters)
            return {TakeRef(*one) for one in cursor.fetchall()}

        found = self._run(still_taken)
        return [one for one in takes if one not in found]

    def bury(
        self, queue: QueueRow, takes: Sequence[TakeRef], reason: str, *, gone: Sequence[MessageRow] = ()
    ) -> int:
        return self._change(queue, "bury", takes, gone=gone, reason=reason)

    def release_all(self, queue: QueueRow) -> int:
        def release(cursor: Cursor, parameters: dict[str, Any]) -> int:
            groups: Sequence[int] = ()
            if queue.settings.keeps_groups:
                groups = groups_in(self._dialect, cursor, "busy_groups", parameters)
            done = self._dialect.change(cursor, "release_all", parameters)
            go_on(self._dialect, cursor, groups, parameters)
            return done

        released = self._after_passing_time(queue, release)
        self._arrived(queue)
        return released

    def peek(self, queue: QueueRow, limit: int) -> list[MessageRow]:
        limit = min(limit, NO_LIMIT)
        if queue.settings.in_groups:
            return self._after_passing_time(queue, partial(look_grouped, self._dialect), limit=limit)
        return self._after_passing_time(queue, self._row_reader("peek"), limit=limit)

    def counts(self, queue: QueueRow, limit: int | None = None) -> Counts:
        def count(cursor: Cursor, parameters: dict[str, Any]) -> Counts:
            cursor.execute(self._sql["counts" if limit is None else "some_counts"], parameters)
            ready, delayed, taken, dead, behind = cursor.fetchone()
            is_asked = limit is None and queue.settings.holds
            held = groups_in(self._dialect, cursor, "held_groups", parameters) if is_asked else ()
            return Counts(ready + behind, delayed, taken, dead, len(held))

        return self._after_passing_time(queue, count, limit=min(limit or 0, NO_LIMIT))

    def taken_rows(
        self,
        queue: QueueRow,
        *,
        limit: int,
        after: int = 0,
        taken_for_ms: int | None = None,
        queued_before_ms: int | None = None,
    ) -> list[MessageRow]:
        return self._after_passing_time(
            queue,
            self._row_reader("taken_rows"),
            limit=limit,
            after=after,
            taken_for_ms=-NO_LIMIT if taken_for_ms is None else min(taken_for_ms, NO_LIMIT),
            queued_before_ms=NO_LIMIT if queued_before_ms is None else _bounded(queued_before_ms),
        )

    def purge(self, queue: QueueRow) -> int:
        def purge(cursor: Cursor, parameters: dict[str, Any]) -> int:
            names = ("purge_ready", "purge_unready")
            purged = sum(self._dialect.change(cursor, name, parameters) for name in names)
            if queue.settings.keeps_groups:
                # Takers have perhaps let new rows wait, meanwhile, for what is gone now.
                groups = groups_in(self._dialect, cursor, "left_groups", parameters)
                go_on(self._dialect, cursor, groups, parameters)
            return purged

        return self._after_passing_time(queue, purge)

    # --- dead letters -----------------------------------------------------------------------------

    def dead_rows(self, queue: QueueRow, limit: int, *, with_bodies: bool) -> list[MessageRow]:
        name = "dead_rows" if with_bodies else "dead_rows_without_bodies"
        rows = self._after_passing_time(queue, self._row_reader(name), limit=min(limit, NO_LIMIT))
        if with_bodies:
            return [row._replace(until_ms=0, size=len(row.body)) for row in rows]
        # This statement gives the length of a body in its place.
        return [row._replace(until_ms=0, size=int(row.body), body=b"") for row in rows]

    def redrive(self, queue: QueueRow, *, ids: Sequence[int] | None, limit: int | None) -> int:
        given: dict[str, Any] = {"limit": NO_LIMIT if limit is None else min(limit, NO_LIMIT)}
        if ids is not None:
            given["ids"] = self._dialect.ids(ids)
        name = "redrive" if ids is None else "redrive_ids"

        def redrive(cursor: Cursor, parameters: dict[str, Any]) -> int:
            groups: Sequence[int] = ()
            if queue.settings.holds and ids is not None:
                groups = groups_of(self._dialect, cursor, ids)
            elif queue.settings.holds:
                groups = groups_in(self._dialect, cursor, "held_groups", parameters)
            redriven = self._dialect.change(cursor, name, parameters)
            go_on(self._dialect, cursor, groups, parameters)
            return redriven

        redriven = self._after_passing_time(queue, redrive, **given)
        self._arrived(queue)
        return redriven

    def purge_dead(self, queue: QueueRow) -> int:
        def purge(cursor: Cursor, parameters: dict[str, Any]) -> int:
            if not queue.settings.holds:
                return self._dialect.change(cursor, "purge_dead", parameters)
            held = partial(groups_in, self._dialect, cursor, "held_groups", parameters)
            purged, groups = change_grouped(self._dialect, cursor, "purge_dead", parameters, held)
            go_on(self._dialect, cursor, groups, parameters)
            return purged

        purged = self._after_passing_time(queue, purge)
        if queue.settings.holds:
            self._arrived(queue)
        return purged

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, queue: QueueRow, taken: Taken, seconds: float) -> bool:
        pause_s = min(seconds, self._dialect.waits_ms / 1000)
        if taken.next_due_ms is not None:
            pause_s = min(pause_s, max(0, taken.next_due_ms - taken.now_ms) / 1000 + 0.001)
        if self._patience is not None:
            seconds = min(seconds, self._patience)
            pause_s = min(pause_s, seconds)
        if self._listener is not None:
            self._listener.start()
        return self._wait(queue.generation, taken.seen, pause_s) or pause_s < seconds

    def wake(self, queue: QueueRow) -> None:
        self._arrivals.note(queue.generation)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.stop()
        if self._notifier is not None:
            self._notifier.stop()
        if self._watcher is not None:
            self._watcher.close()
        self._connections.close()

    def _wait(self, generation: str, seen: int, seconds: float) -> bool:
        if self._watcher is None:
            return self._arrivals.wait(generation, seen, seconds)
        deadline = SYSTEM_CLOCK.monotonic() + seconds
        while (left := deadline - SYSTEM_CLOCK.monotonic()) > 0:
            self._watcher.look()
            if self._arrivals.wait(generation, seen, min(left, self._watcher.PERIOD_S)):
                return True
        return False

    # --- what these methods share -----------------------------------------------------------------

    def _current(self, queue: QueueRow) -> StoredQueueSettings:
        """The settings of the queue as they were read last, since they may have been altered."""
        return self._settings.get(queue.generation, queue.settings)

    def _parameters(self, queue: QueueRow, **more: Any) -> dict[str, Any]:
        settings = self._current(queue)
        most = settings.max_redeliveries
        return {
            **self._dialect.defaults(),
            "queue": int(queue.generation),
            "name": queue.name,
            "automatic": int(not settings.is_manual),
            "to_front": int(settings.to_front),
            "in_groups": int(settings.keeps_groups),
            "shares": int(settings.shares),
            "fair": int(settings.fair),
            "by_noise": int(settings.by_noise),
            "holds": int(settings.holds),
            "window_ms": min(settings.dedup_window_ms, NO_LIMIT),
            "until_acknowledged": int(settings.until_acknowledged),
            "most": NO_LIMIT if most is None else min(most, NO_LIMIT),
            **(_retries(settings.retries) if settings.retry_delays else _NO_RETRIES),
            **more,
        }

    def _pick(self, queue: QueueRow, limit: int, lease_ms: int, *, late: bool, one_per_group: bool) -> Picked:
        parameters = self._parameters(
            queue, limit=min(limit, NO_LIMIT), lease_ms=min(lease_ms, NO_LIMIT), late=int(late)
        )
        for_good = queue.settings.at_most_once
        is_several = (
            queue.settings.collapse or queue.settings.keeps_groups or not self._dialect.is_one_statement
        )
        take: Callable[..., Picked] = self._dialect.take
        if queue.settings.collapse:
            take = partial(take_collapsed, self._dialect)
        elif queue.settings.in_groups:
            take = partial(take_grouped, self._dialect, one_per_group=one_per_group)
        elif queue.settings.shares:
            take = partial(take_shared, self._dialect)

        def pick(cursor: Cursor) -> Picked:
            picked = take(cursor, parameters, for_good=for_good, late=late)
            if not picked.queue_exists:
                raise _not_found(queue)
            return picked

        syncs = is_several and "sync" in self._sql
        sync = partial(self._sync, parameters) if syncs else None
        first: Sequence[MessageRow] = ()
        if queue.settings.in_groups and "take_first" in self._sql:
            at_once = partial(
                take_first, self._dialect, parameters={**parameters}, one_per_group=one_per_group
            )
            found: Picked = self._run(at_once)
            if len(found.rows) == limit:
                return found
            first, parameters["limit"] = found.rows, parameters["limit"] - len(found.rows)
        try:
            found = self._run(pick, several=is_several, then=sync)
        except Unavailable:
            if not first:
                raise
            return found  # they are taken: with an error nobody would have them
        if first:  # not what is due, too: that is said of a take without rows
            found = Picked([*first, *found.rows], first[0].since_ms, waiting=found.waiting)
        if found.waiting and self._dialect.name in ("mariadb", "mysql"):
            with suppress(Unavailable):  # the rows are taken: with an error nobody would have them
                self._show_stranded(queue, found.waiting)
        return found

    def _sync(self, parameters: Mapping[str, Any], cursor: Cursor, picked: Picked) -> None:
        """Make up for the sync that take_turn has put off; fails if the server ended, and lost the take."""
        if picked.rows:
            cursor.execute(self._sql["sync"], parameters)

    def _look_around(self, queue: QueueRow) -> None:
        """Now and then, read the settings, which others may alter, and show what takers left.

        These ended, or lost the server, before they looked.
        """
        now_s = SYSTEM_CLOCK.monotonic()
        looked_s, after = self._looks.get(queue.generation, (-_LOOKS_EACH_S, FIRST))
        if now_s - looked_s < _LOOKS_EACH_S:
            return
        with suppress(ConfigError):  # what a newer kmqpy has set
            self.find_queue(queue.name)
        groups: Sequence[int] = ()
        if queue.settings.keeps_groups and "waiting" in self._sql:
            parameters = self._parameters(queue)
            groups, after = self._run(lambda cursor: waiting_groups(cursor, self._dialect, parameters, after))
        self._looks[queue.generation] = now_s, after
        if groups:
            self._show_stranded(queue, groups)

    def _show_stranded(self, queue: QueueRow, groups: Sequence[int]) -> None:
        """Let those of these groups go on of which all rows wait."""
        parameters = self._parameters(queue)
        found = self._run(lambda cursor: stranded_groups(self._dialect, cursor, groups, parameters))
        if found:
            self._run(lambda cursor: go_on(self._dialect, cursor, found, parameters), several=True)
            self._arrived(queue)

    def _show_waiting(self, ids: Sequence[int]) -> None:
        """Let these rows come if they wait for others: a transaction of the application is to end them.

        Who ends the others meanwhile passes over what it has locked, and if it is rolled back, nobody else
        would let them come for some seconds. Takers see that it is not their turn.
        """

        def show(cursor: Cursor) -> None:
            found = sorted(lock_free(self._dialect, cursor, "lock_behind", ids))
            if found:
                given = {**self._dialect.defaults(), "ids": self._dialect.ids(found)}
                self._dialect.change(cursor, "show", given)

        self._connections.try_now(show)

    def _change(
        self,
        queue: QueueRow,
        name: str,
        takes: Sequence[TakeRef],
        *,
        connection: Any = None,
        gone: Sequence[MessageRow] = (),
        **more: Any,
    ) -> int:
        """Change the rows of takes by the statement `name`; returns how many it changed."""
        if connection is None:
            self._look_around(queue)
        parameters = self._parameters(queue, **self._dialect.refs(takes), **more)

        def change(cursor: Cursor) -> int:
            if gone:
                self._add_again(cursor, queue, gone)
            groups: list[int] = []
            if at_once:
                done = finish_at_once(self._dialect, cursor, parameters)
            elif in_groups:
                if connection is not None:  # else it would not see what a taker lets wait meanwhile
                    check_isolation(self._dialect, cursor, "groups")
                of_takes = partial(groups_of, self._dialect, reader or cursor, [one.id for one in takes])
                done, groups = change_grouped(self._dialect, cursor, name, parameters, of_takes)
            else:
                done = self._dialect.change(cursor, name, parameters)
            if done < len(takes):  # others were faster, or the queue is gone
                self._check_exists(cursor, queue)
            shown = groups and go_on(self._dialect, cursor, groups, parameters, reader)
            if shown and connection is not None:
                self._tell(cursor, queue)
            return done

        can_at_once = queue.settings.in_groups and "finish_naming_groups" in self._sql
        at_once = can_at_once and name == "finish" and connection is None
        own_reads = connection is not None and self._dialect.name in ("mariadb", "mysql")
        reader = self._connections.reader() if own_reads else None
        in_groups = queue.settings.keeps_groups
        if name == "extend":  # by an id it takes a row; others may follow where more than one can be taken
            in_groups = queue.settings.shares and any(one.is_any for one in takes)
        if connection is not None:
            if in_groups and self._dialect.name != "sqlite":
                self._show_waiting([one.id for one in takes])
            return self._connections.within(connection, change)
        several = not at_once and (bool(gone) or in_groups or self._dialect.name == "sqlite")
        done = self._run(change, several=several, repeatable=not gone)
        if done and (name == "give_back" or in_groups):
            self._arrived(queue)
        return done

    def _add_again(self, cursor: Cursor, queue: QueueRow, gone: Sequence[MessageRow]) -> None:
        """Insert rows that a take has deleted, as taken ones: rule 9 of kmqpy.storages.engine."""
        parameters = self._parameters(queue)
        cursor.execute(self._sql["lock_queue"], parameters)
        if cursor.fetchone() is None:
            raise _not_found(queue)
        for row in gone:
            given = {
                "id": row.id,
                "place": row.place,
                "until_ms": NO_LIMIT,  # their lease has not ended, whatever the clock says
                "enqueued_ms": row.enqueued_ms,
                "first_enqueued_ms": row.first_enqueued_ms,
                "take": row.take,
                "requeues": row.requeues,
                "minus_priority": -row.priority,
                "key": row.key,
                "headers": headers_bytes(row.headers),
                "body": row.body,
                "group": row.group,
            }
            cursor.execute(self._sql["add_again"], {**parameters, **given})

    def _after_passing_time(
        self, queue: QueueRow, work: Callable[[Cursor, dict[str, Any]], T], **parameters: Any
    ) -> T:
        """Call _pass_time(), then return the result of `work(cursor, parameters)`."""
        self._pass_time(queue)

        def checked(cursor: Cursor) -> T:
            self._check_exists(cursor, queue)
            return work(cursor, self._parameters(queue, **parameters))

        return self._run(checked, several=True)

    def _pass_time(self, queue: QueueRow) -> None:
        """Carry out the delays and leases of a queue that have ended."""

        def pass_time(cursor: Cursor) -> int:
            if queue.settings.keeps_groups:
                return pass_time_grouped(self._dialect, cursor, self._parameters(queue))
            return self._dialect.pass_time(cursor, self._parameters(queue))

        while self._run(pass_time, several=True) == CHUNK:
            pass

    def _row_reader(self, name: str) -> Callable[[Cursor, dict[str, Any]], list[MessageRow]]:
        """A function that reads the rows of the statement `name`."""

        def rows(cursor: Cursor, parameters: dict[str, Any]) -> list[MessageRow]:
            cursor.execute(self._sql[name], parameters)
            return [message_row(one) for one in cursor.fetchall()]

        return rows

    def _check_exists(self, cursor: Cursor, queue: QueueRow) -> None:
        cursor.execute(self._sql["queue_exists"], {"queue": int(queue.generation)})
        if not cursor.fetchone()[0]:
            raise _not_found(queue)

    def _tell(self, cursor: Cursor, queue: QueueRow) -> None:
        """Let other processes hear of an arrival when the application commits."""
        if "notify" in self._sql:
            cursor.execute(self._sql["notify"], {**self._parameters(queue), "arrived": [queue.generation]})

    def _arrived(self, queue: QueueRow) -> None:
        """Wake threads that wait for the queue, here and, on PostgreSQL, in other processes."""
        self._arrivals.note(queue.generation)
        if self._notifier is not None:
            self._notifier.tell(queue.generation)


def _not_found(queue: QueueRow) -> KmqError:
    return QueueNotFound(f"queue {queue.name!r} was deleted")


def _retries(retries: Retries) -> dict[str, Any]:
    """Parameters with the delays before redeliveries."""
    delays = retries.delays_ms
    return {
        "retries": "".join(f"{delay:0{RETRY_DIGITS}}" for delay in delays),
        "retry_count": len(delays),
        "last_retry": delays[-1] if delays else 0,
        "jitter": round(retries.jitter * 1000),
        "salt": secrets.randbelow(1001) if retries.jitter else 0,
    }


_NO_RETRIES = _retries(Retries())


def _bounded(value: int) -> int:
    return max(-NO_LIMIT, min(value, NO_LIMIT))
