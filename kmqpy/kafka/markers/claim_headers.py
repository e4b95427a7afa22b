"""Claims: which messages a tracker's transaction is about to end (rules R27, R28). Pure: no I/O.

A claim is a tick, which says nothing to readers that don't know claims, with headers:

    kmq-claim    messages that the transaction will end
    kmq-dropped  on a later tick of the same transaction: those of them that it leaves alone after all

Each header holds the key and the value of a range end marker of these messages, so that it is small where
they follow each other; messages too far apart for one range are in several headers of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable

from kmqpy.errors import DecodeError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Headers, Op
from kmqpy.kafka.markers.offset_runs import OffsetRuns

CLAIM = "kmq-claim"
DROPPED = "kmq-dropped"

_KEY_SIZE = 12
MOST_OFFSETS = 1 << 20
"""The most offsets that one claim may name, and so the most messages in one transaction. To read that many,
none next to another, takes a second."""


def naming_tick(partition: int, name: str, offsets: Iterable[int]) -> tuple[bytes, bytes, Headers]:
    """A tick whose headers `name` (CLAIM or DROPPED) hold these ascending offsets."""
    key, value, headers = codec.encode(codec.tick(partition))
    for marker in codec.ranges(partition, Op.END, offsets):
        range_key, range_value, _ = codec.encode(marker)
        headers.append((name, range_key + range_value))
    return key, value, headers


def named_offsets(headers: Headers | None, name: str, partition: int) -> OffsetRuns:
    """The offsets that the headers `name` of a record hold; raises DecodeError, also for more than 1 M.

    Few bytes can name many offsets, and anybody can write such headers.
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
            if count > MOST_OFFSETS:
                raise DecodeError(f"header {name}: more than {MOST_OFFSETS} offsets", data)
            found.add_runs(marker.offset_runs)
    return found
