"""Keys, bodies and headers of messages as JSON: text, or base64 of what is not text. Pure: no I/O."""

from __future__ import annotations

import base64

from kmqpy.message import Headers


def content(name: str, data: bytes | None) -> dict[str, str | None]:
    """Return `{name: text}`, or `{name_base64: …}` if the data is not UTF-8."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": _base64(data)}


def headers_of(headers: Headers) -> dict[str, dict[str, str | None]]:
    """Return `{"headers": {name: text}}`; of a header that occurs several times, the last value.

    A value that is no printable text is in `headers_base64` instead.
    """
    texts: dict[str, str | None] = {}
    binary: dict[str, str | None] = {}
    for name, value in headers:
        texts.pop(name, None)
        binary.pop(name, None)
        text = None if value is None else _printable(value)
        if value is None or text is not None:
            texts[name] = text
        else:
            binary[name] = _base64(value)
    return {"headers": texts, **({"headers_base64": binary} if binary else {})}


def _printable(data: bytes) -> str | None:
    """Return the text; None if it is not UTF-8, or has characters that can't be printed."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if all(c.isprintable() or c in "\t\r\n" for c in text) else None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
