"""What must hold of late operations (rules R32, R33), judged from the markers of the lanes of one partition.

A message is known by the number of its partition among those of all lanes, and its offset. Times are those at
which records were written, in any lane.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from kmqpy.kafka.markers.codec import Marker, Op

Message = tuple[int, int]


class _CopyMade(NamedTuple):
    original: Message
    claim_at: int
    named_at: int
    """Where the end of its original names it, so that others know of what it is a copy."""


class _End(NamedTuple):
    at: int
    by: str
    asked: bool


class _Operation(NamedTuple):
    at: int
    ms: int
    marker: Marker
    asked: bool

    @property
    def due_ms(self) -> int:
        return self.ms + max(0, self.marker.redeliver_after_ms)


class LateAckJudge:
    """Knows what is a copy of what, and what clients did with each message.

    An end is *asked* for if its client's user acknowledged the message, and so are other operations. Those
    that are not are of copies that clients handed out to nobody, and for these there must be one that was.
    """

    def __init__(self) -> None:
        self._copies: dict[Message, _CopyMade] = {}
        self._torn: dict[Message, Message] = {}
        self._ends: defaultdict[Message, list[_End]] = defaultdict(list)
        self._claims: defaultdict[Message, list[int]] = defaultdict(list)
        self._operations: defaultdict[Message, list[_Operation]] = defaultdict(list)

    def claimed(self, messages: Iterable[Message], at: int) -> None:
        """A tracker claimed messages; its transaction may be aborted."""
        for message in messages:
            self._claims[message].append(at)

    def copied(self, original: Message, copy: Message, claim_at: int, named_at: int) -> None:
        """A tracker's transaction, claimed at `claim_at`, made a copy."""
        self._copies[copy] = _CopyMade(original, claim_at, named_at)

    def torn(self, original: Message, copy: Message) -> None:
        """A copy whose transaction was ended early; who reads uncommitted end markers may know of it."""
        self._torn[copy] = original

    def ended(self, message: Message, at: int, by: str, *, asked: bool) -> str | None:
        """A client ended a message; returns what is wrong with that."""
        self._ends[message].append(_End(at, by, asked))
        if asked or any(end.asked for one in self.chain(message) for end in self._ends[one]):
            return None
        return f"R33: {by} ended {message}, which nobody acknowledged, nor {self.chain(message)[1:]}"

    def operated(
        self, message: Message, marker: Marker, at: int, ms: int, by: str, *, asked: bool
    ) -> str | None:
        """A client nacked, extended or rejected a message; returns what is wrong with that."""
        self._operations[message].append(_Operation(at, ms, marker, asked))
        if asked or (marker.op is Op.NACK and not marker.redeliver_after_ms and not marker.counts):
            return None
        # Any, not only the last: another one may have come while the client was deciding.
        reasons = [
            operation.marker
            for copy, one in pairwise(self.chain(message))
            for operation in self._operations[one]
            if copy in self._torn or self._copies[copy].claim_at < operation.at < at
        ]
        if marker.op is Op.DEAD_LETTER:
            fits = any(one.op is Op.DEAD_LETTER and one.reason == marker.reason for one in reasons)
        else:
            waits = [one.redeliver_after_ms for one in reasons if one.op is not Op.DEAD_LETTER]
            fits = not marker.counts and marker.redeliver_after_ms <= max(waits, default=0)
        return None if fits else f"R33: {by} asked for {marker}, and nobody for it: {reasons}"

    def handed_out(self, message: Message, taken_at: int, end: int, at_ms: int | None) -> str | None:
        """A copy was handed out, whose start marker came at `taken_at`; returns what is wrong with that.

        `end`: when; `at_ms`: the same by the broker's clock; None: the clock can't be relied on.
        """
        if (late := self._acknowledged(message, taken_at)) is not None:
            return f"R32: {message}, taken at {taken_at}, {late}"
        # Of other lanes its taker reads on (rule R46): of what came meanwhile it has seen some.
        meanwhile = (
            operation.at + 1
            for one in self.chain(message, taken_at)
            for operation in self._operations[one]
            if one[0] != message[0] and taken_at <= operation.at < end
        )
        problems = [
            self._deferred(message, taken_at, end, at_ms, seen) for seen in (taken_at, *sorted(meanwhile))
        ]
        return None if None in problems else problems[0]

    def _deferred(
        self, message: Message, taken_at: int, end: int, at_ms: int | None, seen: int
    ) -> str | None:
        """What is wrong if its taker has seen other lanes up to `seen`."""
        for operation in self._late(message, taken_at, end, seen):
            if operation.marker.op is Op.DEAD_LETTER:
                return f"R32: {message}, taken at {taken_at}, was rejected at {operation.at}"
            if at_ms is not None and operation.due_ms > at_ms:
                return f"R32: {message}, taken at {taken_at}, was to wait since {operation}, it was {at_ms}"
        return None

    def dead_lettered(self, message: Message, claim_at: int) -> str | None:
        """A message became a dead letter, claimed at `claim_at`; returns what is wrong with that."""
        late = self._acknowledged(message, claim_at)
        return None if late is None else f"R32: a dead letter of {message}, claimed at {claim_at}, {late}"

    def spared(self, message: Message, by: str) -> str | None:
        """A tracker ended a copy that was to become a dead letter; returns what is wrong with that."""
        if any(end.asked for one in self.chain(message) for end in self._ends[one]):
            return None
        return f"R33: {by} ended {message}, which nobody acknowledged, nor {self.chain(message)[1:]}"

    def _acknowledged(self, message: Message, before: int) -> str | None:
        """Where the message of which this is a copy was ended behind its claim, in words."""
        for copy, one in pairwise(self.chain(message, before)):
            since = self._copies[copy].claim_at
            late = [end for end in self._ends[one] if since < end.at < before]
            if late:
                return f"is a copy of {one}, ended at {late[0].at}"
        return None

    def _late(self, message: Message, before: int, end: int, seen: int) -> Iterator[_Operation]:
        """What applies of the late operations of each message of which this is a copy.

        Who takes the copy may have read a claim before `end`: its tracker has applied what stands before it.
        """
        for copy, one in pairwise(self.chain(message, before)):
            since = max([self._copies[copy].claim_at, *(at for at in self._claims[one] if at < end)])
            applies: _Operation | None = None
            for operation in self._operations[one]:
                if not since < operation.at < (before if one[0] == message[0] else seen):
                    continue
                if applies is None or (
                    applies.marker.op is not Op.DEAD_LETTER
                    and not (applies.marker.op is Op.NACK and operation.marker.op is Op.EXTEND)
                ):
                    applies = operation
            if applies is not None:
                yield applies

    def chain(self, message: Message, before: float = math.inf) -> list[Message]:
        """The message, its original, the original of that, and so on, as far as is told before a position."""
        chain = [message]
        while (made := self._copies.get(chain[-1])) is not None and made.named_at < before:
            chain.append(made.original)
        if before == math.inf and chain[-1] in self._torn:
            chain += self.chain(self._torn[chain[-1]])
        return chain
