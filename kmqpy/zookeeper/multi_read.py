"""Many znodes read by one request; kazoo has no call for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import EXCEPTIONS
from kazoo.protocol.serialization import (
    GetData,
    bool_struct,
    int_struct,
    multiheader_struct,
    read_buffer,
    stat_struct,
    write_string,
)
from kazoo.protocol.states import ZnodeStat

_FAILED = -1


class _MultiRead:
    """A request as kazoo sends them."""

    type = 22
    _PART = multiheader_struct.pack(GetData.type, 0, -1)
    _END = multiheader_struct.pack(-1, 1, -1)
    _NO_WATCH = bool_struct.pack(0)

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def serialize(self) -> bytes:
        parts: list[bytes] = [self._PART + write_string(path) + self._NO_WATCH for path in self._paths]
        return b"".join([*parts, self._END])

    @staticmethod
    def deserialize(answer: bytes, offset: int) -> list[Any]:
        found: list[Any] = []
        while True:
            kind, is_end, _ = multiheader_struct.unpack_from(answer, offset)
            offset += multiheader_struct.size
            if is_end:
                return found
            if kind == _FAILED:
                found.append(EXCEPTIONS[int_struct.unpack_from(answer, offset)[0]]())
                offset += int_struct.size
            else:
                data, offset = read_buffer(answer, offset)
                stat = ZnodeStat._make(stat_struct.unpack_from(answer, offset))
                offset += stat_struct.size
                found.append((data or b"", stat))


def multi_read_async(zk: KazooClient, paths: Sequence[str]) -> Any:
    """Read znodes; kazoo's handle of a list with (data, stat) or an exception for each.

    The handle raises UnimplementedError where the server can't do it (before 3.6).
    """
    chroot = zk.chroot or ""
    result: Any = zk.handler.async_result()
    zk._call(_MultiRead([chroot + path for path in paths]), result)
    return result
