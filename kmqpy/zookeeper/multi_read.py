"""Many znodes read by one request; kazoo has no call for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import EXCEPTIONS, ConnectionDropped, NoAuthError, NoNodeError, UnimplementedError
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

MISSING: tuple[bytes, Any] = (b"", None)
"""The data and stat of a znode that is not there."""
DENIED: tuple[bytes, Any] = (b"", NoAuthError())
"""The data and, instead of its stat, the error of a znode that we may not read."""
_MOST = 100
"""The most znodes that one request reads."""
_AT_FIRST = 10
_ANSWER_BYTES = 1_000_000
"""The intended size of an answer: the server makes the whole of it before it sends any."""
_FAILED = -1
_XID = -16
"""The number of the greeting's request; kazoo and ZooKeeper use others."""


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


class MultiReadProbe:
    """Asks each server, when a client has connected to it, whether it can read many (since ZooKeeper 3.6).

    A server ends the connection over a request that it does not know, and answers it out of turn. So nothing
    else may be under way; and a server is not asked again that did not know it.
    """

    def __init__(self) -> None:
        self.can_read_many = False
        """True if the server that we are connected to can."""
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


class ManyReads:
    """Reads znodes, as many by one request as their size and the server allow. Thread-safe."""

    def __init__(self, zk: KazooClient, greeting: MultiReadProbe) -> None:
        self._zk = zk
        self._greeting = greeting
        self._together = _AT_FIRST

    def ask(self, paths: Sequence[str]) -> list[tuple[Sequence[str], Any]]:
        """Ask for znodes; groups of paths, each with kazoo's handle for found()."""
        together = self._together if self._greeting.can_read_many and self._zk.connected else 1
        groups = [paths[start : start + together] for start in range(0, len(paths), together)]
        return [(group, self._ask(group)) for group in groups]

    def found(self, group: Sequence[str], handle: Any, wait: Callable[[Any], Any]) -> list[tuple[bytes, Any]]:
        """The data and stat of each znode of a group; MISSING if it is not there, DENIED if we may not read.

        wait  waits for the handle; what it and kazoo raise is raised
        """
        try:
            answer = wait(handle)
        except (NoNodeError, NoAuthError) as error:
            if len(group) > 1:
                raise
            answer = error
        found = [_found(one) for one in ([answer] if len(group) == 1 else answer)]
        size = sum(len(data) for data, _ in found) // len(found)
        # At most twice as many as before: small znodes and large ones may be read in turn.
        self._together = max(1, min(_MOST, _ANSWER_BYTES // (size + 1), 2 * self._together))
        return found

    def _ask(self, group: Sequence[str]) -> Any:
        if len(group) == 1:
            return self._zk.get_async(group[0])
        chroot = self._zk.chroot or ""
        result: Any = self._zk.handler.async_result()
        self._zk._call(_MultiRead([chroot + path for path in group]), result)
        return result


def _found(answer: Any) -> tuple[bytes, Any]:
    if isinstance(answer, NoNodeError):
        return MISSING
    if isinstance(answer, NoAuthError):
        return DENIED
    if isinstance(answer, Exception):
        raise answer
    data, stat = answer
    return data, stat
