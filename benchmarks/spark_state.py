"""(i) Measures how fast Spark reads and decodes markers, and computes the state of each message from them.

The markers topic has a thousand start markers, then their end markers, and so on, in the JVM format. The sink
does nothing. Two peers only read: one by Spark's defaults, one with the options that kmqpy gives to Spark's
Kafka source.

Other peers keep the state in a table. It is made from all markers, then updated with new messages and their
markers. Another table, of a queue with a tenth of the markers, shows whether old markers cost anything.
"""

import itertools
import tempfile
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
_MADE = "kmqpy, table made"
_PARTITIONS = 4
_BLOCK = 1_000


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case of reading, and one of tables; every turn has a Spark session of its own."""
    share = sizes.spark_markers // 2 // _PARTITIONS
    with lab.queue(_PARTITIONS) as queue:
        fill(lab, queue, share)
        yield Case(
            work="Spark state",
            name=f"{2 * share * _PARTITIONS:,} markers, {_PARTITIONS} partitions, local[2]",
            metrics={"markers_per_s": "markers/s"},
            peers={name: _turn(lab, queue, how, share * _PARTITIONS) for name, how in _PEERS.items()},
            repeats=sizes.few_repeats,
        )
        yield from table_cases(lab, sizes, queue)


def table_cases(lab: Lab, sizes: Sizes, queue: QueueSettings) -> Iterator[Case]:
    """A case: the table of `queue`, which has all markers, and that of a queue with a tenth of them."""
    share = sizes.spark_markers // 2 // _PARTITIONS
    few, new = share // 10, sizes.spark_new_markers // 2 // _PARTITIONS
    with (
        lab.queue(_PARTITIONS) as small,
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as small_folder,
    ):
        fill(lab, small, few)
        _turn(lab, small, "restart", 0, small_folder)()
        yield Case(
            work="Spark state table",
            name=f"{2 * share * _PARTITIONS:,} markers, then {2 * new * _PARTITIONS:,} more in each turn",
            metrics={"seconds": "s"},
            peers={
                _MADE: _turn(lab, queue, "restart", 0, folder),
                "kmqpy, table updated": _after_more(lab, queue, share, new, folder),
                "kmqpy, updated, a tenth of the old": _after_more(lab, small, few, new, small_folder),
            },
            repeats=sizes.few_repeats,
        )


def fill(lab: Lab, queue: QueueSettings, count: int, begin: int = 0) -> None:
    """Put `count` messages in each partition, and the markers of those from offset `begin` on."""
    lab.preload(queue, _PARTITIONS, count * _PARTITIONS, 20)
    for partition in range(_PARTITIONS):
        lab.fill(queue.markers_topic, partition, _markers(partition, count, begin))


def _markers(partition: int, count: int, begin: int = 0) -> Iterator[Record]:
    for first in range(begin, begin + count, _BLOCK):
        offsets = range(first, min(first + _BLOCK, begin + count))
        yield from starts(offsets, HOUR_MS, partition)
        yield from ends(offsets, partition)


def _turn(lab: Lab, queue: QueueSettings, how: str, messages: int, folder: str = "") -> Callable[[], Figures]:
    def turn() -> Figures:
        with children.peer(
            "spark-state",
            "reading" if not folder else "table",
            bootstrap=lab.connection.bootstrap,
            queue=queue.to_json().decode(),
            how=how,
            messages=messages,
            partitions=_PARTITIONS,
            folder=folder,
        ) as child:
            return child.result()

    return turn


def _after_more(lab: Lab, queue: QueueSettings, first: int, count: int, folder: str) -> Callable[[], Figures]:
    """Return a turn: add `count` messages to each partition, and their markers, then update the table."""
    firsts = itertools.count(first, count)
    update = _turn(lab, queue, "update", 2 * count * _PARTITIONS, folder)

    def turn() -> Figures:
        fill(lab, queue, count, next(firsts))
        return update()

    return turn
