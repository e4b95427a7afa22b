"""Decides how many messages a worker takes ahead of its handlers. Pure: no threads, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from kmqpy.message import Message

HORIZON_S = 0.05
"""A worker takes as many messages ahead as its handlers handled within so many seconds."""
_MAX_LEASE_SHARE = 1 / 20
"""The same as a share of the lease, for short ones."""
_LINGER_SHARE = 1 / 10
"""Outcomes wait for others for this share of the time that what was taken ahead lasts."""
_MAX_AHEAD = 1_000
"""With more, receives and acknowledgements get no cheaper."""
_MAX_BYTES = 16 << 20
"""The bodies taken ahead have about this many bytes at most, unless there are `least`."""
_SAMPLE = 10
"""Of each receive, at least so many messages are looked at, if there are."""


class TakingAhead:
    """How many messages to hold beside those that are being handled: `least`, and more for quick handlers.

    A round to the storage takes about as long for hundreds of messages as for ten, so quick handlers would
    wait for rounds. But nobody else gets what is taken ahead, and if the process is killed, it has used up an
    attempt. So slow handlers have no more than `least`. Neither have messages most of which come again: one
    of them may be what kills processes, and those taken with it would become dead letters as well.

    least    the number with which a worker begins; with `grows` False it stays
    lease_s  the seconds of a lease
    limit    it does not grow beyond; None: there is no such limit
    """

    def __init__(
        self, least: int, lease_s: float, now: float, *, grows: bool, limit: int | None = None
    ) -> None:
        self._least = least
        self._horizon_s = min(HORIZON_S, lease_s * _MAX_LEASE_SHARE)
        self.grows = grows
        self._number = least
        self._most = self._limit = _MAX_AHEAD if limit is None else min(limit, _MAX_AHEAD)
        self._handled = 0
        self._since = now

    def linger_s(self, ready: int) -> float:
        """How long outcomes may wait for others while so many messages wait for handlers, and last longer."""
        lasts = self._number > self._least and ready >= 2 * _LINGER_SHARE * self._number
        return _LINGER_SHARE * self._horizon_s if lasts else 0.0

    def number(self, handled: int, now: float) -> int:
        """The number at the monotonic time `now`, when `handled` messages were handled in all."""
        elapsed = now - self._since
        if self.grows and elapsed >= self._horizon_s:
            quick = (handled - self._handled) * self._horizon_s / elapsed
            self._number = max(self._least, min(round(quick), self._most))
            self._handled, self._since = handled, now
        return self._number

    def note(self, messages: Sequence[Message]) -> bool:
        """Note what a receive has returned; True if most of it comes again, and `least` are to be held."""
        if not self.grows or not messages:
            return False
        sample = messages[:: len(messages) // _SAMPLE + 1]
        again = 2 * sum(message.attempts > 1 for message in sample) > len(sample)
        size = sum(len(message.body) for message in sample) // len(sample)
        # After those that come again, it grows by degrees: they may be mixed with others.
        most = min(max(2 * self._most, 2 * self._least), self._limit, _MAX_BYTES // max(1, size))
        self._most = 0 if again else most
        self._number = max(self._least, min(self._number, self._most))
        return again
