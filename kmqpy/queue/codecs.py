"""Codecs for message bodies: JSON, and whatever two functions convert. See docs/codecs.md."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from socket import gaierror
from ssl import SSLError
from typing import Any

from kmqpy.errors import DecodeError, MessageError, Unavailable

_AWAY = (ConnectionError, TimeoutError, gaierror, SSLError)
"""Errors of a server that a codec asks, not of the object or body."""

_NAMES_TYPES = re.compile(r"Object of type \w+ is not JSON serializable|keys must be [\w, ]+, not \w+")
"""The errors of json.dumps() that name types and show no values."""


class JsonCodec:
    """Encodes objects as JSON in UTF-8, and decodes such bodies. Implements Codec."""

    def encode(self, value: Any) -> bytes:
        """The JSON of an object.

        Args:
            value: What send() was given as body.

        Raises:
            MessageError: The object has no JSON; the text leaves out the object, which may be secret.
        """
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            kind = type(value).__name__
            why = str(error) if _NAMES_TYPES.fullmatch(str(error)) else type(error).__name__
            raise MessageError(f"body: an object of type {kind} has no form in JSON: {why}") from None

    def decode(self, body: bytes) -> Any:
        """The object in a body.

        Args:
            body: The body of a message.

        Raises:
            DecodeError: The body is not JSON; the error holds it.
        """
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            raise DecodeError(f"body: it is not JSON ({reason})", body) from None


@dataclass(frozen=True, slots=True)
class FunctionCodec:
    """Encodes and decodes by functions, such as those of pydantic, msgspec or a schema registry.

    Attributes:
        to_body: Makes bytes of an object. What it raises becomes MessageError in send().
        from_body: Makes the object of a body. What it raises becomes DecodeError, which holds the body.
        unavailable: Errors that say nothing of the object or body, such as those of a schema registry. They,
            broken connections, TLS errors and time-outs, even as causes of other errors or hidden by
            `from None`, become Unavailable: try again. A codec that handles one itself raises DecodeError.
    """

    to_body: Callable[[Any], bytes | None]
    from_body: Callable[[bytes], Any]
    unavailable: tuple[type[Exception], ...] = ()

    def encode(self, value: Any) -> Any:
        """See Codec."""
        outer = sys.exception()
        try:
            return self.to_body(value)
        except Exception as error:
            self._raise_if_away(error, outer)
            raise

    def decode(self, body: bytes) -> Any:
        """See Codec."""
        outer = sys.exception()
        try:
            return self.from_body(body)
        except (DecodeError, Unavailable):
            raise
        except Exception as error:  # neither its text nor, in a log, its traceback: they may hold the body
            self._raise_if_away(error, outer)
            raise DecodeError(f"body: the codec can't decode it: {type(error).__name__}", body) from None

    def _raise_if_away(self, error: BaseException, outer: BaseException | None) -> None:
        """Raise Unavailable if something away has caused the error; the caller was handling `outer`."""
        seen = [outer]
        cause: BaseException | None = error
        while cause is not None and cause not in seen:
            if isinstance(cause, (*_AWAY, *self.unavailable)):
                raise Unavailable(f"what the codec needs: {type(cause).__name__}") from None
            seen.append(cause)
            cause = cause.__cause__ or cause.__context__  # even a suppressed one: httpcore hides its sockets'
