"""(a) Measures how fast one client takes and acknowledges a preloaded backlog."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks import children
from benchmarks.lab import Lab
from benchmarks.results import (
    JVM,
    KMQPY,
    PLAIN,
    SHARE,
    SHARE_IMPLICIT,
    SHARE_PERF,
    Case,
    Figures,
    progress,
)
from benchmarks.sizes import Sizes
from kmqpy.kafka.settings import QueueSettings

BATCH = 5_000

_NONE = "jvm"  # it writes no markers

_PEERS = {
    PLAIN: ("consume", _NONE, "fast"),
    KMQPY["range"]: ("kmqpy", "range", "fast"),
    KMQPY["jvm"]: ("kmqpy", "jvm", "medium"),
    SHARE: ("share", _NONE, "medium"),
    SHARE_IMPLICIT: ("share-implicit", _NONE, "medium"),
    SHARE_PERF: ("share-perf", _NONE, "medium"),
    JVM: ("jvm", "jvm", "slow"),
}

_IN_ORDER = {SHARE_IMPLICIT, SHARE_PERF}
"""They acknowledge whole batches."""


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case for each size of messages, number of partitions and order of acknowledgement."""
    backlog = max(sizes.drain_messages.values())
    for size in sizes.drain_bytes:
        for partitions in sizes.drain_partitions:
            with lab.queue(partitions) as queue:
                progress(f"drain | {backlog:,} messages of {size} bytes are sent to {partitions} partitions")
                lab.preload(queue, partitions, backlog, size)
                _turn(lab, queue, partitions, PLAIN, sizes, in_random_order=False)()  # fills the page cache
                for in_random_order in (False, True):
                    yield Case(
                        work="drain",
                        name=f"{size:,} bytes, {partitions} partition{'s' * (partitions > 1)}, "
                        f"acks {'at random' if in_random_order else 'in order'}",
                        metrics={"messages_per_s": "msg/s"},
                        peers={
                            peer: _turn(lab, queue, partitions, peer, sizes, in_random_order=in_random_order)
                            for peer in _PEERS
                            if not (in_random_order and peer in _IN_ORDER)
                        },
                        repeats=sizes.repeats,
                    )


def _turn(
    lab: Lab, queue: QueueSettings, partitions: int, peer: str, sizes: Sizes, *, in_random_order: bool
) -> Callable[[], Figures]:
    module, markers, speed = _PEERS[peer]

    def turn() -> Figures:
        with lab.view(replace(queue, markers=markers), partitions) as view:
            messages = sizes.drain_messages[speed]
            return drained(lab, view, module, messages=messages, in_random_order=in_random_order)

    return turn


def drained(
    lab: Lab,
    view: QueueSettings,
    module: str,
    *,
    messages: int,
    in_random_order: bool = False,
) -> Figures:
    """Have the peer `module` take and acknowledge `messages` messages of a queue; returns its figures."""
    with children.peer(
        module,
        "drain",
        bootstrap=lab.connection.bootstrap,
        topic=view.name,
        group=view.consumer_group,
        queue=view.to_json().decode(),
        batch=BATCH,
        messages=messages,
        random=in_random_order,
    ) as child:
        return child.result()
