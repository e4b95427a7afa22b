"""Measures queues in ZooKeeper beside Curator's DistributedQueue and kazoo's LockingQueue.

The figures are puts and takes per second on one server, which syncs its log before it answers. Each depth has
a new server. It answers half as fast in its first seconds, so it gets requests for a while before the first
turn. The peers, each in a process of its own, are described in peers/zookeeper_queues.py.
"""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.children import peer
from benchmarks.lab import Lab
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes
from benchmarks.storage_speed import BATCHES, TAKERS, batch_name
from kmqpy.dev.cluster import Cluster

JVM_OPTIONS = ("-Xmx1g", "-XX:TieredStopAtLevel=4")
SETTINGS = {"forceSync": "yes"}
STORAGE = "kmqpy storage"
PEERS = (
    STORAGE,
    "unit of work",
    "kmqpy curator",
    "kmqpy curator, executor",
    "kmqpy curator, packed",
    "curator",
    "curator, executor",
    "curator, packed",
    "locking queue",
)


def cases(_: Lab, sizes: Sizes) -> Iterator[Case]:
    """The cases of `make bench`: one for each depth, number of takers and size of batches."""
    for depth in sizes.zookeeper_depths:
        with Cluster(brokers=0, zookeeper_settings=SETTINGS, jvm_options=JVM_OPTIONS) as cluster:
            with peer(
                "zookeeper", "warm_up", hosts=cluster.zookeeper, seconds=sizes.zookeeper_warm_up_s
            ) as child:
                child.result()
            for takers in TAKERS:
                for batch in BATCHES:
                    yield _case(cluster.zookeeper, depth, takers, batch, sizes)


def _case(hosts: str, depth: int, takers: int, batch: int, sizes: Sizes) -> Case:
    seconds = sizes.storage_s
    peers = {name: _turn(name, hosts, depth, takers, batch, seconds) for name in _peers_of(takers, batch)}
    return Case(
        work="queues in ZooKeeper",
        name=f"depth {depth:,}, {takers} takers, {batch_name(batch)}",
        metrics={"put": "put/s", "take": "take+ack/s"},
        peers=peers,
        repeats=sizes.repeats,
    )


def _peers_of(takers: int, batch: int) -> Sequence[str]:
    """The peers that differ from others: an executor needs several takers, and `packed` needs batches."""
    return [
        name
        for name in PEERS
        if not (name.endswith("executor") and takers == 1) and not (name.endswith("packed") and batch == 1)
    ]


def _turn(
    name: str, hosts: str, depth: int, takers: int, batch: int, seconds: float
) -> Callable[[], Figures]:
    def turn() -> Figures:
        path = f"/bench/{name.replace(', ', '-').replace(' ', '-')}"
        with peer(
            "zookeeper",
            "speed",
            peer=name,
            hosts=hosts,
            path=path,
            depth=depth,
            takers=takers,
            batch=batch,
            seconds=seconds,
        ) as child:
            return child.result()

    return turn
