"""The ASGI applications of a gateway: the one for clients, and the one for operators on another port."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from uuid import uuid4

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.gateway.http import BodyTimeout, Call, ClientDisconnect, json_response, text_response
from kmqpy.gateway.limits import Held, Limits, Overloaded, Share
from kmqpy.gateway.metrics import GatewayMetrics

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("kmqpy.gateway.access")

Answer = Callable[[Call, str], Awaitable[Response]]
"""A dialect: answers a call below a path that it has."""
Speaks = Callable[[Call], bool]
"""Whether a dialect without a path of its own is meant by a request."""

_REQUEST_ID = "x-request-id"
_MAX_REQUEST_ID = 100
_SMALL = 16 * 1024
"""A body of so many bytes does not fill buffers."""
_LOOKS = ["GET", "HEAD", "OPTIONS"]
"""The methods of what only shows something."""
_BUSY = json_response(b'{"message":"the gateway is busy","retryAfterSeconds":1}', 503, {"retry-after": "1"})


class GatewayApp:
    """Answers clients: finds the dialect of a path, and holds limits, logs and metrics for all of them.

    dialects  by path: the dialect's name and what answers
    spoken    of dialects without a path of their own: name, what answers, and whether they are meant
    busy      the answer of each dialect, by its name, when too many requests run
    home      where a browser goes that asks for /, or for this path without its last /
    counted   gets verb, queue and count of messages that a request was about
    """

    def __init__(
        self,
        dialects: Mapping[str, tuple[str, Answer]],
        *,
        limits: Limits,
        metrics: GatewayMetrics,
        busy: Mapping[str, Response],
        spoken: Sequence[tuple[str, Answer, Speaks]] = (),
        home: str = "",
        counted: Callable[[str, str, int], None] = lambda *_: None,
    ) -> None:
        self._dialects = {f"{base}/": (base, *found) for base, found in dialects.items()}
        self._spoken = spoken
        self._limits = limits
        self._metrics = metrics
        self._busy = busy
        self._home = home
        self._counted = counted
        self._held = Held(limits.max_held_bytes)
        self._running = 0
        self._id_prefix = uuid4().hex[:12]
        self._count = 0
        self.draining = False
        """While True, every answer asks the client to close its connection."""

    @property
    def held_bytes(self) -> int:
        """Bytes of bodies in memory."""
        return self._held.count

    @property
    def running(self) -> int:
        """Requests that have not been answered yet."""
        return self._running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; see ASGI."""
        if scope["type"] != "http":
            return
        started_s = SYSTEM_CLOCK.monotonic()
        request = Request(scope, receive)
        call = Call(request, Share(self._held), self._limits, self._waiting)
        request_id = call.request_id = self._request_id(call)
        base, dialect, answer = self._dialect(call)
        self._running += 1
        try:
            response = await self._answer(call, base, dialect, answer)
        finally:
            self._running -= 1
        response.raw_headers.append((_REQUEST_ID.encode(), request_id.encode()))
        if self.draining:
            response.headers["connection"] = "close"
        try:
            if isinstance(response, StreamingResponse):  # its length tells nothing of the gateway
                self._note(call, dialect, response, started_s, request_id)
                await response(scope, receive, send)
            else:
                await _sent(response, send)
        finally:
            call.share.close()
            if not isinstance(response, StreamingResponse):
                self._note(call, dialect, response, started_s, request_id)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """While a request waits for its body, it is none that runs: slow clients must not take all places."""
        self._running -= 1
        try:
            yield
        finally:
            self._running += 1
        if self._running > self._limits.max_requests:
            raise Overloaded("the gateway is busy", "requests")

    def _request_id(self, call: Call) -> str:
        """The client's own id of the request, if it has a fitting one, else one that no other request has."""
        given = call.header(_REQUEST_ID)
        if 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable():
            return given
        self._count += 1
        return f"{self._id_prefix}-{self._count}"

    def _dialect(self, call: Call) -> tuple[str, str, Answer | None]:
        path = call.request.scope["path"]
        for start, found in self._dialects.items():
            if path.startswith(start):
                return found
        for name, answer, speaks in self._spoken:
            if speaks(call):
                return "", name, answer
        return "", "none", None

    async def _answer(self, call: Call, base: str, dialect: str, answer: Answer | None) -> Response:
        if answer is None:
            asks = call.request.method in ("GET", "HEAD")
            if self._home and asks and call.request.scope["path"] in ("/", self._home.rstrip("/")):
                return RedirectResponse(self._home, 303)
            paths = ", ".join(self._dialects)
            return json_response(
                json.dumps({"message": f"no such path; queues are below {paths}"}).encode(), 404
            )
        if self._running > self._limits.max_requests:
            call.refused = "requests"
            return _copy(self._busy.get(dialect, _BUSY))
        try:
            return await answer(call, base)
        except ClientDisconnect:
            return Response(status_code=499)
        except BodyTimeout:
            return text_response("the body did not come in time", 408, {"connection": "close"})
        except Exception:
            _log.exception("a request failed", extra={"call": call.verb, "queue": call.queue})
            return json_response(b'{"message":"internal error"}', 500)

    def _note(self, call: Call, dialect: str, response: Response, started_s: float, request_id: str) -> None:
        seconds = SYSTEM_CLOCK.monotonic() - started_s
        self._metrics.note_request(dialect, call.verb, response.status_code, seconds)
        if call.refused:
            self._metrics.refused.labels(call.refused).inc()
        if call.count and call.queue and 200 <= response.status_code < 300:
            self._metrics.count_messages(dialect, call.verb, call.queue, call.count)
            self._counted(call.verb, call.queue, call.count)
        if _access_log.isEnabledFor(logging.INFO):
            client = call.request.client
            _access_log.info(
                "request",
                extra={
                    "request_id": request_id,
                    "client": None if client is None else client.host,
                    "key": call.key_id,
                    "dialect": dialect,
                    "call": call.verb,
                    "queue": call.queue,
                    "status": response.status_code,
                    "count": call.count,
                    "ms": round(seconds * 1000, 2),
                },
            )


