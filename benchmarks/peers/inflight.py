"""The tracker's pure state alone, filled from encoded markers as a client writes them."""

import gc
import os
import random
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.children import usage
from kmqpy import markers
from kmqpy.inflight import InFlight
from kmqpy.markers import Marker, Op

_BATCH = 5_000
_LEASE_MS = 3_600_000


def fill(options: dict[str, Any]) -> dict[str, float]:
    """Take messages, with `gaps` twice as many and end half of them; says what is left costs."""
    count, pid = options["messages"], os.getpid()
    taken = range(2 * count if options["gaps"] else count)
    ended = sorted(random.sample(taken, count)) if options["gaps"] else []
    gc.collect()
    if options["traced"]:
        tracemalloc.start()
    before, began = usage(pid)["rss"], time.process_time()
    state = InFlight()
    at = 0
    for at, record in enumerate(_records(options["markers"], taken, ended)):
        state.apply(markers.decode(*record), at, 1_000_000 + at // 1_000)
    seconds = time.process_time() - began
    gc.collect()
    if len(state) != count:
        raise RuntimeError(f"{len(state)} in flight, not {count}")
    if options["traced"]:
        return {"traced_per_message": tracemalloc.get_traced_memory()[0] / count}
    return {
        "rss_per_message": (usage(pid)["rss"] - before) / count,
        "apply_us_per_record": seconds / (at + 1) * 1e6,
        "records": at + 1,
    }


def _records(form: str, taken: range, ended: list[int]) -> Iterator[tuple[Any, Any, Any]]:
    for first in range(0, len(taken), _BATCH):
        yield from _marked(form, Op.TAKE, taken[first : first + _BATCH])
    for first in range(0, len(ended), _BATCH):
        yield from _marked(form, Op.END, ended[first : first + _BATCH])


def _marked(form: str, op: Op, offsets: Iterable[int]) -> Iterator[tuple[Any, Any, Any]]:
    lease_ms = _LEASE_MS if op is Op.TAKE else 0
    if form == "range":
        found = markers.ranges(0, op, offsets, redeliver_after_ms=lease_ms)
    else:
        found = [Marker(0, offset, op, lease_ms) for offset in offsets]
    return map(markers.encode, found)
