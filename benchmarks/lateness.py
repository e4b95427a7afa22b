"""(c) Measures how late a redelivery is, when a client drops every tenth message: takes it, and does no more.

The time is that from the end of the lease (log-append time of the start marker plus its duration) to the
log-append time of the copy. Both are times of the broker.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks import children, trackers
from benchmarks.lab import Lab, stamp_of
from benchmarks.results import JVM, Case, Figures, percentile
from benchmarks.sizes import Sizes
from benchmarks.trackers import Tracker
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.settings import QueueSettings

RATE = 1_000
PARTITIONS = 4
LEASE_MS = 2_000

_PEERS: dict[str, tuple[Tracker, str]] = {
    trackers.KMQPY_RANGE: (trackers.kmqpy, "range"),
    trackers.KMQPY_JVM: (trackers.kmqpy, "jvm"),
    JVM: (trackers.jvm, ""),
}


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """One case with several trackers; in each turn, the client that drops messages is kmqpy's."""
    # Not counted: a broker that has just started, and has never seen a transaction, is slow.
    turn(lab, *_PEERS[trackers.KMQPY_JVM], replace(sizes, lateness_s=2.0))()
    yield Case(
        work="lateness",
        name=f"{RATE:,} msg/s, 10 % dropped, leases of {LEASE_MS // 1000} s, lease end to the copy's append",
        metrics={"p50_ms": "ms p50", "p99_ms": "ms p99"},
        peers={
            peer: turn(lab, tracker, form, sizes)
            for peer, (tracker, form) in _PEERS.items()
            if form in (*sizes.formats, "")
        },
        repeats=sizes.few_repeats,
    )


def turn(lab: Lab, tracker: Tracker, marker_format: str, sizes: Sizes) -> Callable[[], Figures]:
    """Return the function that measures `tracker` once."""
    bootstrap = lab.connection.bootstrap
    count = int(sizes.lateness_s * RATE)

    def measure() -> Figures:
        with (
            lab.queue(PARTITIONS, register=True, markers=marker_format or "jvm", lease_ms=LEASE_MS) as queue,
            tracker(lab, queue, PARTITIONS),
            children.peer(
                "sender",
                "send",
                bootstrap=bootstrap,
                topic=queue.name,
                rate=RATE,
                partitions=PARTITIONS,
                count=count,
            ),
            children.peer(
                "kmqpy",
                "drop",
                bootstrap=bootstrap,
                queue=queue.to_json().decode(),
                batch=100,
                max_in_flight=count,
                seconds=sizes.lateness_s + LEASE_MS / 1000 + 2.5,
            ) as dropper,
        ):
            dropped = dropper.result()["dropped"]
            delays = _delays(lab, queue)
        if not delays:
            raise children.Failed("nothing was redelivered")
        return {
            "p50_ms": percentile(delays, 50),
            "p99_ms": percentile(delays, 99),
            "max_ms": max(delays),
            "dropped": dropped,
            "redelivered": len(delays),
        }

    return measure


def _delays(lab: Lab, queue: QueueSettings) -> list[float]:
    ends: dict[tuple[int, int], int] = {}
    for record in lab.records(queue.markers_topic, PARTITIONS):
        marker = codec.decode(record.key(), record.value(), record.headers())
        if marker.op is Op.TAKE:
            for offset in marker.offsets():
                ends[marker.partition, offset] = record.timestamp()[1] + marker.redeliver_after_ms
    originals: dict[int, tuple[int, int]] = {}
    delays: list[float] = []
    for record in sorted(lab.records(queue.name, PARTITIONS), key=lambda one: one.offset()):
        number = stamp_of(record.value())[0]
        if number in originals:  # a copy: it is in the partition of its original, at a higher offset
            delays.append(record.timestamp()[1] - ends[originals[number]])
        else:
            originals[number] = (record.partition(), record.offset())
    return delays
