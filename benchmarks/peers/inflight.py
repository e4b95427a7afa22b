"""Measures the pure state of a tracker alone, filled from records like those that a tracker consumes."""

import gc
import os
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from confluent_kafka import Message

from benchmarks.children import usage
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.replay import replay_markers

_BATCH = 5_000
_LEASE_MS = 3_600_000
_T0_MS = 1_000_000
_SEED = 1


def fill(options: dict[str, Any]) -> dict[str, float]:
    """Fill the state with `messages` messages in flight, and return what they cost.

    `gaps`: twice as many are taken, and a random half is ended.
    `arrival`: "series" (one after the other, a timestamp for each batch), "holder" (the same, with the
    header that says who took them), "random" (in a random order), "trickle" (one in each ms).
    """
    count, pid, arrival = options["messages"], os.getpid(), options["arrival"]
    rng = random.Random(_SEED)
    taken = list(range(2 * count if options["gaps"] else count))
    if arrival == "random":
        rng.shuffle(taken)
    ended = sorted(rng.sample(taken, count)) if options["gaps"] else []
    holder = "somebody" if arrival == "holder" else None
    gc.collect()
    if options["traced"]:
        tracemalloc.start()
    before = usage(pid)["rss"]
    state, at, seconds = InFlight(), 0, 0.0
    for op, offsets in ((Op.TAKE, taken), (Op.END, ended)):
        for batch in _batches(options["markers"], op, offsets, holder):
            each_ms = arrival == "trickle"
            stamp = _T0_MS + at // _BATCH
            messages = [
                Message(
                    topic="markers",
                    partition=0,
                    offset=at + i,
                    key=key,
                    value=value,
                    headers=headers or None,
                    timestamp=(2, _T0_MS + at + i if each_ms else stamp),
                )
                for i, (key, value, headers) in enumerate(batch)
            ]
            at += len(messages)
            began = time.process_time()
            replay_markers(state, 0, messages)
            seconds += time.process_time() - began
    del messages, batch
    gc.collect()
    if len(state) != count:
        raise RuntimeError(f"{len(state)} in flight, not {count}")
    if options["traced"]:
        return {"traced_per_message": tracemalloc.get_traced_memory()[0] / count}
    return {
        "rss_per_message": (usage(pid)["rss"] - before) / count,
        "apply_us_per_record": seconds / at * 1e6,
        "records": at,
    }


def _batches(
    form: str, op: Op, offsets: Sequence[int], holder: str | None
) -> Iterator[list[tuple[Any, Any, Any]]]:
    fields: dict[str, Any] = {}
    if op is Op.TAKE:
        fields = {"redeliver_after_ms": _LEASE_MS, "holder": holder}
    make: Callable[[Sequence[int]], list[Marker]] = (
        (lambda some: codec.ranges(0, op, sorted(some), **fields))
        if form == "range"
        else (lambda some: [Marker(0, offset, op, **fields) for offset in some])
    )
    for first in range(0, len(offsets), _BATCH):
        yield [codec.encode(one) for one in make(offsets[first : first + _BATCH])]
