"""How often an item is handed out; pure.

A policy that counts writes a znode `meta-…` in the same ZooKeeper transaction that locks the item, before the
item is handed out, so no crash makes it count too little. Its content is JSON:

    {"taken": 2, "not_before_ms": 1760000000000}

taken          how often the item was handed out
not_before_ms  it is not handed out again before this time, in ms since 1970 UTC, by the taker's clock; a time
               further away than twice the taker's own longest back-off does not count. Twice, since the
               clock of the taker before may be ahead
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kmqpy.core.backoff import Backoff
from kmqpy.core.durations import duration_ms
from kmqpy.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The content of a meta znode."""

    taken: int = 0
    not_before_ms: int = 0

    def encode(self) -> bytes:
        """The JSON."""
        return json.dumps({"taken": self.taken, "not_before_ms": self.not_before_ms}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Meta:
        """The meta that `data` holds; that of an item which was never taken if `data` holds none."""
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
    """Its back-off is not over."""


class Policy(Protocol):
    """Decides whether an item is handed out."""

    @property
    def counts(self) -> bool:
        """True when the policy writes meta znodes."""
        ...

    def next(self, meta: Meta, now_ms: int) -> Meta | Refusal:
        """The meta with which the item is handed out, or why it is not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AtLeastOnce:
    """Hand an item out until a transaction with it is committed.

    backoff  an item that was taken is not taken again before its delay after that; None: at once
    """

    backoff: Backoff | None = None

    @property
    def counts(self) -> bool:
        """Only a back-off needs the count."""
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
    """Hand an item out at most `times` times; after that it goes to the queue's dlq."""

    times: int
    backoff: Backoff | None = None

    def __post_init__(self) -> None:
        if self.times < 1:
            raise ConfigError(f"times: {self.times} must be at least 1")

    @property
    def counts(self) -> bool:
        """Always."""
        return True

    def next(self, meta: Meta, now_ms: int) -> Meta | Refusal:
        """See Policy."""
        if meta.taken >= self.times:
            return Refusal.TOO_OFTEN
        return AtLeastOnce(backoff=self.backoff).next(meta, now_ms)


def ConsumeOnce() -> ConsumeTimes:  # noqa: N802 - a policy like the others
    """Hand an item out at most once: it is lost to the dlq when its transaction is not committed."""
    return ConsumeTimes(1)
