"""Connections to gateways, kept for later requests. They follow no redirects, know no cookies, no proxies.

The standard library has all that is needed; libraries beyond it take three times as long for a request.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.sockets import is_readable
from kmqpy.errors import AccessDenied
from kmqpy.storages.tls import is_refusal

_CONNECT_S = 3.0
"""The longest wait for a connection; then the next gateway is asked."""
_KEPT_S = 30.0
"""Idle connections are closed after this time, before the gateway does."""
_MOST_KEPT = 20
_OF_PATHS = "/%:@!$&'()*+,;=~"
_PORTS = {"http": 80, "https": 443}


class Failed(Exception):
    """A request has failed, and may be repeated.

    not_done  True: it has certainly done nothing
    """

    def __init__(self, why: str, *, not_done: bool) -> None:
        super().__init__(why)
        self.not_done = not_done


class Answer(NamedTuple):
    """An answer; `kind` is its Content-Type without parameters."""

    status: int
    kind: str
    body: bytes


class Connections:
    """Connections to any hosts. Safe to use from any thread.

    tls  for urls with https
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._kept: defaultdict[str, list[_Connection]] = defaultdict(list)
        self._closed = False

    def ask(
        self,
        method: str,
        base: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
    ) -> Answer:
        """Send a request to the url `base + target`; an answer may let `timeout_s` pass without a byte.

        Raises Failed; AccessDenied if TLS is refused.
        """
        url = urlsplit(base)
        connection = self._take(base) or _Connection(
            url.hostname or "",
            url.port or _PORTS[url.scheme],
            self._tls if url.scheme == "https" else None,
        )
        is_open = connection.sock is not None
        try:
            if not is_open:
                connection.open(min(_CONNECT_S, timeout_s))
                is_open = True
            answer = connection.ask(method, quote(url.path, _OF_PATHS) + target, body, headers, timeout_s)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError | HTTPException):
                raise
            if is_refusal(error):
                raise AccessDenied(f"gateway at {url.netloc}: {error}") from None
            raise Failed(str(error) or type(error).__name__, not_done=not is_open) from error
        self._keep(base, connection)
        return answer

    def close(self) -> None:
        """Close those that are kept, and all others when their requests have ended."""
        with self._lock:
            self._closed = True
            kept = [one for some in self._kept.values() for one in some]
            self._kept.clear()
        for one in kept:
            one.close()

    def _take(self, base: str) -> _Connection | None:
        """The one that was used last, if the gateway has not closed it."""
        while True:
            with self._lock:
                if not self._kept[base]:
                    return None
                found = self._kept[base].pop()
            if found.is_good():
                return found
            found.close()

    def _keep(self, base: str, connection: _Connection) -> None:
        if connection.sock is None:  # the answer said that it ends
            return
        connection.used_s = SYSTEM_CLOCK.monotonic()
        with self._lock:
            kept = self._kept[base]
            kept.append(connection)
            is_one_too_many = self._closed or len(kept) > _MOST_KEPT
            surplus = kept.pop(0) if is_one_too_many else None
        if surplus is not None:
            surplus.close()


class _Connection(HTTPConnection):
    """Sends head and body of a request together: two pieces would cost a gateway twice as much."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port)
        self.default_port = _PORTS["https" if tls else "http"]
        self.used_s = 0.0
        self._tls = tls
        self._held: list[bytes] = []

    def open(self, timeout_s: float) -> None:
        """Connect; raises OSError."""
        self.timeout = timeout_s
        self.connect()
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)

    def is_good(self) -> bool:
        """Whether it may be used again: what can be read now is its end, or what nobody asked for."""
        return SYSTEM_CLOCK.monotonic() - self.used_s < _KEPT_S and not is_readable(self.sock.fileno(), 0)

    def send(self, data: Any) -> None:
        """Keep a piece of a request; called by request()."""
        self._held.append(data)

    def ask(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Answer:
        """Send a request and read its answer; raises OSError and HTTPException."""
        self.sock.settimeout(timeout_s)
        self.request(method, target, body, headers)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # perhaps it has answered before
            self.sock.sendall(b"".join(self._held))
        self._held.clear()
        response = self.getresponse()
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        return Answer(response.status, kind, response.read())
