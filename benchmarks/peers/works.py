"""The works that every client does in the same way.

drain    The clock starts when the first tenth of the messages has been handed out and acknowledged
         (connecting, joining the group, the first fetch and the JIT compiler are in that tenth), and
         stops when the acknowledgement of the last message is confirmed by the broker. Every message's
         body is read, except by the JVM kmq. In random order: windows of 1,000 messages are shuffled
         before they are acknowledged; windows of one batch where a client hands out fewer at a time.
latency  From just before produce() in the sending process to the moment a message has been handed out,
         by CLOCK_MONOTONIC, which the two processes share. Messages that come before the warm-up is
         over don't count.
"""

import os
import random
import resource
import sys
import time
from collections.abc import Iterable
from typing import Any, Protocol

from benchmarks.lab import stamp_of

WINDOW = 1_000
_PATIENCE_S = 60.0


class Peer(Protocol):
    """A client that takes messages and acknowledges each of them."""

    def take(self) -> Any:
        """The next batch, with a length; empty when nothing came for a while."""
        ...

    def bodies(self, batch: Any) -> Iterable[bytes]:
        """The bodies of the messages of a batch."""
        ...

    def ack(self, batch: Any, *, shuffled: bool) -> None:
        """Acknowledge each message of a batch, without waiting for it."""
        ...

    def confirm(self) -> None:
        """Return when all acknowledgements so far are confirmed."""
        ...


def drain(peer: Peer, options: dict[str, Any]) -> dict[str, float]:
    wanted, shuffled = options["messages"], options["random"]
    before = taken = size = 0
    began = cpu = 0.0
    heard = time.monotonic()
    while taken < wanted:
        if not began and taken >= wanted // 10:
            before, began, cpu = taken, time.perf_counter(), _cpu_s()
        batch = peer.take()
        if not len(batch):
            if time.monotonic() - heard > _PATIENCE_S:
                raise TimeoutError(f"{taken} of {wanted} messages, and no more")
            continue
        taken += len(batch)
        size += sum(map(len, peer.bodies(batch)))
        peer.ack(batch, shuffled=shuffled)
        heard = time.monotonic()
    peer.confirm()
    seconds, cpu = time.perf_counter() - began, _cpu_s() - cpu
    return {
        "messages": taken - before,
        "seconds": seconds,
        "messages_per_s": (taken - before) / seconds,
        "cpu_s": cpu,
        "cpu_us_per_message": cpu / (taken - before) * 1e6,
        "peak_rss": peak_rss(),
        "body_bytes": size,
    }


def latency(peer: Peer, options: dict[str, Any]) -> dict[str, list[float]]:
    delays: list[float] = []
    warm_at = None
    while len(delays) < options["messages"]:
        batch = peer.take()
        now = time.monotonic_ns()
        if not len(batch):
            continue
        if warm_at is None:
            warm_at = now + options["warm_up_s"] * 1e9
        sent = [stamp_of(body)[1] for body in peer.bodies(batch)]
        peer.ack(batch, shuffled=False)
        if now >= warm_at:
            delays += [(now - at) / 1e6 for at in sent if at >= warm_at]
    return {"delays_ms": delays}


def shuffle_windows(batch: list[Any]) -> list[Any]:
    """The batch with each window of it in random order."""
    mixed: list[Any] = []
    for first in range(0, len(batch), WINDOW):
        window = batch[first : first + WINDOW]
        random.shuffle(window)
        mixed += window
    return mixed


def peak_rss() -> float:
    """The most memory that this process ever had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system
