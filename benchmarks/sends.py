"""(m) Measures sends that wait until Kafka has confirmed them: one message at a time, and batches.

The peer sends with confluent-kafka's Producer, idempotent and without lingering, and polls until it has each
report. Where several threads share it, a thread of its own polls for them. With tasks, reports
end futures: its AIOProducer asks for them a second later.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks import children
from benchmarks.lab import Lab
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes

PARTITIONS = 4
_PEERS = {"kmqpy": "kmqpy", "confluent-kafka, linger 0": "plain"}
_CASES = {
    "one by one": (1, 1, False),
    "one by one, 8 threads": (8, 1, False),
    "100 at once": (1, 100, False),
    "1,000 at once": (1, 1_000, False),
    "one each, 1,000 tasks": (1, 1_000, True),
}
"""By name, how many threads send, how many messages each at once, and whether each in a task of its own."""


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case for each number of threads and messages at once."""
    for name, (threads, at_once, tasks) in _CASES.items():
        yield Case(
            work="sends",
            name=f"{name}, 100 bytes, {PARTITIONS} partitions, send to confirmed",
            metrics={"messages_per_s": "msg/s"},
            peers={
                peer: partial(_turn, lab, sizes, client=client, threads=threads, at_once=at_once, tasks=tasks)
                for peer, client in _PEERS.items()
            },
            repeats=sizes.repeats,
        )


def _turn(lab: Lab, sizes: Sizes, **options: Any) -> Figures:
    with (
        lab.queue(PARTITIONS) as queue,
        children.peer(
            "sender",
            "confirmed",
            bootstrap=lab.connection.bootstrap,
            queue=queue.to_json().decode(),
            seconds=sizes.sends_s,
            **options,
        ) as child,
    ):
        return child.result()
