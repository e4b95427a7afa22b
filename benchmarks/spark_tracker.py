"""(i) The tracker on Spark: how fast it reads markers, how large its state is, how late a redelivery.

On `local[*]`. The markers come when it runs; from Spark's own progress are the seconds that the turns took
which read them. The state is what Spark's checkpoint holds of it on disk. Lateness is measured as in the work
of that name; the goal is the trigger interval and one second.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks import children, lateness
from benchmarks.children import Child
from benchmarks.lab import HOUR_MS, Lab, Record, ends, starts
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.settings import QueueSettings

PARTITIONS = 4
TRIGGER_S = 1.0
_READ_TRIGGER_S = 5.0
"""Long enough for most of the markers to come between two turns."""
_NAMES = {"range": "tracker on Spark, range markers", "jvm": "tracker on Spark, JVM markers"}
_BATCH = 500


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """Markers of finished messages, then of messages in flight; then lateness."""
    yield Case(
        work="tracker on Spark",
        name=f"{sizes.markers // 10:,} markers of finished messages, {PARTITIONS} partitions",
        metrics={"messages_per_s": "messages/s", "idle_s": "s per turn, idle"},
        peers={_NAMES[one]: _finished(lab, one, sizes.markers // 20) for one in sizes.formats},
        repeats=sizes.few_repeats,
    )
    for gaps in (False, True):
        yield Case(
            work="tracker on Spark",
            name=f"{sizes.in_flight:,} in flight, "
            + ("a random half of what was taken" if gaps else "taken one after the other"),
            metrics={
                "read_s": "s to read them",
                "bytes_per_message": "bytes/msg of state",
                "changed_s": "s per turn, 1 % acknowledged",
            },
            peers={_NAMES[one]: _in_flight(lab, one, sizes.in_flight, gaps=gaps) for one in sizes.formats},
            repeats=sizes.few_repeats,
        )
    yield Case(
        work="tracker on Spark",
        name=f"lateness with a trigger of {TRIGGER_S:g} s, otherwise as above",
        metrics={"p50_ms": "ms p50", "p99_ms": "ms p99", "max_ms": "ms max"},
        peers={_NAMES[one]: lateness.turn(lab, tracker, one, sizes) for one in sizes.formats},
        repeats=sizes.few_repeats,
    )


@contextmanager
def tracker(lab: Lab, queue: QueueSettings, partitions: int) -> Iterator[Child]:
    """A tracker on Spark that owns all partitions."""
    with _peer(lab, queue, "track", partitions=partitions, trigger_s=TRIGGER_S) as child:
        child.line()
        yield child
        child.stop(60.0)


@contextmanager
def _peer(lab: Lab, queue: QueueSettings, work: str, **options: object) -> Iterator[Child]:
    with (
        tempfile.TemporaryDirectory() as folder,
        children.peer(
            "spark_tracker",
            work,
            bootstrap=lab.connection.bootstrap,
            zookeeper=lab.zookeeper.hosts,
            queue=queue.to_json().decode(),
            checkpoint=folder,
            **options,
        ) as child,
    ):
        yield child


def _finished(lab: Lab, form: str, messages: int) -> Callable[[], Figures]:
    def turn() -> Figures:
        each = messages // PARTITIONS
        figures = _read(lab, form, each, ended=lambda taken: taken, in_flight=0)
        return {**figures, "messages_per_s": each * PARTITIONS / figures["read_s"]}

    return turn


def _in_flight(lab: Lab, form: str, count: int, *, gaps: bool) -> Callable[[], Figures]:
    def turn() -> Figures:
        each = count // PARTITIONS * (1 + gaps)

        def ended(taken: range) -> list[int]:
            return sorted(random.sample(taken, len(taken) // 2)) if gaps else []

        figures = _read(lab, form, each, ended, in_flight=each * PARTITIONS)
        return {**figures, "bytes_per_message": figures["state_bytes"] / count}

    return turn


def _read(
    lab: Lab, form: str, each: int, ended: Callable[[range], range | list[int]], in_flight: int
) -> Figures:
    records = [_batches(form, partition, each, ended) for partition in range(PARTITIONS)]
    with (
        lab.queue(PARTITIONS, register=True) as queue,
        _peer(
            lab,
            queue,
            "read",
            partitions=PARTITIONS,
            records=sum(map(len, records)),
            in_flight=in_flight,
            markers=form,
            trigger_s=_READ_TRIGGER_S,
        ) as child,
    ):
        child.line()
        for partition, batch in enumerate(records):
            lab.fill(queue.markers_topic, partition, batch)
        return child.result()


def _batches(
    form: str, partition: int, count: int, ended: Callable[[range], range | list[int]]
) -> list[Record]:
    """Start markers in batches, and after each batch the end markers of some of it."""
    found: list[Record] = []
    for first in range(0, count, _BATCH):
        taken = range(first, min(first + _BATCH, count))
        if form == "jvm":
            found += starts(taken, HOUR_MS, partition)
            found += ends(ended(taken), partition)
        else:
            found += _ranges(partition, Op.TAKE, taken)
            found += _ranges(partition, Op.END, ended(taken))
    return found


def _ranges(partition: int, op: Op, offsets: range | list[int]) -> list[Record]:
    lease_ms = HOUR_MS if op is Op.TAKE else 0
    encoded = map(codec.encode, codec.ranges(partition, op, offsets, redeliver_after_ms=lease_ms))
    return [(key, value) for key, value, _ in encoded]
