"""Measures when a worker has a message again whose handler asked for it a second later, behind a backlog.

Every hundredth message of the backlog is retried once; the other handlers wait for 1 ms. A copy stands behind
all that was in its partition, so it comes when that was handled; not in a queue with a retry lane.
"""

from collections.abc import Iterator
from functools import partial

from benchmarks import children, trackers
from benchmarks.lab import Lab
from benchmarks.results import RETRY_LANE, Case, Figures
from benchmarks.sizes import Sizes

PARTITIONS = 4
_HANDLERS = 8


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case for each backlog."""
    for backlog in sizes.retry_backlogs:
        yield Case(
            work="retries",
            name=f"backlog of {backlog:,}, {_HANDLERS} handlers of 1 ms, 1 % retried in 1 s, due to handled",
            metrics={"p50_ms": "ms p50", "p99_ms": "ms p99", "handled_per_s": "msg/s of the backlog"},
            peers={
                trackers.KMQPY_RANGE: partial(_turn, lab, backlog, retry_lane=False),
                RETRY_LANE: partial(_turn, lab, backlog, retry_lane=True),
            },
            repeats=sizes.few_repeats,
        )


def _turn(lab: Lab, backlog: int, *, retry_lane: bool) -> Figures:
    with (
        lab.queue(PARTITIONS, register=True, markers="range", retry_lane=retry_lane) as queue,
        trackers.kmqpy(lab, queue, PARTITIONS * len(queue.lanes())),
    ):
        lab.preload(queue, PARTITIONS, backlog, 100)
        with children.peer(
            "worker",
            "retries",
            bootstrap=lab.connection.bootstrap,
            queue=queue.to_json().decode(),
            handlers=_HANDLERS,
            messages=backlog,
        ) as child:
            return child.result()
