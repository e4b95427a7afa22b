"""How long the topics of a queue must keep records (rule R9). Pure: no I/O."""

from __future__ import annotations

from kmqpy.core.durations import DAY_MS
from kmqpy.errors import ConfigError
from kmqpy.kafka.settings import QueueSettings

DEFAULT_RETENTION_MS = 14 * DAY_MS


def check_retention(queue: QueueSettings, retention_ms: int) -> None:
    """Raise ConfigError unless messages and markers outlive the longest lease or delay."""
    if retention_ms <= queue.longest_ms:
        raise ConfigError(
            f"retention: {retention_ms} ms must be longer than max_delay and max_hold "
            f"({queue.longest_ms} ms), or a leased message could disappear"
        )


def ample_retention_ms(queue: QueueSettings) -> int:
    """The retention to create or advise: the longest lease or delay, and a week for a standstill."""
    return queue.longest_ms + 7 * DAY_MS
