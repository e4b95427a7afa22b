"""Encodes and decodes the bytes of znodes of Curator's queues, as Curator 5.9.0 does; pure.

    00 01 00 01                          the version
    01  length (4 bytes)  bytes          once for each item
    02                                   the end

Numbers are big-endian and signed. Curator ignores bytes after the end; so do we.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kmqpy.errors import DecodeError

VERSION = 0x00010001
_ITEM = 1
_END = 2
_INT = struct.Struct(">i")
_ITEM_HEAD = struct.Struct(">bi")


def encode_items(items: Iterable[bytes]) -> bytes:
    parts = [_INT.pack(VERSION)]
    for item in items:
        parts += (_ITEM_HEAD.pack(_ITEM, len(item)), item)
    parts.append(bytes([_END]))
    return b"".join(parts)


def decode_items(data: bytes) -> list[bytes]:
    """Return the items of a znode; raise DecodeError if `data` has another version or is malformed."""
    if len(data) < _INT.size or (version := _INT.unpack_from(data)[0]) != VERSION:
        found = f"{version:#010x}" if len(data) >= _INT.size else f"only {len(data)} bytes"
        raise DecodeError(f"item of a Curator queue: version {found} is not {VERSION:#010x}", data)
    items: list[bytes] = []
    at = _INT.size
    while True:
        if at >= len(data):
            raise DecodeError(f"item of a Curator queue: cut off after {len(data)} bytes", data)
        if data[at] == _END:
            return items
        if data[at] != _ITEM:
            raise DecodeError(f"item of a Curator queue: operation {data[at]} at byte {at}", data)
        if at + _ITEM_HEAD.size > len(data):
            raise DecodeError(f"item of a Curator queue: cut off after {len(data)} bytes", data)
        _, length = _ITEM_HEAD.unpack_from(data, at)
        at += _ITEM_HEAD.size
        if not 0 <= length <= len(data) - at:
            raise DecodeError(f"item of a Curator queue: length {length} at byte {at - _INT.size}", data)
        items.append(data[at : at + length])
        at += length
