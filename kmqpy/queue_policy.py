"""The settings that queues of every storage have: leases, redeliveries and delays of their messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kmqpy.core.durations import DAY_MS, check_lease
from kmqpy.core.retries import Retries, normal
from kmqpy.core.settings import check_count
from kmqpy.errors import ConfigError

LEASES = ("lease_ms", "max_lease_ms")
"""The settings that are leases: a value below MIN_LEASE_MS (100 ms) raises ConfigError."""


RETRIES = ("retry_delays", "retry_max_ms", "retry_jitter")
"""The settings of the delays before redeliveries; of storages with the capability `retry_delays`."""

POLICY = ("max_redeliveries", *LEASES, "max_delay_ms", *RETRIES)
"""The settings that any storage can change while the queue is used."""


@dataclass(frozen=True, kw_only=True)
class QueuePolicy:
    """Holds the limits of leases, redeliveries and delays of one queue, and checks them.

    Args:
        name: Name of the queue; each storage says which names it accepts.
        max_redeliveries: Redeliveries before a message becomes a dead letter; None: no limit.
        lease_ms: Lease of a message if receive() is given none; at least 100.
        max_delay_ms: Longest delay of send() and nack().
        max_lease_ms: Longest lease or extension; at least 100.
        retry_delays: Durations as text: how long a message waits before its first, second, … redelivery after
            its lease ended or nack() without a delay; the last goes for all that follow.
        retry_max_ms: None, or each delay behind the last of retry_delays is twice the one before, up to it.
        retry_jitter: 0 to 1: each of these delays is shortened at random by up to so much of it.
    """

    name: str
    max_redeliveries: int | None = 3
    lease_ms: int = 30_000
    max_delay_ms: int = 7 * DAY_MS
    max_lease_ms: int = 7 * DAY_MS
    retry_delays: tuple[str, ...] = ()
    retry_max_ms: int | None = None
    retry_jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.max_redeliveries is not None:
            check_count(self, "max_redeliveries")
        for key in (*LEASES, "max_delay_ms"):
            check_count(self, key)
        for key in LEASES:
            check_lease(getattr(self, key), key)
        object.__setattr__(self, "retry_delays", normal(self.retry_delays))
        _ = self.retries  # raises for wrong ones

    @cached_property
    def retries(self) -> Retries:
        """The delays before redeliveries."""
        return Retries.of(self.retry_delays, self.retry_max_ms, self.retry_jitter, self.max_delay_ms)

    @property
    def longest_ms(self) -> int:
        """The longest time that a message can be leased or delayed."""
        return max(self.max_delay_ms, self.max_lease_ms)


def bounded(value_ms: int, argument: str, limit: str, policy: QueuePolicy) -> int:
    """Return the value of an argument; raises ConfigError above the limit, one of the policy's settings."""
    most = getattr(policy, limit)
    if value_ms > most:
        raise ConfigError(f"{argument}: {value_ms} ms is longer than {limit} of {policy.name!r}, {most}")
    return value_ms
