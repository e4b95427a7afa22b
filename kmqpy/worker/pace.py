"""Decides when a worker may start its next handler: by rate and breaker. Pure: no threads, no clock."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass

from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.settings import check_limit
from kmqpy.errors import ConfigError, shown

_RATE = re.compile(r"(\d+(?:\.\d+)?)/(s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_BURST_S = 0.05
"""Who was late may start at once what he could have started in so many seconds, and at least one."""
_TRIED_AGAIN = 12
"""A message that was tried before is held back for so many pauses, if there are others."""
_MOST_TRIED = 10_000
"""So many messages that were tried are remembered."""
_ALONE_S = 1.0
"""Else it is held back for so many seconds beyond the pause, in which another one would come."""
_AHEAD_S = 1.0
"""Messages wait for their time for so many seconds, not longer: others could have them sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """Pauses a worker while what its handlers need is away, so that messages use up no attempts.

    When the handlers of `failures` different messages have failed in a row, the breaker opens: the worker
    gives back what it has taken, and receives nothing. After a pause it tries one message. If that fails,
    too, the attempt does not count, and the next pause is twice as long; the message comes again a second
    after that, or, if it was tried before and there are others, after 12 pauses (at most the queue's
    `max_delay_ms`), so that these are tried meanwhile. Otherwise the worker goes on at once as before.

    Args:
        failures: Above 1, a message that fails by itself does not open the breaker, however often it comes.
        on: The errors that count; any other outcome says that all is well. Reject and Retry never count. Name
            those of what may be away: with Exception, what fails by a fault of the handler is tried again and
            again, too, once the breaker is open.
        pause: The first pause.
        max_pause: The longest one: the worker notices no later that all is well again.

    Raises:
        ConfigError: For wrong arguments.
    """

    failures: int = 10
    on: type[Exception] | tuple[type[Exception], ...] = Exception
    pause: Duration = 0.5
    max_pause: Duration = 5.0

    def __post_init__(self) -> None:
        check_limit(self.failures, "breaker: failures")
        kinds = self.on if isinstance(self.on, tuple) else (self.on,)
        if not kinds or not all(isinstance(one, type) and issubclass(one, Exception) for one in kinds):
            raise ConfigError(
                f"breaker: on: {shown(self.on)} is neither a class of errors nor a tuple of some"
            )
        if not 0 < self.pause_s <= self.max_pause_s:
            raise ConfigError(
                f"breaker: pause: {shown(self.pause)} must be above 0, and not above max_pause, "
                f"{shown(self.max_pause)}"
            )

    @property
    def pause_s(self) -> float:
        """The first pause in seconds."""
        return duration_ms(self.pause, "breaker: pause") / 1000

    @property
    def max_pause_s(self) -> float:
        """The longest pause in seconds."""
        return duration_ms(self.max_pause, "breaker: max_pause") / 1000


def rate_of(rate: str | float) -> float:
    """The handlers per second of "100/s", "30/min", "5/h", or of a number; raises ConfigError."""
    per_s = 0.0
    if isinstance(rate, str) and (found := _RATE.fullmatch(rate)):
        per_s = float(found[1]) / _SECONDS[found[2]]
    elif isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < sys.float_info.max:
        per_s = float(rate)  # of a larger int there is no float
    if not 0 < per_s < math.inf:
        raise ConfigError(
            f'rate: {shown(rate)} is not a rate above 0: write "100/s", "30/min", "5/h", or 0.5'
        )
    return per_s


class Pace:
    """When handlers may start. One thread at a time uses it; times are monotonic, in seconds.

    rate  handlers per second; None: as many as there are
    """

    def __init__(self, rate: float | None, breaker: Breaker | None, now: float) -> None:
        self._rate = rate
        self._breaker = breaker
        self._most = 1.0 if rate is None else max(1.0, rate * _BURST_S)
        self._left = self._most
        self._left_at = now
        self._failed: set[str] = set()
        self._pause_s = 0.0
        self._tries_at: float | None = None
        self._tried: str | None = None
        self._tried_before: set[str] = set()
        self._is_alone = False
        self._is_late = False
        self._late = 0

    @property
    def is_free(self) -> bool:
        """True if there is neither a rate nor a breaker."""
        return self._rate is None and self._breaker is None

    @property
    def is_open(self) -> bool:
        """True from the failures that have opened the breaker to the first handler that does not fail."""
        return self._tries_at is not None

    def wait_s(self, now: float) -> float:
        """Seconds until the next handler may start; 0: now; inf: when the one that is tried has ended."""
        if self._tried is not None:
            return math.inf
        wait_s = 0.0 if self._tries_at is None else max(0.0, self._tries_at - now)
        if self._rate is not None:
            self._left = min(self._most, self._left + (now - self._left_at) * self._rate)
            self._left_at = now
            wait_s = max(wait_s, (1 - self._left) / self._rate)
        return wait_s

    def room(self, room: int, waiting: int, now: float) -> int:
        """How many messages to receive, if there is `room` for some; `waiting`: so many wait for handlers."""
        if self._tries_at is not None:
            may_try = self._tried is None and not waiting and now >= self._tries_at
            return min(room, 1) if may_try else 0
        if self._rate is None:
            return room
        soon = self._rate * _AHEAD_S
        if self._left + (now - self._left_at) * self._rate + soon < 1:
            return 0
        return min(room, max(1, math.ceil(soon)) - waiting)

    def nothing_came(self) -> None:
        """Note that there is no message to be received."""
        self._is_alone = True

    def hold(self) -> None:
        """Note that a message waits until wait_s() is over."""
        self._is_late = not self.is_open

    def take_late(self) -> int:
        """How many handlers have started late because of the rate since the last call."""
        late, self._late = self._late, 0
        return late

    def begin(self, message_id: str) -> None:
        """Note that the handler of this message starts; wait_s() was 0."""
        self._left -= 1
        self._late += self._is_late
        self._is_late = False
        if self.is_open:
            self._tried = message_id

    def end(self, message_id: str, error: BaseException | None, now: float) -> float | None:
        """Note how a handler has ended; returns None if that counts as an attempt.

        Else the breaker is open, and the message is held back for so many seconds.
        """
        if self._breaker is None:
            return None
        has_failed = isinstance(error, self._breaker.on)
        if not self.is_open:
            self._failed = self._failed | {message_id} if has_failed else set()
            if len(self._failed) >= self._breaker.failures:
                self._pause_s = self._breaker.pause_s
                self._tries_at = now + self._pause_s
            return None
        if message_id != self._tried:
            return 0.0 if has_failed else None
        self._tried = None
        if not has_failed:
            self._tries_at = None
            self._failed = set()
            self._tried_before = set()
            return None
        self._pause_s = min(2 * self._pause_s, self._breaker.max_pause_s)
        self._tries_at = now + self._pause_s
        is_soon = self._is_alone or message_id not in self._tried_before
        self._is_alone = False
        if len(self._tried_before) >= _MOST_TRIED:  # those come again soon once more
            self._tried_before.clear()
        self._tried_before.add(message_id)
        return self._pause_s + _ALONE_S if is_soon else _TRIED_AGAIN * self._pause_s

    def drop(self, message_id: str) -> None:
        """Note that a message is finished; if end() was not called, its handler has not run."""
        if message_id == self._tried:
            self._tried = None
