"""Administration commands for queues of other storages than Kafka, which --queue-url names.

Each function does the work of one command, or prints its result: as JSON if `as_json`, else as text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import click

from kmqpy.cli.output import confirmed, distance, many, print_json, print_table, print_text, span, warn, when
from kmqpy.cli.storage_url import StorageUrl
from kmqpy.queue import DeadLetter, Orphan, QueueDescription
from kmqpy.queue.plain import content


def create(url: StorageUrl, name: str, settings: Mapping[str, Any], *, as_json: bool) -> None:
    """Create a queue and print it; the given `settings` overrule those of the url."""
    with url.storage(for_create=True) as storage:
        storage.create(name, **{**url.settings, **settings})
        found = storage.describe(name)
    if as_json:
        print_json(found.settings)
    else:
        print_text(f"queue {name}")


def alter(url: StorageUrl, name: str, changes: Mapping[str, Any], *, as_json: bool) -> None:
    """Change settings of a queue, and print them."""
    with url.storage() as storage:
        storage.alter(name, **changes)
        found = storage.describe(name)
    if as_json:
        print_json(found.settings)
    else:
        print_text(f"queue {name} changed")


def list_queues(url: StorageUrl, *, as_json: bool) -> None:
    """Print the queues of the storage."""
    with url.storage() as storage:
        names = storage.list()
        if as_json:
            print_json([storage.describe(name).settings for name in names])
        else:
            print_table(["queue"], [[name] for name in names])


def describe(url: StorageUrl, name: str, *, as_json: bool) -> None:
    """Print the settings of a queue, and how many messages it holds."""
    with url.storage() as storage:
        found = storage.describe(name)
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    for key, value in found.settings.items():
        shown = "none" if value in (None, ()) else span(value) if key.endswith("_ms") else value
        shown = ",".join(shown) if isinstance(shown, tuple) else shown
        print_text(f"{key.removesuffix('_ms'):<26}{shown}")
    print_text()
    print_table(*_sizes(found))


def delete(url: StorageUrl, name: str, *, yes: bool, if_empty: bool, as_json: bool) -> None:
    """Show how many messages a queue holds, ask, and delete the queue."""
    with url.storage() as storage:
        found = storage.describe(name)
        held = found.ready + found.delayed + found.in_flight
        shown = f"{many(held, 'message')}, {many(found.dead, 'dead letter')}"
        if if_empty and (held or found.dead):
            raise click.UsageError(f"queue {name} is not empty: {shown}")
        warn(f"to be deleted: {shown}")
        confirmed(f"Delete queue {name}, with all messages and dead letters?", yes=yes)
        storage.delete(name)
    if as_json:
        print_json({"queue": name, "deleted": True})
    else:
        print_text(f"queue {name} deleted")


def stats(url: StorageUrl, name: str, *, as_json: bool) -> None:
    """Print how many messages a queue holds."""
    with url.storage() as storage:
        found = storage.describe(name)
    if as_json:
        sizes = {key: getattr(found, key) for key in ("ready", "delayed", "in_flight", "dead")}
        held = {"held_groups": found.held_groups} if _holds(found) else {}
        print_json({"queue": name, "depth": found.ready + found.delayed, **sizes, **held})
    else:
        print_table(*_sizes(found))


def purge(url: StorageUrl, name: str, *, yes: bool, as_json: bool) -> None:
    """Show how many messages a queue holds, ask, and delete all of them but the dead letters."""
    with url.opened(name) as queue:
        warn(f"to be deleted: {many(queue.size(), 'message')} waiting, {queue.in_flight()} in flight")
        confirmed(f"Delete every message of queue {name}?", yes=yes)
        count = queue.purge()
    if as_json:
        print_json({"queue": name, "purged": count})
    else:
        print_text(f"queue {name}: {many(count, 'message')} deleted")


def print_dead_letters(found: Sequence[DeadLetter], *, as_json: bool) -> None:
    """Print dead letters without bodies."""
    if as_json:
        print_json([dead_letter_object(one) for one in found])
        return
    print_table(
        ["id", "key", "attempts", "dead since", "first enqueued", "bytes", "reason"],
        [
            [
                one.id,
                None if one.key is None else one.key.decode(errors="replace"),
                one.attempts,
                when(one.dead_since_ms),
                when(one.first_enqueued_ms),
                one.size,
                one.reason,
            ]
            for one in found
        ],
    )


def dead_letter_object(one: Any) -> dict[str, Any]:
    """Return the fields of a dead letter of any storage, for JSON, without its body and headers."""
    plain = {
        field.name: getattr(one, field.name)
        for field in dataclasses.fields(one)
        if field.name not in ("key", "body", "headers")
    }
    return {**plain, **content("key", one.key)}


def redrive(url: StorageUrl, name: str, ids: tuple[str, ...], *, as_json: bool) -> int:
    """Send dead letters back; returns the exit code, 1 if some of `ids` name no dead letter."""
    with url.opened(name) as queue:
        count = queue.dead_letters.redrive(ids or None)
    missing = len(set(ids)) - count if ids else 0
    if as_json:
        print_json({"queue": name, "redriven": count})
    else:
        print_text(f"queue {name}: {many(count, 'dead letter')} sent back")
    if missing:
        warn(f"{missing} of these ids name no dead letter")
    return 1 if missing else 0


def print_orphans(found: Sequence[Orphan], *, as_json: bool) -> None:
    """Print messages in flight, each with its receipt."""
    if as_json:
        print_json(
            [
                {
                    "receipt": one.receipt,
                    "holder": one.holder,
                    "since_ms": one.since_ms,
                    "lease_until_ms": one.lease_until_ms,
                    "attempts": None if one.message is None else one.message.attempts,
                    **({} if one.message is None else content("body", one.message.body)),
                }
                for one in found
            ]
        )
        return
    print_table(
        ["holder", "since", "lease ends", "attempts", "receipt"],
        [
            [
                one.holder,
                distance(one.since_ms),
                distance(one.lease_until_ms),
                None if one.message is None else one.message.attempts,
                one.receipt,
            ]
            for one in found
        ],
    )


def _sizes(found: QueueDescription) -> tuple[list[str], list[list[object]]]:
    """Return columns and rows of a table that shows how many messages the queue holds."""
    held = [found.held_groups] if _holds(found) else []
    return (
        ["queue", "depth", "in flight", "delayed", "dead", *(["held groups"] if held else [])],
        [[found.name, found.ready + found.delayed, found.in_flight, found.delayed, found.dead, *held]],
    )


def _holds(found: QueueDescription) -> bool:
    return found.settings.get("on_dead_letter") == "hold"
