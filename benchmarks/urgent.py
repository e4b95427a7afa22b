"""Measures when a client is handed an urgent message behind a backlog, and in a queue that is empty."""

import time
from collections.abc import Iterator
from functools import partial

from benchmarks.lab import Lab
from benchmarks.results import Case, Figures, percentile
from benchmarks.sizes import Sizes
from kmqpy.kafka.kmq_client import KmqClient

PARTITIONS = 4
_URGENT = 200
_BATCH = 100


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """One case; the backlog is that of the largest of `retries`."""
    backlog = max(sizes.retry_backlogs)
    yield Case(
        work="urgent",
        name=f"one urgent message every {_BATCH} others, send's confirmation to handed out",
        metrics={"p50_ms": "ms p50", "p99_ms": "ms p99"},
        peers={
            "empty queue": partial(_turn, lab, 0),
            f"backlog of {backlog:,}": partial(_turn, lab, backlog),
        },
        repeats=sizes.few_repeats,
    )


def _turn(lab: Lab, backlog: int) -> Figures:
    late_ms: list[float] = []
    sent: dict[str, float] = {}
    with (
        lab.queue(PARTITIONS, markers="range", priorities=2) as queue,
        KmqClient(queue, lab.connection) as client,
    ):
        lab.preload(queue, PARTITIONS, backlog, 100)
        client.send(b"first", priority=1)
        deadline = time.monotonic() + 120
        while len(late_ms) < _URGENT and time.monotonic() < deadline:
            found = client.receive(_BATCH, wait=0.02)
            now = time.monotonic()
            late_ms += [(now - sent.pop(one.id)) * 1000 for one in found if one.id in sent]
            client.ack(found)
            if len(client.partitions) == PARTITIONS and not sent:
                sent[client.send(b"urgent", priority=1)] = time.monotonic()
    return {"p50_ms": percentile(late_ms, 50), "p99_ms": percentile(late_ms, 99), "max_ms": max(late_ms)}
