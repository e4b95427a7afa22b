"""Sends requests to gateways, repeats them after failures, and raises the errors that they tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from kmqpy import errors
from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import (
    AccessDenied,
    Closed,
    ConfigError,
    KmqError,
    MessageError,
    NotSupported,
    Unavailable,
    Unfinished,
    UnknownOutcome,
)
from kmqpy.queue.shapes import LATE_BODY, PROBLEM, PROBLEM_TYPE, Problem
from kmqpy.storages.http.connections import Answer, Connections, Failed
from kmqpy.storages.tls import Tls

T = TypeVar("T")

_BACKOFF = Backoff(first=0.02, maximum=1.0)
_CLOSE_S = 5.0
"""close() waits so many seconds for requests that run."""
_OF_PROXIES = (502, 504)


class Changed(KmqError):
    """Others have changed a setting that was expected to have a certain value."""


class Gateways:
    """A client of one gateway, or of several of one storage. Safe to use from any thread.

    find  returns what the paths of calls follow, without a / at the end; called again when none answers
    """

    def __init__(
        self, find: Callable[[], Sequence[str]], *, key: str | None, timeout_s: float, tls: Tls | None
    ) -> None:
        self._find = find
        self._urls = find()
        self._timeout_s = timeout_s
        self._current = 0
        self._key = {} if key is None else {"authorization": f"Bearer {key}"}
        self._connections = Connections(None if tls is None else tls.context())
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False

    def call(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        query: msgspec.Struct | None = None,
        body: msgspec.Struct | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
        wait_s: float = 0.0,
    ) -> tuple[T, float]:
        """Send a request; returns the answer, and how many seconds it took.

        It is sent again after a failure, for up to `timeout_s`; one that is not `repeatable` only if it has
        certainly done nothing. `wait_s`: the gateway may wait so long before it answers.

        Raises the error of the gateway; Unavailable, UnknownOutcome, AccessDenied, and Closed after close().
        """
        content = None if body is None else msgspec.json.encode(body)
        kind = {} if content is None else {"content-type": "application/json"}
        all_headers = {**self._key, **kind, **(headers or {})}
        target = path if query is None else f"{path}?{_parameters(query)}"
        until_s = SYSTEM_CLOCK.monotonic() + self._timeout_s + wait_s
        for attempts in count(1):
            urls, index = self._urls, self._current
            url = urls[index % len(urls)]
            host = urlsplit(url).netloc
            try:
                begun_s = SYSTEM_CLOCK.monotonic()
                with self._run():
                    found = self._connections.ask(
                        method, url, target, content, all_headers, timeout_s=self._timeout_s + wait_s
                    )
                return _decoded(found, answer, host), SYSTEM_CLOCK.monotonic() - begun_s
            except Failed as failed:
                if self._current == index:  # no other thread has gone on to the next one
                    self._current = index + 1
                left_s = until_s - SYSTEM_CLOCK.monotonic()
                if not (repeatable or failed.not_done):
                    raise UnknownOutcome(
                        f"gateway at {host}: {failed}; whether it was done is not known"
                    ) from failed.__cause__
                if left_s <= 0:
                    raise Unavailable(
                        f"gateway at {host}: {failed}; check the address, and that `kmq gateway` runs there"
                    ) from failed.__cause__
            if attempts % len(urls) == 0:
                SYSTEM_CLOCK.sleep(min(left_s, _BACKOFF.delay(attempts // len(urls))))
                self._urls = self._find()
        raise AssertionError("count() does not end")

    def close(self) -> None:
        """Wait for requests that run, and close the connections."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running, _CLOSE_S)
        self._connections.close()

    def _run(self) -> _Running:
        return _Running(self)

    def begin(self) -> None:
        """A request begins; raises Closed."""
        with self._changed:
            if self._closed:
                raise Closed("the storage is closed")
            self._running += 1

    def end(self) -> None:
        """A request has ended."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


class _Running:
    """A request runs in this block; close() waits for it."""

    __slots__ = ("_gateways",)

    def __init__(self, gateways: Gateways) -> None:
        self._gateways = gateways

    def __enter__(self) -> None:
        self._gateways.begin()

    def __exit__(self, *_: object) -> None:
        self._gateways.end()


def _parameters(query: msgspec.Struct) -> str:
    given = {name: value for name, value in msgspec.to_builtins(query).items() if value is not None}
    return urlencode(
        {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
    )


def _decoded(found: Answer, answer: type[T], host: str) -> T:
    """The answer; raises the error that a response tells."""
    status, kind, body = found
    try:
        if status == 204 and answer is type(None):
            return None
        if status == 200 and kind == "application/json":
            return msgspec.json.decode(body, type=answer)
        problem = msgspec.json.decode(body, type=Problem) if kind == PROBLEM else None
    except (msgspec.MsgspecError, ValueError):
        problem = None
    if status in _OF_PROXIES or (problem is None and status >= 500):
        raise Failed(f"status {status}", not_done=False)
    if problem is None:
        raise ConfigError(
            f"queue url: what answers at {host} is not a gateway of this version: status {status}"
        )
    raise _error(problem, host)


def _error(problem: Problem, host: str) -> Exception:
    name = problem.type.removeprefix(PROBLEM_TYPE)
    known = getattr(errors, name, KmqError)
    if name in ("Overloaded", LATE_BODY):
        return Failed(problem.detail, not_done=True)
    if name == Changed.__name__:
        return Changed(problem.detail)
    if known is AccessDenied:
        return AccessDenied(f"gateway at {host}: {problem.detail}")
    if known is UnknownOutcome:
        return UnknownOutcome(f"gateway at {host}: {problem.detail}")
    if issubclass(known, Unavailable):
        return Failed(problem.detail, not_done=False)
    if known is Unfinished:
        return Unfinished(problem.detail, problem.done or 0)
    if name == "TooLarge":
        return MessageError(f"body: {problem.detail}")
    if name in ("NotFound", "NotAllowed"):
        return NotSupported(f"gateway at {host}: it does not have this call, {problem.detail}")
    return known(problem.detail)
