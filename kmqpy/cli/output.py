"""Prints for the commands: JSON or aligned text on stdout, messages, questions and progress on stderr.

Commands print foreign text (keys, reasons, holders, names) only by these functions: they escape control
characters, so that such text can't steer the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.logs import printable, printable_json, printable_lines
from kmqpy.core.throttle import Throttle
from kmqpy.queue.plain import content, headers_of

if TYPE_CHECKING:
    from kmqpy.message import Message
    from kmqpy.queue import QueueDescription

_MIN_REDRAW_S = 0.1
"""counted() shows no new number within this time, in seconds, after the last one."""


class PartlyDone(click.ClickException):
    """A command failed after it had done a part; the text says which. `kmq` exits with 1 then."""


def print_json(value: Any) -> None:
    """Print a value as JSON on one line of stdout, and flush it."""
    click.echo(printable_json(value))


def as_object(message: Message) -> dict[str, Any]:
    """Return the fields of a message that `kmq receive` prints, on Kafka with the place of its record."""
    place = {name: getattr(message, name) for name in ("partition", "offset") if hasattr(message, name)}
    return {
        "receipt": message.receipt,
        "queue": message.queue,
        "id": message.id,
        **place,
        **content("key", message.key),
        **content("body", message.body),
        **headers_of(message.headers),
        "attempts": message.attempts,
        "enqueued_ms": message.enqueued_ms,
        "first_enqueued_ms": message.first_enqueued_ms,
        "lease_until_ms": message.lease_until_ms,
        **({} if message.group is None else {"group": message.group}),
    }


def print_text(text: str = "") -> None:
    click.echo(printable(text))


def print_lines(text: str) -> None:
    click.echo(printable_lines(text))


def replace_closed_streams() -> None:
    """Let stdout and stderr that were closed before we began (`>&-`) swallow what is printed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open until the end
            setattr(sys, name, nowhere)


def check_stdout() -> None:
    """Raise click's UsageError if stdout was closed before we began."""
    if getattr(sys.stdout, "name", None) == os.devnull:
        raise click.UsageError("standard output is closed; /dev/null throws away what is printed")


def standard_input(otherwise: str) -> TextIO:
    """Return standard input. If it was closed, raises click's UsageError with the advice `otherwise`."""
    if sys.stdin is None:
        raise click.UsageError(f"standard input is closed; {otherwise}")
    return sys.stdin


def drop_stdout() -> None:
    """Throw further output away: nobody reads stdout any longer, and flushing it at exit must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print aligned columns; where stdout is no terminal, no line is wrapped. None prints as -."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", min_width=len(column), no_wrap=not sys.stdout.isatty())
    for row in rows:
        table.add_row(*("-" if cell is None else printable(str(cell)) for cell in row))
    console = Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else 10_000,
        highlight=False,
        markup=False,
        emoji=False,
    )
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def print_sizes(found: QueueDescription) -> None:
    """Print how many messages a queue of another storage than Kafka holds, as a table."""
    holds = found.settings.get("on_dead_letter") == "hold"
    held = {"held groups": found.held_groups} if holds else {}
    sizes = (found.ready + found.delayed, found.in_flight, found.delayed, found.dead)
    columns = ["queue", "depth", "in flight", "delayed", "dead", *held]
    print_table(columns, [[found.name, *sizes, *held.values()]])


def warn(text: str) -> None:
    """Print one line on stderr that begins with `kmq:`."""
    click.echo(printable("kmq: " + " ".join(text.split())), err=True)


def print_error(text: object) -> None:
    warn(f"error: {text}")


@contextmanager
def counted(what: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows a growing number on a terminal; it may be called as often as one likes."""
    shown = Throttle(_MIN_REDRAW_S)
    if not sys.stderr.isatty():
        yield lambda _count: None
        return

    def show(count: int) -> None:
        if shown.allows():
            click.echo(f"\r{count:,} {what} ", nl=False, err=True)

    try:
        yield show
    finally:
        click.echo("\r\x1b[K", nl=False, err=True)


def when(ms: int | None) -> str | None:
    """Return a moment (ms since 1970) as UTC text; `never` for moments after the year 9999."""
    if ms is None:
        return None
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
    except OverflowError:
        return "never"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def distance(ms: int | None) -> str | None:
    """Return how far a moment (ms since 1970) is from now: `in 4.2s`, `3m ago`."""
    if ms is None:
        return None
    away = ms - SYSTEM_CLOCK.wall_ms()
    return f"in {span(away)}" if away > 0 else f"{span(-away)} ago"


def span(ms: int) -> str:
    """Return a duration, rounded down, for people: `350ms`, `4.2s`, `3m`, `2h`, `7d`."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        if ms >= 2 * size or (ms >= size and ms % size == 0):
            return f"{ms // size}{unit}"
    return (
        f"{ms / 1000:.1f}s" if ms >= 1_000 and ms % 1_000 else f"{ms // 1000}s" if ms >= 1_000 else f"{ms}ms"
    )


def many(count: int, thing: str) -> str:
    """Return the number with its noun: `1 message`, `2 messages`."""
    return f"{count:d} {thing}{'' if count == 1 else 's'}"


def confirmed(question: str, *, yes: bool) -> None:
    """Ask before something is deleted, unless `yes`.

    Raises click's UsageError for any answer on standard input but y or yes, and for no answer.
    """
    if yes:
        return
    asked = sys.stdin is not None and sys.stdin.isatty()
    if asked:
        click.echo(printable(f"{question} [y/N] "), nl=False, err=True)
    answer = "" if sys.stdin is None else sys.stdin.readline()
    if asked and not answer.endswith("\n"):
        click.echo(err=True)
    if answer.strip().lower() not in ("y", "yes"):
        raise click.UsageError(f"{question} It was not confirmed; use --yes")
