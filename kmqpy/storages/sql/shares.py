"""Takes and ends of messages in queues that are fair or have caps (rule 13 of Engine), on any dialect.

group_statements.py explains how messages of a group wait for each other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.storages.engine import MessageRow
from kmqpy.storages.settings import NOISY_FROM, NOISY_PART, StoredQueueSettings, noise
from kmqpy.storages.sql.dialect import (
    Cursor,
    Dialect,
    Parameters,
    Picked,
    just_taken,
    message_rows,
    situation,
)

_MAX_RANK = 100
"""The largest rank that is stored; a take compares those that it looks at by their true ranks."""
_FEWEST_LOOKED, _MOST_LOOKED, _LOOKS = 32, 1_000, 12
"""A take looks at so many ready rows, and again at more of them, so often at most, if some must wait."""
_MOST_FILLED = 8
"""Of so many groups at most a take returns more than the first ready row: each costs two statements."""


class _Ready(NamedTuple):
    """A ready row; by its rank and place it is before others."""

    id: int
    place: int
    rank: int
    group: int | None


class _Group(NamedTuple):
    """How many rows of a group are taken, and its first taken one, ready one and one that waits behind."""

    taken: int
    taken_id: int | None
    shown_id: int | None
    shown_place: int | None
    shown_rank: int | None
    behind_id: int | None
    behind_place: int | None

    @property
    def follower(self) -> int | None:
        """The id of a row that waits, if it is to be ready: none that is ready is before it."""
        is_first = self.shown_place is None or (self.behind_place or self.shown_place) < self.shown_place
        return self.behind_id if is_first else None


@dataclass(slots=True)
class _Limits:
    """Which rank a group has, and whether one more of it may be taken, when so many are taken.

    in_flight  how many rows of the queue are taken; needed if by_noise
    """

    is_fair: bool
    by_noise: bool
    most: int
    in_flight: int = 0

    @classmethod
    def of(cls, settings: StoredQueueSettings) -> _Limits:
        return cls(settings.fair, settings.by_noise, settings.max_in_flight_per_group or INT64_MAX)

    def rank(self, taken: int, more: int = 0) -> int:
        if self.by_noise:
            return noise(taken, self.in_flight + more)
        return taken if self.is_fair else 0

    def given(
        self, dialect: Dialect, cursor: Cursor, parameters: Parameters, groups: Mapping[int, _Group]
    ) -> _Limits:
        """The limits when these groups are so. Rows are counted only if a group may be noisy, and not all."""
        more = min(parameters.get("limit", 0), _MOST_LOOKED)  # as many as a take may add
        most = max((one.taken + more for one in groups.values()), default=0)
        if not self.by_noise or most < NOISY_FROM:
            return self
        cursor.execute(dialect.sql["in_flight"], {**parameters, "limit": most * NOISY_PART})
        (in_flight,) = cursor.fetchone()
        return replace(self, in_flight=in_flight)


@dataclass(slots=True)
class _Look:
    """What a take finds out about ready rows.

    heads    rows that may be taken, one of each group, with their ranks
    waiting  ids of rows that must wait, with the row of their group behind which they do
    ranks    by id, ranks of rows that have another one, or that are to be ready
    """

    heads: list[_Ready] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)

    @classmethod
    def at(cls, rows: Iterable[_Ready], groups: Mapping[int, _Group], limits: _Limits) -> _Look:
        look = cls()
        for row in rows:
            group = None if row.group is None else groups[row.group]
            if group is None:
                look.heads.append(row)
            elif group.taken >= limits.most and group.taken_id is not None:
                look.waiting.append((row.id, group.taken_id))
            elif group.shown_id != row.id:
                look.waiting += [] if group.shown_id is None else [(row.id, group.shown_id)]
            else:
                rank = limits.rank(group.taken)
                look.heads.append(row._replace(rank=rank))
                if group.follower is not None:
                    look.ranks[group.follower] = rank
                elif min(rank, _MAX_RANK) != row.rank:
                    look.ranks[row.id] = rank
        return look


def take_shared(
    dialect: Dialect,
    cursor: Cursor,
    parameters: Parameters,
    *,
    for_good: bool,  # noqa: ARG001 - no such queue is at-most-once
    late: bool,
) -> Picked:
    """Take rows of the groups of which least is taken. One taker at a time decides.

    `has_ready` in the result says that there is more to find out, in another transaction.
    """
    sql = dialect.sql
    now = None
    if "RETURNING" in sql["take_shared"]:
        cursor.execute(sql.get("take_turn_settings", sql["settings"]), parameters)
    else:
        cursor.execute(sql["take_turn"], parameters)
        now = situation(cursor, sql, parameters)
        if now.is_due and not late:
            return now
        cursor.execute(sql["settings"], parameters)
    settings = cursor.fetchone()
    if settings is None:
        return situation(cursor, sql, parameters)
    limits = _limits(settings[0])  # those that the queue has now, in whatever open queue they were altered
    look, groups, limits, is_clear, waiting = _look(dialect, cursor, parameters, limits)
    chosen, ranks = _chosen(dialect, cursor, parameters["limit"], look.heads, groups, limits)
    order = {row_id: at for at, row_id in enumerate(chosen)}
    rows = take_rows(dialect, cursor, parameters, chosen, now, "take_shared")
    rows.sort(key=lambda row: order[row.id])
    _set_ranks(dialect, cursor, ranks)
    if rows:
        return Picked(rows, rows[0].since_ms, waiting=waiting)
    now = situation(cursor, sql, parameters)
    unseen = now.has_ready and not late  # what was due may have become ready since it looked
    return now._replace(has_ready=not is_clear or unseen, waiting=waiting)


def share_on(
    dialect: Dialect, cursor: Cursor, groups: Sequence[int], parameters: Parameters, reader: Cursor
) -> int:
    """Let the first row of each of these groups be ready, with its rank; returns how many it changed.

    Also of groups that seem to have as many taken as they may, which only takes heed: of those who end the
    others at the same time, each may see what the others still have.

    It follows the statement that has changed other rows of the groups, so that it sees which rows others have
    let wait for these, and waits for nobody: who has locked a row looks after its group, too.

    reader  see go_on()
    """
    states = _states(dialect, reader, groups)
    limits = _Limits(bool(parameters["fair"]), bool(parameters["by_noise"]), INT64_MAX)
    limits = limits.given(dialect, reader, parameters, states)
    ranks: dict[int, int] = {}
    for one in states.values():
        rank = limits.rank(one.taken)
        if one.follower is not None:
            ranks[one.follower] = rank
        elif one.shown_id is not None and (one.shown_rank or 0) > rank:  # takes notice what is too small
            ranks[one.shown_id] = rank
    return _set_ranks(dialect, cursor, ranks)


@lru_cache(maxsize=1_000)
def _limits(settings: str) -> _Limits:
    return _Limits.of(StoredQueueSettings.from_json(settings, "queue"))


def _look(
    dialect: Dialect, cursor: Cursor, parameters: Parameters, limits: _Limits
) -> tuple[_Look, Mapping[int, _Group], _Limits, bool, list[int]]:
    """Look at ready rows until what is said of the first ones is true.

    Also returns whether it is, and the groups of rows that were let wait.
    """
    waiting: set[int] = set()
    size = min(max(parameters["limit"], _FEWEST_LOOKED), _MOST_LOOKED)
    for _ in range(_LOOKS):
        cursor.execute(dialect.sql["look_shared"], {**parameters, "limit": size})
        rows = sorted((_Ready(*one) for one in cursor.fetchall()), key=lambda row: (row.rank, row.place))
        groups = _states(dialect, cursor, sorted({row.group for row in rows if row.group is not None}))
        limits = limits.given(dialect, cursor, parameters, groups)
        look = _Look.at(rows, groups, limits)
        free = lock_free(dialect, cursor, "lock_witnesses", sorted({witness for _, witness in look.waiting}))
        behind = [row_id for row_id, witness in look.waiting if witness in free]
        if behind:
            dialect.change(cursor, "wait_behind", {"ids": dialect.ids(behind)})
            waiting |= {row.group for row in rows if row.group is not None and row.id in behind}
        is_clear = not _set_ranks(dialect, cursor, look.ranks) and not behind
        # Without any head, what all of them wait for is locked by others; behind them may be more. Of the
        # highest rank more may be behind them, too, of which less is taken.
        is_told = bool(look.heads) and rows[0].rank < _MAX_RANK
        if is_clear and (is_told or len(rows) < size or size == _MOST_LOOKED):
            return look, groups, limits, True, sorted(waiting)
        size = min(2 * size, _MOST_LOOKED)
    return look, groups, limits, False, sorted(waiting)


def _chosen(
    dialect: Dialect,
    cursor: Cursor,
    limit: int,
    heads: Iterable[_Ready],
    groups: Mapping[int, _Group],
    limits: _Limits,
) -> tuple[list[int], dict[int, int]]:
    """The ids of rows to take, in order, and the ranks of those that follow them.

    Rows to take are heads, and those that wait behind them, by rank.
    """
    taken = {group: one.taken for group, one in groups.items()}
    followers: dict[int, deque[tuple[int, int]]] = {}
    # A row without an id stands for the next one of its group, which is at this place.
    waiting = [(row.rank, row.place, row.id, row.group) for row in heads]
    heapify(waiting)
    chosen: list[int] = []
    while waiting and len(chosen) < limit:
        _, _, row_id, group = heappop(waiting)
        if group is not None and not row_id:
            if group not in followers and len(followers) < _MOST_FILLED:
                followers[group] = deque(_behind(dialect, cursor, group, limit - len(chosen) + 1))
            if not followers.get(group):
                continue
            row_id, _ = followers[group].popleft()
        chosen.append(row_id)
        if group is not None:
            taken[group] += 1
            place = groups[group].behind_place
            if group in followers:
                place = followers[group][0][1] if followers[group] else None
            if place is not None and taken[group] < limits.most:
                heappush(waiting, (limits.rank(taken[group], len(chosen)), place, 0, group))
    following = {}
    for group, count in taken.items():
        if count > groups[group].taken and count < limits.most:
            next_id = groups[group].behind_id
            if group in followers:
                next_id = followers[group][0][0] if followers[group] else None
            if next_id is not None:
                following[next_id] = limits.rank(count, len(chosen))
    return chosen, following


def _behind(dialect: Dialect, cursor: Cursor, group: int, limit: int) -> list[tuple[int, int]]:
    """Ids and places of the first rows that wait in a group, but those that others have locked."""
    cursor.execute(dialect.sql["behind"], {**dialect.defaults(), "group_id": group, "limit": limit})
    found = [(row_id, place) for row_id, place, _ in cursor.fetchall()]
    free = lock_free(dialect, cursor, "lock_behind", [row_id for row_id, _ in found])
    return [one for one in found if one[0] in free]


def _states(dialect: Dialect, cursor: Cursor, groups: Sequence[int]) -> dict[int, _Group]:
    if not groups:
        return {}
    cursor.execute(dialect.sql["group_states"], listed(dialect, groups))
    return {group: _Group(*one) for group, *one in cursor.fetchall()}


def _set_ranks(dialect: Dialect, cursor: Cursor, ranks: Mapping[int, int]) -> int:
    """Make rows ready, with these ranks, but those that others have locked; returns how many."""
    free = lock_free(dialect, cursor, "lock_waiting", sorted(ranks))
    stored = {row_id: min(ranks[row_id], _MAX_RANK) for row_id in free}
    for rank in sorted({*stored.values()}):
        ids = [row_id for row_id in free if stored[row_id] == rank]
        dialect.change(cursor, "rank", {"ids": dialect.ids(ids), "rank": rank})
    return len(free)


def take_rows(
    dialect: Dialect,
    cursor: Cursor,
    parameters: Parameters,
    ids: Sequence[int],
    now: Picked | None,
    statement: str,
) -> list[MessageRow]:
    """Take these rows; with None for `now`, the statement returns them, in the queue's order."""
    if not ids:
        return []
    given = {**parameters, "ids": dialect.ids(ids)}
    if now is None:
        cursor.execute(dialect.sql[statement], given)
        return message_rows(cursor.fetchall())
    rows = just_taken(rows_of(dialect, cursor, ids), now, parameters)
    dialect.change(cursor, statement, given)
    return rows


def rows_of(dialect: Dialect, cursor: Cursor, ids: Sequence[int]) -> list[MessageRow]:
    """The rows with these ids."""
    if not ids:
        return []
    cursor.execute(dialect.sql["rows"], {"ids": dialect.ids(ids)})
    return message_rows(cursor.fetchall())


def lock_free(dialect: Dialect, cursor: Cursor, statement: str, ids: Sequence[int]) -> set[int]:
    """Lock these rows, if nobody else has; returns the ids of those that are locked now."""
    if not ids:
        return set()
    cursor.execute(dialect.sql[statement], {"ids": dialect.ids(ids)})
    return {row_id for (row_id,) in cursor.fetchall()}


def listed(dialect: Dialect, values: Sequence[Any]) -> dict[str, Any]:
    """Parameters with a list, in each form in which dialects take one."""
    return {"ids": dialect.ids(values), "listed": json.dumps(values)}