async def _sent(response: Response, send: Send) -> None:
    """Send a response; returns when it is on its way, and no longer in our memory.

    uvicorn lets the next message wait as long as buffers are full. The last one is empty for that.
    """
    await send(
        {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    )
    is_large = len(response.body) > _SMALL
    await send({"type": "http.response.body", "body": response.body, "more_body": is_large})
    if is_large:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _copy(response: Response) -> Response:
    """A response object serves one request: headers are added to it."""
    return Response(response.body, response.status_code, dict(response.headers))


def admin_app(
    metrics: GatewayMetrics,
    problems: Callable[[], list[str]],
    refresh: Callable[[], None],
    notes: Callable[[], list[str]],
    further: Sequence[Route] = (),
) -> ASGIApp:
    """What operators and EmoDB's clients ask on the admin port; needs no key.

    problems  why the gateway is not ready; empty when it is
    refresh   called before metrics are shown
    notes     what operators should know though the gateway is ready
    further   more routes
    """

    async def health(_: Request) -> Response:
        found = problems()
        return text_response("; ".join([*(found or ["ok"]), *notes()]), 503 if found else 200)

    async def alive(_: Request) -> Response:
        return text_response("ok")

    async def show_metrics(_: Request) -> Response:
        refresh()
        return Response(generate_latest(metrics.registry), 200, {"content-type": CONTENT_TYPE_LATEST})

    looks = {
        "/healthcheck": health,
        "/readyz": health,
        "/livez": alive,
        "/ping": alive,
        "/metrics": show_metrics,
    }
    routes = [
        Route(path + end, _look(show), methods=_LOOKS) for path, show in looks.items() for end in ("", "/")
    ]
    return Starlette(routes=[*routes, *further])


def _look(show: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """An end point that shows something, and answers OPTIONS."""

    async def answer(request: Request) -> Response:
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"allow": ", ".join(_LOOKS)})
        return await show(request)

    return answer
