"""Requests and responses of the gateway, whatever dialect they speak."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qsl, unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from kmqpy.gateway.limits import Limits, Share, read_body

__all__ = ["Call", "ClientDisconnect", "Response", "json_response", "text_response"]


class BodyTimeout(Exception):
    """The client did not send the body of its request in time."""


@dataclass(slots=True)
class Call:
    """One request, and what is logged of it.

    request  Starlette's
    share    the bytes that it holds in memory
    limits   of the gateway
    waiting  entered while it waits for its client, so that it does not count as running; raises Overloaded
    request_id  names it in logs
    verb     what it asks for, in the words of the dialect
    queue    the name of the queue, if it is about one
    key_id   whose key it has
    count    messages that it was about
    refused  which limit has refused it
    """

    request: Request
    share: Share
    limits: Limits
    waiting: Callable[[], AbstractContextManager[None]]
    request_id: str = ""
    verb: str = "unknown"
    queue: str = ""
    key_id: str = "-"
    count: int = 0
    refused: str = ""
    _headers: dict[str, str] | None = None

    def segments(self, base: str) -> list[str] | None:
        """The parts of the path below `base`, split before they are unescaped; None for a path elsewhere.

        An empty last part is left out. What is no UTF-8 becomes U+FFFD, which no name has.
        """
        path = self.request.scope.get("raw_path") or self.request.scope["path"].encode()
        text = path.partition(b"?")[0].decode("latin-1")
        if not text.startswith(f"{base}/"):
            return None
        parts = [unquote(part, errors="replace") for part in text.removeprefix(f"{base}/").split("/")]
        return parts[:-1] if parts[-1] == "" else parts

    def parameters(self) -> Mapping[str, str]:
        """The query's parameters; of one that is given more than once, the first."""
        found: dict[str, str] = {}
        query = self.request.scope["query_string"].decode("latin-1")
        if not query:
            return found
        for name, value in parse_qsl(query, keep_blank_values=True, errors="replace", max_num_fields=None):
            found.setdefault(name, value)
        return found

    def header(self, name: str) -> str:
        """A header, its name in small letters; empty if it is missing, of several the first."""
        return self.headers().get(name, "")

    def headers(self) -> Mapping[str, str]:
        """The headers, by names in small letters; of several the first."""
        if self._headers is None:  # Starlette would decode all of them for each
            pairs = reversed(self.request.scope["headers"])
            self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        return self._headers

    def has_body(self) -> bool:
        """True if the head of the request announces a body."""
        return bool(self.header("transfer-encoding")) or self.header("content-length").strip("0 ") != ""

    async def body(self) -> bytes:
        """The body, decompressed; raises TooLarge, BadEncoding, Overloaded, BodyTimeout, ClientDisconnect."""
        first = at_once(self.request.receive)
        reading = read_body(
            self._chunks(first), self.header("content-encoding"), self.share, self.limits.max_body_bytes
        )
        if first is not None and not first.get("more_body"):
            return await reading
        try:
            with self.waiting():
                async with asyncio.timeout(self.limits.body_timeout_s):
                    return await reading
        except TimeoutError:
            raise BodyTimeout from None

    async def is_gone(self) -> bool:
        """True if the client has closed the connection, so nobody would get an answer."""
        return is_end(at_once(self.request.receive))

    async def _chunks(self, message: Message | None) -> AsyncIterator[bytes]:
        while True:
            message = message or await self.request.receive()
            if is_end(message):
                raise ClientDisconnect
            yield message["body"]
            if not message.get("more_body"):
                return
            message = None


def at_once(receive: Receive) -> Message | None:
    """What the server has for the application now; None if nothing: then nobody waits for it."""
    waiting = cast("Coroutine[Any, Any, Message]", receive())
    try:
        waiting.send(None)
    except StopIteration as done:
        return cast("Message", done.value)
    waiting.close()
    return None


def is_end(message: Message | None) -> bool:
    """True for what says that the client has closed the connection."""
    return message is not None and message["type"] == "http.disconnect"


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with exactly the type `application/json`."""
    return Response(body, status, {"content-type": "application/json", **(headers or {})})


def text_response(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with exactly the type `text/plain`."""
    return Response(text.encode(), status, {"content-type": "text/plain", **(headers or {})})
