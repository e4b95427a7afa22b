"""Which message makes a query fail, and who pays for that. Pure: no I/O.

A micro-batch that fails behind process() or take(), because of an expression or the sink, does not say which
of its messages was the cause, or whether any was: the sink may be away. The rules:

1. When a query fails, the messages it has taken stay in flight for its next run, and cost no attempt.
2. The next run has the same micro-batch. If that fails again and nothing has got through since, half of its
   messages, by chance the lower or the upper ones, are given back at each restart without counting, and come
   again in later micro-batches. So each run hands out half as many as the last one, until the micro-batch
   gets through, or one message is alone in it.
3. Messages of a micro-batch that failed are remembered, with how far the queue's group had got (of a large
   one they are not yet; its halves are smaller). A message that was alone in one is given back: as a failed
   attempt, with the query's failure as the reason, if another micro-batch has got through since it was
   remembered; else without counting.

So a sink that is away costs nobody an attempt, however long; and one message that its sink refuses, while
others get through, ends as a dead letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kmqpy.kafka.places import Place

FAILED = "the query failed: "
"""How the reason begins of messages in flight that a failed query has left."""

RERUN_MS = 7_200_000
"""How long messages of a failed query wait for its next run, at least. A job may be started every hour."""

MOST_REMEMBERED = 20_000
"""Messages; those that failed first are forgotten first, and then have failed later."""

LAST: Place = (-1, -1)
"""In the place of a message: how far the group had got when a micro-batch failed last."""

LARGE = 5_000
"""A micro-batch of more messages is not remembered."""


def split(failed: Iterable[Place], *, keeps_lower: bool) -> tuple[Sequence[Place], Sequence[Place]]:
    """The messages that the next run has, and those that are given back; of two or more messages.

    keeps_lower  which half is kept; by chance, so that each message comes to stand with each other
    """
    ones = sorted(failed)
    half = len(ones) // 2
    lower, upper = ones[:half], ones[half:]
    return (lower, upper) if keeps_lower else (upper, lower)


def remember(failed: Iterable[Place], progress: int, remembered: Mapping[Place, int]) -> Mapping[Place, int]:
    """Return the memory after a failed micro-batch: for each message, the progress at its first failure.

    failed      the messages in it, each by the place of its first copy, which names it across redeliveries
    progress    how far the queue's group has got; it grows when a micro-batch gets through
    """
    known = {message: first for message, first in remembered.items() if message != LAST}
    new = {message: progress for message in failed if message not in known}
    return dict([*[*known.items(), *new.items()][-MOST_REMEMBERED:], (LAST, progress)])


def failed_before(progress: int, remembered: Mapping[Place, int]) -> bool:
    """Return True if a micro-batch has failed before and nothing has got through since."""
    return remembered.get(LAST) == progress


def pays(message: Place, progress: int, remembered: Mapping[Place, int]) -> bool:
    """Return True if it counts as an attempt that a message has failed alone; see remember()."""
    return progress > remembered.get(message, progress)
