"""Errors as problem details (RFC 9457). Their texts name the field and the value, and say what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kmqpy.errors import (
    AccessDenied,
    Closed,
    ConfigError,
    DecodeError,
    KmqError,
    MessageError,
    NotSupported,
    QueueNotFound,
    ReceiptError,
    TopicError,
    Unavailable,
    Unfinished,
)
from kmqpy.gateway.http import Response
from kmqpy.gateway.limits import BadEncoding, Overloaded, TooLarge
from kmqpy.queue.shapes import PROBLEM, PROBLEM_TYPE, Problem

_STATUSES: Mapping[type[KmqError], int] = {
    QueueNotFound: 404,
    TopicError: 409,
    NotSupported: 501,
    Unavailable: 503,
    Unfinished: 503,
    Closed: 503,
    TooLarge: 413,
    BadEncoding: 415,
    ConfigError: 400,
    MessageError: 400,
    ReceiptError: 400,
    DecodeError: 400,
}
_KEY_LIMIT = 429
_FIELD = re.compile(r"([a-z][a-z0-9_]*): ")
_MAX_VALUE = 100


class Refused(KmqError):
    """Ends a request with an answer of its own."""

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self.response = response


def problem(
    kind: str, status: int, detail: str, headers: Mapping[str, str] | None = None, **more: Any
) -> Response:
    """A response that says what is wrong; `kind` is the name of a class of errors."""
    words = re.sub(r"(?<!^)([A-Z])", r" \1", kind).capitalize()
    shape = Problem(type=PROBLEM_TYPE + kind, title=words, status=status, detail=detail, **more)
    return Response(msgspec.json.encode(shape), status, {"content-type": PROBLEM, **(headers or {})})


def problem_of(error: KmqError, given: Mapping[str, Any]) -> Response:
    """The answer to an error; `given` are the parameters of the request, by name."""
    if isinstance(error, Refused):
        return error.response
    if isinstance(error, Overloaded):
        seconds = {"retry-after": str(max(1, round(error.retry_after_s)))}
        return problem("Overloaded", _KEY_LIMIT if error.why == "key" else 503, str(error), seconds)
    if isinstance(error, AccessDenied):  # the gateway's, not the client's
        return problem("Unavailable", 503, "the storage refuses the gateway")
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 500)
    is_away = status == 503 and not isinstance(error, Unfinished)
    kind = type(error).__name__ if not isinstance(error, Closed) else "Unavailable"
    detail = "the storage does not answer" if is_away else str(error)
    more: dict[str, Any] = {}
    if isinstance(error, Unfinished):
        more["done"] = error.done
    if status == 400 and (found := _FIELD.match(detail)):
        more["field"] = found[1]
        value = given.get(found[1], msgspec.UNSET)
        if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= _MAX_VALUE):
            more["value"] = value
    return problem(kind, status, detail, {"retry-after": "1"} if is_away else None, **more)


BUSY = problem("Overloaded", 503, "the gateway is busy", {"retry-after": "1"})
"""The answer when too many requests run."""
