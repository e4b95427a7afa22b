"""A codec for message bodies that are JSON."""

from __future__ import annotations

import json
from typing import Any

from kmqpy.errors import DecodeError, MessageError


class JsonCodec:
    """Encodes objects as JSON in UTF-8, and decodes such bodies. Implements Codec (kmqpy.queue)."""

    def encode(self, value: Any) -> bytes:
        """The JSON of an object.

        Raises MessageError for an object that has none; its text leaves out the object, which may be secret.
        """
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            kind = type(value).__name__
            raise MessageError(
                f"body: an object of type {kind} has no form in JSON: {type(error).__name__}"
            ) from None

    def decode(self, body: bytes) -> Any:
        """The object in a body. Raises DecodeError, which holds the body, if the body is not JSON."""
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            raise DecodeError(f"body: it is not JSON ({reason})", body) from None
