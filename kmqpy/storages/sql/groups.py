"""Takes and ends of messages in queues with order="group" (rule 11 of kmqpy.storages.engine), on any dialect.

group_statements.py explains how messages of a group wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple

from kmqpy.errors import ConfigError
from kmqpy.storages.engine import MessageRow
from kmqpy.storages.sql.dialect import (
    CHUNK,
    Cursor,
    Dialect,
    Parameters,
    Picked,
    message_rows,
    situation,
)
from kmqpy.storages.sql.shares import listed, lock_free, rows_of, share_on, take_rows

_MOST_PICKED = 1_000
FIRST = (-1, -1)
"""For waiting_groups(): begin with the first rows."""
_MOST_FOLLOWED = 8
"""For so many groups at most a take asks what follows their first messages, by two statements each."""


class _Ready(NamedTuple):
    """A ready row, and the first rows of its group in each state."""

    id: int
    place: int
    group: int | None
    first_ready: int | None
    first_delayed: int | None
    delayed_id: int | None
    taken_id: int | None
    dead_id: int | None
    first_behind: int | None
    next_ready: int | None

    def waits_for(self, *, holds: bool) -> int | None:
        """The id of a row for which it must wait, if one of the group is in flight, or dead and holds it."""
        return self.taken_id or (self.dead_id if holds else None)

    @property
    def is_behind_delayed(self) -> bool:
        """True if a delayed row of the group is before it."""
        return self.first_delayed is not None and self.first_delayed < self.place

    @property
    def has_followers(self) -> bool:
        """True if others of the group may be taken with it, the first one."""
        return self.next_ready is not None or self.first_behind is not None

    @property
    def is_behind_others(self) -> bool:
        """True if a row that waits behind others is before it."""
        return self.first_behind is not None and self.first_behind < self.place

    def is_first(self, *, holds: bool) -> bool:
        """True if it may be taken."""
        if self.group is None:
            return True
        is_free = self.waits_for(holds=holds) is None
        is_next = not (self.is_behind_delayed or self.is_behind_others)
        return is_free and is_next and self.first_ready == self.place


@dataclass(slots=True)
class _Take:
    """What one take does with the ready rows that it looks at.

    chosen   ids of rows to take, in order
    own      the groups of these
    followed rows of `chosen` that follow() has found, of the groups in `closed`
    closed   groups of which nothing else is taken
    waiting  ids of rows that must wait, by a row of their group that lets them go on: a witness; 0: a row of
             `chosen`
    late     groups of rows in `waiting`, but for those behind rows of `chosen`
    unclear  groups of which another transaction has the first row
    healed   groups whose first row waits behind nothing any more: it was given back late
    """

    limit: int
    holds: bool
    one_per_group: bool
    follow: Callable[[_Ready, int], Sequence[int]]
    chosen: list[int] = field(default_factory=list)
    own: set[int] = field(default_factory=set)
    followed: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    waiting: dict[int, list[int]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    unclear: set[int] = field(default_factory=set)
    healed: set[int] = field(default_factory=set)
    _stopped: dict[int, int] = field(default_factory=dict)
    _most_followed: int = _MOST_FOLLOWED

    @property
    def room(self) -> int:
        return self.limit - len(self.chosen)

    def look_at(self, rows: Sequence[_Ready], locked: Collection[int] | None) -> None:
        """Decide about rows, which come by place; `locked`: those that could be locked. None: all."""
        if locked is not None:
            # A server is asked what follows more than one first row only if the first rows are too few.
            firsts = sum(row.id in locked and row.is_first(holds=self.holds) for row in rows)
            self._most_followed = 1 if firsts >= self.room else _MOST_FOLLOWED
        for row in rows:
            if locked is None or row.id in locked:
                self._look(row)
            elif row.group is not None:
                self.unclear.add(row.group)

    def _look(self, row: _Ready) -> None:
        group = row.group
        if group is None:
            if self.room:
                self.chosen.append(row.id)
            return
        if group in self.unclear or group in self.healed or row.id in self.followed:
            return
        witness = self._stopped.get(group) or row.waits_for(holds=self.holds)
        if witness is None and row.is_behind_delayed:
            witness = row.delayed_id
        if witness == row.id:  # it was given back since its group was looked at; nothing waits for itself
            self.unclear.add(group)
        elif witness is not None:
            self._stopped[group] = witness
            self.late.add(group)
            self.waiting.setdefault(witness, []).append(row.id)
        elif group in self.own:
            if row.is_behind_others or self.one_per_group or group in self.closed:
                self.waiting.setdefault(0, []).append(row.id)
                self.closed.add(group)
            elif self.room:
                self.chosen.append(row.id)
        elif row.first_ready != row.place:
            self.unclear.add(group)
        elif row.is_behind_others:
            self.healed.add(group)
        elif self.room:
            self.chosen.append(row.id)
            self.own.add(group)
            may_follow = self.room and not self.one_per_group and len(self.closed) < self._most_followed
            if may_follow and row.has_followers:
                followers = self.follow(row, self.room)
                self.chosen += followers
                self.followed |= {*followers}
                self.closed.add(group)


def take_grouped(
    dialect: Dialect,
    cursor: Cursor,
    parameters: Parameters,
    *,
    for_good: bool,  # noqa: ARG001 - no such queue is at-most-once
    late: bool,
    one_per_group: bool,
) -> Picked:
    """Take rows in order of each group. One taker at a time decides; it finds out which rows must wait.

    `has_ready` in the result says that there is more to find out, in another transaction.
    """
    sql = dialect.sql
    cursor.execute(sql["take_turn"], parameters)
    now = None if "take_chosen" in sql else situation(cursor, sql, parameters)
    if now is not None and now.is_due and not late:
        return now
    follow = partial(_followers, dialect, cursor)
    take = _Take(parameters["limit"], bool(parameters["holds"]), one_per_group, follow)
    after, size, looked = -1, min(take.limit, _MOST_PICKED), 0
    is_end = False
    while take.room and looked < CHUNK and not is_end:
        found = _ready_rows(cursor, sql["look_grouped"], {**parameters, "after": after, "limit": size})
        locked = None
        if "lock_ready" in sql:
            locked = lock_free(dialect, cursor, "lock_ready", [row.id for row in found])
        take.look_at(found, locked)
        is_end = len(found) < size
        looked += len(found)
        after = found[-1].place if found else after
        size = min(2 * size, _MOST_PICKED)
    statement = "take_chosen" if now is None else "take_picked"
    rows = take_rows(dialect, cursor, parameters, take.chosen, now, statement)
    waiting = _let_wait(dialect, cursor, take)
    healed = go_on(dialect, cursor, take.healed, parameters)
    if not rows:
        now = situation(cursor, sql, parameters)
        unseen = now.has_ready and not late  # what was due may have become ready since it looked
        more = waiting > 0 and not is_end  # what others have locked would be found again and again
        return now._replace(has_ready=healed > 0 or more or unseen, waiting=sorted(take.late))
    return Picked(rows, rows[0].since_ms, waiting=sorted(take.late))


def take_first(dialect: Dialect, cursor: Cursor, parameters: Parameters, *, one_per_group: bool) -> Picked:
    """Take the first rows that wait for nothing, in a transaction of its own; take_grouped() finds others.

    It may return fewer than :limit although take_grouped() would find more.
    """
    limit = min(parameters["limit"], _MOST_PICKED)
    given = {**parameters, "limit": limit, "follow": 0 if one_per_group else limit - 1}
    sql = dialect.sql
    take = ((sql["take_turn"], parameters), (sql["take_first"], given))
    _, found, _ = cursor.transact(take, [(sql["sync_taken"], parameters)])
    rows = message_rows(found)
    return Picked(rows, rows[0].since_ms if rows else 0)


def finish_at_once(dialect: Dialect, cursor: Cursor, parameters: Parameters) -> int:
    """Finish rows and let their groups go on, in a transaction of its own; returns how many it finished."""
    sql = dialect.sql
    finish = ((sql["finish_naming_groups"], parameters), (sql["show_first_named"], parameters))
    ((finished, _),), _ = cursor.transact(finish)
    return int(finished)


def stranded_groups(
    dialect: Dialect, cursor: Cursor, groups: Sequence[int], parameters: Parameters
) -> list[int]:
    """Those of these groups of which all rows wait, and none for another one."""
    cursor.execute(dialect.sql["stranded"], {**parameters, **listed(dialect, groups)})
    return [group for (group,) in cursor.fetchall()]


def waiting_groups(
    cursor: Cursor, dialect: Dialect, parameters: Parameters, after: tuple[int, int]
) -> tuple[list[int], tuple[int, int]]:
    """The groups of the next rows that wait, by rank and place; also returns the `after` of the next call."""
    rank, place = after
    given = {**parameters, "rank": rank, "after": place, "limit": _MOST_PICKED}
    cursor.execute(dialect.sql["waiting"], given)
    rows = cursor.fetchall()
    groups = sorted({group for group, _, _ in rows})
    return groups, rows[-1][1:] if len(rows) == _MOST_PICKED else FIRST


def look_grouped(dialect: Dialect, cursor: Cursor, parameters: Parameters) -> list[MessageRow]:
    """The first rows that a take would find, at most :limit."""
    after, ids = -1, list[int]()
    while len(ids) < parameters["limit"]:
        given = {**parameters, "after": after, "limit": _MOST_PICKED, "late": 1}
        found = _ready_rows(cursor, dialect.sql["look_grouped"], given)
        ids += [row.id for row in found if row.is_first(holds=bool(parameters["holds"]))]
        if len(found) < _MOST_PICKED:
            break
        after = found[-1].place
    return rows_of(dialect, cursor, ids[: parameters["limit"]])


def groups_of(dialect: Dialect, cursor: Cursor, ids: Sequence[int]) -> list[int]:
    """The groups of rows; they never change."""
    cursor.execute(dialect.sql["groups_of"], {"ids": dialect.ids(ids)})
    return [group for (group,) in cursor.fetchall()]


def change_grouped(
    dialect: Dialect,
    cursor: Cursor,
    name: str,
    parameters: Parameters,
    groups: Callable[[], list[int]],
) -> tuple[int, list[int]]:
    """As Dialect.change(); also returns the groups of the rows: `groups` reads them where it does not."""
    if f"{name}_in_groups" in dialect.sql:
        cursor.execute(dialect.sql[f"{name}_in_groups"], parameters)
        found = [group for (group,) in cursor.fetchall()]
        return len(found), found
    found = groups()
    return dialect.change(cursor, name, parameters), found


def check_isolation(dialect: Dialect, cursor: Cursor, what: str) -> None:
    """Raise ConfigError if a transaction does not see what others commit meanwhile, where `what` needs it."""
    if "isolation" in dialect.sql:
        cursor.execute(dialect.sql["isolation"])
        (found,) = cursor.fetchone()
        if found != "read committed":
            raise ConfigError(f"transaction: its isolation level is {found}; {what} need read committed")


def groups_in(dialect: Dialect, cursor: Cursor, name: str, parameters: Parameters) -> list[int]:
    """The groups of a queue that the statement `name` finds, one of those …_groups."""
    cursor.execute(dialect.sql[name], parameters)
    return [group for (group,) in cursor.fetchall()]


def go_on(
    dialect: Dialect,
    cursor: Cursor,
    groups: Iterable[int | None],
    parameters: Parameters,
    reader: Cursor | None = None,
) -> int:
    """Make the first row that waits ready in each of these groups; returns how many.

    It follows the statement that has changed other rows of the groups, so that it sees which rows others have
    let wait for these, and waits for nobody: who has locked the first row makes it ready, too.

    reader  reads what is committed, for a transaction of the application's that would read an older snapshot
            and lock gaps. What the transaction has ended is still there then, so a row may be too many
    """
    wanted = sorted({group for group in groups if group is not None})
    if not wanted:
        return 0
    if parameters["shares"]:
        shown = share_on(dialect, cursor, wanted, parameters, reader or cursor)
        if reader is None or shown >= len(wanted):
            return shown
    given = {**dialect.defaults(), **listed(dialect, wanted)}
    if "show_first" in dialect.sql:
        return dialect.change(cursor, "show_first", given)
    reader = reader or cursor
    reader.execute(dialect.sql["first_behind"], given)
    ids = [row_id for (row_id,) in reader.fetchall() if row_id is not None]
    ids = sorted(lock_free(dialect, cursor, "lock_behind", ids))
    if ids:
        dialect.change(cursor, "show", {**dialect.defaults(), "ids": dialect.ids(ids)})
    return len(ids)


def pass_time_grouped(dialect: Dialect, cursor: Cursor, parameters: Parameters) -> int:
    """As Dialect.pass_time(); then the groups of the rows go on."""
    sql, given = dialect.sql, {**parameters, "limit": CHUNK, "number": 0}
    if "draw" in sql and not parameters["to_front"]:
        cursor.execute(sql["draw"], {"count": CHUNK})
        (given["number"],) = cursor.fetchone()
    if "pass_time_in_groups" in sql:
        cursor.execute(sql["pass_time_in_groups"], given)
        groups = [group for (group,) in cursor.fetchall()]
        go_on(dialect, cursor, groups, parameters)
        return len(groups)
    cursor.execute(sql["due"], given)
    ids = [row_id for (row_id,) in cursor.fetchall()]
    if ids:
        dialect.change(cursor, "pass_time", {**given, "ids": dialect.ids(ids)})
        go_on(dialect, cursor, groups_of(dialect, cursor, ids), parameters)
    return len(ids)


def _ready_rows(cursor: Cursor, statement: str, parameters: Parameters) -> list[_Ready]:
    cursor.execute(statement, parameters)
    return sorted((_Ready(*one) for one in cursor.fetchall()), key=lambda row: row.place)


def _followers(dialect: Dialect, cursor: Cursor, first: _Ready, limit: int) -> Sequence[int]:
    """Lock the rows that may be taken with the first one of their group; returns their ids, in order."""
    given = {"group_id": first.group, "after": first.place, "limit": limit}
    cursor.execute(dialect.sql["followers"], {**dialect.defaults(), **given})
    bound = first.first_delayed
    ids = []
    for row_id, place, is_delayed in sorted(cursor.fetchall(), key=itemgetter(1))[:limit]:
        if is_delayed or (bound is not None and place > bound):
            break
        ids.append(row_id)
    locked = lock_free(dialect, cursor, "lock_waiting", ids)
    return [*takewhile(locked.__contains__, ids)]


def _let_wait(dialect: Dialect, cursor: Cursor, take: _Take) -> int:
    """Make rows wait behind others, if these can be locked: else somebody may be about to end them.

    Returns how many it has made wait.
    """
    witnesses = [one for one in take.waiting if one]
    locked = lock_free(dialect, cursor, "lock_witnesses", witnesses)
    ids = [row_id for one, waiting in take.waiting.items() if not one or one in locked for row_id in waiting]
    if ids:
        dialect.change(cursor, "wait_behind", {"ids": dialect.ids(ids)})
    return len(ids)
