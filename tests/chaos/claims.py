"""Where claims stand in a log of markers beside consumers' acknowledgements (rules R27, R32). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kmqpy.kafka.markers.claim_headers import CLAIM, named_offsets
from kmqpy.kafka.markers.codec import Headers, Marker, Op
from kmqpy.kafka.markers.lineage import COPY, read_copies

from .judge import Place

_CONFIRMED_IN_MS = 1_000
"""In another lane, a marker counts as written before when it is older by more than this: readers see it when
it was confirmed."""


class _Moment(NamedTuple):
    """Where a marker stands in which log, and when it was written (ms)."""

    partition: int
    at: int
    ms: int

    def is_before(self, other: _Moment) -> bool:
        if self.partition == other.partition:
            return self.at < other.at
        return self.ms + _CONFIRMED_IN_MS < other.ms


class ClaimOrder:
    """Reads the committed markers of all partitions, each in the order of its log.

    `copied` are places that a tracker ended although a consumer's end marker stands before its claim, and no
    take between the two.
    """

    def __init__(self) -> None:
        self.copied: set[Place] = set()
        self._acked_at: dict[Place, int] = {}
        self._claimed_at: dict[Place, int] = {}

    def read_claim(self, partition: int, at: int, headers: Headers | None, lane: int = 0) -> None:
        """A tick at markers offset `at`, which is a claim or not; `lane`: what is added to partitions."""
        for offset in named_offsets(headers, CLAIM, partition):
            self._claimed_at[partition + lane, offset] = at

    def read_marker(self, place: Place, marker: Marker, at: int) -> None:
        """A marker of `place` at markers offset `at`."""
        if marker.op is Op.TAKE:
            self._acked_at.pop(place, None)
        elif marker.op is Op.END and not marker.by_tracker:
            self._acked_at.setdefault(place, at)
        elif marker.op is Op.END:
            claimed_at = self._claimed_at.pop(place, -1)
            if self._acked_at.get(place, claimed_at) < claimed_at:
                self.copied.add(place)


class LateAckOrder:
    """Reads the committed markers of all partitions of all `lanes`, each in the order of its log.

    It knows of each copy where the claim of its transaction stands, and where consumers ended and took what.
    Offsets of two lanes don't compare: there the brokers' times decide, which are those of one machine.

    lanes  by topic of a lane, what is added to its partitions; see lanes_of()
    """

    def __init__(self, lanes: Mapping[str, int]) -> None:
        self._lanes = lanes
        self._originals: dict[Place, Place] = {}
        self._copied_at: dict[Place, int] = {}
        self._claimed_at: dict[Place, int] = {}
        self._ended_at: dict[Place, list[_Moment]] = {}
        self._taken_at: dict[Place, _Moment] = {}

    def read_claim(self, lane: str, partition: int, at: int, headers: Headers | None) -> None:
        """A tick at markers offset `at`, which is a claim or not."""
        for offset in named_offsets(headers, CLAIM, partition):
            self._claimed_at[partition + self._lanes[lane], offset] = at

    def read_marker(self, lane: str, marker: Marker, at: int, headers: Headers | None, ms: int = 0) -> None:
        """A marker at markers offset `at`, written at the time `ms`."""
        partition = marker.partition + self._lanes[lane]
        places = [(partition, offset) for offset in marker.offsets()]
        moment = _Moment(partition, at, ms)
        if marker.op is Op.TAKE:
            for place in places:
                self._taken_at.setdefault(place, moment)
        elif marker.op is Op.END and not marker.by_tracker:
            for place in places:
                self._ended_at.setdefault(place, []).append(moment)
        elif marker.op is Op.END and (named := dict(headers or ()).get(COPY)) is not None:
            for place, copy in zip(places, read_copies(named, lane, marker.count), strict=True):
                if copy.topic in self._lanes:
                    there = copy.partition + self._lanes[copy.topic], copy.offset
                    self._originals[there] = place
                    self._copied_at[there] = self._claimed_at.get(place, at)

    def copies_after_late_ack(self) -> Iterator[Place]:
        """Copies taken after a message of which they are copies had been ended, behind its claim."""
        for copy, taken_at in self._taken_at.items():
            place = copy
            while (original := self._originals.get(place)) is not None:
                since = self._copied_at[place]
                if any(
                    since < one.at and one.is_before(taken_at) for one in self._ended_at.get(original, ())
                ):
                    yield copy
                    break
                place = original
