"""Guards and counts the connections of a gateway: their number, large heads of requests, and slow ones."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kmqpy.gateway.limits import Limits
from kmqpy.gateway.metrics import GatewayMetrics

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

_NO_HTTP = "Invalid HTTP request received."

_GRACE_S = 1.0
"""So long, in seconds, the answer to a body that is late may take before the connection is closed without."""

_SMALL = 16 * 1024
"""What has more bytes is written at once."""

_LAST_S = 0.5
"""So long, in seconds, connections without a request stay open when the gateway ends."""


class _HeadTooLarge(Exception):
    """Ends the parsing of a head."""


class _BadHead(Exception):
    """Ends it for CONNECT, and for HTTP/1.1 without a Host, or with several: RFC 9112 wants status 400."""


class _Transport:
    """A transport that writes head and body of an answer together; each write costs as much as the rest.

    It drops what is written after its end, where uvloop's raises, with a traceback in the log: a call may
    still run when its connection ends, by the client, or as the rest of the request is no HTTP.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._held.append(data)
        if len(data) > _SMALL:  # who writes it waits until it is on its way
            self._flush()
        elif len(self._held) == 1:
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():
            self._transport.writelines(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def guarded(limits: Limits, metrics: GatewayMetrics) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn that closes connections that exceed the limits."""

    class Guarded(HttpToolsProtocol):
        _head_bytes = 0
        _further_bytes = 0
        """Of the head, after the piece with which it began: the parser keeps what has no end of line yet."""
        _begins = False
        _hosts = 0
        _head_timer: asyncio.TimerHandle | None = None
        _body_timer: asyncio.TimerHandle | None = None
        _answer_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(_Transport(transport, self.loop))  # type: ignore[arg-type]
            metrics.connections.inc()
            if len(self.connections) > limits.max_connections:
                metrics.refused.labels("connections").inc()
                transport.abort()
                return
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            self._end_body()
            self._end_answer()
            metrics.connections.dec()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._begins = False
            self._unset_keepalive_if_required()
            rest = memoryview(data)
            try:
                while rest:
                    rest = self._fed(rest)
            except httptools.HttpParserError:
                self.logger.warning(_NO_HTTP)
                self.send_400_response(_NO_HTTP)
            if self._head_timer is not None and not self._begins:
                self._further_bytes += len(data)
                if self._further_bytes > limits.max_header_bytes and not self.transport.is_closing():
                    self._refuse_head()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._begins = True
            self._head_bytes = self._further_bytes = self._hosts = 0
            self._await_head()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value))
            if self._head_timer is not None:  # else a trailer, which is no header
                self._hosts += name.lower() == b"host"
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._end_head()
            method, version = self.parser.get_method(), self.parser.get_http_version()
            if method == b"CONNECT" or (self._hosts != 1 and version == "1.1"):
                raise _BadHead
            if self.parser.should_upgrade():
                return
            # Calls that read their body answer 408 before; others are answered, and their connection is kept.
            self._end_body()
            self._body_timer = self.loop.call_later(limits.body_timeout_s + _GRACE_S, self._give_up)
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            if not self.parser.should_upgrade():
                self._end_body()
                super().on_message_complete()

        def pause_writing(self) -> None:
            self._end_answer()
            self._answer_timer = self.loop.call_later(limits.answer_timeout_s, self._give_up)
            super().pause_writing()

        def resume_writing(self) -> None:
            self._end_answer()
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            if self._head_bytes > limits.max_header_bytes:
                self._refuse_head()
            else:
                super().send_400_response(msg)

        def shutdown(self) -> None:
            """The gateway listens no longer. A client may just be sending: it gets an answer that says so."""
            if self.cycle is None or self.cycle.response_complete:
                self.loop.call_later(_LAST_S, super().shutdown)
            else:
                super().shutdown()

        def _fed(self, data: memoryview) -> memoryview:
            """Feed the parser; returns what it has left over.

            It passes over the body of a request that offers another protocol: all of Java's own client offer
            HTTP/2. So the head of that request is fed again, without the offer, and then the rest.
            """
            try:
                self.parser.feed_data(data)
                return data[:0]
            except httptools.HttpParserUpgrade as offered:
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                headers = [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
                lines = [b"%s %s HTTP/%s" % (method, self.url, version), *headers, b"", b""]
                self.parser.feed_data(b"\r\n".join(lines))
                return data[offered.args[0] :]

        def _refuse_head(self) -> None:
            metrics.refused.labels("head").inc()
            self.transport.write(_TOO_LARGE)
            self.transport.close()

        def _count(self, size: int) -> None:
            self._head_bytes += size
            if self._head_bytes > limits.max_header_bytes:
                raise _HeadTooLarge  # the parser ends with an error, and so the connection

        def _await_head(self) -> None:
            self._end_head()
            self._head_timer = self.loop.call_later(limits.head_timeout_s, self._give_up)

        def _give_up(self) -> None:
            metrics.refused.labels("slow").inc()
            self.transport.abort()

        def _end_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _end_body(self) -> None:
            if self._body_timer is not None:
                self._body_timer.cancel()
                self._body_timer = None

        def _end_answer(self) -> None:
            if self._answer_timer is not None:
                self._answer_timer.cancel()
                self._answer_timer = None

    return Guarded
