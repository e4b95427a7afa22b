"""Sends with dedup keys (rule 12 of kmqpy.storages.engine), on any dialect: the keys are rows of a table."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from kmqpy.storages.engine import NewRow
from kmqpy.storages.sql.dialect import Cursor, DedupKey, Dialect, Parameters

_CLEANED_EVERY = 10
"""One put of so many looks for old keys, and removes at most twice as many as came since the last one."""
_LEAST_WINDOW_MS = 60_000
"""Keys of messages that are unique until they are acknowledged are not looked at again for at least this."""


def cleans() -> bool:
    """Whether a put of rows with keys is one that removes old keys, as put_unique() can; at random."""
    return random.random() * _CLEANED_EVERY < 1


def are_distinct(rows: Sequence[NewRow]) -> bool:
    """Whether all rows have keys, each another one."""
    return len({row.dedup for row in rows} - {None}) == len(rows)


def put_new(dialect: Dialect, cursor: Cursor, parameters: Parameters, rows: Sequence[NewRow]) -> list[int]:
    """Put rows by one statement; returns no ids, and put_unique() must do it, if a key was used before."""
    keys = dialect.ids([row.dedup for row in rows if row.dedup is not None])
    return dialect.put(cursor, {**_keeping(parameters), "new_keys": keys}, rows)


def put_unique(
    dialect: Dialect,
    cursor: Cursor,
    parameters: Parameters,
    rows: Sequence[NewRow],
    *,
    cleaning: bool,
) -> list[int]:
    """Put the rows whose keys are free; returns the ids of all, or of those that have their keys.

    parameters  with :window_ms, and :until_acknowledged
    cleaning    remove old keys, too
    """
    wanted = dict.fromkeys(row.dedup for row in rows if row.dedup is not None)
    until_acknowledged = bool(parameters["until_acknowledged"])
    keeping = _keeping(parameters)
    claimed = dialect.claim_keys(cursor, keeping, [*wanted])
    if cleaning:
        clean(dialect, cursor, parameters, len(rows))
    new_ids = {one.key: one.message for one in claimed if one.is_new}
    if len(new_ids) == len(rows):
        return dialect.put(cursor, parameters, rows, [new_ids[key] for key in wanted if key is not None])
    former = [one for one in claimed if not one.is_new]
    there = (
        _there(dialect, cursor, parameters, former)
        if until_acknowledged
        else {one.key for one in former if one.in_window}
    )
    ids = {one.key: one.message for one in former if one.key in there}
    fresh: dict[str, NewRow] = {}
    new: list[NewRow] = []
    for row in rows:
        if row.dedup is None:
            new.append(row)
        elif row.dedup not in ids and row.dedup not in fresh:
            fresh[row.dedup] = row
            new.append(row)
    if not new:
        return [ids[row.dedup] for row in rows if row.dedup is not None]
    put_ids = dialect.put(cursor, parameters, new)
    if not put_ids:
        return []
    ids |= {row.dedup: row_id for row, row_id in zip(new, put_ids, strict=True) if row.dedup is not None}
    _keep(dialect, cursor, keeping, {key: ids[key] for key in fresh})
    without = iter(row_id for row, row_id in zip(new, put_ids, strict=True) if row.dedup is None)
    return [next(without) if row.dedup is None else ids[row.dedup] for row in rows]


def _keeping(parameters: Parameters) -> dict[str, Any]:
    least_ms = _LEAST_WINDOW_MS if parameters["until_acknowledged"] else 0
    return {**parameters, "window_ms": max(parameters["window_ms"], least_ms)}


def _there(dialect: Dialect, cursor: Cursor, parameters: Parameters, keys: Sequence[DedupKey]) -> set[str]:
    """The keys whose messages are there, by now that the keys are locked."""
    there = {one.key for one in keys if one.is_there}
    unsure = {one.message: one.key for one in keys if one.is_there is None}
    if unsure:
        cursor.execute(dialect.sql["still_there"], {**parameters, "ids": dialect.ids([*unsure])})
        there |= {unsure[row_id] for (row_id,) in cursor.fetchall()}
    return there


def _keep(dialect: Dialect, cursor: Cursor, parameters: Parameters, ids: dict[str, int]) -> None:
    given = {
        **parameters,
        **_keys(dialect, [*ids]),
        "ids": dialect.ids([*ids.values()]),
        "listed": json.dumps([*ids.items()]),
    }
    dialect.change(cursor, "keep_keys", given)


def clean(dialect: Dialect, cursor: Cursor, parameters: Parameters, count: int) -> None:
    """Remove keys whose time is over; those of messages that are still there get more, if that keeps them.

    count  as many rows with keys are put
    """
    parameters = {**_keeping(parameters), "limit": 2 * _CLEANED_EVERY * count}
    cursor.execute(dialect.sql["old_keys"], parameters)
    kept: list[str] = []
    over: list[str] = []
    for key, is_there in cursor.fetchall():
        (kept if is_there and parameters["until_acknowledged"] else over).append(key)
    if kept:
        dialect.change(cursor, "prolong_keys", {**parameters, **_keys(dialect, kept)})
    if over:
        dialect.change(cursor, "forget_keys", {**parameters, **_keys(dialect, over)})


def _keys(dialect: Dialect, keys: Sequence[str]) -> dict[str, Any]:
    return {"keys": dialect.ids(keys), "listed": json.dumps(keys)}
