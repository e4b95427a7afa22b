"""The command `kmq zookeeper drain`, for queues that are stored in ZooKeeper itself."""

from __future__ import annotations

import sys

import click

from kmqpy.cli.groups import Group
from kmqpy.cli.options import Cli, connected
from kmqpy.cli.output import confirmed, many, print_json, print_text, warn
from kmqpy.errors import ConfigError


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
@click.option("--any-name", is_flag=True, help="Remove also children not named like a queue's items.")
@click.option("--yes", is_flag=True, help="Don't ask; what is removed is shown all the same.")
@connected
def drain(cli: Cli, path: str, lock_path: str | None, *, any_name: bool, yes: bool) -> None:
    """Throw away the items of a queue at PATH, also of one too full for its own consumers.

    They are removed in pieces, the znode of the queue stays. Items that are being consumed stay where
    that can be seen, other znodes than items as well. Znodes that are no queues are refused.

    \b
    Example:
      kmq zookeeper drain /app/queue --lock-path /app/locks
    """
    from kmqpy.zookeeper.drain import drain as remove
    from kmqpy.zookeeper.drain import plan
    from kmqpy.zookeeper.session import connect

    if not cli.zookeeper.hosts:
        raise ConfigError("zookeeper: is needed; give --zookeeper or KMQ_ZOOKEEPER")
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
    if cli.json:
        print_json({"path": path, "removed": count, "locked": sum(one.locked for one in plans)})
    else:
        print_text(f"{path}: {many(count, 'znode')} removed")


def _progress(done: int) -> None:
    click.echo(f"\r{done} removed", nl=False, err=True)
