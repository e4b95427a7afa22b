"""The command `kmq trace`: prints the life of a message."""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta

import click

from kmqpy.cli.options import DURATION, Cli, connected, milliseconds
from kmqpy.cli.output import counted, print_json, print_table, print_text, span, warn, when
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, ReceiptError
from kmqpy.kafka.markers.life import LifeEvent, LifeState, MessageLife
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.trace import find_by_key, trace_all


@click.command()
@click.argument("arguments", nargs=-1, metavar="[QUEUE] [MESSAGE]")
@click.option("--key", help="Instead of MESSAGE: all messages of this key; needs --since.")
@click.option("--since", type=DURATION, help="With --key: those sent within this time.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="With --key: at most this many, the oldest first.",
)
@connected
def trace(cli: Cli, arguments: tuple[str, ...], key: str | None, since: timedelta | None, limit: int) -> None:
    """Show the life of a message: every delivery, redelivery and end.

    MESSAGE is a receipt, which names its queue itself, or a partition and offset in QUEUE, as send prints
    them (0-17 or 0:17); of a dead letter TOPIC:0:17. Any copy of the message will do. -o json prints an
    object a message.

    Reads what was written from the time of the message on, until a minute after its end. --key reads all
    messages since that time. Copies made by JVM trackers, or before kmqpy named copies, are not found.

    \b
    Example:
      kmq trace 1.WyJqb2JzIiwi...
      kmq trace jobs 0-17
      kmq trace jobs --key user-1 --since 1h
    """
    more = False
    queue, messages = _read_arguments(cli, arguments, by_key=key is not None)
    with counted("records read") as progress:
        if key is not None:
            if since is None:
                raise click.UsageError("--key: say since when with --since, for example --since 1h")
            since_ms = SYSTEM_CLOCK.wall_ms() - milliseconds(since)
            found = find_by_key(
                cli.connection, queue, os.fsencode(key), since_ms, limit=limit + 1, progress=progress
            )
            messages = found[:limit]
            more = len(found) > limit
        lives = trace_all(cli.connection, queue, messages, progress=progress)
    if key is not None and not messages:
        warn(f"no message with key {key!r} within {span(milliseconds(since or timedelta()))}")
    for life in lives:
        _print(life, as_json=cli.json)
    if more:
        warn(f"there are more than {limit} messages with this key; --limit shows more")


def _read_arguments(cli: Cli, arguments: tuple[str, ...], *, by_key: bool) -> tuple[QueueSettings, list[str]]:
    """Return the queue's settings, and the message that the arguments name; no message if `by_key`."""
    wanted = 1 if by_key else 2
    if cli.queue_in_url:
        arguments = (cli.queue_in_url, *arguments)
    if len(arguments) == 1 and not by_key:
        try:
            return cli.queue_with(Receipt.parse(arguments[0]).queue), [*arguments]
        except ConfigError as error:
            raise ReceiptError(f"receipt: {error}") from None
        except ReceiptError as error:
            raise ReceiptError(f"{error}; or give the queue and an id: kmq trace QUEUE 0-42") from None
    if len(arguments) != wanted:
        raise click.UsageError("give a receipt, or QUEUE and MESSAGE, or QUEUE and --key")
    return cli.queue(arguments[0]), [*arguments[1:]]


def _print(life: MessageLife, *, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(life))
        return
    records = ", ".join(f"{one} (deleted)" if one in life.deleted else one for one in life.records)
    lost = ": its log was cut back" if life.state is LifeState.LOST else ""
    key = "" if life.key is None else f", key {life.key}"
    print_text(f"{life.queue} {records}: {life.state}{lost}{key}")
    print_table(["time", "message", "event", "by", "for", "copy", "about"], map(_row, life.events))


def _row(event: LifeEvent) -> list[object]:
    lasts = None if event.for_ms is None else span(max(0, event.for_ms))
    words = [event.reason, "late: it was finished before" if event.late else None]
    words.append(None if event.counts else "not an attempt")
    about = "; ".join(word for word in words if word)
    return [when(event.at_ms), event.record, event.what, event.by, lasts, event.copy, about]
