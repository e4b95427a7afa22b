"""Digests of bodies, by which a queue with the setting `collapse` knows equal messages. Pure: no I/O.

Bodies that are JSON are equal when they mean the same: the order of keys, spaces and escapes do not count, of
a key that stands twice the last value counts, whole numbers are equal as they are written, other numbers by
their exact value (1.0 = 1.00 = 10e-1, but not 1). All other bodies are equal byte by byte; so is JSON that is
nested deeper than MAX_DEPTH, and JSON with an exponent of more than MAX_EXPONENT_DIGITS digits.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from json.encoder import encode_basestring_ascii
from typing import Any

DIGEST_BYTES = 16
MAX_DEPTH = 100
"""So deep that no stack is too small for it: what a body equals must not depend on who sends it."""
MAX_EXPONENT_DIGITS = 500
"""Fewer than Python may be told to refuse (sys.set_int_max_str_digits)."""

_JSON, _BYTES = b"kmqpy JSON", b"kmqpy bytes"
"""Make digests of different kinds differ, even where the canonical form is the bytes of another body."""


class _Number(str):
    """The canonical text of a number."""

    __slots__ = ()


def body_digest(body: bytes) -> bytes:
    """DIGEST_BYTES bytes, which equal bodies share, and others do not."""
    text = canonical_json(body)
    if text is None:
        return blake2b(body, digest_size=DIGEST_BYTES, person=_BYTES).digest()
    return blake2b(text.encode(), digest_size=DIGEST_BYTES, person=_JSON).digest()


def canonical_json(body: bytes) -> str | None:
    """The canonical form of a body; None for one that is compared byte by byte."""
    try:
        return _text(_DECODER.decode(body.decode()), MAX_DEPTH)
    except (ValueError, RecursionError):
        return None


def _text(value: Any, depth: int) -> str:
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if not isinstance(value, list | dict):
        return json.dumps(value)
    if not depth:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return f"[{','.join([_text(one, depth - 1) for one in value])}]"
    pairs = [f"{encode_basestring_ascii(key)}:{_text(one, depth - 1)}" for key, one in sorted(value.items())]
    return f"{{{','.join(pairs)}}}"


def _whole(text: str) -> _Number:
    return _Number("0" if text == "-0" else text)


def _other(text: str) -> _Number:
    """Digits without zeros around them, and an exponent; text that can't be a whole number's."""
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.removeprefix("-").partition(".")
    digits = (whole + fraction).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return _Number("0e0")
    magnitude = exponent.lstrip("+-0") or "0"
    if len(magnitude) > MAX_EXPONENT_DIGITS:
        raise ValueError("an exponent of too many digits")
    power = -int(magnitude) if exponent.startswith("-") else int(magnitude)
    power += len(digits) - len(significant) - len(fraction)
    return _Number(f"{'-' if mantissa.startswith('-') else ''}{significant}e{power}")


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_other, parse_constant=_refuse)
