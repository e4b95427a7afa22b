"""Measures how many messages a second workers handle, of a backlog; handlers do nothing, or wait for 1 ms.

On Kafka, kmqpy is beside the least code for such a worker: a consumer and a pool of threads, or tasks, that
handle each batch and commit its offsets; what is behind one slow message waits, and a failed one is gone. On
SQLite it is beside huey's own consumer, with `synchronous = FULL` as ours.
"""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks import children
from benchmarks.lab import Lab
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes
from benchmarks.storage_speed import OURS, Peer, python_of
from kmqpy.kafka.settings import QueueSettings

PARTITIONS = 4
BARE = "consumer and pool"
HUEY = Peer(
    name="huey", package="huey==3.5.4", script=Path(__file__).resolve().parent / "peers" / "huey_worker.py"
)
_ON_KAFKA = (("threads", 8, 0), ("threads", 1, 0), ("threads", 8, 1), ("asyncio", 100, 1), ("asyncio", 8, 1))
"""The kind of handlers, how many at the same time, and for how many ms each waits."""
_WAITING, _SQLITE = 5, 10
"""Handlers that wait, and SQLite, get so many times fewer messages."""


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case for each kind of handlers."""
    with lab.queue(PARTITIONS) as queue:
        lab.preload(queue, PARTITIONS, sizes.worker_messages, 100)
        for kind, handlers, ms in _ON_KAFKA:
            count = sizes.worker_messages // (_WAITING if ms else 1)
            turn = partial(_on_kafka, lab, queue, kind=kind, handlers=handlers, ms=ms, messages=count)
            yield _case(
                f"Kafka, {kind}, {handlers} handlers of {ms} ms",
                {OURS: partial(turn, "kmqpy"), BARE: partial(turn, "bare")},
                sizes,
            )
    count = sizes.worker_messages // _SQLITE
    yield _case(
        "SQLite, threads, 1 handlers of 0 ms",
        {OURS: partial(_on_sqlite, count), HUEY.name: partial(_huey, count)},
        sizes,
    )


def _case(name: str, peers: dict[str, Callable[[], Figures]], sizes: Sizes) -> Case:
    metrics = {"handled_per_s": "handled/s"}
    return Case(work="workers", name=name, metrics=metrics, peers=peers, repeats=sizes.repeats)


def _on_kafka(
    lab: Lab, queue: QueueSettings, who: str, *, kind: str, handlers: int, ms: int, messages: int
) -> Figures:
    with (
        lab.view(queue, PARTITIONS) as view,
        children.peer(
            "worker",
            who,
            bootstrap=lab.connection.bootstrap,
            queue=view.to_json().decode(),
            kind=kind,
            handlers=handlers,
            ms=ms,
            messages=messages,
        ) as child,
    ):
        return child.result()


def _on_sqlite(messages: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/kmqpy.db"
        with children.peer(
            "worker", "stored", url=url, kind="threads", handlers=1, ms=0, messages=messages
        ) as child:
            return child.result()


def _huey(messages: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python_of(HUEY), HUEY.script, f"{folder}/huey.db", str(messages)],
            check=True,
            capture_output=True,
            text=True,
            timeout=600,
        )
    figures: Figures = json.loads(done.stdout)
    return figures
