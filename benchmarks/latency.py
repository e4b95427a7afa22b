"""(b) Measures the time from sending a message until a client has it, at 1,000 messages a second."""

from collections.abc import Callable, Iterator

from benchmarks import children
from benchmarks.lab import Lab
from benchmarks.results import JVM, KMQPY, PLAIN, SHARE, Case, Figures, percentile
from benchmarks.sizes import Sizes

RATE = 1_000
PARTITIONS = 4
BATCH = 100

_NONE = "jvm"  # it writes no markers

_PEERS = {
    PLAIN: ("consume", _NONE),
    KMQPY["range"]: ("kmqpy", "range"),
    KMQPY["jvm"]: ("kmqpy", "jvm"),
    SHARE: ("share", _NONE),
    JVM: ("jvm", "jvm"),
}


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """One case; every turn has a queue of its own."""
    _turn(lab, PLAIN, sizes)()  # not counted: a broker that has just started is slow
    yield Case(
        work="latency",
        name=f"{RATE:,} msg/s, 100 bytes, {PARTITIONS} partitions, send to handed out",
        metrics={"p50_ms": "ms p50", "p99_ms": "ms p99"},
        peers={peer: _turn(lab, peer, sizes) for peer in _PEERS},
        repeats=sizes.repeats,
    )


def _turn(lab: Lab, peer: str, sizes: Sizes) -> Callable[[], Figures]:
    module, markers = _PEERS[peer]
    bootstrap = lab.connection.bootstrap

    def turn() -> Figures:
        with (
            lab.queue(PARTITIONS, markers=markers) as queue,
            children.peer(
                "sender", "send", bootstrap=bootstrap, topic=queue.name, rate=RATE, partitions=PARTITIONS
            ),
            children.peer(
                module,
                "latency",
                bootstrap=bootstrap,
                topic=queue.name,
                group=queue.consumer_group,
                queue=queue.to_json().decode(),
                batch=BATCH,
                messages=sizes.latency_messages,
                warm_up_s=sizes.latency_warm_up_s,
            ) as child,
        ):
            delays = child.result()["delays_ms"]
        return {
            "p50_ms": percentile(delays, 50),
            "p99_ms": percentile(delays, 99),
            "max_ms": max(delays),
        }

    return turn
