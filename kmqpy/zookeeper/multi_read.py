"""Reads many znodes by one request; kazoo has no method for that."""

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
"""The data and stat of a znode that does not exist."""
DENIED: tuple[bytes, Any] = (b"", NoAuthError())
"""The data and, instead of its stat, the error of a znode that we may not read."""
_MAX_ZNODES = 100
"""The most znodes that one request reads; more are read by several requests."""
_ZNODES_OF_FIRST_REQUEST = 10
"""The most znodes that the first request reads; for later ones, ManyReads adapts it to the answers' sizes."""
_ANSWER_BYTES = 1_000_000
"""The intended size of an answer: the server builds a whole answer before it sends any of it."""
_ERROR_RESULT = -1
"""In an answer: the result for this znode is an error."""
_PROBE_XID = -16
"""The request number of a probe; kazoo and ZooKeeper use other numbers."""


class _MultiRead:
    """The request that reads many znodes, with the methods that kazoo calls on a request."""

    type = 22
    _READ_OF_ONE = multiheader_struct.pack(GetData.type, 0, -1)
    _END = multiheader_struct.pack(-1, 1, -1)
    _NO_WATCH = bool_struct.pack(0)

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def serialize(self) -> bytes:
        parts: list[bytes] = [self._READ_OF_ONE + write_string(path) + self._NO_WATCH for path in self._paths]
        return b"".join([*parts, self._END])

    @staticmethod
    def deserialize(answer: bytes, offset: int) -> list[Any]:
        found: list[Any] = []
        while True:
            kind, is_end, _ = multiheader_struct.unpack_from(answer, offset)
            offset += multiheader_struct.size
            if is_end:
                return found
            if kind == _ERROR_RESULT:
                found.append(EXCEPTIONS[int_struct.unpack_from(answer, offset)[0]]())
                offset += int_struct.size
            else:
                data, offset = read_buffer(answer, offset)
                stat = ZnodeStat._make(stat_struct.unpack_from(answer, offset))
                offset += stat_struct.size
                found.append((data or b"", stat))


class MultiReadProbe:
    """Asks the server of each new connection whether it can read many znodes by one request (ZooKeeper 3.6).

    A server that does not know this request answers out of turn or not at all, and ends the connection. So no
    other request may be under way when the server is asked. A server that did not know the request is not
    asked again; one that gave no answer is not asked at the next connection to it.
    """

    def __init__(self) -> None:
        self.can_read_many = False
        """True if the server of the present connection can read many znodes by one request."""
        self._unable_servers: set[Any] = set()
        self._silent_server: Any = None

    def __call__(self, zk: KazooClient, server: Any, timeout_s: float) -> None:
        """Probe the server of a new connection; session.connect() calls it, as its greeting.

        Raises ConnectionDropped if the server does not know the request: kazoo must connect again.
        """
        self.can_read_many = False
        if server in self._unable_servers:
            return
        if server == self._silent_server:  # it may not know the request, or the connection ended by chance
            self._silent_server = None
            return
        self._silent_server = server
        try:
            zk._connection._invoke(timeout_s, _MultiRead(["/"]), xid=_PROBE_XID)
        except UnimplementedError:
            self._unable_servers.add(server)
            raise ConnectionDropped("it can't read many znodes by one request") from None
        self._silent_server = None
        self.can_read_many = True


class ManyReads:
    """Reads znodes, as many by one request as their sizes and the server allow. Thread-safe."""

    def __init__(self, zk: KazooClient, probe: MultiReadProbe) -> None:
        self._zk = zk
        self._probe = probe
        self._per_request = _ZNODES_OF_FIRST_REQUEST

    def ask(self, paths: Sequence[str]) -> list[tuple[Sequence[str], Any]]:
        """Send requests for znodes; return groups of paths, each with kazoo's handle, which found() wants."""
        per_request = self._per_request if self._probe.can_read_many and self._zk.connected else 1
        groups = [paths[start : start + per_request] for start in range(0, len(paths), per_request)]
        return [(group, self._ask(group)) for group in groups]

    def found(self, group: Sequence[str], handle: Any, wait: Callable[[Any], Any]) -> list[tuple[bytes, Any]]:
        """Return data and stat of each znode of a group; MISSING if there is none, DENIED if we may not read.

        wait  waits for a handle and returns its value; its errors are raised, and those of single znodes
        """
        try:
            answer = wait(handle)
        except (NoNodeError, NoAuthError) as error:
            if len(group) > 1:
                raise
            answer = error
        found = [_found(one) for one in ([answer] if len(group) == 1 else answer)]
        size = sum(len(data) for data, _ in found) // len(found)
        # At most twice as many znodes as before: callers may read small znodes and large ones in turn.
        self._per_request = max(1, min(_MAX_ZNODES, _ANSWER_BYTES // (size + 1), 2 * self._per_request))
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
