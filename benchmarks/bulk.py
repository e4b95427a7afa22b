"""(d) Measures how fast many messages whose leases have all ended are redelivered.

The time is that from the first copy to the last, by their log-append times. The tracker starts when all
leases have ended. The start markers are in one of the two formats; a range marker names a hundred messages.
The tracker writes its end markers in the same format.
"""

import time
from collections.abc import Callable, Iterator

from benchmarks import trackers
from benchmarks.children import Failed
from benchmarks.lab import Lab, Record, starts
from benchmarks.results import JVM, Case, Figures
from benchmarks.sizes import Sizes
from benchmarks.trackers import Tracker
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Op

_LEASE_MS = 1
_TAKEN_AT_ONCE = 100
_TIMEOUT_S = 300.0

_PEERS: dict[str, Tracker] = {
    trackers.KMQPY_RANGE: trackers.kmqpy,
    trackers.KMQPY_JVM: trackers.kmqpy,
    JVM: trackers.jvm,
}


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case for each number of partitions, with the same number of messages in all."""
    for partitions in sizes.bulk_partitions:
        yield Case(
            work="bulk redelivery",
            name=f"{sizes.bulk_messages:,} messages of 100 bytes, "
            f"{partitions} partition{'s' * (partitions > 1)}",
            metrics={"messages_per_s": "msg/s"},
            peers={peer: turn(lab, peer, partitions, sizes.bulk_messages) for peer in _PEERS},
            repeats=sizes.few_repeats,
        )


def turn(lab: Lab, peer: str, partitions: int, count: int) -> Callable[[], Figures]:
    """Return the function that measures the tracker `peer` once."""
    share = count // partitions

    def measure() -> Figures:
        with lab.queue(partitions, register=True, lease_ms=1_000) as queue:
            lab.preload(queue, partitions, count, 100)
            for partition in range(partitions):
                lab.fill(queue.markers_topic, partition, _starts(peer, share, partition))
            with _PEERS[peer](lab, queue, partitions):
                _wait_until_quiet(lab, queue.name, partitions, 2 * count)
                times = [record.timestamp()[1] for record in lab.records(queue.name, partitions, share)]
        if len(times) != count:
            raise Failed(f"{len(times):,} copies of {count:,} messages")
        seconds = max(max(times) - min(times), 1) / 1000
        return {"messages_per_s": count / seconds, "seconds": seconds}

    return measure


def _starts(peer: str, count: int, partition: int) -> Iterator[Record]:
    if peer != trackers.KMQPY_RANGE:
        yield from starts(range(count), _LEASE_MS, partition)
        return
    for first in range(0, count, _TAKEN_AT_ONCE):
        taken = range(first, min(first + _TAKEN_AT_ONCE, count))
        for marker in codec.ranges(partition, Op.TAKE, taken, redeliver_after_ms=_LEASE_MS):
            key, value, _ = codec.encode(marker)
            yield key, value


def _wait_until_quiet(lab: Lab, topic: str, partitions: int, expected: int) -> None:
    """Return when the topic has `expected` records and grows no more; raises Failed after _TIMEOUT_S."""
    deadline = time.monotonic() + _TIMEOUT_S
    before = -1
    while True:
        now = sum(lab.end(topic, partition) for partition in range(partitions))
        if now == before and now >= expected:
            return
        if time.monotonic() > deadline:
            raise Failed(f"after {_TIMEOUT_S:.0f} s only {now:,} of {expected:,} records")
        before = now
        time.sleep(1.0)
