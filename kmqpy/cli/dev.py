"""The command `kmq dev up`: runs servers on this machine."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import click

from kmqpy.cli.options import Cli, Group, connected_service
from kmqpy.cli.output import print_json, print_text, warn


@click.group(cls=Group)
def dev() -> None:
    """Run Kafka, ZooKeeper and databases on this machine.

    \b
    Example:
      kmq dev up
    """


@dev.command()
@click.option(
    "--brokers", type=click.Choice(["1", "3"]), default="1", show_default=True, help="Kafka brokers."
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep data and ports here.",
)
@click.option(
    "--with",
    "databases",
    metavar="NAMES",
    default="",
    help="Start databases, too: postgresql,redis,valkey,mariadb,mysql.",
)
@connected_service
def up(cli: Cli, brokers: str, keep: Path | None, databases: str) -> None:
    """Run a real Kafka and a ZooKeeper on this machine until Ctrl-C.

    The first time it fetches them; without --keep everything is gone at the end. The lines that begin
    with `export` set the addresses for other commands.

    \b
    Example:
      kmq dev up --brokers 3 --keep kmq-data
      kmq dev up --with postgresql,redis
    """
    from kmqpy.dev import Cluster, Databases

    names = [name.strip() for name in databases.split(",") if name.strip()]
    beside = Databases(*names, keep=keep)
    stop = threading.Event()
    warn(f"starting {', '.join(['Kafka', 'ZooKeeper', *names])} (the first time they are fetched) ...")
    with Cluster(brokers=int(brokers), keep=keep) as cluster, beside:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        if cli.json:
            print_json({"bootstrap": cluster.bootstrap, "zookeeper": cluster.zookeeper, **beside.urls})
        else:
            print_text(f"Kafka:     {cluster.bootstrap}")
            print_text(f"ZooKeeper: {cluster.zookeeper}")
            for name, url in beside.urls.items():
                print_text(f"{f'{name}:':<10} {url}")
            print_text()
            print_text(f"export KMQ_BOOTSTRAP={cluster.bootstrap} KMQ_ZOOKEEPER={cluster.zookeeper}")
        warn("running; Ctrl-C ends it")
        stop.wait()
    warn("stopped")
