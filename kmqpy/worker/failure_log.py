"""Logs and counts the failures after which a worker goes on."""

from __future__ import annotations

import logging

from kmqpy.errors import KmqError
from kmqpy.telemetry.base import Telemetry
from kmqpy.worker.outcome import described

_log = logging.getLogger(__name__)


class FailureLog:
    """Reports failures of one worker to the log and to the telemetry; never raises."""

    def __init__(self, queue: str, telemetry: Telemetry) -> None:
        self._queue = queue
        self._telemetry = telemetry

    def report(self, what: str, text: str, error: BaseException, count: int = 1) -> None:
        """Log `text` with the error, and count `count` failures of the kind `what`."""
        why = described(error)  # in the text, too: most formatters show no fields
        extra: dict[str, object] = {"queue": self._queue, "error": why}
        if count > 1:
            extra["count"] = count
        trace = None if isinstance(error, KmqError) else error
        _log.warning(f"{text}: %s", why, exc_info=trace, extra=extra)
        self.count(what, count)

    def count(self, what: str, count: int = 1) -> None:
        """Count `count` failures of the kind `what`."""
        try:
            self._telemetry.failed(self._queue, what, count)
        except Exception:  # a faulty telemetry must not end a thread of the worker
            _log.exception("telemetry failed", extra={"queue": self._queue})
