"""Says how long the topics of a queue must keep records (rule R9 of docs/rules.md). Pure: no I/O."""

from __future__ import annotations

from kmqpy.core.durations import DAY_MS
from kmqpy.errors import ConfigError
from kmqpy.kafka.settings import QueueSettings

DEFAULT_RETENTION_MS = 14 * DAY_MS
"""The retention of a new queue if nobody gives another; longer if ample_retention_ms() is."""


def check_retention(queue: QueueSettings, retention_ms: int) -> None:
    """Raise ConfigError unless topics with this retention keep records for longer than any lease or delay."""
    if retention_ms <= queue.longest_ms:
        raise ConfigError(
            f"retention: {retention_ms} ms must be longer than max_delay and max_lease "
            f"({queue.longest_ms} ms), or a leased message could disappear"
        )


def ample_retention_ms(queue: QueueSettings) -> int:
    """The retention that new queues get at least and that the doctor advises.

    That is the longest lease or delay, and a week more in which redelivery may stand still.
    """
    return queue.longest_ms + 7 * DAY_MS
