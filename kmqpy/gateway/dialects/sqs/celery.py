"""Tasks of Celery with an ETA, which wait in the queue. Pure: no I/O.

A worker of Celery receives such a task at once and keeps it in its memory until then, so that SQS hands it to
another one when the visibility timeout is over, and it runs twice.
"""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

_BEGINS = b'{"body": '
"""With this kombu's messages begin."""
_BEGINS_BASE64 = base64.b64encode(_BEGINS)
_MOST_S = 7 * 86_400.0


def wait_s(body: bytes, now_ms: int) -> float:
    """How many seconds a message must wait for its ETA; 0 for all others. At most 7 days, as queues allow."""
    if body.startswith(_BEGINS_BASE64):
        try:
            body = base64.b64decode(body, validate=True)
        except ValueError:
            return 0
    if not body.startswith(_BEGINS):
        return 0
    try:
        eta = datetime.fromisoformat(json.loads(body)["headers"]["eta"])
        eta_s = (eta if eta.tzinfo else eta.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):  # of somebody else, or no ETA
        return 0
    return min(max(0.0, eta_s - now_ms / 1000), _MOST_S)
