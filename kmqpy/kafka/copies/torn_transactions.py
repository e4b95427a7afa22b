"""Finds the copies that torn transactions have made (rule R37 of docs/rules.md).

A torn transaction is one of which readers see the claim and copies, but not the end markers that name the
copies; see open_claims. Its copies name the claim, so whoever is alone to write about its messages finds them
and writes the end markers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import DecodeError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.markers.claim_headers import CLAIM_ID
from kmqpy.kafka.markers.lineage import ANCESTORS, RecordPlace, read_ancestors
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts
from kmqpy.kafka.markers.open_claims import TornClaim
from kmqpy.kafka.markers.records import UNREADABLE, headers_of_each, read_headers
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection

_EARLIER_MS = 300_000
"""Copies may have timestamps this much earlier than their claim: the clock of the tracker that made them may
be behind the broker's."""
_STABLE_WITHIN_S = 2.0
"""find_copies() waits this many seconds for the end of transactions that are open."""
_STABLE_POLL_S = 0.1
_ABSENCE_CONFIRMED_S = 3.0
"""If copies are missing, find_copies() looks once more after this time: a broker that was paused may say for
a moment that the log ends before them."""

Copies = dict[int, Place]
"""By number of a message, ascending: partition and number of its copy."""


def find_copies(
    connection: KafkaConnection,
    messages_topic: str,
    copy_topic: str,
    partitions: Collection[int],
    torn: Mapping[int, Collection[TornClaim]],
    clock: Clock = SYSTEM_CLOCK,
    cuts: LogCuts = NO_CUTS,
) -> dict[tuple[int, bytes], Copies]:
    """Return the copies in `copy_topic` of each torn transaction, by partition and id of its claim.

    messages_topic  the topic of the messages of which the transactions have made copies
    partitions      those of `copy_topic` to be read
    torn            by partition of `messages_topic`: the claims whose transactions are torn
    cuts            those of the log of the one partition of `copy_topic` that is read

    The transactions must be over; all have made their copies in `copy_topic`. Raises Unavailable if another
    transaction hides a part of it for 2 s, and the errors of partition_reader.
    """
    claims = {claim.id: (partition, claim) for partition, some in torn.items() for claim in some}
    found: dict[tuple[int, bytes], Copies] = {}

    def visit(_partition: int, records: list[Any]) -> bool:
        for record, headers in zip(records, headers_of_each(records), strict=True):
            if not headers:
                continue
            named = dict(read_headers(record)[0] if headers is UNREADABLE else headers)
            torn_claim = claims.get(named.get(CLAIM_ID) or b"")
            if torn_claim is None:
                continue
            partition, claim = torn_claim
            copy = RecordPlace(record.topic(), record.partition(), cuts.number_of(record.offset()))
            offset = _original(copy, named, messages_topic, partition)
            if offset is not None and offset in claim.offsets:
                copies = found.setdefault((partition, claim.id), {})
                copies.setdefault(offset, (copy.partition, copy.offset))
        return False

    if not partitions or not claims:
        return {}
    since_ms = max(0, min(claim.at_ms for _, claim in claims.values()) - _EARLIER_MS)
    wanted = sum(len(claim.offsets) for _, claim in claims.values())
    for pause_s in (0.0, _ABSENCE_CONFIRMED_S):
        clock.sleep(pause_s)
        _wait_until_stable(connection, copy_topic, partitions, clock)
        times_ms = dict.fromkeys(partitions, since_ms)
        partition_reader.scan_since(connection, copy_topic, times_ms, visit, clock=clock)
        if sum(map(len, found.values())) == wanted:
            break
    return {key: dict(sorted(copies.items())) for key, copies in found.items()}


def _original(
    copy: RecordPlace, headers: Mapping[str, bytes | None], topic: str, partition: int
) -> int | None:
    """The message in this partition of which the record there is a copy; None if it is of another."""
    try:
        ancestors = read_ancestors(headers.get(ANCESTORS), copy)
    except DecodeError:
        return None
    if not ancestors or ancestors[-1][:2] != (topic, partition):
        return None
    return ancestors[-1].offset


def _wait_until_stable(
    connection: KafkaConnection, topic: str, partitions: Collection[int], clock: Clock
) -> None:
    """Wait until all that stands in these partitions now can be read: no transaction there is open."""
    written = partition_reader.bounds(connection, topic, partitions, uncommitted=True)
    deadline = clock.monotonic() + _STABLE_WITHIN_S
    while True:
        stable = partition_reader.bounds(connection, topic, partitions)
        hidden = [partition for partition in partitions if stable[partition][1] < written[partition][1]]
        if not hidden:
            return
        if clock.monotonic() > deadline:
            raise Unavailable(
                f"{topic}: somebody's transaction stays open in partitions {hidden}, so the copies that a "
                "torn transaction has made can't be looked for"
            )
        clock.sleep(_STABLE_POLL_S)
