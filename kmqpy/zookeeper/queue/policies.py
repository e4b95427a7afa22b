"""Decides how often an item is handed out, and after which delay again; pure.

A policy that counts writes a meta znode (`meta-…`) in the same ZooKeeper transaction that locks the item. The
item is handed out after that, so no crash makes the count too small. A meta znode holds JSON:

    {"taken": 2, "not_before_ms": 1760000000000}

taken          how often the item was handed out
not_before_ms  the item is not handed out again before this time, in ms since 1970 UTC, by the taker's clock.
               A taker ignores a time that lies further in the future than twice the taker's own longest
               back-off: the clock of the taker before was far ahead, and the item would wait too long. Twice
               and not once, so that a time counts if that clock was only a little ahead
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from kmqpy.core.backoff import Backoff
from kmqpy.core.durations import duration_ms
from kmqpy.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The content of a meta znode: what a Policy remembers of an item.

    Attributes:
        taken: How often the item was handed out.
        not_before_ms: The item waits until then, in ms since 1970 UTC.
    """

    taken: int = 0
    not_before_ms: int = 0

    def encode(self) -> bytes:
        """Return the JSON."""
        return json.dumps({"taken": self.taken, "not_before_ms": self.not_before_ms}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Meta:
        """Return the meta; if there is none, that of an item that was never taken.

        Args:
            data: The content of a meta znode.
        """
        try:
            found = json.loads(data)
            return cls(taken=max(0, int(found["taken"])), not_before_ms=int(found.get("not_before_ms", 0)))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return cls()


class Refusal(Enum):
    """Why an item is not handed out."""

    TOO_OFTEN = "too often"
    """The item goes to the queue's dlq."""
    NOT_YET = "not yet"
    """The back-off of the item is not over."""


@runtime_checkable
class Policy(Protocol):
    """Decides whether an item is handed out; threads share it."""

    @property
    def counts(self) -> bool:
        """True when the policy writes meta znodes."""
        ...

    def next(self, meta: Meta, now_ms: int) -> Meta | Refusal:
        """Return the meta to write when the item is handed out, or why the item is not handed out.

        Args:
            meta: What is known of the item.
            now_ms: ZooKeeper's time, in ms since 1970.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AtLeastOnce:
    """Hands an item out until a transaction with this item is committed.

    Args:
        backoff: The delay after each take before which the item is not taken again; None: no delay.
    """

    backoff: Backoff | None = None

    @property
    def counts(self) -> bool:
        """True with a back-off, which depends on the count."""
        return self.backoff is not None

    def next(self, meta: Meta, now_ms: int) -> Meta | Refusal:
        """See Policy."""
        furthest_ms = 2 * duration_ms(self.backoff.maximum, "maximum") if self.backoff else 0
        if now_ms < meta.not_before_ms <= now_ms + furthest_ms:
            return Refusal.NOT_YET
        delay_ms = round(1000 * self.backoff.delay(meta.taken + 1)) if self.backoff else 0
        return Meta(taken=meta.taken + 1, not_before_ms=now_ms + delay_ms)


@dataclass(frozen=True, slots=True)
class ConsumeTimes:
    """Hands an item out at most `times` times; the next attempt to take it moves it to the queue's dlq.

    Args:
        times: At least 1.
        backoff: As in AtLeastOnce.
    """

    times: int
    backoff: Backoff | None = None

    def __post_init__(self) -> None:
        if self.times < 1:
            raise ConfigError(f"times: {self.times} must be at least 1")

    @property
    def counts(self) -> bool:
        """True: this policy counts takes."""
        return True

    def next(self, meta: Meta, now_ms: int) -> Meta | Refusal:
        """See Policy."""
        if meta.taken >= self.times:
            return Refusal.TOO_OFTEN
        return AtLeastOnce(backoff=self.backoff).next(meta, now_ms)


def ConsumeOnce() -> ConsumeTimes:  # noqa: N802 - a policy like the others
    """Hand an item out at most once: it goes to the dlq if its transaction is not committed."""
    return ConsumeTimes(1)
