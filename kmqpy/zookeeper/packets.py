"""Requests to ZooKeeper whose size is checked before they are sent.

A server closes the connection on a request larger than its jute.maxbuffer, without saying why.
"""

from __future__ import annotations

from typing import Any

from kazoo.client import KazooClient, TransactionRequest
from kazoo.protocol.serialization import Transaction

from kmqpy.errors import MessageError

MAX_PACKET_BYTES = 0xFFFFF
"""The default of ZooKeeper's jute.maxbuffer."""

_RESERVE_BYTES = 2_048
"""Room for what a server adds to a request (jute.maxbuffer bounds its log of transactions as well)."""


def check_packet(request: Any, max_bytes: int, what: str) -> None:
    """Raise MessageError if `request`, of kazoo, is too large for a server that accepts `max_bytes`."""
    size = len(request.serialize())
    if size > max_bytes - _RESERVE_BYTES:
        raise MessageError(
            f"{what}: {size} bytes in one request, but ZooKeeper accepts {max_bytes} less {_RESERVE_BYTES}; "
            "nothing was sent. Use smaller parts, or raise jute.maxbuffer at servers, and max_packet_bytes"
        )


def check_multi(multi: TransactionRequest, max_bytes: int, what: str) -> None:
    """Do what check_packet() does for a kazoo transaction."""
    check_packet(Transaction(multi.operations), max_bytes, what)


def check_create(zk: KazooClient, path: str, data: bytes, max_bytes: int, what: str) -> None:
    """Do what check_packet() does for the creation of one znode with the default ACL."""
    multi = zk.transaction()
    multi.create(path, data)
    check_multi(multi, max_bytes, what)
