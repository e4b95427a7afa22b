"""What must hold of late acknowledgements (rules R32, R33), judged from one partition's markers."""

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple


class _CopyMade(NamedTuple):
    original: int
    claim_at: int


class _End(NamedTuple):
    at: int
    by: str
    asked: bool


class LateAckJudge:
    """Knows what is a copy of what, and which ends of clients there are.

    An end is *asked* for if its client's user acknowledged the message. The others are those of copies that
    clients ended unseen, and for these there must be an end that was asked for.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _CopyMade] = {}
        self._ends: defaultdict[int, list[_End]] = defaultdict(list)

    def copied(self, original: int, copy: int, claim_at: int) -> None:
        """A tracker's transaction, whose claim stands at `claim_at`, made a copy."""
        self._copies[copy] = _CopyMade(original, claim_at)

    def ended(self, offset: int, at: int, by: str, *, asked: bool) -> str | None:
        """A client ended a message; returns what is wrong with that."""
        self._ends[offset].append(_End(at, by, asked))
        if asked or any(end.asked for one in self._chain(offset) for end in self._ends[one]):
            return None
        return f"R33: {by} ended {offset}, which nobody acknowledged, nor {self._chain(offset)[1:]}"

    def handed_out(self, offset: int, taken_at: int) -> str | None:
        """A copy was handed out whose start marker stands at `taken_at`; returns what is wrong with that."""
        chain = self._chain(offset)
        for copy, one in pairwise(chain):
            since = self._copies[copy].claim_at
            late = [end for end in self._ends[one] if since < end.at < taken_at]
            if late:
                return f"R32: {offset}, taken at {taken_at}, is a copy of {one}, ended at {late[0].at}"
        return None

    def _chain(self, offset: int) -> list[int]:
        """The message, its original, the original of that, and so on."""
        chain = [offset]
        while chain[-1] in self._copies:
            chain.append(self._copies[chain[-1]].original)
        return chain
