"""Remembers which messages of a partition were taken, to tell equal ones that waited then. Pure: no I/O."""

from __future__ import annotations

from itertools import islice

from kmqpy.core.int64 import INT64_MAX


class Twins:
    """The digests of messages that a client took in one partition, with the end of the log at each take.

    A message below that end with the same digest is a twin: it waited when the first was taken.
    """

    def __init__(self) -> None:
        self._ends: dict[bytes, int] = {}
        """In the order in which the messages were taken, so of ascending ends."""
        self._new: list[bytes] = []
        """The digests of messages whose end is not known yet. What is read meanwhile waited, too."""

    def __len__(self) -> int:
        return len(self._ends)

    def is_first(self, digest: bytes, offset: int) -> bool:
        """Return False for a twin; note that any other message is taken. note_end() must follow."""
        end = self._ends.get(digest)
        if end is not None:
            if offset < end:
                return False
            del self._ends[digest]  # takes its place behind the others
        self._ends[digest] = INT64_MAX
        self._new.append(digest)
        return True

    def note_end(self, end: int, position: int, most: int) -> None:
        """Note where the log ended before the messages taken last were handed out; 0: it is not known.

        Forgets messages whose end is not above `position`, up to where the partition is read, and those that
        were taken first if there are more than `most`.
        """
        for digest in self._new:
            self._ends[digest] = end
        self._new.clear()
        surplus = len(self._ends) - most
        passed = 0
        for passed, known in enumerate(self._ends.values()):
            if known > position and passed >= surplus:
                break
        else:
            passed = len(self._ends)
        for digest in list(islice(self._ends, passed)):
            del self._ends[digest]

    def clear(self) -> None:
        """Forget all messages."""
        self._ends.clear()
        self._new.clear()
