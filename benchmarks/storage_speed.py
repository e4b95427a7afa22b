"""Measures puts, and takes with acknowledgements, per second on storages, beside peers on the same server.

`python -m benchmarks.storage_speed` (see --help). Messages are put and taken one by one and in batches of
100, by 1 and 8 takers, which are threads of one process, at several depths. kmqpy and each peer have a
process of their own. Before each turn, PostgreSQL is vacuumed, and Redis rewrites its append-only file, which
would else take a core in the middle of some turns. Measuring begins after a warm-up. Rows are in the form of
benchmarks.results.
"""

import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

import click
import psycopg
from redis import Redis

from benchmarks.children import peer
from benchmarks.lab import Lab
from benchmarks.peers.storage_queues import filled
from benchmarks.results import Case, Figures, Row, run_case, shown, to_json
from benchmarks.sizes import Sizes
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.dev import Databases
from kmqpy.queue import storage_for

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers" / "sql_queues.py"
POSTGRESQL_PEERS = HERE / "peers" / "postgresql_queues.py"
REDIS_PEERS = HERE / "peers" / "redis_queues.py"
VENVS = Path.home() / ".cache" / "kmqpy" / "bench-peers"
"""The folder of the peers' venvs: one for each `Peer.package`, made when the peer is first run."""
OURS = "kmqpy"
BATCHES = (1, 100)
TAKERS = (1, 8)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another queue on the same server: a script that is run by the Python of a venv with `package`.

    package    the packages that pip installs, with blanks between; empty: this Python has what it needs
    is_filled  whether it is measured at each depth, not only at 0
    """

    name: str
    script: Path
    package: str = ""
    is_filled: bool = False


@dataclass(frozen=True, kw_only=True)
class Server:
    """A storage to measure, and its peers.

    peer_url  the url as the peers want it
    tidy_up   is called before each turn, so that none starts with what the turn before has left behind
    """

    name: str
    url: str
    peer_url: Callable[[], str]
    peers: Sequence[Peer] = ()
    tidy_up: Callable[[], None] = lambda: None


def cases(_: Lab, sizes: Sizes) -> Iterator[Case]:
    """The cases of `make bench`: each storage beside its peers."""
    for name, depths in sizes.storages.items():
        with _started(name) as server:
            yield from cases_on(server, depths, sizes.storage_s, sizes.repeats)


def cases_on(server: Server, depths: Sequence[int], seconds: float, turns: int) -> Iterator[Case]:
    """A case for each combination of depth, takers and batch; kmqpy and the peers take turns."""
    for depth in depths:
        with storage_for(server.url) as storage:
            filled(storage, depth)
        for takers in TAKERS:
            for batch in BATCHES:
                peers: dict[str, Callable[[], Figures]] = {OURS: ours(server, depth, takers, batch, seconds)}
                for other in server.peers:
                    if depth == 0 or other.is_filled:
                        peers[other.name] = theirs(other, server, depth, takers, batch, seconds)
                yield Case(
                    work=f"queues on {server.name}",
                    name=f"depth {depth:,}, {takers} takers, {batch_name(batch)}",
                    metrics={"put": "put/s", "take": "take+ack/s"},
                    peers=peers,
                    repeats=turns,
                )


def batch_name(batch: int) -> str:
    """The words for a size of batches in the name of a case."""
    return "one by one" if batch == 1 else f"batches of {batch}"


def ours(
    server: Server, depth: int, takers: int, batch: int, seconds: float, kind: str = ""
) -> Callable[[], Figures]:
    """A turn of kmqpy on a queue of this depth, or of a kind of benchmarks.peers.storage_queues."""
    options = {"url": server.url, "depth": depth, "takers": takers, "batch": batch, "seconds": seconds}

    def turn() -> Figures:
        server.tidy_up()
        with peer("storage", "speed", **options, kind=kind) as child:
            return child.result()

    return turn


def theirs(
    other: Peer, server: Server, depth: int, takers: int, batch: int, seconds: float
) -> Callable[[], Figures]:
    """A turn of a peer."""

    def turn() -> Figures:
        server.tidy_up()
        arguments = [other.name, server.peer_url(), *map(str, (takers, batch, seconds, depth))]
        done = subprocess.run(
            [python_of(other), str(other.script), *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
        figures: Mapping[str, float] = json.loads(done.stdout)
        return figures

    return turn


def python_of(other: Peer) -> str:
    """The Python that has the packages of a peer; they are installed when they are first needed."""
    if not other.package:
        return sys.executable
    folder = VENVS / re.sub(r"[^\w.=-]+", "-", other.package)  # some packages glob in their own folder
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *other.package.split()], check=True)
        ready.touch()
    return str(python)


def table(rows: Sequence[Row]) -> str:
    """A line for each row: minimum, median and maximum, and the ratio of kmqpy to the peer."""
    lines = []
    ours = {(row.work, row.case, row.metric): row.median for row in rows if row.peer == OURS}
    for row in rows:
        if not row.values:
            lines.append(f"{row.work} | {row.case} | {row.unit} | {row.peer}: {row.problem}")
            continue
        figures = " / ".join(shown(value) for value in (min(row.values), row.median or 0, max(row.values)))
        mine = ours.get((row.work, row.case, row.metric))
        beside = (
            f" | kmqpy by it: {mine / row.median:.2f}" if mine and row.median and row.peer != OURS else ""
        )
        lines.append(f"{row.work} | {row.case} | {row.unit} | {row.peer}: {figures}{beside}")
    return "\n".join(lines)


@click.command()
@click.option("--on", "names", default="postgresql,mariadb,sqlite,redis", show_default=True)
@click.option("--depths", default="0,10000,1000000", show_default=True)
@click.option("--seconds", type=float, default=3.0, show_default=True, help="Of each part of a turn.")
@click.option("--turns", type=click.IntRange(1), default=3, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(*, names: str, depths: str, seconds: float, turns: int, out: Path | None) -> None:
    """Measure queues in SQL, Redis and Valkey."""
    rows: list[Row] = []
    for name in names.split(","):
        with _started(name) as server:
            for case in cases_on(server, [int(one) for one in depths.split(",")], seconds, turns):
                rows += run_case(case)
    click.echo(table(rows))
    if out is not None:
        out.write_text(json.dumps(to_json({"seconds": seconds, "turns": turns}, rows), indent=1) + "\n")


@contextmanager
def _started(name: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, Databases(*{name} - {"sqlite"}) as started:
        yield server_of(name, started, Path(folder))


def server_of(name: str, started: Databases, folder: Path) -> Server:
    """A server that was started, or a file in the folder."""
    if name == "sqlite":
        return Server(
            name=name,
            url=f"sqlite:///{folder}/kmqpy.db",
            peer_url=lambda: str(folder / f"{uuid4().hex}.db"),
            peers=[
                Peer(name="litequeue", package="litequeue==0.9", script=PEERS),
                Peer(name="huey", package="huey==3.5.4", script=PEERS),
                Peer(name="kmqpy-at-most-once", script=PEERS),
            ],
        )
    url = started.urls[name]
    peers = []
    if name == "postgresql":
        driver = "psycopg[binary,pool]==3.3.9"
        peers = [
            Peer(name="bare-postgresql", script=PEERS, is_filled=True),
            Peer(name="kmqpy-statements", script=PEERS, is_filled=True),
            Peer(name="pgmq", package=f"pgmq==1.1.4 {driver}", script=POSTGRESQL_PEERS),
            Peer(name="pgqueuer", package=f"pgqueuer==1.6.0 {driver}", script=POSTGRESQL_PEERS),
            Peer(name="procrastinate", package=f"procrastinate==3.10.0 {driver}", script=POSTGRESQL_PEERS),
        ]
    elif name in ("redis", "valkey"):
        peers = [
            Peer(name="bare-redis", script=REDIS_PEERS, is_filled=True),
            Peer(name="rq", package="rq==3.0.0", script=REDIS_PEERS),
            Peer(name="taskiq", package="taskiq-redis==1.2.4", script=REDIS_PEERS),
        ]
    tidy_up = {"postgresql": _vacuum, "redis": _rewrite, "valkey": _rewrite}.get(name)
    return Server(
        name=name,
        url=url,
        peer_url=lambda: url,
        peers=peers,
        tidy_up=partial(tidy_up, url) if tidy_up else Server.tidy_up,
    )


def _vacuum(url: str) -> None:
    """Free what dead rows and index entries take, in all tables."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")


def _rewrite(url: str) -> None:
    """Rewrite the append-only file, and wait until it is done."""
    with Redis.from_url(url) as client:
        _await_rewrite(client)  # for one that Redis began itself: it refuses a second one meanwhile
        client.bgrewriteaof()
        _await_rewrite(client)


def _await_rewrite(client: Redis) -> None:
    while True:
        found = client.info("persistence")
        if not (found["aof_rewrite_in_progress"] or found["aof_rewrite_scheduled"]):
            return
        SYSTEM_CLOCK.sleep(0.1)


if __name__ == "__main__":
    main()
