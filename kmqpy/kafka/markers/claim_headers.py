"""Writes and reads claims: the records that name the messages of a transaction. Pure: no I/O.

Redeliveries, redrives and purges of dead letters begin each transaction with a claim. It names all messages
that the transaction may end (rules R27 and R28 of docs/rules.md). A claim is a tick, an end marker of no
message, so readers that don't know claims ignore it. A claim, or a later tick, has headers:

    kmq-claim     the messages that the transaction may end
    kmq-claim-id  which claim it is: a random text; the copies of the transaction have the same header
    kmq-copies-to the topic to which the transaction writes its copies
    kmq-epoch     the copies have this leader epoch or a lower one (rule R39); not where trackers know none.
                  On claims of redrives and purges, that of the dead letters
    kmq-cuts      on these, too: the cuts of the dead letters' log
    kmq-unsure    copies before the claim may have been aborted after their commit: its tracker is looking
    kmq-dropped   on a later tick of the transaction: the claimed messages that the transaction leaves alone

A header `kmq-claim` or `kmq-dropped` holds the key and the value of a range end marker that names the
messages, which takes few bytes if their offsets follow each other. Messages too far apart for one range
marker are in several headers of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable

from kmqpy.errors import DecodeError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Headers, Op
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts
from kmqpy.kafka.markers.offset_runs import OffsetRuns

CLAIM = "kmq-claim"
CLAIM_ID = "kmq-claim-id"
COPIES_TO = "kmq-copies-to"
DROPPED = "kmq-dropped"
UNSURE = "kmq-unsure"

_KEY_SIZE = 12
MAX_CLAIMED_OFFSETS = 1 << 20
"""The headers of one name on a record may hold at most this many offsets; named_offsets() refuses more. So a
transaction has no more messages. Reading this many offsets takes a second if none follows another."""


def naming_tick(
    partition: int,
    name: str,
    offsets: Iterable[int],
    epoch: int | None = None,
    cuts: LogCuts = NO_CUTS,
    *,
    unsure: bool = False,
) -> tuple[bytes, bytes, Headers]:
    """Key, value and headers of a tick whose headers `name` (CLAIM or DROPPED) hold ascending offsets.

    `epoch`, `cuts`, `unsure`: see the headers kmq-epoch, kmq-cuts and kmq-unsure.
    """
    key, value, headers = codec.encode(codec.tick(partition, cuts, epoch=epoch))
    if unsure:
        headers.append((UNSURE, b"1"))
    for marker in codec.ranges(partition, Op.END, offsets):
        range_key, range_value, _ = codec.encode(marker)
        headers.append((name, range_key + range_value))
    return key, value, headers


def named_offsets(headers: Headers | None, name: str, partition: int) -> OffsetRuns:
    """The offsets that the headers `name` (CLAIM or DROPPED) of a record in this partition hold.

    Raises DecodeError for headers that can't be read and for more than MAX_CLAIMED_OFFSETS offsets, because
    anybody can write such headers, and few bytes can name many offsets.
    """
    found = OffsetRuns()
    count = 0
    for header, data in headers or ():
        if header == name:
            if data is None:
                raise DecodeError(f"header {name}: null", data)
            data = data.encode() if isinstance(data, str) else data
            marker = codec.decode(data[:_KEY_SIZE], data[_KEY_SIZE:], partition=partition)
            count += marker.count
            if count > MAX_CLAIMED_OFFSETS:
                raise DecodeError(f"header {name}: more than {MAX_CLAIMED_OFFSETS} offsets", data)
            found.add_runs(marker.offset_runs)
    return found
