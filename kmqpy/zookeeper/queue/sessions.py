"""Watches the session to which transactions are bound, and repeats reads whose answers are lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kazoo.client import KazooClient

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import Closed, SessionExpired
from kmqpy.zookeeper.multi_read import ManyReads, MultiReadProbe
from kmqpy.zookeeper.session import LOST_ANSWER, address

_POLL_S = 0.02
"""The pause, in seconds, before another look at the connection or another attempt of a read."""


class SessionWatch:
    """Counts the sessions of a kazoo client, which makes a new one by itself when the old one has expired.

    kazoo sends requests in the order in which they are made, even if they waited for a connection. So a
    thread that reads after a lost answer learns for certain whether the request was executed.
    """

    def __init__(self, zk: KazooClient) -> None:
        self.zk = zk
        self.number = 1
        """The number of the session; a transaction can be used while this number does not change."""
        self.closed = False
        self._giving_up = threading.Lock()
        zk.add_listener(self._on_state)

    @property
    def timeout_s(self) -> float:
        return float(self.zk.granted_s)

    def check(self, number: int) -> None:
        if self.closed:
            raise Closed("the queue is closed, and its transactions with it")
        if number != self.number:
            raise SessionExpired(
                f"the session with ZooKeeper at {address(self.zk)} has ended, and the locks of this "
                "transaction with it; begin another one"
            )

    def wait_until_connected(self, number: int, deadline: float) -> bool:
        """Return False after `deadline`, or if the session of this number is over."""
        while not self.zk.connected:
            if SYSTEM_CLOCK.monotonic() >= deadline or self.closed or number != self.number:
                return False
            SYSTEM_CLOCK.sleep(_POLL_S)
        return True

    def get(self, result: Any, deadline: float | None = None) -> Any:
        """Return the answer for `result`, kazoo's handle of a request; KazooTimeoutError after `deadline`.

        deadline  in monotonic s; None: the session time-out from now
        """
        left = self.timeout_s if deadline is None else deadline - SYSTEM_CLOCK.monotonic()
        return result.get(timeout=max(_POLL_S, left))

    def ask(self, question: Callable[[], Any], deadline: float) -> Any:
        """Send a read by `question()` and return its answer; if it is lost, ask again until `deadline`."""
        while True:
            try:
                return self.get(question(), deadline)
            except LOST_ANSWER:
                if self.closed or SYSTEM_CLOCK.monotonic() >= deadline:
                    raise
                SYSTEM_CLOCK.sleep(_POLL_S)

    def give_up(self, number: int) -> None:
        """Leave the session of this number for good: it expires at the server, and its locks go with it."""
        with self._giving_up:
            if self.closed or number != self.number:
                return
            with contextlib.suppress(Exception):
                self.zk.stop()
            if number == self.number:  # as a rule, the listener has counted already
                self.number += 1
            self.zk.start_async()

    def _on_state(self, state: str) -> None:
        if state == "LOST":
            self.number += 1


class Reads:
    """Reads znodes, and reads a znode again when its answer was lost. Thread-safe."""

    def __init__(self, session: SessionWatch, probe: MultiReadProbe) -> None:
        self._session = session
        self._many = ManyReads(session.zk, probe)

    def send(self, paths: Sequence[str]) -> Callable[[], list[tuple[bytes, Any]]]:
        """Send requests for znodes; return a function that waits for the data and stat of each znode.

        For a znode, these may be MISSING or DENIED. The function raises kazoo's errors, but an error that
        means a lost answer (LOST_ANSWER) only after the session time-out.
        """
        return partial(self._answers, self._many.ask(paths))

    def _answers(self, sent: Sequence[tuple[Sequence[str], Any]]) -> list[tuple[bytes, Any]]:
        deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
        found: list[tuple[bytes, Any]] = []
        for group, handle in sent:
            try:
                found += self._many.found(group, handle, partial(self._session.get, deadline=deadline))
            except LOST_ANSWER:
                found += [self._read_again(path, deadline) for path in group]
        return found

    def _read_again(self, path: str, deadline: float) -> tuple[bytes, Any]:
        def ask(_: Any) -> Any:
            return self._session.ask(partial(self._session.zk.get_async, path), deadline)

        return self._many.found([path], None, ask)[0]
