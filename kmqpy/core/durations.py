"""Converts durations (text with a unit, seconds, timedeltas) to milliseconds, and checks leases."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from decimal import Decimal

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError, shown

Duration = float | int | timedelta
"""Seconds, or a timedelta."""
DAY_MS = 86_400_000
MIN_LEASE_MS = 100
"""The shortest lease, in ms; a shorter one raises ConfigError. Within a lease, a client must get its start
marker ("this client took the message") confirmed, and process the message."""
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": DAY_MS}
_DURATION = re.compile(r"([0-9]{1,999}(?:\.[0-9]{1,999})?)\s*(ms|s|m|h|d)")
_MILLISECOND = timedelta(milliseconds=1)


def parse_duration_ms(text: str, name: str = "duration") -> int:
    """`500ms`, `30s`, `5m`, `1h` or `7d` as ms, rounded up; raises ConfigError with `name` and `text`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}: {shown(text)} is not a duration; write it like 500ms, 30s, 5m, 1h, 7d")
    duration = math.ceil(Decimal(match[1]) * _UNITS_MS[match[2]])
    if duration > INT64_MAX:
        raise ConfigError(f"{name}: {shown(text)} is longer than 2**63 - 1 ms")
    return duration


def duration_ms(value: Duration, name: str) -> int:
    """Seconds or a timedelta as ms, rounded up.

    Raises ConfigError with `name` for a negative value, for 2**53 seconds or more, and for other types.
    """
    if isinstance(value, timedelta):
        if value < timedelta():
            raise ConfigError(f"{name}: {value!r} must not be negative")
        whole, rest = divmod(value, _MILLISECOND)
        return whole + bool(rest)
    if type(value) is int and 0 <= value < 2**53:  # a fast path: each message needs it
        return value * 1000
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}: {shown(value)} is neither seconds nor a timedelta")
    if not 0 <= value < 2**53:
        raise ConfigError(f"{name}: {shown(value)} must not be negative, and below 2**53 s")
    # Decimal of the shortest decimal form, because 0.07 * 1000 is 70.00000000000001 as a float.
    return math.ceil(Decimal(repr(float(value))) * 1000)


def lease_duration_ms(value: Duration) -> int:
    """A lease as ms, converted by duration_ms(); raises ConfigError also below MIN_LEASE_MS (100 ms)."""
    return check_lease(duration_ms(value, "lease"), "lease")


def check_lease(value_ms: int, name: str) -> int:
    """Return `value_ms`; raise ConfigError that names the setting `name` below MIN_LEASE_MS."""
    if value_ms < MIN_LEASE_MS:
        raise ConfigError(f"{name}: {value_ms} ms is shorter than the least, {MIN_LEASE_MS} ms")
    return value_ms
