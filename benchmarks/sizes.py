"""The sizes of a full run and of a quick one: numbers of messages, turns and seconds."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of messages, repeats and seconds.

    The slow peers of a drain get fewer messages, so that a turn of each peer lasts seconds. Speeds do not
    depend on the number, because the first tenth is not timed.
    """

    repeats: int
    few_repeats: int
    formats: tuple[str, ...]
    """The marker formats that are measured with kmqpy's tracker."""
    drain_bytes: tuple[int, ...]
    drain_partitions: tuple[int, ...]
    drain_messages: dict[str, int]
    latency_messages: int
    latency_warm_up_s: float
    waiting_threads: tuple[int, ...]
    waiting_s: float
    worker_messages: int
    worker_latency_s: float
    retry_backlogs: tuple[int, ...]
    sends_s: float
    lateness_s: float
    bulk_messages: int
    in_flight: int
    failover_in_flight: int
    markers: int
    restart_lease_s: int
    restart_cases: tuple[bool, ...]
    """A case for each value; True: one long lease is before all other markers."""
    bulk_partitions: tuple[int, ...]
    storages: Mapping[str, tuple[int, ...]]
    """The depths (messages in the queue before a turn) at which each storage is measured, by its name."""
    zookeeper_depths: tuple[int, ...]
    zookeeper_warm_up_s: float
    storage_s: float
    """The seconds for which a turn puts messages; it takes them for at most four times as long."""
    gateway_connections: tuple[int, ...]
    spark_messages: int
    spark_markers: int
    spark_new_markers: int
    """The number of markers that are added before each update of the table of states."""


FULL = Sizes(
    repeats=3,
    few_repeats=3,
    formats=("range", "jvm"),
    drain_bytes=(100, 1_000),
    drain_partitions=(1, 4),
    drain_messages={"fast": 1_000_000, "medium": 500_000, "slow": 200_000},
    latency_messages=10_000,
    latency_warm_up_s=3.0,
    waiting_threads=(1, 8, 64),
    waiting_s=10.0,
    worker_messages=200_000,
    worker_latency_s=4.0,
    retry_backlogs=(1_000, 40_000),
    sends_s=5.0,
    lateness_s=20.0,
    bulk_messages=100_000,
    in_flight=1_000_000,
    failover_in_flight=1_000_000,
    markers=10_000_000,
    restart_lease_s=15,
    restart_cases=(False, True),
    bulk_partitions=(1, 4),
    storages=dict.fromkeys(("postgresql", "mariadb", "sqlite", "redis"), (0, 10_000, 1_000_000)),
    zookeeper_depths=(0, 10_000, 100_000),
    zookeeper_warm_up_s=20.0,
    storage_s=3.0,
    gateway_connections=(1, 16, 64),
    spark_messages=3_000_000,
    spark_markers=10_000_000,
    spark_new_markers=100_000,
)

QUICK = Sizes(
    repeats=1,
    few_repeats=1,
    formats=("range",),
    drain_bytes=(100,),
    drain_partitions=(4,),
    drain_messages={"fast": 300_000, "medium": 80_000, "slow": 30_000},
    latency_messages=2_000,
    latency_warm_up_s=1.0,
    waiting_threads=(8,),
    waiting_s=1.0,
    worker_messages=40_000,
    worker_latency_s=1.0,
    retry_backlogs=(1_000,),
    sends_s=0.5,
    lateness_s=2.0,
    bulk_messages=20_000,
    in_flight=50_000,
    failover_in_flight=20_000,
    markers=300_000,
    restart_lease_s=3,
    restart_cases=(False,),
    bulk_partitions=(4,),
    storages={
        "postgresql": (0, 10_000, 1_000_000),
        "mariadb": (0, 10_000),
        "sqlite": (0, 10_000),
        "redis": (0, 10_000, 1_000_000),
    },
    zookeeper_depths=(0, 10_000, 100_000),
    zookeeper_warm_up_s=5.0,
    storage_s=0.5,
    gateway_connections=(16,),
    spark_messages=600_000,
    spark_markers=500_000,
    spark_new_markers=8_000,
)
