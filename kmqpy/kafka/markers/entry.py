"""A message in flight, alone or in a run of messages that were taken together. Pure: no I/O, no clock."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class EntryState(StrEnum):
    """Why a message is in flight."""

    LEASED = "leased"
    """A client has it, until its lease ends."""
    DELAYED = "delayed"
    """Its delay has not passed yet."""
    RELEASED = "released"
    """Given back by a nack; waits for its redelivery."""
    DEAD = "dead"
    """To be dead-lettered now. Sticky: no later marker but the end marker changes it."""


class Entry(NamedTuple):
    """One message in flight.

    offset      its offset in the queue topic
    taken_at    offset of its take in the markers topic
    since_ms    the partition's now when it was taken
    due_ms      when it is to be redelivered, in the partition's time
    counts      whether that redelivery counts as an attempt
    """

    offset: int
    taken_at: int
    since_ms: int
    due_ms: int
    state: EntryState
    counts: bool = True
    reason: str | None = None
    holder: str | None = None


class TakenRun(NamedTuple):
    """Messages in flight that were taken together, as a snapshot has them.

    Bit i of `bits` stands for the message at queue offset `first` + i, bit 0 is set. `taken_at` is the
    markers offset of its take, those of the next offsets stand `stride` apart.
    """

    first: int
    bits: int
    taken_at: int
    stride: int
    since_ms: int
    due_ms: int
    holder: str | None


SnapshotRow = Entry | TakenRun
"""A row of a snapshot."""
