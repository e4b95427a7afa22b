"""Types for the places of messages in a queue topic, and the message id. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Place = tuple[int, int]
"""Partition and offset in the queue topic."""

Offsets = Mapping[int, Sequence[int]]
"""Ascending, distinct offsets in the queue topic, by partition."""


def message_id(partition: int, offset: int) -> str:
    """The id of a message within its queue."""
    return f"{partition}-{offset}"
