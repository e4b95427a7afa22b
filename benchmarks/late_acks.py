"""Measures what late acks cost: clients that look for them, and others, drain a backlog with copies in it.

A share of the messages in the backlog have the headers of copies. The markers topic has the claims and end
markers of a tracker that made these copies. None was acknowledged late, so all are handed out.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks import drain
from benchmarks.lab import Lab, starts
from benchmarks.results import Case, Figures, progress
from benchmarks.sizes import Sizes
from kmqpy.kafka.copies.copy_transaction import NewRecord
from kmqpy.kafka.copies.end_markers import end_markers
from kmqpy.kafka.markers.claim_headers import CLAIM, naming_tick
from kmqpy.kafka.markers.late_operations import planned_at_header
from kmqpy.kafka.settings import QueueSettings

_PER_MILLE = (0, 10, 100)
"""The cases: the number of copies in 1,000 messages of the backlog."""
_BODY = b"x" * 100
_CLAIMED_AT_ONCE = 1_000
_LEASE_MS = 1


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case per share of copies, in one partition; both formats of markers, with and without late acks."""
    count = sizes.drain_messages["medium"]
    for per_mille in _PER_MILLE:
        copies = count * per_mille // 1000
        with lab.queue(1, late_acks=True) as queue:
            progress(f"late acks | {count:,} messages are sent, {copies:,} of them copies")
            lab.append(queue.name, _backlog(queue, count, copies))
            yield Case(
                work="late acks: drain",
                name=f"100 bytes, {per_mille / 10:g} % copies",
                metrics={"messages_per_s": "msg/s"},
                peers={
                    f"{'with' if late_acks else 'without'} late acks, {markers}": _turn(
                        lab, queue, markers, count, copies, late_acks=late_acks
                    )
                    for markers in ("range", "jvm")
                    for late_acks in (False, True)
                },
                repeats=sizes.few_repeats,
            )


def _turn(
    lab: Lab, queue: QueueSettings, markers: str, count: int, copies: int, *, late_acks: bool
) -> Callable[[], Figures]:
    def turn() -> Figures:
        with lab.view(replace(queue, late_acks=late_acks, markers=markers), 1) as view:
            # The originals count as taken before, so they are not taken again (rule R10).
            lab.fill(view.markers_topic, 0, starts(range(copies), _LEASE_MS))
            lab.append(view.markers_topic, _made(view, count, copies, ranges=view.writes_ranges))
            return drain.drained(lab, view, "kmqpy", messages=count)

    return turn


def _backlog(queue: QueueSettings, count: int, copies: int) -> Iterator[NewRecord]:
    """The originals, then `count` messages, some of which are their copies, at equal distances."""
    header = planned_at_header(queue.name, 0, copies)
    places = set(_places(count, copies))
    for offset in range(copies + count):
        yield NewRecord(0, None, _BODY, [header] if offset in places else [])


def _made(view: QueueSettings, count: int, copies: int, *, ranges: bool) -> Iterator[NewRecord]:
    """The claims and end markers of a tracker that copied the originals."""
    pairs = enumerate(_places(count, copies))
    while some := dict(itertools.islice(pairs, _CLAIMED_AT_ONCE)):
        yield NewRecord(0, *naming_tick(0, CLAIM, some))
        copied = {original: (0, copy) for original, copy in some.items()}
        yield from end_markers(view.name, 0, copied, copy_topic=view.name, ranges=ranges)


def _places(count: int, copies: int) -> Iterator[int]:
    """The offsets of the copies."""
    return (copies + number * count // copies for number in range(copies))
