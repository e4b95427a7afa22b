"""The commands `kmq dlq list`, `peek`, `redrive` and `purge`, for dead letters."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

import click

from kmqpy.cli import stored
from kmqpy.cli.groups import Group
from kmqpy.cli.options import Cli, connected_to_any, queue_argument
from kmqpy.cli.output import confirmed, many, print_json, print_table, print_text, warn, when
from kmqpy.queue.plain import content, headers_of


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


_LIMIT_OPTION = click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Show at most this many."
)


_ORIGIN_OPTION = click.option(
    "--origin", default="", metavar="NAME", help="Dead letters that came from this queue instead; Kafka only."
)


@dlq.command(name="list")
@queue_argument
@_LIMIT_OPTION
@_ORIGIN_OPTION
@connected_to_any
def list_(cli: Cli, queue: str | None, limit: int, origin: str) -> None:
    """List dead letters, the oldest first, with their ids.

    \b
    Example:
      kmq dlq list jobs --limit 20
    """
    name = cli.named_queue(queue)
    if cli.url is not None:
        cli.kafka_only(origin=origin)
        with cli.url.opened(name) as opened:
            stored.print_dead_letters(opened.dead_letters.list(limit), as_json=cli.json)
        return
    from kmqpy.kafka.dead_letters import KafkaDeadLetters

    with KafkaDeadLetters(cli.queue(name), cli.connection, origin=origin) as letters:
        found = letters.list(limit)
    if cli.json:
        print_json([stored.dead_letter_object(one) for one in found])
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
                _origin(one),
                one.reason,
            ]
            for one in found
        ],
    )


@dlq.command()
@queue_argument
@_LIMIT_OPTION
@_ORIGIN_OPTION
@connected_to_any
def peek(cli: Cli, queue: str | None, limit: int, origin: str) -> None:
    """Print dead letters with body and headers; they stay where they are.

    A JSON object a line.

    \b
    Example:
      kmq dlq peek jobs --limit 1
    """
    name = cli.named_queue(queue)
    if cli.url is not None:
        cli.kafka_only(origin=origin)
        with cli.url.opened(name) as opened:
            _print_whole(opened.dead_letters.peek(limit))
        return
    from kmqpy.kafka.dead_letters import KafkaDeadLetters

    with KafkaDeadLetters(cli.queue(name), cli.connection, origin=origin) as letters:
        _print_whole(letters.peek(limit))


def _origin(letter: Any) -> str:
    """Where a dead letter came from; `?` for one that does not tell it, which others wrote."""
    if letter.origin_partition is None:
        return letter.origin_topic or "?"
    return f"{letter.origin_topic or '?'} {letter.origin_partition}-{letter.origin_offset}"


def _print_whole(letters: Iterable[Any]) -> None:
    """Print dead letters with body and headers, each as a line of JSON."""
    for one in letters:
        shown = stored.dead_letter_object(one)
        print_json({**shown, **content("body", one.body), **headers_of(one.headers)})


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
    if cli.url is not None:
        cli.kafka_only(origin=origin, rate=rate)
        ctx.exit(stored.redrive(cli.url, name, ids, as_json=cli.json))
    from kmqpy.kafka.dead_letters import KafkaDeadLetters

    with KafkaDeadLetters(cli.queue(name), cli.connection, origin=origin) as letters:
        result = letters.run_redrive(
            ids or None, rate=rate, progress=_progress if sys.stderr.isatty() else None
        )
    if sys.stderr.isatty():
        click.echo(err=True)
    if cli.json:
        print_json({"queue": name, **dataclasses.asdict(result)})
    else:
        print_text(f"queue {name}: {many(result.redriven, 'dead letter')} sent back")
    for one in result.not_found:
        warn(f"no dead letter {one}")
    for one in result.refused:
        warn(f"dead letter {one} is too large for the queue; it stays")
    if result.not_found:
        warn(f"kmq dlq list {name} prints the ids there are")
    if result.not_found or result.refused:
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
    if cli.url is not None:
        cli.kafka_only(origin=origin)
        with cli.url.opened(name) as opened:
            count = _purged(opened.dead_letters, name, yes=yes)
    else:
        from kmqpy.kafka.dead_letters import KafkaDeadLetters

        with KafkaDeadLetters(cli.queue(name), cli.connection, origin=origin) as letters:
            name = origin or name
            count = _purged(letters, name, yes=yes)
    if cli.json:
        print_json({"queue": name, "purged": count})
    else:
        print_text(f"queue {name}: {many(count, 'dead letter')} deleted")


def _purged(letters: Any, name: str, *, yes: bool) -> int:
    """Show how many dead letters there are, ask, and delete them. Returns how many were deleted."""
    shown = len(letters.list(_MAX_COUNTED))
    warn(f"to be deleted: {many(shown, 'dead letter')}{' or more' if shown == _MAX_COUNTED else ''}")
    confirmed(f"Throw away all dead letters of {name}?", yes=yes)
    return int(letters.purge())


_MAX_COUNTED = 10_000
"""`kmq dlq purge` counts dead letters up to this number before it asks; of more it says "or more"."""


def _progress(done: int, total: int) -> None:
    click.echo(f"\r{done} of {total}", nl=False, err=True)
