"""The commands `kmq zookeeper drain`, `stats` and `dlq`, for queues that are stored in ZooKeeper itself."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import click

from kmqpy.cli.options import LIMIT_OPTION, Cli, Group, connected
from kmqpy.cli.output import confirmed, many, warn, when
from kmqpy.errors import ConfigError
from kmqpy.queue.plain import content

if TYPE_CHECKING:
    from kmqpy.zookeeper.queue import DeadItem, ZkQueue


@click.group(cls=Group)
def zookeeper() -> None:
    """Queues stored in ZooKeeper: those of kmqpy.zookeeper, of Curator and kazoo.

    \b
    Example:
      kmq zookeeper drain /app/queue
    """


@zookeeper.command()
@click.argument("path")
@click.option("--lock-path", metavar="ZNODE", help="Curator's lock path: locked items stay.")
@click.option(
    "--any-name", is_flag=True, help="Also remove children that are not named like a queue's items."
)
@click.option("--yes", is_flag=True, help="Don't ask; what is removed is shown all the same.")
@connected
def drain(cli: Cli, path: str, lock_path: str | None, *, any_name: bool, yes: bool) -> None:
    """Throw away the items of a queue at PATH, even of one too full for its own consumers.

    They are removed in pieces, the znode of the queue stays. Items that are being consumed stay where
    that can be seen, and so do other znodes than items. Znodes that are not queues are refused.

    \b
    Example:
      kmq zookeeper drain /app/queue --lock-path /app/locks
    """
    from kmqpy.zookeeper.drain import drain as remove
    from kmqpy.zookeeper.drain import plan
    from kmqpy.zookeeper.session import connect

    _check_address(cli)
    if path == cli.connection.root or path.startswith(cli.connection.root + "/"):
        raise ConfigError(f"PATH: {path!r} belongs to the registry of kmqpy ({cli.connection.root})")
    with connect(cli.zookeeper, 30_000) as zk:
        plans = plan(zk, path, lock_path=lock_path, any_name=any_name)
        for one in plans:
            stay = f"; {many(one.locked, 'locked znode')} stay" if one.locked else ""
            stay += f"; {many(len(one.foreign), 'foreign znode')} stay" if one.foreign else ""
            warn(f"to be deleted: {many(len(one.names), 'znode')} in {one.path}{stay}")
        if any(one.names for one in plans):
            confirmed(f"Throw them away, in ZooKeeper at {cli.zookeeper.hosts}?", yes=yes)
        count = remove(zk, plans, _progress if sys.stderr.isatty() else lambda _done: None)
    if sys.stderr.isatty():
        click.echo(err=True)
    done = {"path": path, "removed": count, "locked": sum(one.locked for one in plans)}
    cli.tell(done, f"{path}: {many(count, 'znode')} removed")


def _progress(done: int) -> None:
    click.echo(f"\r{done} removed", nl=False, err=True)


def _check_address(cli: Cli) -> None:
    if not cli.zookeeper.hosts:
        raise ConfigError("zookeeper: is needed; give --zookeeper or KMQ_ZOOKEEPER")


def _unit_of_work(cli: Cli, root: str) -> ZkQueue:
    from kmqpy.zookeeper.queue import ZkQueue, ZkQueueSettings

    _check_address(cli)
    return ZkQueue(cli.zookeeper, ZkQueueSettings(root=root))


_ROOT_OPTION = click.option(
    "--queue-root",
    default="/zms",
    show_default=True,
    metavar="ZNODE",
    help="The parent of all queues, ZkQueueSettings(root=).",
)


@zookeeper.command()
@click.argument("queues", nargs=-1)
@_ROOT_OPTION
@connected
def stats(cli: Cli, queues: tuple[str, ...], queue_root: str) -> None:
    """Count the items of queues of the unit of work (ZkQueue): all, taken, dead letters.

    \b
    Example:
      kmq zookeeper stats
      kmq zookeeper stats orders
    """
    with _unit_of_work(cli, queue_root) as queue:
        found = [queue.stats(name) for name in queues or queue.queues()]
    cli.show(found, ["queue", "items", "taken", "dead letters"], lambda one: [*dataclasses.astuple(one)])


@zookeeper.group(cls=Group)
def dlq() -> None:
    """Dead letters of the unit of work (ZkQueue): items that a policy handed out too often.

    \b
    Example:
      kmq zookeeper dlq list orders
    """


@dlq.command(name="list")
@click.argument("queue")
@LIMIT_OPTION
@_ROOT_OPTION
@connected
def list_(cli: Cli, queue: str, limit: int, queue_root: str) -> None:
    """List dead letters: higher priorities first, then the oldest. As JSON with their bodies.

    \b
    Example:
      kmq zookeeper dlq list orders --limit 20
    """
    with _unit_of_work(cli, queue_root) as opened:
        found = opened.dead_letters(queue).list(limit)

    def as_object(one: DeadItem) -> dict[str, Any]:
        shown = dataclasses.asdict(one)
        body = shown.pop("body")
        return {**shown, **content("body", body)}

    def row(one: DeadItem) -> list[object]:
        return [one.name, one.taken, when(one.died_ms), len(one.body)]

    cli.show(found, ["name", "taken", "dead since", "bytes"], row, as_object)


@dlq.command()
@click.argument("queue")
@click.argument("names", nargs=-1)
@_ROOT_OPTION
@connected
@click.pass_context
def redrive(ctx: click.Context, cli: Cli, queue: str, names: tuple[str, ...], queue_root: str) -> None:
    """Put dead letters back as new items, all of them or those of these names; their takes begin at 0.

    Exits with 1 when there are fewer than names.

    \b
    Example:
      kmq zookeeper dlq redrive orders item-0000000001
    """
    with _unit_of_work(cli, queue_root) as opened:
        count = opened.dead_letters(queue).redrive(names or None)
    cli.tell({"queue": queue, "redriven": count}, f"queue {queue}: {many(count, 'dead letter')} sent back")
    if names and count < len(set(names)):
        warn(f"some names are not those of dead letters; kmq zookeeper dlq list {queue} prints them")
        ctx.exit(1)


@dlq.command()
@click.argument("queue")
@click.option("--yes", is_flag=True, help="Don't ask; the count is shown all the same.")
@_ROOT_OPTION
@connected
def purge(cli: Cli, queue: str, queue_root: str, *, yes: bool) -> None:
    """Throw away all dead letters of a queue.

    \b
    Example:
      kmq zookeeper dlq purge orders --yes
    """
    with _unit_of_work(cli, queue_root) as opened:
        letters = opened.dead_letters(queue)
        warn(f"to be deleted: {many(letters.size(), 'dead letter')}")
        confirmed(f"Throw away all dead letters of {queue}?", yes=yes)
        count = letters.purge()
    cli.tell({"queue": queue, "purged": count}, f"queue {queue}: {many(count, 'dead letter')} deleted")
