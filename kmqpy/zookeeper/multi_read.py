"""Many znodes read by one request; kazoo has no call for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import EXCEPTIONS, ConnectionDropped, UnimplementedError
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
_XID = -16
"""Of our greeting; kazoo and ZooKeeper use others."""


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


class Greeting:
    """Asks each server, when a client has connected to it, whether it can read many (since ZooKeeper 3.6).

    A server ends the connection over a request that it does not know, and answers it out of turn. So nothing
    else may be under way; and a server is not asked again that did not know it.
    """

    def __init__(self) -> None:
        self.can_read_many = False
        """Of the server that we are connected to."""
        self._unable: set[Any] = set()
        self._cut_off: Any = None

    def __call__(self, zk: KazooClient, server: Any, timeout_s: float) -> None:
        """For session.connect(); raises ConnectionDropped when another connection has to be made."""
        self.can_read_many = False
        if server in self._unable:
            return
        if server == self._cut_off:  # without an answer: over what it did not know, or by chance
            self._cut_off = None
            return
        self._cut_off = server
        try:
            zk._connection._invoke(timeout_s, _MultiRead(["/"]), xid=_XID)
        except UnimplementedError:
            self._unable.add(server)
            raise ConnectionDropped("it can't read many znodes by one request") from None
        self._cut_off = None
        self.can_read_many = True


def multi_read_async(zk: KazooClient, paths: Sequence[str]) -> Any:
    """Read znodes; kazoo's handle of a list with (data, stat) or an exception for each."""
    chroot = zk.chroot or ""
    result: Any = zk.handler.async_result()
    zk._call(_MultiRead([chroot + path for path in paths]), result)
    return result
