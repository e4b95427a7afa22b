"""(i) The state of a queue on Spark: markers read, decoded, and made into the state of each message.

Start and end markers in turns, a thousand of each, in the JVM format, into a sink that does nothing. Spark
only reads them by its defaults, and with the options that kmqpy gives to its Kafka source.
"""

from collections.abc import Callable, Iterator

from benchmarks import children
from benchmarks.lab import HOUR_MS, Lab, Record, ends, starts
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes
from kmqpy.kafka.settings import QueueSettings

BARE = "Spark Kafka, only read"
_PEERS = {
    BARE: "read",
    "Spark Kafka, with our options": "read faster",
    "kmqpy, decoded": "decode",
    "kmqpy, state of each message": "state",
}
_PARTITIONS = 4
_BLOCK = 1_000


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """One case; every turn has a Spark session of its own."""
    share = sizes.spark_markers // 2 // _PARTITIONS
    with lab.queue(_PARTITIONS) as queue:
        lab.preload(queue, _PARTITIONS, share * _PARTITIONS, 20)
        for partition in range(_PARTITIONS):
            lab.fill(queue.markers_topic, partition, _markers(partition, share))
        yield Case(
            work="Spark state",
            name=f"{2 * share * _PARTITIONS:,} markers, {_PARTITIONS} partitions, local[2]",
            metrics={"markers_per_s": "markers/s"},
            peers={name: _turn(lab, queue, how, share * _PARTITIONS) for name, how in _PEERS.items()},
            repeats=sizes.few_repeats,
        )


def _markers(partition: int, count: int) -> Iterator[Record]:
    for first in range(0, count, _BLOCK):
        offsets = range(first, min(first + _BLOCK, count))
        yield from starts(offsets, HOUR_MS, partition)
        yield from ends(offsets, partition)


def _turn(lab: Lab, queue: QueueSettings, how: str, messages: int) -> Callable[[], Figures]:
    def turn() -> Figures:
        with children.peer(
            "spark-state",
            "reading",
            bootstrap=lab.connection.bootstrap,
            queue=queue.to_json().decode(),
            how=how,
            messages=messages,
            partitions=_PARTITIONS,
        ) as child:
            return child.result()

    return turn
