"""The command `kmq demo`: shows kmqpy's main job, end to end, on servers that it starts itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.throttle import Throttle

if TYPE_CHECKING:
    from kmqpy.dev.demo import DemoReport, Progress

_LINE_EVERY_S = 2.0
"""Seconds between two lines of progress, where the output is no terminal."""


@click.command(
    short_help="Try it all out: consumers fail, a tracker is killed.",
    epilog="\b\nExample:\n  kmq demo --json > report.json",
)
@click.option(
    "--messages",
    default=20_000,
    type=click.IntRange(1_000, 10_000_000),
    metavar="N",
    help="How many are sent, 1,000 or more [20000].",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, all else on stderr.")
def demo(messages: int, as_json: bool) -> int:
    """Send messages to failing consumers, kill a tracker, and count: nothing may be lost.

    Starts a Kafka and a ZooKeeper of its own, 2 trackers and 3 consumers. Of the messages, 5 % are
    left unacknowledged once, 2 % are given back once, 0.5 % always fail and must end as dead letters.
    Halfway one tracker is killed with SIGKILL while messages of its partitions are due.

    Exits with 1 unless lost, unexpected and tracker-made duplicates are 0 and the dead letters are
    exactly the messages that always fail.
    """
    from kmqpy.dev.demo import run

    # With --json, only the JSON object goes to stdout.
    console = Console(stderr=as_json)
    with _display(console, messages) as show:
        report = run(messages, show)
    if as_json:
        json.dump(report.to_json(), sys.stdout)
        sys.stdout.write("\n")
    console.print(_table(report))
    return 0 if report.ok else 1


@contextmanager
def _display(console: Console, total: int) -> Iterator[Callable[..., None]]:
    """Yield a function that shows progress: as live figures on a terminal, else as a line now and then."""
    started, throttle = SYSTEM_CLOCK.monotonic(), Throttle(_LINE_EVERY_S)

    def text(progress: Progress) -> str:
        return (
            f"{SYSTEM_CLOCK.monotonic() - started:5.1f} s  sent {progress.sent:,} of {total:,}  "
            f"delivered {progress.delivered:,}  acknowledged {len(progress.acknowledged):,}  "
            f"dead letters {progress.dead_lettered:,}  {progress.note}"
        )

    if console.is_terminal:
        with Live(console=console, refresh_per_second=8, transient=True) as live:
            yield lambda progress: live.update(text(progress))
    else:
        console.print("starting a Kafka and a ZooKeeper ...")
        yield lambda progress: console.print(text(progress), soft_wrap=True) if throttle.allows() else None


_NOTES = {
    "sent": "",
    "delivered": "all attempts",
    "acknowledged": "",
    "redelivered": "copies made by trackers",
    "dead_lettered": "",
    "duplicates": "a copy delivered again",
    "tracker_duplicates": "must be 0",
    "unexpected": "must be 0",
    "lost": "must be 0",
    "wrong_dead_letters": "must be 0",
    "due_at_kill": "due on the killed tracker's partitions",
    "recovery_seconds": "from the kill to the next redelivery there",
    "seconds": "",
}
"""The figures of the report that the table shows, each with a note."""


def _table(report: DemoReport) -> Table:
    table = Table(title="kmq demo: " + ("nothing lost" if report.ok else "PROMISE BROKEN"))
    table.add_column("messages")
    table.add_column("", justify="right")
    table.add_column("")
    for name, note in _NOTES.items():
        value = getattr(report, name)
        shown = f"{value:,}" if isinstance(value, int) else f"{value}"
        table.add_row(name.replace("_", " "), shown, note)
    return table
