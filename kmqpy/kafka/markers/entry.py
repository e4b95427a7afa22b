"""Describes messages in flight: one as an Entry, some that were taken together as a TakenRun. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class EntryState(StrEnum):
    """Why a message is in flight."""

    LEASED = "leased"
    """A client has it, until its lease ends."""
    DELAYED = "delayed"
    """A client met the message before its delay was over; nobody has it."""
    RELEASED = "released"
    """A client gave the message back with a nack; it waits for its redelivery."""
    FAILED = "failed"
    """Released without a delay, in a queue with `retry_delays`: a tracker sees how long it has to wait, and
    gives it back with that delay, after which it is RELEASED (rule R44 of docs/rules.md)."""
    DEAD = "dead"
    """A client wants it dead-lettered now. Only an end marker changes this state."""


class Entry(NamedTuple):
    """One message in flight.

    offset      the offset of the message in the queue topic
    taken_at    the markers offset of its take, or of another marker that put it in flight
    since_ms    the partition's now (the largest timestamp read from the markers) at the take
    due_ms      when the message must be redelivered, compared with the partition's now
    state       why it is in flight
    counts      True: the redelivery counts as an attempt
    reason      the reason in the latest operation on the message, if any
    holder      the name of the client that took the message, if it gave one
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
    """Messages in flight that were taken together, for storing them compactly.

    Bit i of `bits` is set if the message at queue offset `first` + i is in flight; in a snapshot, bit 0 is
    set. The take of that message stands at markers offset `taken_at` + i * `stride`; `stride` is 0 if one
    range marker took all messages. The other fields are as in Entry, for each of the messages.
    """

    first: int
    bits: int
    taken_at: int
    stride: int
    since_ms: int
    due_ms: int
    holder: str | None


SnapshotRow = Entry | TakenRun
"""A row of a snapshot, which is the stored form of the messages in flight of one partition."""
