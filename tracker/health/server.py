"""Serves /metrics (for Prometheus), /backlog (for autoscalers), /livez and /readyz on one port."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import unquote

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError
from tracker.health.metrics import TrackerMetrics

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""More connections than Prometheus and all probes need. At this limit a new one closes the oldest."""

REQUEST_TIMEOUT_S = 10.0
"""A connection is closed this long after it was accepted, answered or not."""

_CHECK_EVERY_S = 0.5
"""The server looks for expired connections, and for the request to stop, once in this many seconds."""
_METHODS = "GET, HEAD, OPTIONS"
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
"""Errors of accept(): the process, or the machine, has no free file descriptor."""


class HealthSource(Protocol):
    """A process whose health a HealthServer serves; `problems` says why it is not ready."""

    metrics: TrackerMetrics

    def alive(self) -> bool:
        """True if the process works, or will work again without a restart."""
        ...

    def problems(self) -> list[str]: ...


class _Server(ThreadingHTTPServer):
    """Serves a bounded number of connections, each for a bounded time.

    Without these limits, idle and slow connections could use up the file descriptors that the tracker needs
    for ZooKeeper and Kafka. The server keeps one descriptor in reserve, so that it can answer a request even
    when all other descriptors are in use.
    """

    request_queue_size = 512  # connections waiting to be accepted; they need no descriptor yet

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, float] = {}  # to the deadline of each connection, oldest first
        self._closed = threading.Condition()
        self._reserve_descriptor: int | None = os.open(os.devnull, os.O_RDONLY)
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        with self._closed:
            while len(self._open) >= MAX_CONNECTIONS:
                _hang_up(next(iter(self._open)))
                if not self._closed.wait(_CHECK_EVERY_S):
                    raise OSError("no connection has ended")  # the new one stays in the listen queue
        try:
            request, client = super().get_request()
        except OSError as error:
            if error.errno not in _OUT_OF_DESCRIPTORS:
                raise
            self._release_reserve()
            request, client = super().get_request()
        with self._closed:
            self._open[request] = SYSTEM_CLOCK.monotonic() + REQUEST_TIMEOUT_S
        return request, client

    def service_actions(self) -> None:
        """Close connections past their deadlines. Called every `_CHECK_EVERY_S`, and for each new one."""
        now = SYSTEM_CLOCK.monotonic()
        with self._closed:
            for request, until in self._open.items():
                if until > now:
                    break
                _hang_up(request)

    def shutdown_request(self, request: Any) -> None:
        with self._closed:
            self._open.pop(request, None)
            super().shutdown_request(request)
            if self._reserve_descriptor is None:
                with contextlib.suppress(OSError):
                    self._reserve_descriptor = os.open(os.devnull, os.O_RDONLY)
            self._closed.notify_all()

    def server_close(self) -> None:
        super().server_close()
        with self._closed:
            for request in self._open:
                _hang_up(request)
        self._release_reserve()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        _log.debug("a request for the tracker's health failed", exc_info=True)

    def _release_reserve(self) -> None:
        with self._closed:
            reserve, self._reserve_descriptor = self._reserve_descriptor, None
        if reserve is None:  # it is in use: without a pause, accept() would fail in a busy loop
            SYSTEM_CLOCK.sleep(_CHECK_EVERY_S)
        else:
            os.close(reserve)


def _hang_up(request: socket.socket) -> None:
    """Shut a connection down; the thread that serves it wakes up and closes it."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class HealthServer:
    """Answers HTTP requests in threads until close(). Raises ConfigError when the port can't be opened.

    `port` is the port that is served, even when port 0 (any free port) was asked for.
    """

    def __init__(self, source: HealthSource, host: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0].rstrip("/")
                if path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(source.metrics.registry))
                elif path == "/livez":
                    alive = source.alive()
                    self._json(200 if alive else 503, {"alive": alive})
                elif path == "/readyz":
                    problems = source.problems()
                    self._json(503 if problems else 200, {"ready": not problems, "problems": problems})
                elif path.startswith("/backlog/"):
                    self._backlog(unquote(path.removeprefix("/backlog/")))
                else:
                    self._json(404, {"error": "there is /metrics, /backlog/QUEUE, /livez and /readyz"})

            def _backlog(self, queue: str) -> None:
                try:
                    backlog = source.metrics.backlog(queue)
                except KeyError:
                    self._json(404, {"error": f"queue {queue!r}: this tracker knows none of this name"})
                    return
                if backlog is None:
                    self._json(503, {"error": "not all partitions are counted yet", "queue": queue})
                else:
                    self._json(200, {"queue": queue, "backlog": backlog})

            do_HEAD = do_GET  # noqa: N815 - without the body, see _answer()

            def do_OPTIONS(self) -> None:
                self._answer(204, None, b"")

            def _refuse(self) -> None:
                self.close_connection = True  # the body of the request is not read
                self._json(405, {"error": f"{self.command} is not possible; {_METHODS} are"})

            do_POST = do_PUT = do_PATCH = do_DELETE = _refuse  # noqa: N815

            def _json(self, status: int, content: dict[str, Any]) -> None:
                self._answer(status, "application/json", json.dumps(content).encode() + b"\n")

            def _answer(self, status: int, content_type: str | None, body: bytes) -> None:
                self.send_response(status)
                if status in (204, 405):
                    self.send_header("Allow", _METHODS)
                if content_type is not None:
                    self.send_header("Content-Type", content_type)
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Probes come every few seconds; they are not worth a log line."""

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"http_port: {port} on {host} can't be opened: {error.strerror}; "
                "another tracker here? Use --http-port 0 for any free one"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CHECK_EVERY_S,), name="kmq-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
