"""Asks Kafka for the ends of queue topics, for markers that name messages which may not exist."""

from __future__ import annotations

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import KmqError
from kmqpy.kafka.log_ends import LogEnd, LogEnds
from tracker.leadership.assignment import Partition

ABSENCE_CONFIRMED_S = 3.0
"""Trackers believe Kafka that a message does not exist only after it has said so for this long. A broker that
was paused answers as leader for a while, and does not know the messages that the new leader has written."""
ABSENCE_RECHECK_S = 0.5
"""The pause between two requests during this time."""


class QueueEnds(LogEnds):
    """Asks for the ends of logs, uncommitted records included. Safe to use from any thread.

    Clients on the JVM read uncommitted records by default, and so may take such messages.
    """

    def end_beyond(self, place: Partition, offset: int) -> LogEnd:
        """The end of a partition, where the caller knows of a message at `offset`. Raises KmqError.

        While the answer is not above `offset`, asks again for ABSENCE_CONFIRMED_S before believing it.
        """
        end = self.end_of(place)
        deadline = SYSTEM_CLOCK.monotonic() + ABSENCE_CONFIRMED_S
        while end.offset <= offset and SYSTEM_CLOCK.monotonic() < deadline:
            SYSTEM_CLOCK.sleep(ABSENCE_RECHECK_S)
            end = end.or_newer(self.end_of(place, anew=True))
        return end

    def end_of(self, place: Partition, *, anew: bool = False) -> LogEnd:
        """The end of a partition; `anew`: see each_of(). Raises KmqError."""
        end = self.with_epochs([place], anew=anew)[place]
        if isinstance(end, KmqError):
            raise end
        return end
