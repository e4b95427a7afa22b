"""`kmq in-flight`, `kmq stats`, `kmq doctor`."""

from __future__ import annotations

import dataclasses

import click

from kmqpy.cli.options import Cli, connected
from kmqpy.cli.output import confirmed, distance, many, print_json, print_table, print_text, warn
from kmqpy.kafka.admin.findings import Severity
from kmqpy.kafka.admin.leftover_znodes import Leftover
from kmqpy.kafka.admin.stats import PartitionStats, QueueStats


@click.command(name="in-flight")
@click.argument("queue")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Show at most this many."
)
@connected
def in_flight(cli: Cli, queue: str, limit: int) -> None:
    """List messages taken and not acknowledged.

    Messages taken longest ago come first. Also lists messages that are delayed, given back (released) or
    about to be dead-lettered (dead).

    \b
    Example:
      kmq in-flight jobs -o json
    """
    with cli.admin() as admin:
        cli.check_root(admin)
        found = admin.in_flight(queue, limit)
    if cli.json:
        print_json([dataclasses.asdict(one) for one in found])
        return
    print_table(
        ["partition", "offset", "state", "holder", "since", "lease ends", "attempts", "reason", "receipt"],
        [
            [
                one.partition,
                one.offset,
                one.state,
                one.holder,
                distance(one.since_ms),
                distance(one.lease_until_ms),
                one.attempts,
                one.reason,
                one.receipt,
            ]
            for one in found
        ],
    )


@click.command()
@click.argument("queue")
@connected
def stats(cli: Cli, queue: str) -> None:
    """Count what a queue holds.

    \b
    depth      waiting: neither in flight nor dead; messages that are not due yet are included
    in flight  taken and not acknowledged
    delayed    of the depth, those not due yet that a client has met
    overdue    past their time; more than 0 for long means that no tracker redelivers
    dead       dead letters that are neither redriven nor purged
    offset     what the tracker has stored: all markers before it are dealt with
    A ~ marks a number that is an upper bound (above 10,000 only offsets are counted).

    \b
    Example:
      kmq stats jobs
    """
    with cli.admin() as admin:
        cli.check_root(admin)
        found = admin.stats(queue)
    if cli.json:
        print_json(dataclasses.asdict(found))
        return
    print_table(
        [
            "partition",
            "depth",
            "in flight",
            "delayed",
            "overdue",
            "dead",
            "oldest",
            "tracker",
            "offset",
        ],
        [
            *(
                [*_counts(str(part.partition), part), part.owner, part.stored_offset]
                for part in found.partitions
            ),
            [*_counts("total", found), "", ""],
        ],
    )


def _counts(name: str, part: QueueStats | PartitionStats) -> list[object]:
    about = "" if part.exact else "~"
    return [
        name,
        f"{about}{part.depth}",
        part.in_flight,
        part.delayed,
        part.overdue,
        f"{about}{part.dead_letters}",
        distance(part.oldest_ms),
    ]


@click.command()
@click.argument("queue", required=False)
@click.option("--fix", is_flag=True, help="First show unusable znodes and remove them, after asking.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@connected
@click.pass_context
def doctor(ctx: click.Context, cli: Cli, queue: str | None, *, fix: bool, yes: bool) -> None:
    """Check queues and say what to do.

    One queue or all: topics, retention, trackers, offsets, consumer groups, znodes.

    Exits with 1 when there are errors.

    \b
    Example:
      kmq doctor jobs
      kmq doctor --fix
    """
    removed: list[Leftover] = []
    with cli.admin() as admin:
        cli.check_root(admin)
        if fix and (leftovers := admin.leftovers(queue)):
            for znode in leftovers:
                warn(f"{znode.path}: {znode.why}")
            confirmed(f"Remove {many(len(leftovers), 'znode')}?", yes=yes)
            removed = admin.clear_leftovers(leftovers)
            for znode in leftovers:
                if znode not in removed:
                    warn(f"{znode.path}: changed meanwhile, so not removed")
        found = admin.doctor(queue)
    if cli.json:
        findings = [dataclasses.asdict(one) for one in found]
        print_json({"removed": [znode.path for znode in removed], "findings": findings} if fix else findings)
    else:
        for znode in removed:
            print_text(f"{'removed':<8}{znode.path}")
        for one in found:
            click.secho(f"{one.severity:<8}", nl=False, fg=_COLOURS[one.severity])
            print_text(f"{one.queue}: {one.what}")
            if one.to_do:
                print_text(f"{'':<8}→ {one.to_do}")
        if not found:
            print_text("no queues")
    if any(one.severity is Severity.ERROR for one in found):
        ctx.exit(1)


_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.OK: "green"}
