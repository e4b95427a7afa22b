"""One port for /metrics (Prometheus), /livez and /readyz."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kmqpy.errors import ConfigError
from tracker.metrics import TrackerMetrics


class Watched(Protocol):
    """What is asked for its health."""

    metrics: TrackerMetrics

    def alive(self) -> bool:
        """Whether it still works at all; if not, it is to be restarted."""
        ...

    def problems(self) -> list[str]:
        """Why it is not ready; empty when it is."""
        ...


class HealthServer:
    """Serves until close(); raises ConfigError when the port can't be had."""

    def __init__(self, watched: Watched, host: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(watched.metrics.registry))
                elif path == "/livez":
                    alive = watched.alive()
                    self._json(200 if alive else 503, {"alive": alive})
                elif path == "/readyz":
                    problems = watched.problems()
                    self._json(503 if problems else 200, {"ready": not problems, "problems": problems})
                else:
                    self._json(404, {"error": "there is /metrics, /livez and /readyz"})

            def _json(self, status: int, content: dict[str, Any]) -> None:
                self._answer(status, "application/json", json.dumps(content).encode() + b"\n")

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Probes come every few seconds; they are not worth a log line."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"http_port: {port} on {host} can't be had: {error.strerror}; "
                "another tracker here? Use --http-port 0 for any free one"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="kmq-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
