"""Where claims stand in a log of markers beside consumers' acknowledgements (rules R27, R32). Pure."""

from collections.abc import Iterator

from kmqpy.kafka.markers.claim_headers import CLAIM, named_offsets
from kmqpy.kafka.markers.codec import Headers, Marker, Op
from kmqpy.kafka.markers.lineage import COPY, read_copies

from .judge import Place


class ClaimOrder:
    """Reads the committed markers of all partitions, each in the order of its log.

    `copied` are places that a tracker ended although a consumer's end marker stands before its claim, and no
    take between the two.
    """

    def __init__(self) -> None:
        self.copied: set[Place] = set()
        self._acked_at: dict[Place, int] = {}
        self._claimed_at: dict[Place, int] = {}

    def read_claim(self, partition: int, at: int, headers: Headers | None) -> None:
        """A tick at markers offset `at`, which is a claim or not."""
        for offset in named_offsets(headers, CLAIM, partition):
            self._claimed_at[partition, offset] = at

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
    """Reads the committed markers of all partitions of `queue`, each in the order of its log.

    It knows of each copy where the claim of its transaction stands, and where consumers ended and took what.
    """

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._originals: dict[Place, Place] = {}
        self._copied_at: dict[Place, int] = {}
        self._claimed_at: dict[Place, int] = {}
        self._ended_at: dict[Place, list[int]] = {}
        self._taken_at: dict[Place, int] = {}

    def read_claim(self, partition: int, at: int, headers: Headers | None) -> None:
        """A tick at markers offset `at`, which is a claim or not."""
        for offset in named_offsets(headers, CLAIM, partition):
            self._claimed_at[partition, offset] = at

    def read_marker(self, marker: Marker, at: int, headers: Headers | None) -> None:
        """A marker at markers offset `at`."""
        places = [(marker.partition, offset) for offset in marker.offsets()]
        if marker.op is Op.TAKE:
            for place in places:
                self._taken_at.setdefault(place, at)
        elif marker.op is Op.END and not marker.by_tracker:
            for place in places:
                self._ended_at.setdefault(place, []).append(at)
        elif marker.op is Op.END and (named := dict(headers or ()).get(COPY)) is not None:
            for place, copy in zip(places, read_copies(named, self._queue, marker.count), strict=True):
                if copy.topic == self._queue:
                    self._originals[copy.partition, copy.offset] = place
                    self._copied_at[copy.partition, copy.offset] = self._claimed_at.get(place, at)

    def copies_after_late_ack(self) -> Iterator[Place]:
        """Copies taken after a message of which they are copies had been ended, behind its claim."""
        for copy, taken_at in self._taken_at.items():
            place = copy
            while (original := self._originals.get(place)) is not None:
                since = self._copied_at[place]
                if any(since < at < taken_at for at in self._ended_at.get(original, ())):
                    yield copy
                    break
                place = original
