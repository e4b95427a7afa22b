"""The commands that look at queues: `kmq in-flight`, `orphans`, `peek`, `size`, `stats` and `doctor`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import click

from kmqpy.cli.options import DURATION, LIMIT_OPTION, MOMENT, Cli, connected_to_any, queue_argument
from kmqpy.cli.output import (
    as_object,
    confirmed,
    distance,
    many,
    print_json,
    print_sizes,
    print_table,
    print_text,
    warn,
)
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Finding, Kind, Severity
from kmqpy.kafka.admin.stats import PartitionStats, QueueStats
from kmqpy.kafka.admin.unusable_znodes import UnusableZnode
from kmqpy.queue import Capabilities, Orphan, Storage
from kmqpy.queue.plain import content
from kmqpy.storages.stored_storage import StoredStorage


@click.command(name="in-flight")
@queue_argument
@LIMIT_OPTION
@connected_to_any
def in_flight(cli: Cli, queue: str | None, limit: int) -> None:
    """List messages taken and not acknowledged.

    Messages taken longest ago come first. On Kafka, messages that are delayed, given back (released) or about
    to be dead-lettered (dead) are listed, too.

    \b
    Example:
      kmq in-flight jobs -o json
    """
    name = cli.named_queue(queue)
    if cli.url is not None:
        with cli.url.opened(name) as opened:
            _print_orphans(cli, opened.orphans()[:limit])
        return

    def row(one: Any) -> list[object]:
        times = distance(one.since_ms), distance(one.lease_until_ms)
        about = one.attempts, one.reason, one.receipt
        return [one.partition, one.offset, one.state, one.holder, *times, *about]

    columns = [
        "partition",
        "offset",
        "state",
        "holder",
        "since",
        "lease ends",
        "attempts",
        "reason",
        "receipt",
    ]
    with cli.admin() as admin:
        cli.show(admin.in_flight(name, limit), columns, row)


@click.command()
@queue_argument
@click.option("--older-than", type=DURATION, help="Only those taken longer ago than this.")
@click.option(
    "--queued-before",
    type=MOMENT,
    help="Only those sent, or last redelivered, before this: so long ago (1h), or a time (2030-01-31T12:00).",
)
@connected_to_any
def orphans(cli: Cli, queue: str | None, older_than: timedelta | None, queued_before: int | None) -> None:
    """List messages taken and not acknowledged, with their receipts: all, or those of long ago.

    \b
    Example:
      kmq orphans jobs --older-than 1h
      kmq orphans jobs --queued-before 1h
    """
    if older_than is not None and queued_before is not None:
        raise click.UsageError("give --older-than or --queued-before, not both")
    with cli.opened(cli.named_queue(queue)) as opened:
        found = opened.orphans(older_than, queued_before_ms=queued_before)
        _print_orphans(cli, found)


def _print_orphans(cli: Cli, found: Sequence[Orphan]) -> None:
    def as_object(one: Orphan) -> dict[str, Any]:
        message = one.message
        times = {"since_ms": one.since_ms, "lease_until_ms": one.lease_until_ms}
        body = {} if message is None else content("body", message.body)
        about = {"attempts": None if message is None else message.attempts, **body}
        return {"receipt": one.receipt, "holder": one.holder, **times, **about}

    def row(one: Orphan) -> list[object]:
        attempts = None if one.message is None else one.message.attempts
        return [one.holder, distance(one.since_ms), distance(one.lease_until_ms), attempts, one.receipt]

    cli.show(found, ["holder", "since", "lease ends", "attempts", "receipt"], row, as_object)


@click.command()
@queue_argument
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="At most this many.")
@connected_to_any
def peek(cli: Cli, queue: str | None, limit: int) -> None:
    """Print messages that wait, without taking them.

    A JSON object a line.

    \b
    Example:
      kmq peek jobs --limit 1
    """
    with cli.opened(cli.named_queue(queue)) as opened:
        for message in opened.peek(limit):
            shown = as_object(message)
            del shown["receipt"], shown["lease_until_ms"]  # only a taken message has them
            print_json(shown)


@click.command()
@queue_argument
@connected_to_any
def size(cli: Cli, queue: str | None) -> None:
    """Print how many messages wait.

    Counts messages that are neither in flight nor dead-lettered; delayed messages are included.

    \b
    Example:
      kmq size jobs
    """
    name = cli.named_queue(queue)
    with cli.opened(name) as opened:
        count = opened.size()
    cli.tell({"queue": name, "size": count}, str(count))


@click.command()
@queue_argument
@connected_to_any
def stats(cli: Cli, queue: str | None) -> None:
    """Count what a queue holds.

    \b
    depth      waiting: neither in flight nor dead; messages that are not due yet are included
    in flight  taken and not acknowledged
    delayed    of the depth, those not due yet that a client has met
    overdue    past their time; more than 0 for long means that no tracker redelivers
    dead       dead letters that are neither redriven nor purged
    offset     what the tracker has stored: all markers before it are dealt with
    In a queue with lanes, a row for each lane, too.
    A ~ marks a number that is an upper bound (above 10,000 only offsets are counted).
    With --queue-url: depth, in flight, delayed and dead, all exact.

    \b
    Example:
      kmq stats jobs
    """
    name = cli.named_queue(queue)
    if cli.url is not None:
        with cli.url.storage() as storage:
            held = storage.describe(name)
        if not cli.json:
            print_sizes(held)
            return
        sizes = {key: getattr(held, key) for key in ("ready", "delayed", "in_flight", "dead")}
        if held.settings.get("on_dead_letter") == "hold":
            sizes["held_groups"] = held.held_groups
        print_json({"queue": name, "depth": held.ready + held.delayed, **sizes})
        return
    with cli.admin() as admin:
        found = admin.stats(name)
    if cli.json:
        print_json(dataclasses.asdict(found))
        return
    columns = ["partition", "depth", "in flight", "delayed", "overdue", "dead", "oldest", "tracker", "offset"]
    rows = [[*_counts(str(one.partition), one), one.owner, one.stored_offset] for one in found.partitions]
    lanes = [[*_counts(lane.queue, lane), "", ""] for lane in found.lanes]
    print_table(columns, [*rows, *lanes, [*_counts("total", found), "", ""]])


def _counts(name: str, part: QueueStats | PartitionStats) -> list[object]:
    about = "" if part.exact else "~"
    waiting = [f"{about}{part.depth}", part.in_flight, part.delayed, part.overdue]
    return [name, *waiting, f"{about}{part.dead_letters}", distance(part.oldest_ms)]


@click.command()
@click.argument("queue", required=False)
@click.option("--fix", is_flag=True, help="First show what can be mended, and mend it after asking.")
@click.option("--logs", is_flag=True, help="Read all that is still to be read, to find damage.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@connected_to_any
@click.pass_context
def doctor(ctx: click.Context, cli: Cli, queue: str | None, *, fix: bool, logs: bool, yes: bool) -> None:
    """Check queues and say what to do.

    One queue or all: topics, retention, trackers, offsets, consumer groups, znodes,
    transactions that nobody ends. With --queue-url: whether the storage's server keeps
    what it confirmed when its power is cut, and notices damage on its disk.

    --fix removes unusable znodes, and ends such transactions of trackers and redrives.

    Exits with 1 when there are errors.

    \b
    Example:
      kmq doctor jobs
      kmq doctor --fix
    """
    removed: list[UnusableZnode] = []
    if cli.url is not None:
        if fix:
            raise click.UsageError("--fix: only for queues on Kafka")
        with cli.url.storage() as storage:
            found = [_durability(storage.capabilities), *_damage(storage, reads_all=logs)]
        _print_findings(found, as_json=cli.json)
        if any(one.severity is Severity.ERROR for one in found):
            ctx.exit(1)
        return
    with cli.admin() as admin:
        if fix and (unusable := admin.unusable_znodes(queue)):
            for znode in unusable:
                warn(f"{znode.path}: {znode.why}")
            confirmed(f"Remove {many(len(unusable), 'znode')}?", yes=yes)
            removed = admin.remove_unusable_znodes(unusable)
            for znode in unusable:
                if znode not in removed:
                    warn(f"{znode.path}: changed meanwhile, so not removed")
        ended = _end_hanging(admin, queue, yes=yes) if fix else []
        found = admin.doctor(queue, reads_logs=logs)
    if cli.json and fix:
        findings = [dataclasses.asdict(one) for one in found]
        print_json({"removed": [znode.path for znode in removed], "ended": ended, "findings": findings})
    else:
        for znode in removed:
            print_text(f"{'removed':<8}{znode.path}")
        for place in ended:
            print_text(f"{'ended':<8}{place}")
        _print_findings(found, as_json=cli.json)
    if any(one.severity is Severity.ERROR for one in found):
        ctx.exit(1)


def _print_findings(found: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return
    for one in found:
        click.secho(f"{one.severity:<8}", nl=False, fg=_COLOURS[one.severity])
        print_text(f"{one.queue}: {one.what}")
        if one.to_do:
            print_text(f"{'':<8}→ {one.to_do}")
    if not found:
        print_text("no queues")


def _damage(storage: Storage, *, reads_all: bool) -> Iterator[Finding]:
    checks = storage.damage_checks if isinstance(storage, StoredStorage) else None
    if checks is None:
        if reads_all:
            raise click.UsageError("--logs: only for queues on Kafka and in SQL databases")
        return
    if setting := checks.unchecked_setting():
        yield Finding(
            Severity.WARNING,
            "storage",
            Kind.UNCHECKED,
            f"{setting}: what the disk has changed is handed out as if it were whole, or left out",
            'see docs/storage-operations.md, "Damaged files"',
        )
    if reads_all:
        if damage := checks.read_all():
            to_do = 'see docs/storage-operations.md, "Damaged files"'
            yield Finding(Severity.ERROR, "storage", Kind.DAMAGED_TABLE, damage, to_do)
        else:
            yield Finding(Severity.OK, "storage", Kind.OK, "all messages can be read")


def _durability(can: Capabilities) -> Finding:
    reason = can.lossy_setting
    does_not_tell = f"{reason}: the server does not tell; "
    if can.durable:
        what = "no setting of the server lets it lose what it confirmed"
        if not can.immediate:  # Kafka, behind a gateway
            what = (
                "what it confirmed is on all in-sync replicas; it is lost if all lose power before they flush"
            )
        elif reason:
            what = f"{does_not_tell}with its default it keeps what it confirmed"
        return Finding(Severity.OK, "storage", Kind.OK, what)
    loses = "a power cut can lose messages and acknowledgements that were confirmed"
    if reason.endswith("=unknown"):
        return Finding(
            Severity.WARNING,
            "storage",
            Kind.NOT_DURABLE,
            f"{does_not_tell}if it is not as docs/storage-operations.md says, {loses}",
            "ask whoever runs the server, or let the user of kmqpy read its settings",
        )
    return Finding(
        Severity.WARNING,
        "storage",
        Kind.NOT_DURABLE,
        f"{reason}: {loses}",
        "change this setting of the server; docs/storage-operations.md says to what",
    )


def _end_hanging(admin: Admin, queue: str | None, *, yes: bool) -> list[str]:
    found = [one for one in admin.own_hanging(queue) if one.may_be_ended]
    places = ["{}, partition {}".format(*one.hanging.place) for one in found]
    if found:
        for one, place in zip(found, places, strict=True):
            warn(f"{place}: a transaction of {one.transactional_id} that nobody ends")
        confirmed(f"End {many(len(found), 'transaction')}?", yes=yes)
    ended = []
    for one, place in zip(found, places, strict=True):
        if admin.end_transaction(one):
            ended.append(place)
        else:
            warn(f"{place}: Kafka has forgotten the producer of the transaction, so it is not ended")
    return ended


_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.OK: "green"}
