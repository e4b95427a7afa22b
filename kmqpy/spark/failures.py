"""Decides how each message that failed on Spark is given back, and makes the markers that say so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kmqpy.core.backoff import Backoff
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.errors import ConfigError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import QueueSettings
from kmqpy.spark.values import NotOfSchema
from kmqpy.worker.outcome import Reject, Retry, described, shortened

_log = logging.getLogger(__name__)

DELAY = "kmq_delay"
"""The column in which a function says how long, in seconds, a failed message waits for its redelivery. Errors
about a delay begin with this name."""

DEFAULT_BACKOFF = Backoff(jitter=0)  # no jitter: messages that fail together then share a range marker
"""Where neither the user says how long a failed message waits nor the queue's `retry_delays` do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The fields of the marker for one message: a nack, a dead-letter request, or an extension."""

    op: Op
    delay_ms: int = 0
    counts: bool = True
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """Makes the Failure of each failed message, by the settings of its queue and a back-off."""

    queue: QueueSettings
    backoff: Backoff

    def of_error(self, error: BaseException, attempts: int) -> Failure:
        """The failure of a message for which the user's function raised `error`."""
        if isinstance(error, Reject):
            return Failure(op=Op.DEAD_LETTER, reason=shortened(error.reason))
        if isinstance(error, Retry):
            return self.given_back(error.reason, attempts, error.delay, counts=error.count)
        return self.given_back(described(error), attempts)

    def given_back(
        self, reason: str | None, attempts: int, delay: Duration | None = None, *, counts: bool = True
    ) -> Failure:
        """The failure of a message that is redelivered after `delay`, by default after the back-off.

        The queue's max_delay_ms caps the delay. If `delay` is not a duration, the back-off applies, and the
        reason is the error of that delay. The default back-off leaves it to the queue's `retry_delays`.
        """
        retries = bool(self.queue.retry_delays)
        usual = 0.0 if retries and self.backoff == DEFAULT_BACKOFF else self.backoff.delay(int(attempts))
        try:
            delay_ms = duration_ms(usual if delay is None else delay, DELAY)
        except ConfigError as error:
            delay, delay_ms, reason = None, duration_ms(usual, DELAY), str(error)
        delay_ms = min(delay_ms, self.queue.max_delay_ms)
        if retries and delay is not None and not delay_ms:
            delay_ms = codec.AT_ONCE_MS
        reason = None if reason is None else shortened(reason)
        return Failure(op=Op.NACK, delay_ms=delay_ms, counts=counts, reason=reason)

    def log(self, error: BaseException, count: int) -> None:
        """Warn that `count` messages failed with this error; errors that quote values are not logged."""
        about = {"queue": self.queue.name, "count": count}
        if isinstance(error, NotOfSchema):  # kmqpy raised this error, and its text quotes values
            _log.warning(
                "not of the schema, as the reason in the dead letter will say; redelivered", extra=about
            )
        else:
            _log.warning("processing failed; the messages will be redelivered", exc_info=error, extra=about)


def nacks(queue: QueueSettings, failures: Mapping[Place, Failure]) -> list[Marker]:
    """The markers with the fields of `failures`: one for each message, or range markers for those alike."""
    alike: dict[tuple[int, Failure], list[int]] = {}
    for (partition, offset), failure in failures.items():
        alike.setdefault((partition, failure), []).append(offset)
    found: list[Marker] = []
    for (partition, failure), offsets in alike.items():
        fields: dict[str, Any] = {
            "redeliver_after_ms": failure.delay_ms,
            "counts": failure.counts,
            "reason": failure.reason,
        }
        if queue.writes_ranges and len(offsets) > 1:
            found += codec.ranges(partition, failure.op, sorted(offsets), **fields)
        else:
            found += [Marker(partition, offset, failure.op, **fields) for offset in sorted(offsets)]
    return found
