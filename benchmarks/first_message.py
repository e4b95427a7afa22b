"""(k) Measures how soon a message reaches a client that is new, or was busy for longer than a second."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from benchmarks.lab import Lab
from benchmarks.results import KMQPY, PLAIN, RETRY_LANE, Case, Figures, percentile
from benchmarks.sizes import Sizes
from kmqpy.kafka import librdkafka
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import QueueSettings

_BUSY_S = 1.5
_PAUSES = 4

Receive = Callable[[], object]
"""Receives one message; returns None or [] if none comes within a second."""
_Peer = Callable[[Lab, QueueSettings], AbstractContextManager[Receive]]


@contextmanager
def _plain(lab: Lab, queue: QueueSettings) -> Iterator[Receive]:
    consumer = librdkafka.new_consumer(lab.connection, {"group.id": queue.consumer_group})
    consumer.subscribe([queue.name])
    try:
        yield lambda: consumer.poll(1.0)
    finally:
        consumer.close()


@contextmanager
def _kmqpy(lab: Lab, queue: QueueSettings) -> Iterator[Receive]:
    with KmqClient(queue, lab.connection) as client:
        yield lambda: client.receive(1, wait=1.0)


_PEERS: dict[str, _Peer] = {PLAIN: _plain, KMQPY["range"]: _kmqpy, RETRY_LANE: _kmqpy}


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """Two cases: the first message of a new client, and the next message after each pause."""
    _turn(lab, _plain, 1, 0.0)()  # not counted: a broker that has just started is slow
    for name, times, busy_s in (("new client", 1, 0.0), (f"after {_BUSY_S:g} s of work", _PAUSES, _BUSY_S)):
        yield Case(
            work="first message",
            name=f"{name}, 1 partition, from receive() to the message",
            metrics={"p50_ms": "ms p50"},
            peers={
                peer: _turn(lab, open_peer, times, busy_s, retry_lane=peer == RETRY_LANE)
                for peer, open_peer in _PEERS.items()
            },
            repeats=sizes.repeats,
        )


def _turn(
    lab: Lab, open_peer: _Peer, times: int, busy_s: float, *, retry_lane: bool = False
) -> Callable[[], Figures]:
    def turn() -> Figures:
        waited_ms = []
        with lab.queue(1, retry_lane=retry_lane) as queue, KmqClient(queue, lab.connection) as producer:
            producer.send(b"first")
            with open_peer(lab, queue) as receive:
                if busy_s:
                    _wait(receive)
                for _ in range(times):
                    if busy_s:
                        time.sleep(busy_s)
                        producer.send(b"next")
                    began = time.monotonic()
                    _wait(receive)
                    waited_ms.append((time.monotonic() - began) * 1000)
        return {"p50_ms": percentile(waited_ms, 50), "max_ms": max(waited_ms)}

    return turn


def _wait(receive: Receive) -> None:
    while not receive():
        pass
