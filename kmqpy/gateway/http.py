"""Requests and responses of the gateway, whatever dialect they speak."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

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
    request_id: str
    verb: str = "unknown"
    queue: str = ""
    key_id: str = "-"
    count: int = 0
    refused: str = ""

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
        for name, value in parse_qsl(query, keep_blank_values=True, errors="replace", max_num_fields=None):
            found.setdefault(name, value)
        return found

    def header(self, name: str) -> str:
        """A header; empty if it is missing."""
        return self.request.headers.get(name, "")

    def has_body(self) -> bool:
        """True if the head of the request announces a body."""
        return bool(self.header("transfer-encoding")) or self.header("content-length").strip("0 ") != ""

    async def body(self) -> bytes:
        """The body, decompressed; raises TooLarge, BadEncoding, Overloaded, BodyTimeout, ClientDisconnect."""
        try:
            with self.waiting():
                async with asyncio.timeout(self.limits.body_timeout_s):
                    return await read_body(
                        self.request.stream(),
                        self.header("content-encoding"),
                        self.share,
                        self.limits.max_body_bytes,
                    )
        except TimeoutError:
            raise BodyTimeout from None

    async def is_gone(self) -> bool:
        """True if the client has closed the connection, so nobody would get an answer."""
        return await self.request.is_disconnected()


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with exactly the type `application/json`."""
    return Response(body, status, {"content-type": "application/json", **(headers or {})})


def text_response(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with exactly the type `text/plain`."""
    return Response(text.encode(), status, {"content-type": "text/plain", **(headers or {})})
