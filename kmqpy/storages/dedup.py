"""Dedup keys: a queue stores one message per key. Pure: no I/O."""

from __future__ import annotations

from binascii import b2a_base64
from hashlib import blake2b

_KEY_BYTES = 16
_ID, _BODY = b"kmqpy dedup id", b"kmqpy dedup body"
"""Make keys of different kinds differ: no body has the key of an id."""
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def key_of_id(dedup_id: str) -> str:
    """The key of a dedup id: 22 characters of ASCII."""
    return _text(blake2b(dedup_id.encode(), digest_size=_KEY_BYTES, person=_ID).digest())


def key_of_body(body: bytes) -> str:
    """The key of a message without a dedup id, in a queue with dedup_by="body"; equal are the same bytes."""
    return _text(blake2b(body, digest_size=_KEY_BYTES, person=_BODY).digest())


def _text(digest: bytes) -> str:
    return b2a_base64(digest).translate(_URL_SAFE).decode()[:-3]  # without == and the end of the line
