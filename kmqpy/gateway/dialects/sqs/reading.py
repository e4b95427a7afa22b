"""The values of a request in JSON, as SQS reads them. Pure: no I/O.

What clients of typed languages send fits at once. From others SQS also takes numbers and flags where texts
belong, and nulls, which count as missing.
"""

from __future__ import annotations

import re
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from kmqpy.gateway.dialects.sqs.errors import MALFORMED, SqsError
from kmqpy.gateway.dialects.sqs.shapes import REQUESTS

_DECODERS = {action: msgspec.json.Decoder(kind) for action, kind in REQUESTS.items()}
_UNFIT = re.compile(r"Expected `(\w+).*`, got `(\w+)`")
_TOLD = {
    "object": "Start of structure or map found where not expected.",
    "array": "Start of list found where not expected",
    "str": "STRING_VALUE can not be converted to an Integer",
}
"""What SQS says of a value that does not fit, by its type."""


def read_json(action: str, body: bytes) -> Any:
    """The values of a request; raises SqsError."""
    try:
        try:
            return _DECODERS[action].decode(body)
        except msgspec.ValidationError:
            given = _cast(msgspec.json.decode(body), REQUESTS[action])
            return msgspec.convert(given, REQUESTS[action], builtin_types=())  # bytes are base64, as in JSON
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise malformed(error) from None


_fields = cache(get_type_hints)
"""The types of a struct's fields: slow to find, and a request may have a struct many times."""


def _cast(value: Any, kind: Any) -> Any:
    if isinstance(kind, UnionType):  # `| None`, as of all fields
        kind = get_args(kind)[0]
    if isinstance(value, dict):
        fields = _fields(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else {}
        other = get_args(kind)[1] if get_origin(kind) is dict else None
        return {key: _cast(one, fields.get(key, other)) for key, one in value.items() if one is not None}
    if isinstance(value, list) and get_origin(kind) is list:
        return [_cast(one, get_args(kind)[0]) for one in value]
    if kind is str and isinstance(value, int | float):
        return msgspec.json.encode(value).decode()
    return value


def malformed(error: Exception) -> SqsError:
    """The error for a request that can't be read."""
    if not isinstance(error, msgspec.MsgspecError):
        return SqsError(MALFORMED, f"The request can't be read: {type(error).__name__}")
    found = _UNFIT.match(str(error))
    if found is not None and found[2] in _TOLD and (found[2] != "str" or found[1] == "int"):
        return SqsError(MALFORMED, _TOLD[found[2]])
    return SqsError(MALFORMED, f"The request can't be read: {error}")
