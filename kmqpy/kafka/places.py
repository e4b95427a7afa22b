"""Types for the places of messages in a queue topic, and message ids. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Place = tuple[int, int]
"""Partition and offset in the queue topic."""

Offsets = Mapping[int, Sequence[int]]
"""Ascending, distinct offsets in the queue topic, by partition."""


_MESSAGE_ID = re.compile(r"([0-9]{1,10})-([0-9]{1,19})")


def message_id(partition: int, number: int) -> str:
    """The id of a message within its queue: the place of its first record, see log_cuts for the number."""
    return f"{partition}-{number}"


def place_in_id(text: object) -> Place | None:
    """The place that a message id names; None for any other value."""
    found = _MESSAGE_ID.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    partition, number = int(found[1]), int(found[2])
    return (partition, number) if partition < 2**31 and number < 2**63 else None
