"""Where claims stand in a log of markers beside consumers' acknowledgements (rule R27). Pure."""

from kmqpy.kafka.markers.claims import CLAIM, named_offsets
from kmqpy.kafka.markers.codec import Headers, Marker, Op

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
