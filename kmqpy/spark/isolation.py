"""Finds the message that makes a query fail, so that no other message loses an attempt. Pure: no I/O.

When a micro-batch fails behind process() or take(), because of an expression or the sink, it is unknown which
of its messages was the cause, or whether any was: the sink may be away. An *attempt* is a delivery that
counts towards the queue's max_redeliveries. The *progress* of a queue is the sum of the offsets that its
group has committed: it grows with each micro-batch that succeeds. The rules:

1. When a query fails, the messages that it has taken stay in flight for its next run, and lose no attempt.
2. The next run repeats the micro-batch. If it fails again, and none has succeeded since, half of its messages
   (by chance the lower or the upper ones) are given back at each restart, which is no attempt; they come
   again in later micro-batches. So each run hands out half as many messages as the run before, until the
   micro-batch succeeds, or has one message only.
3. The messages of a failed micro-batch are remembered, with the progress at that time (unless they are more
   than MAX_REMEMBERED_BATCH; its halves are smaller). A message that failed alone is given back. That is an
   attempt if a micro-batch has succeeded since the message was remembered, else it is none.

So while the sink is away, no message loses an attempt, however long that lasts. A message that the sink
refuses while it takes others becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kmqpy.kafka.places import Place

FAILED_PREFIX = "the query failed: "
"""Begins the reason of a message that a failed query has left in flight."""

MIN_RERUN_WAIT_MS = 7_200_000
"""The messages of a failed query stay leased for its next run at least this long, if the queue's max_lease_ms
allows it: a job may run once an hour."""

MAX_REMEMBERED = 20_000
"""The most messages in the memory; the oldest are forgotten, as if they had not failed."""
MAX_REMEMBERED_BATCH = 5_000

LAST_FAILURE: Place = (-1, -1)
"""The key in the memory, in place of a message, of the progress when a micro-batch failed last."""


def split(failed: Iterable[Place], *, keeps_lower: bool) -> tuple[Sequence[Place], Sequence[Place]]:
    """The half of two or more messages that the next run has, and the half that is given back.

    keeps_lower  whether the next run has the lower half. Callers choose by chance, so that the messages of a
                 group do not stay together
    """
    ones = sorted(failed)
    half = len(ones) // 2
    lower, upper = ones[:half], ones[half:]
    return (lower, upper) if keeps_lower else (upper, lower)


def remember(failed: Iterable[Place], progress: int, remembered: Mapping[Place, int]) -> Mapping[Place, int]:
    """Return the memory after a failed micro-batch: for each message, the progress at its first failure.

    failed  the messages of the micro-batch, each by the place of its first copy: redeliveries keep that
    """
    known = {message: first for message, first in remembered.items() if message != LAST_FAILURE}
    new = {message: progress for message in failed if message not in known}
    return dict([*[*known.items(), *new.items()][-MAX_REMEMBERED:], (LAST_FAILURE, progress)])


def failed_before(progress: int, remembered: Mapping[Place, int]) -> bool:
    """Return True if a micro-batch has failed before, and none has succeeded since."""
    return remembered.get(LAST_FAILURE) == progress


def counts_as_attempt(message: Place, progress: int, remembered: Mapping[Place, int]) -> bool:
    """Return True if `message`, which failed alone, loses an attempt by this failure; see remember()."""
    return progress > remembered.get(message, progress)
