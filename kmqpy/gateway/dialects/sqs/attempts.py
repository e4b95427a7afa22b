"""What receives with a ReceiveRequestAttemptId were answered, so that a retry gets the same. Pure: no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

_FOR_S = 300.0
_MAX_BYTES = 16 * 1024 * 1024
"""Of all messages that are remembered; the oldest answers go first, and a retry is another receive then."""
_OVERHEAD = 1_000

Key = tuple[str, str]
"""The queue's unique id, and the attempt's."""


class Answered(NamedTuple):
    """An answer.

    shown     the messages; empty if one of them was deleted or changed since
    wire_ids  of the messages
    at_s      when it was given (monotonic)
    size      bytes that it takes
    """

    shown: Sequence[dict[str, Any]]
    wire_ids: Sequence[str]
    at_s: float
    size: int


class Attempts:
    """Remembers the answers of this gateway for 5 minutes."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Key, Answered] = OrderedDict()
        self._of: dict[str, Key] = {}
        self._bytes = 0

    def keep(
        self, key: Key, shown: Sequence[dict[str, Any]], wire_ids: Sequence[str], size: int, now_s: float
    ) -> None:
        """Remember an answer, with messages of so many bytes."""
        self.forget(key)
        found = self._answers[key] = Answered(shown, wire_ids, now_s, _OVERHEAD + size)
        self._of.update(dict.fromkeys(wire_ids, key))
        self._bytes += found.size
        while self._bytes > _MAX_BYTES or (
            self._answers and now_s - next(iter(self._answers.values())).at_s > _FOR_S
        ):
            self.forget(next(iter(self._answers)))

    def find(self, key: Key, now_s: float) -> Answered | None:
        """What was answered, if that is not too long ago."""
        found = self._answers.get(key)
        return None if found is None or now_s - found.at_s > _FOR_S else found

    def touch(self, wire_id: str) -> None:
        """A message was deleted or changed: the receive that brought it can't be repeated."""
        key = self._of.get(wire_id)
        if key is not None and (found := self._answers.get(key)) is not None:
            self._answers[key] = found._replace(shown=())

    def forget(self, key: Key) -> None:
        """Let the next receive with this id be a new one."""
        found = self._answers.pop(key, None)
        if found is not None:
            self._bytes -= found.size
            for wire_id in found.wire_ids:
                if self._of.get(wire_id) == key:  # a later receive may have brought it again
                    del self._of[wire_id]
