"""The MD5 digests by which SQS's clients check what was stored and what they received. Pure: no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kmqpy.gateway.dialects.sqs.values import Value

_TEXT, _BINARY = b"\x01", b"\x02"


def of_body(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def of_attributes(attributes: Mapping[str, Value]) -> str:
    """That of attributes: of their names, types and values, each behind its length, sorted by names."""
    digest = hashlib.md5(usedforsecurity=False)
    for name in sorted(attributes):
        value = attributes[name]
        for part in (name.encode(), value.type.encode()):
            digest.update(len(part).to_bytes(4, "big") + part)
        digest.update(_BINARY if value.is_binary else _TEXT)
        digest.update(len(value.content).to_bytes(4, "big") + value.content)
    return digest.hexdigest()
