"""Reads of many znodes of queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kazoo.exceptions import NoNodeError

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.zookeeper.multi_read import Greeting, multi_read_async
from kmqpy.zookeeper.queue.sessions import LOST_ANSWER, SessionWatch

MISSING: tuple[bytes, Any] = (b"", None)
"""The data and stat of a znode that is not there."""
_MOST = 100
"""So many znodes are read by one request at most."""
_AT_FIRST = 10
_ANSWER_BYTES = 1_000_000
"""An answer is to be about so large at most: the server makes the whole of it before it sends any."""


class Reads:
    """Reads znodes, as many by one request as their size and the server allow. Thread-safe."""

    def __init__(self, session: SessionWatch, greeting: Greeting) -> None:
        self._session = session
        self._greeting = greeting
        self._together = _AT_FIRST

    def send(self, paths: Sequence[str]) -> Callable[[], list[tuple[bytes, Any]]]:
        """Ask for znodes; the returned function waits for the data and stat of each, MISSING for none.

        It raises what kazoo raises; that an answer was lost, only after the session time-out.
        """
        zk = self._session.zk
        together = self._together if self._greeting.can_read_many and zk.connected else 1
        groups = [paths[start : start + together] for start in range(0, len(paths), together)]
        sent = [
            (group, zk.get_async(group[0]) if len(group) == 1 else multi_read_async(zk, group))
            for group in groups
        ]
        return partial(self._answers, sent)

    def _answers(self, sent: Sequence[tuple[Sequence[str], Any]]) -> list[tuple[bytes, Any]]:
        deadline = SYSTEM_CLOCK.monotonic() + self._session.timeout_s
        found = [one for group, result in sent for one in self._answer(group, result, deadline)]
        if found:
            size = sum(len(data) for data, _ in found) // len(found)
            self._together = max(1, min(_MOST, _ANSWER_BYTES // (size + 1)))
        return found

    def _answer(self, group: Sequence[str], result: Any, deadline: float) -> list[tuple[bytes, Any]]:
        try:
            answer = self._session.get(result, deadline)
        except LOST_ANSWER:
            return [self._again(path, deadline) for path in group]
        except NoNodeError:  # of one znode
            return [MISSING]
        return [_found(one) for one in ([answer] if len(group) == 1 else answer)]

    def _again(self, path: str, deadline: float) -> tuple[bytes, Any]:
        try:
            return _found(self._session.ask(partial(self._session.zk.get_async, path), deadline))
        except NoNodeError:
            return MISSING


def _found(answer: Any) -> tuple[bytes, Any]:
    if isinstance(answer, NoNodeError):
        return MISSING
    if isinstance(answer, Exception):
        raise answer
    data, stat = answer
    return data, stat
