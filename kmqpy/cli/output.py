"""Printing: machine-readable JSON or aligned text on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kmqpy.clock import SYSTEM_CLOCK


class Partly(click.ClickException):
    """Something was done before it failed; the text says what."""


def print_json(value: Any) -> None:
    """One JSON value on one line, at once."""
    click.echo(json.dumps(value, ensure_ascii=False))


def drop_stdout() -> None:
    """The reader of our output is gone: print nothing more, and let nothing complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Aligned columns; nothing is cut off when stdout is no terminal. `None` prints as -."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", min_width=len(column), no_wrap=not sys.stdout.isatty())
    for row in rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    console = Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else 10_000, highlight=False, markup=False
    )
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def warn(text: str) -> None:
    """One line on stderr."""
    click.echo("kmq: " + " ".join(text.split()), err=True)


def when(ms: int | None) -> str | None:
    """A moment (ms since 1970) as UTC text."""
    if ms is None:
        return None
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
    except OverflowError:
        return "never"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def distance(ms: int | None) -> str | None:
    """How far a moment is from now: `in 4.2s`, `3m ago`."""
    if ms is None:
        return None
    away = ms - SYSTEM_CLOCK.wall_ms()
    return f"in {span(away)}" if away > 0 else f"{span(-away)} ago"


def span(ms: int) -> str:
    """A duration for people: `350ms`, `4.2s`, `3m`, `2h`, `7d`."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        if ms >= 2 * size or (ms >= size and ms % size == 0):
            return f"{ms // size}{unit}"
    return (
        f"{ms / 1000:.1f}s" if ms >= 1_000 and ms % 1_000 else f"{ms // 1000}s" if ms >= 1_000 else f"{ms}ms"
    )


def many(count: int, thing: str) -> str:
    """`1 message`, `2 messages`."""
    return f"{count:d} {thing}{'' if count == 1 else 's'}"


def confirmed(question: str, *, yes: bool) -> None:
    """Ask before something is deleted, unless `yes`; nothing but y or yes on standard input will do.

    Raises click's UsageError when it is refused.
    """
    if yes:
        return
    asked = sys.stdin is not None and sys.stdin.isatty()
    if asked:
        click.echo(f"{question} [y/N] ", nl=False, err=True)
    answer = "" if sys.stdin is None else sys.stdin.readline()
    if asked and not answer.endswith("\n"):
        click.echo(err=True)
    if answer.strip().lower() not in ("y", "yes"):
        raise click.UsageError(f"{question} It was not confirmed; use --yes")
