"""What the storages say of values that another program wrote, and that cost no message."""

from __future__ import annotations

import logging

from kmqpy.core.throttle import Throttle
from kmqpy.message import Headers

_log = logging.getLogger(__name__)
_complaints = Throttle(60.0)


def no_headers(error: Exception) -> Headers:
    """None at all, in place of headers that can't be read, and at times a log line."""
    if _complaints.lets_through():
        _log.warning("headers of a message can't be read; it has none", extra={"error": str(error)})
    return ()
