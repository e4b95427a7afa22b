"""`kmq dlq list/peek/redrive/purge`."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import click

from kmqpy.cli.options import Cli, connected
from kmqpy.cli.output import confirmed, many, print_json, print_table, print_text, warn, when
from kmqpy.cli.text import content, headers_of


@click.group()
def dlq() -> None:
    """Look at dead letters, send them back.

    They are messages that were delivered too often, or rejected. Where two queues have one dead-letter
    topic, each shows and touches its own only.

    \b
    Example:
      kmq dlq list jobs
      kmq dlq redrive jobs
    """


_LIMIT = click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Show at most this many."
)


_ORIGIN = click.option(
    "--origin", default="", metavar="NAME", help="Instead those that came from a queue of that name."
)


@dlq.command(name="list")
@click.argument("queue")
@_LIMIT
@_ORIGIN
@connected
def list_(cli: Cli, queue: str, limit: int, origin: str) -> None:
    """List dead letters, the oldest first, with their ids.

    \b
    Example:
      kmq dlq list jobs --limit 20
    """
    from kmqpy.kafka.dead_letters import KafkaDeadLetters

    with KafkaDeadLetters(cli.queue(queue), cli.connection, origin=origin) as letters:
        found = letters.list(limit)
    if cli.json:
        print_json([_object(one) for one in found])
        return
    print_table(
        ["id", "key", "attempts", "dead since", "first enqueued", "origin", "reason"],
        [
            [
                one.id,
                None if one.key is None else one.key.decode(errors="replace"),
                one.attempts,
                when(one.dead_since_ms),
                when(one.first_enqueued_ms),
                f"{one.origin_topic or '?'} {one.origin_partition}-{one.origin_offset}",
                one.reason,
            ]
            for one in found
        ],
    )


@dlq.command()
@click.argument("queue")
@_LIMIT
@_ORIGIN
@connected
def peek(cli: Cli, queue: str, limit: int, origin: str) -> None:
    """Print dead letters with body and headers, a JSON object a line; they stay where they are.

    \b
    Example:
      kmq dlq peek jobs --limit 1
    """
    from kmqpy.kafka.dead_letters import KafkaDeadLetters

    with KafkaDeadLetters(cli.queue(queue), cli.connection, origin=origin) as letters:
        for one in letters.peek(limit):
            print_json({**_object(one), **content("body", one.body), **headers_of(one.headers)})


@dlq.command()
@click.argument("queue")
@click.argument("ids", nargs=-1)
@click.option("--rate", type=float, help="Redrive at most this many messages a second.")
@_ORIGIN
@connected
@click.pass_context
def redrive(
    ctx: click.Context, cli: Cli, queue: str, ids: tuple[str, ...], rate: float | None, origin: str
) -> None:
    """Send dead letters back to the queue, all of them or those named by id; they start anew.

    Exits with 1 when some ids name no dead letter, or some are too large for the queue.

    \b
    Example:
      kmq dlq redrive jobs --rate 100
      kmq dlq redrive jobs 0-17 2-4
    """
    from kmqpy.kafka.dead_letters import KafkaDeadLetters

    with KafkaDeadLetters(cli.queue(queue), cli.connection, origin=origin) as letters:
        result = letters.run_redrive(
            ids or None, rate=rate, progress=_progress if sys.stderr.isatty() else None
        )
    if sys.stderr.isatty():
        click.echo(err=True)
    if cli.json:
        print_json({"queue": queue, **dataclasses.asdict(result)})
    else:
        print_text(f"queue {queue}: {many(result.redriven, 'dead letter')} sent back")
    for one in result.not_found:
        warn(f"no dead letter {one}")
    for one in result.refused:
        warn(f"dead letter {one} is too large for the queue; it stays")
    if result.not_found or result.refused:
        ctx.exit(1)


@dlq.command()
@click.argument("queue")
@click.option("--yes", is_flag=True, help="Don't ask; the count is shown all the same.")
@_ORIGIN
@connected
def purge(cli: Cli, queue: str, origin: str, *, yes: bool) -> None:
    """Throw away all dead letters of a queue; those of another queue in the same topic stay.

    \b
    Example:
      kmq dlq purge jobs --yes
    """
    from kmqpy.kafka.dead_letters import KafkaDeadLetters

    with KafkaDeadLetters(cli.queue(queue), cli.connection, origin=origin) as letters:
        shown = len(letters.list(_SHOWN))
        warn(f"to be deleted: {many(shown, 'dead letter')}{' or more' if shown == _SHOWN else ''}")
        confirmed(f"Throw away all dead letters of {origin or queue}?", yes=yes)
        count = letters.purge()
    if cli.json:
        print_json({"queue": queue, "purged": count})
    else:
        print_text(f"queue {queue}: {many(count, 'dead letter')} deleted")


_SHOWN = 10_000
"""Dead letters that are counted before they are thrown away."""


def _progress(done: int, total: int) -> None:
    click.echo(f"\r{done} of {total}", nl=False, err=True)


def _object(one: Any) -> dict[str, Any]:
    plain = {
        field.name: getattr(one, field.name)
        for field in dataclasses.fields(one)
        if field.name not in ("key", "body", "headers")
    }
    return {**plain, **content("key", one.key)}
