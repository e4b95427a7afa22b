"""Computes the pauses between attempts, which grow with each attempt up to a maximum."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kmqpy.core.durations import Duration, duration_ms
from kmqpy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Backoff:
    """Computes how long to wait after a failure: `first * factor ** (attempts - 1)`, at most `maximum`.

    Args:
        first: Seconds or timedelta.
        factor: Each pause is `factor` times the pause before; at least 1.
        maximum: Seconds or timedelta.
        jitter: 0.1 makes each pause up to a tenth longer or shorter, at random; never above `maximum`.

    Raises:
        ConfigError: For a value that is out of range.
    """

    first: Duration = 1.0
    factor: float = 2.0
    maximum: Duration = 60.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        duration_ms(self.first, "first")
        duration_ms(self.maximum, "maximum")
        if not self.factor >= 1:
            raise ConfigError(f"factor: {self.factor!r} must be at least 1")
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"jitter: {self.jitter!r} must be from 0 to 1")

    def delay(self, attempts: int) -> float:
        """How long to wait after an attempt.

        Args:
            attempts: How many there were, this one included.

        Returns:
            Seconds to wait.
        """
        maximum = duration_ms(self.maximum, "maximum") / 1000
        try:
            delay = duration_ms(self.first, "first") / 1000 * self.factor ** (max(1, attempts) - 1)
        except OverflowError:
            delay = maximum
        return min(maximum, delay * random.uniform(1 - self.jitter, 1 + self.jitter))
