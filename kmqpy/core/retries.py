"""How long a queue holds a message back before it tries it again (`retry_delays`). Pure: no I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kmqpy.core.durations import DAY_MS, parse_duration_ms
from kmqpy.errors import ConfigError

MAX_RETRIES = 100
MAX_DELAY_MS = 366 * DAY_MS
_UNITS = (("d", DAY_MS), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))


@dataclass(frozen=True, slots=True)
class Retries:
    """The delays of a message that failed, or whose lease ended.

    delays_ms  by how often it was redelivered before, in ms; the last goes for all that follow. Empty: none
    jitter     each delay is shortened at random by up to so much of it, from 0 to 1
    """

    delays_ms: tuple[int, ...] = ()
    jitter: float = 0.0

    @classmethod
    def of(cls, delays: Sequence[str], most_ms: int | None, jitter: float, limit_ms: int) -> Retries:
        """The delays in `delays`; with `most_ms` each that follows is twice the one before, up to that.

        Raises ConfigError, also for delays above `limit_ms` or a year.
        """
        if not 0 <= jitter <= 1:
            raise ConfigError(f"retry_jitter: {jitter!r} must be from 0 to 1")
        found = [parse_duration_ms(one, "retry_delays") for one in delays]
        if len(found) > MAX_RETRIES:
            raise ConfigError(f"retry_delays: {len(found)} delays are more than {MAX_RETRIES}")
        if most_ms is not None:
            if not found or not 1 <= found[-1] <= most_ms:
                raise ConfigError(
                    f"retry_max_ms: {most_ms} ms must be at least the last of retry_delays, and that 1ms"
                )
            while found[-1] < most_ms:
                found.append(min(found[-1] * 2, most_ms))
        for one in found:
            if one > min(limit_ms, MAX_DELAY_MS):
                raise ConfigError(
                    f"retry_delays: {one} ms is longer than max_delay_ms, {limit_ms}, or {MAX_DELAY_MS}"
                )
        return cls(tuple(found), jitter)

    def delay_ms(self, requeues: int, drawn: float | None = None) -> int:
        """The delay of a message that was redelivered `requeues` times before.

        `drawn` stands for the random number from 0 to 1, for callers that have to find the same delay again.
        """
        if not self.delays_ms:
            return 0
        delay = self.delays_ms[min(requeues, len(self.delays_ms) - 1)]
        return round(delay * (1 - self.jitter * (random.random() if drawn is None else drawn)))


def normal(delays: Sequence[str]) -> tuple[str, ...]:
    """The delays, each in its shortest form: `1000ms` becomes `1s`."""
    return tuple(_shown(parse_duration_ms(one, "retry_delays")) for one in delays)


def _shown(value_ms: int) -> str:
    unit, factor = (
        next((unit, factor) for unit, factor in _UNITS if value_ms % factor == 0) if value_ms else ("s", 1)
    )
    return f"{value_ms // factor}{unit}"
