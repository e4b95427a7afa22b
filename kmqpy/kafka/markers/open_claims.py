"""Finds torn transactions: those of which readers see a part only. Pure: no I/O.

A transaction that copies messages begins with a claim, which names the messages (see claim_headers), and its
end markers come last. Kafka shows all of a committed transaction and nothing of an aborted one. But when the
request that ended an earlier transaction of the same producer arrives late, it commits what is written of the
next one until then: the claim and copies, without end markers. So a claim that is visible says: torn, if its
transaction is over and neither an end marker of a tracker nor its own `kmq-dropped` says what became of a
message that it names (rule R37 of docs/rules.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from typing import Any, NamedTuple

from kmqpy.kafka.markers.claim_headers import CLAIM, CLAIM_ID, COPIES_TO, DROPPED, named_offsets
from kmqpy.kafka.markers.codec import Marker
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import read_headers

_MAX_ID_BYTES = 64
"""A claim with a longer id is ignored; kmqpy's have 16 bytes."""
_MAX_CLAIMS = 1_000
"""Of more claims, the oldest are forgotten. A partition has one; forged claims can be many."""


class TornClaim(NamedTuple):
    """A claim of a torn transaction.

    id       the value of the header `kmq-claim-id`, which the transaction's copies have, too
    topic    the topic to which the transaction wrote its copies
    at_ms    the timestamp of the claim
    offsets  the messages of which nobody knows what became of them; not to be changed
    """

    id: bytes
    topic: str
    at_ms: int
    offsets: OffsetRuns


class _OpenClaim(NamedTuple):
    """`at` is the claim's markers offset, `now_ms` the partition's now there, `offsets` as in TornClaim."""

    id: bytes
    topic: str
    at: int
    at_ms: int
    now_ms: int
    offsets: OffsetRuns


class OpenClaims:
    """The claims of one markers partition that name messages of which nothing more was read yet.

    The records of one transaction after the other stand in the log, since its producers fence each other. So
    all claims but the last are over, and so is the last after end_all(). If something else writes claims
    between, a transaction may count as over too early: then somebody looks for its copies while its end
    markers are on the way, which does no harm.

    expects  called with the id of each claim that is new: tells whether it is worth reading; None: all are.
             Once a tracker has read the claims of its predecessors, it expects only its own, each once:
             others are forged
    aborted  the ids of claims whose transactions the tracker has aborted: what readers see of one is torn
    """

    def __init__(self) -> None:
        self.expects: Callable[[bytes], bool] | None = None
        self.aborted: Container[bytes] = ()
        self._claims: dict[bytes, _OpenClaim] = {}  # in the order of the log
        self._last: bytes | None = None
        """The last claim that was read, if its transaction may be going on."""

    def __bool__(self) -> bool:
        return bool(self._claims)

    def read(self, marker: Marker, record: Any, now_ms: int) -> None:
        """Take in an end marker of a tracker or redrive, or a tick. Raises DecodeError.

        record  the record of the marker; no record may be read twice
        now_ms  the partition's now there
        """
        if marker.offset >= 0:
            self.account_for(marker.offset_runs)
            return
        headers = read_headers(record)[0]
        names = dict(headers)
        claim_id, topic = names.get(CLAIM_ID), names.get(COPIES_TO)
        if DROPPED in names and self._last in self._claims:
            # The transaction of the last claim leaves them alone; an earlier one may have copied them.
            self._account_for(self._last, named_offsets(headers, DROPPED, marker.partition).runs())
        if CLAIM in names and claim_id and topic and self._is_new(claim_id):
            offsets = named_offsets(headers, CLAIM, marker.partition)
            at, at_ms = record.offset(), record.timestamp()[1]
            written_to = topic.decode("utf-8", "replace")
            self._claims[claim_id] = _OpenClaim(claim_id, written_to, at, at_ms, now_ms, offsets)
            self._last = claim_id
            if len(self._claims) > _MAX_CLAIMS:
                del self._claims[next(iter(self._claims))]

    def _is_new(self, claim_id: bytes) -> bool:
        if len(claim_id) > _MAX_ID_BYTES or claim_id in self._claims:
            return False
        return self.expects is None or self.expects(claim_id)

    def account_for(self, runs: Iterable[tuple[int, int]]) -> None:
        """Note what became of the messages of these runs: a tracker has ended them, or left them alone."""
        if self._claims:
            runs = tuple(runs)
            for claim_id in list(self._claims):
                self._account_for(claim_id, runs)

    def _account_for(self, claim_id: bytes, runs: Iterable[tuple[int, int]]) -> None:
        offsets = self._claims[claim_id].offsets
        offsets.discard_runs(runs)
        if not offsets:
            del self._claims[claim_id]

    def drop(self, is_gone: Callable[[int], bool]) -> None:
        """Forget the messages of which `is_gone` is True."""
        gone = {offset for claim in self._claims.values() for offset in claim.offsets if is_gone(offset)}
        self.account_for((offset, 1) for offset in sorted(gone))

    def end_all(self) -> None:
        """Note that the transactions of all claims are over; those that were not accounted for are torn."""
        self._last = None

    def torn(self) -> list[TornClaim]:
        """The claims of torn transactions, the oldest first."""
        return [
            TornClaim(claim.id, claim.topic, claim.at_ms, OffsetRuns(claim.offsets.runs()))
            for claim in self._claims.values()
            if claim.id != self._last or claim.id in self.aborted
        ]

    def forget(self, ids: Collection[bytes]) -> None:
        """Forget these claims: it is known which copies their transactions have made."""
        for claim_id in ids:
            self._claims.pop(claim_id, None)

    def set_back(self, by_ms: int) -> None:
        """Follow the partition's now, which was set back by `by_ms`."""
        self._claims = {
            key: claim._replace(now_ms=max(0, claim.now_ms - by_ms)) for key, claim in self._claims.items()
        }

    def oldest(self) -> tuple[int, int] | None:
        """The markers offset of the oldest claim, and the partition's now there; None without a claim."""
        for claim in self._claims.values():
            return claim.at, claim.now_ms
        return None
