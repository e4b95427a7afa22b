"""Measures what claims cost: bulk redelivery and lateness of queues with and without them, in turns."""

from collections.abc import Iterator

from benchmarks import bulk, lateness, trackers
from benchmarks.lab import Lab
from benchmarks.results import Case
from benchmarks.sizes import Sizes

_PEERS = {"without claims": False, "with claims": True}


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """Two cases with range markers. The bulk is in one partition: no other work fills a claim's wait."""
    yield Case(
        work="claims: bulk redelivery",
        name=f"{sizes.bulk_messages:,} messages of 100 bytes, 1 partition",
        metrics={"messages_per_s": "msg/s"},
        peers={
            name: bulk.turn(lab, trackers.KMQPY_RANGE, 1, sizes.bulk_messages, claims=claims)
            for name, claims in _PEERS.items()
        },
        repeats=sizes.few_repeats,
    )
    yield Case(
        work="claims: lateness",
        name=f"{lateness.RATE:,} msg/s, 10 % dropped, leases of {lateness.LEASE_MS // 1000} s",
        metrics={"p50_ms": "ms p50", "p99_ms": "ms p99"},
        peers={
            name: lateness.turn(lab, trackers.kmqpy, "range", sizes, claims=claims)
            for name, claims in _PEERS.items()
        },
        repeats=sizes.few_repeats,
    )
