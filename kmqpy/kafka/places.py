"""Types for the places of messages in a queue topic, and message ids. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Place = tuple[int, int]
"""Partition and offset in the queue topic."""

Offsets = Mapping[int, Sequence[int]]
"""Ascending, distinct offsets in the queue topic, by partition."""


_MESSAGE_ID = re.compile(r"(?:([a-z]{1,9}[1-9]?):)?([0-9]{1,10})-([0-9]{1,19})")


def message_id(partition: int, number: int, lane: str = "") -> str:
    """The id of a message within its queue: the place of its first record, see log_cuts for the number.

    `lane` is the ending of the lane in which that stands, as "priority1"; "" is the main lane.
    """
    return f"{lane}:{partition}-{number}" if lane else f"{partition}-{number}"


def place_in_id(text: object) -> Place | None:
    """The place in the main lane that a message id names; None for any other value."""
    lane, place = lane_in_id(text) or ("", None)
    return None if lane else place


def lane_in_id(text: object) -> tuple[str, Place] | None:
    """The ending of the lane ("": the main lane) and the place that a message id names; None for others."""
    found = _MESSAGE_ID.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    partition, number = int(found[2]), int(found[3])
    return (found[1] or "", (partition, number)) if partition < 2**31 and number < 2**63 else None
