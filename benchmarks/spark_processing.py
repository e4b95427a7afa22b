"""(h) Measures what acknowledgement costs on Spark: a backlog is processed with it, or only read.

The function returns the messages that it is given, and the sink does nothing. So the difference is the cost
of acknowledgement.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks import children
from benchmarks.lab import Lab
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes
from kmqpy.kafka.settings import QueueSettings

PLAIN_SPARK = "Spark Kafka, only read"
TAKE = "kmqpy take, range markers"
RANGE = "kmqpy process, range markers"

_PEERS = {
    PLAIN_SPARK: ("read", ""),
    "Spark Kafka, mapInPandas": ("pandas", ""),
    TAKE: ("take", "range"),
    RANGE: ("frames", "range"),
    "kmqpy process, JVM markers": ("frames", "jvm"),
    "kmqpy process_rows, range markers": ("rows", "range"),
    'kmqpy process, range, format("kmq")': ("own source", "range"),
}
"""The way in which each peer's child process reads the backlog, and the format of its markers."""

_PARTITIONS = 4


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """One case; every turn has a Spark session of its own, and its first micro-batch is not timed."""
    count = sizes.spark_messages
    peers = list(_PEERS) if "jvm" in sizes.formats else [PLAIN_SPARK, TAKE, RANGE]
    with lab.queue(_PARTITIONS) as queue:
        lab.preload(queue, _PARTITIONS, count, 100)
        yield Case(
            work="Spark processing",
            name=f"100 bytes, {_PARTITIONS} partitions, local[2]",
            metrics={"messages_per_s": "msg/s"},
            peers={peer: _turn(lab, queue, peer, count) for peer in peers},
            repeats=sizes.few_repeats,
        )


def _turn(lab: Lab, queue: QueueSettings, peer: str, count: int) -> Callable[[], Figures]:
    how, markers = _PEERS[peer]

    def turn() -> Figures:
        with (
            lab.view(replace(queue, markers=markers or "jvm"), _PARTITIONS) as view,
            children.peer(
                "spark",
                "processing",
                bootstrap=lab.connection.bootstrap,
                queue=view.to_json().decode(),
                how=how,
                messages=count,
            ) as child,
        ):
            return child.result()

    return turn
