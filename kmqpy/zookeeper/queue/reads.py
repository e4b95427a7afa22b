"""Reads many znodes of queues by few requests, and reads again those whose answers are lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.zookeeper.multi_read import ManyReads, MultiReadProbe
from kmqpy.zookeeper.queue.sessions import LOST_ANSWER, SessionWatch


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
