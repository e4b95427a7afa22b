"""Measures what many queues of one Kafka storage cost their process: threads, connections, memory.

`python -m benchmarks.many_queues --queues 1000 --receive 20` (Linux) makes 1,000 queues on a Kafka of its
own, opens all of them, sends a message to each, and then receives from 20. It prints a line of JSON for each
step.
"""

import gc
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path

import click

from kmqpy.core.backoff import Backoff
from kmqpy.dev.cluster import Cluster
from kmqpy.errors import Unavailable
from kmqpy.queue import Queue, Storage, storage_for

_ESTABLISHED = "01"
_TRIES = 5


@click.command()
@click.option("--queues", type=click.IntRange(1), default=1_000, show_default=True)
@click.option("--receive", "receiving", type=click.IntRange(0), default=20, show_default=True)
@click.option("--seconds", type=float, default=600.0, show_default=True, help="For making queues.")
def main(*, queues: int, receiving: int, seconds: float) -> None:
    """Measure many queues of one storage."""
    with Cluster(jvm_options=("-Xmx1g",)) as cluster:
        url = f"kafka://{cluster.bootstrap}?zookeeper={cluster.zookeeper}"
        with storage_for(url) as storage:
            names = _made(storage, queues, seconds)
        with ExitStack() as opened:
            storage = opened.enter_context(storage_for(url))
            _tell("storage open", 0)
            every = [opened.enter_context(storage.open(name)) for name in names]
            _tell("queues open", len(every))
            for queue in every:
                queue.send(b"x")
            _tell("sent to each", len(every))
            for queue in every[:receiving]:
                _receive(queue)
            _tell("received", receiving)


def _made(storage: Storage, count: int, seconds: float) -> list[str]:
    """The names of up to `count` new queues of one partition, as many as can be made in the time."""
    began, names = time.monotonic(), [f"many-{number}" for number in range(count)]
    for at, name in enumerate(names):
        if time.monotonic() - began > seconds:
            return names[:at]
        for attempt in range(1, _TRIES + 1):
            try:
                storage.create(name, partitions=1)
                break
            except Unavailable:  # the broker is busy
                if attempt == _TRIES:
                    raise
                time.sleep(Backoff(0.5, 2, 10).delay(attempt))
    return names


def _receive(queue: Queue) -> None:
    deadline = time.monotonic() + 60
    while not (messages := queue.receive(1, wait=10)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came from {queue.name}")
    queue.ack(messages)


def _tell(step: str, queues: int) -> None:
    gc.collect()
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    figures = {
        "step": step,
        "queues": queues,
        "threads": int(status["Threads"]),
        "connections": _connections(),
        "rss_mb": round(int(status["VmRSS"].split()[0]) / 1024, 1),
        "load": round(os.getloadavg()[0], 1),
    }
    click.echo(json.dumps(figures))


def _connections() -> int:
    """The number of established TCP connections of this process."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(str(descriptor.readlink()))
        except OSError:  # the descriptor of this listing, which is closed
            continue
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return sum(row[3] == _ESTABLISHED and f"socket:[{row[9]}]" in own for row in rows)


if __name__ == "__main__":
    main()
