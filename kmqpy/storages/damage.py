"""Replaces headers that kmqpy can't read because another program wrote them, and logs a warning."""

from __future__ import annotations

import logging

from kmqpy.core.throttle import Throttle
from kmqpy.message import Headers

_log = logging.getLogger(__name__)
_throttle = Throttle(60.0)


def replace_unreadable_headers(error: Exception) -> Headers:
    """Return empty headers in place of those that can't be read; log a warning, at most one in 60 s."""
    if _throttle.allows():
        _log.warning("headers of a message can't be read; it has none", extra={"error": str(error)})
    return ()
