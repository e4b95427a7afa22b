"""The commands `kmq dlq list`, `peek`, `redrive` and `purge`, for dead letters."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from kmqpy.cli.options import LIMIT_OPTION, Cli, Group, connected_to_any, queue_argument
from kmqpy.cli.output import confirmed, many, print_json, warn, when
from kmqpy.queue.plain import content, headers_of

_MAX_COUNTED = 10_000
"""`kmq dlq purge` counts dead letters up to this number before it asks; of more it says "or more"."""


@click.group(cls=Group)
def dlq() -> None:
    """Look at dead letters, send them back.

    They are messages that were delivered too often, or rejected. Where two queues have one dead-letter
    topic, each shows and touches its own only.

    \b
    Example:
      kmq dlq list jobs
      kmq dlq redrive jobs
    """


_ORIGIN_OPTION = click.option(
    "--origin", default="", metavar="NAME", help="Dead letters that came from this queue instead; Kafka only."
)


@contextmanager
def _letters(cli: Cli, name: str, origin: str) -> Iterator[Any]:
    """Open the dead letters of a queue in any storage."""
    if cli.url is not None:
        cli.kafka_only(origin=origin)
        with cli.url.opened(name) as opened:
            yield opened.dead_letters
    else:
        from kmqpy.kafka.dead_letters import KafkaDeadLetters

        with KafkaDeadLetters(cli.queue(name), cli.connection, origin=origin) as letters:
            yield letters


@dlq.command(name="list")
@queue_argument
@LIMIT_OPTION
@_ORIGIN_OPTION
@connected_to_any
def list_(cli: Cli, queue: str | None, limit: int, origin: str) -> None:
    """List dead letters, the oldest first, with their ids.

    \b
    Example:
      kmq dlq list jobs --limit 20
    """

    def row(one: Any) -> list[object]:
        key = None if one.key is None else one.key.decode(errors="replace")
        times = when(one.dead_since_ms), when(one.first_enqueued_ms)
        last = _origin(one) if cli.url is None else one.size
        return [one.id, key, one.attempts, *times, last, one.reason]

    with _letters(cli, cli.named_queue(queue), origin) as letters:
        found = letters.list(limit)
    last = "origin" if cli.url is None else "bytes"
    columns = ["id", "key", "attempts", "dead since", "first enqueued", last, "reason"]
    cli.show(found, columns, row, _as_object)


@dlq.command()
@queue_argument
@LIMIT_OPTION
@_ORIGIN_OPTION
@connected_to_any
def peek(cli: Cli, queue: str | None, limit: int, origin: str) -> None:
    """Print dead letters with body and headers; they stay where they are.

    A JSON object a line.

    \b
    Example:
      kmq dlq peek jobs --limit 1
    """
    with _letters(cli, cli.named_queue(queue), origin) as letters:
        for one in letters.peek(limit):
            print_json({**_as_object(one), **content("body", one.body), **headers_of(one.headers)})


def _origin(letter: Any) -> str:
    """Where a dead letter came from; `?` for one that does not tell it, which others wrote."""
    if letter.origin_partition is None:
        return letter.origin_topic or "?"
    return f"{letter.origin_topic or '?'} {letter.origin_partition}-{letter.origin_offset}"


def _as_object(one: Any) -> dict[str, Any]:
    """Return the fields of a dead letter for JSON, without its body and headers."""
    names = [field.name for field in dataclasses.fields(one)]
    plain = {name: getattr(one, name) for name in names if name not in ("key", "body", "headers")}
    return {**plain, **content("key", one.key)}


@dlq.command()
@queue_argument
@click.argument("ids", nargs=-1)
@click.option("--rate", type=float, help="At most this many messages a second; Kafka only.")
@_ORIGIN_OPTION
@connected_to_any
@click.pass_context
def redrive(
    ctx: click.Context, cli: Cli, queue: str | None, ids: tuple[str, ...], rate: float | None, origin: str
) -> None:
    """Send dead letters back to the queue, all of them or those named by id; their attempts begin at 1 again.

    Exits with 1 when some ids name no dead letter, or some are too large for the queue.

    \b
    Example:
      kmq dlq redrive jobs --rate 100
      kmq dlq redrive jobs 0-17 2-4
    """
    name, ids = cli.named_queue_and(queue, ids)
    cli.kafka_only(origin=origin, rate=rate)
    problems = []
    with _letters(cli, name, origin) as letters:
        if cli.url is not None:
            count = letters.redrive(ids or None)
            done = {"redriven": count}
            if missing := len(set(ids)) - count if ids else 0:
                problems = [f"{missing} of these ids name no dead letter"]
        else:
            on_terminal = sys.stderr.isatty()
            result = letters.run_redrive(ids or None, rate=rate, progress=_progress if on_terminal else None)
            if on_terminal:
                click.echo(err=True)
            count, done = result.redriven, dataclasses.asdict(result)
            problems = [f"no dead letter {one}" for one in result.not_found]
            problems += [f"dead letter {one} is too large for the queue; it stays" for one in result.refused]
            problems += [f"kmq dlq list {name} prints the ids there are"] if result.not_found else []
    cli.tell({"queue": name, **done}, f"queue {name}: {many(count, 'dead letter')} sent back")
    for problem in problems:
        warn(problem)
    if problems:
        ctx.exit(1)


@dlq.command()
@queue_argument
@click.option("--yes", is_flag=True, help="Don't ask; the count is shown all the same.")
@_ORIGIN_OPTION
@connected_to_any
def purge(cli: Cli, queue: str | None, origin: str, *, yes: bool) -> None:
    """Throw away all dead letters of a queue; those of another queue in the same topic stay.

    \b
    Example:
      kmq dlq purge jobs --yes
    """
    name = cli.named_queue(queue)
    with _letters(cli, name, origin) as letters:
        name = origin or name
        shown = len(letters.list(_MAX_COUNTED))
        warn(f"to be deleted: {many(shown, 'dead letter')}{' or more' if shown == _MAX_COUNTED else ''}")
        confirmed(f"Throw away all dead letters of {name}?", yes=yes)
        count = int(letters.purge())
    cli.tell({"queue": name, "purged": count}, f"queue {name}: {many(count, 'dead letter')} deleted")


def _progress(done: int, total: int) -> None:
    click.echo(f"\r{done} of {total}", nl=False, err=True)
