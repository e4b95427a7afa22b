"""Log lines about values in a storage that another program wrote and that can't be read."""

from __future__ import annotations

import logging

from kmqpy.core.throttle import Throttle
from kmqpy.message import Headers

_log = logging.getLogger(__name__)
_throttle = Throttle(60.0)


def no_headers(error: Exception) -> Headers:
    """Return no headers, in place of those that can't be read; writes a log line, once a minute at most."""
    if _throttle.allows():
        _log.warning("headers of a message can't be read; it has none", extra={"error": str(error)})
    return ()
