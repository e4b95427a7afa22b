"""Limits of memory and of rates: what is above them is refused before it costs much."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kmqpy.core.clock import Clock
from kmqpy.errors import KmqError


class Overloaded(KmqError):
    """The gateway, or the sender's key, is at a limit; a later try may succeed.

    why  which limit, in the words of docs/metrics.md
    """

    def __init__(self, message: str, why: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.why = why
        self.retry_after_s = retry_after_s


class TooLarge(KmqError):
    """The body of a request is larger than the gateway reads."""


class BadEncoding(KmqError):
    """The body of a request is not encoded as its Content-Encoding says."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one gateway takes on.

    max_message_bytes   the largest message
    max_body_bytes      the largest body of a request, decompressed
    max_held_bytes      bodies of requests and messages that are in the gateway's memory at once
    max_key_bytes       the same for the requests of one key
    max_requests        requests that run at once
    max_connections     connections that are open at once
    max_header_bytes    the largest head of a request
    head_timeout_s      how long a client may take to send the head of a request
    body_timeout_s      how long a client may take to send the body
    answer_timeout_s    how long a client may take to read an answer that does not fit into buffers
    """

    max_message_bytes: int = 1024 * 1024
    max_body_bytes: int = 16 * 1024 * 1024
    max_held_bytes: int = 256 * 1024 * 1024
    max_key_bytes: int = 128 * 1024 * 1024
    max_requests: int = 1_000
    max_connections: int = 10_000
    max_header_bytes: int = 16 * 1024
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    answer_timeout_s: float = 30.0


class Held:
    """Counts the bytes that requests hold in memory; each request has a Share of it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0


class Share:
    """The bytes that one request holds, of what all requests may hold, and of what those of its key may.

    Give it back by close().
    """

    def __init__(self, held: Held) -> None:
        self._held = [held]
        self.count = 0

    def join(self, held: Held) -> None:
        """Count the bytes here, too, from now on; called before the first add()."""
        self._held.append(held)

    def add(self, count: int) -> None:
        """Hold `count` more bytes; raises Overloaded at a limit, also for no bytes."""
        for held in self._held:
            if held.count + max(count, 1) > held.most:
                raise Overloaded("too many bytes of messages are in the gateway's memory", "memory")
        for held in self._held:
            held.count += count
        self.count += count

    def close(self) -> None:
        """Hold nothing any more."""
        for held in self._held:
            held.count -= self.count
        self.count = 0


class Rate:
    """Allows so much per second, and at once what one second allows; used on one event loop."""

    def __init__(self, per_second: float, clock: Clock) -> None:
        self._per_second = per_second
        self._clock = clock
        self._left = per_second
        self._at_s = clock.monotonic()

    def spend(self, amount: float) -> float:
        """Spend if anything is left, even more than that; returns the seconds to wait, 0 if it was spent."""
        now_s = self._clock.monotonic()
        self._left = min(self._per_second, self._left + (now_s - self._at_s) * self._per_second)
        self._at_s = now_s
        if self._left <= 0:
            return max(-self._left / self._per_second, 0.001)
        self._left -= amount
        return 0.0


async def read_body(chunks: AsyncIterator[bytes], encoding: str, share: Share, most: int) -> bytes:
    """The body of a request, decompressed; never holds much more than `most` bytes.

    Raises TooLarge, BadEncoding, and Overloaded for a body that `share` has no room for.
    """
    encodings = [one for one in encoding.lower().replace(" ", "").split(",") if one not in {"", "identity"}]
    if encodings not in ([], ["gzip"], ["x-gzip"]):
        raise BadEncoding("Content-Encoding must be gzip or identity")
    body = bytearray()
    gunzip = _Gunzip() if encodings else None
    try:
        async for chunk in chunks:
            piece = chunk if gunzip is None else gunzip.next(chunk, most + 1 - len(body))
            share.add(len(piece))
            body += piece
            if len(body) > most:
                raise TooLarge(f"the body has more than {most} bytes")
    except zlib.error:
        raise BadEncoding("the body is not gzip") from None
    if gunzip is not None and not gunzip.at_end:
        raise BadEncoding("the gzip of the body ends too early")
    return bytes(body)


class _Gunzip:
    """Decompresses gzip, of which several may stand one behind the other."""

    def __init__(self) -> None:
        self._member: zlib._Decompress | None = None

    @property
    def at_end(self) -> bool:
        return self._member is None

    def next(self, chunk: bytes, most: int) -> bytes:
        """The next bytes, at most `most`; the caller gives up when it gets as many."""
        found = bytearray()
        while chunk and len(found) < most:
            if self._member is None:
                self._member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            found += self._member.decompress(chunk, most - len(found))
            if not self._member.eof:
                break
            chunk = self._member.unused_data
            self._member = None
        return bytes(found)
