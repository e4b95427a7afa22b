"""(j) Measures ack() that waits until it is confirmed, alone and beside ack() that does not (rule R26).

The threads of one client acknowledge one message after the other with `confirmed=True`. Beside them, another
thread acknowledges 50,000 messages a second in batches of a hundred, without waiting. A turn in which `ack()`
raises Unavailable has no figure.
"""

from collections.abc import Callable, Iterator

from benchmarks import children
from benchmarks.lab import Lab
from benchmarks.results import KMQPY, Case, Figures, percentile
from benchmarks.sizes import Sizes

RATE = 50_000
PARTITIONS = 4
_MESSAGES = 10_000
"""The messages that the client takes. It acknowledges them again and again: a marker costs the same each
time."""


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case for each number of threads; a peer for each marker format, alone and beside other acks."""
    for threads in sizes.waiting_threads:
        yield Case(
            work="waiting acks",
            name=f"{threads} thread{'s' * (threads > 1)}, {PARTITIONS} partitions, ack to confirmed",
            metrics={"p50_ms": "ms p50", "p99_ms": "ms p99"},
            peers={
                f"{KMQPY[markers]}, {beside}": _turn(lab, markers, threads, rate, sizes)
                for markers in sizes.formats
                for beside, rate in (("alone", 0), (f"beside {RATE:,} acks/s", RATE))
            },
            repeats=sizes.repeats,
        )


def _turn(lab: Lab, markers: str, threads: int, rate: int, sizes: Sizes) -> Callable[[], Figures]:
    def turn() -> Figures:
        with lab.queue(PARTITIONS, markers=markers) as queue:
            lab.preload(queue, PARTITIONS, _MESSAGES, 100)
            with children.peer(
                "kmqpy",
                "wait",
                bootstrap=lab.connection.bootstrap,
                queue=queue.to_json().decode(),
                batch=_MESSAGES,
                threads=threads,
                rate=rate,
                warm_up_s=1.0,
                seconds=sizes.waiting_s,
            ) as child:
                found = child.result()
        delays = found["delays_ms"]
        return {
            "p50_ms": percentile(delays, 50),
            "p99_ms": percentile(delays, 99),
            "max_ms": max(delays),
            "acks_per_s": len(delays) / sizes.waiting_s,
            "others_per_s": found["others_per_s"],
        }

    return turn
