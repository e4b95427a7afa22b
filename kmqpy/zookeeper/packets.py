"""Checks the size of requests to ZooKeeper before they are sent.

On a request larger than its jute.maxbuffer, a server closes the connection without saying why.
"""

from __future__ import annotations

from kazoo.client import KazooClient, TransactionRequest
from kazoo.protocol.serialization import Transaction

from kmqpy.errors import MessageError

MAX_PACKET_BYTES = 0xFFFFF
"""The default of ZooKeeper's jute.maxbuffer."""

_RESERVE_BYTES = 2_048
"""A request must be smaller than jute.maxbuffer by at least this many bytes. A server adds bytes to a request
that it writes to its transaction log, and jute.maxbuffer bounds the log's entries as well."""


def check_multi(multi: TransactionRequest, max_bytes: int, what: str) -> None:
    """Raise MessageError if a kazoo transaction is too large for a server that accepts `max_bytes`.

    what  names the operation in the error
    """
    size = len(Transaction(multi.operations).serialize())
    if size > max_bytes - _RESERVE_BYTES:
        raise MessageError(
            f"{what}: {size} bytes in one request, but ZooKeeper accepts {max_bytes} less {_RESERVE_BYTES}; "
            "nothing was sent. Use smaller parts, or raise jute.maxbuffer at servers, and max_packet_bytes"
        )


def check_create(zk: KazooClient, path: str, data: bytes, max_bytes: int, what: str) -> None:
    """Check the request that creates one znode with the default ACL, as check_multi() does."""
    multi = zk.transaction()
    multi.create(path, data)
    check_multi(multi, max_bytes, what)
