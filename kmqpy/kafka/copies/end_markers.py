"""Builds the end markers with which trackers and redrives finish messages; they name the messages' copies.

Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from kmqpy.kafka.copies.copy_transaction import NewRecord
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.lineage import COPY, copy_header, prefix_of
from kmqpy.kafka.places import Place


def end_markers(
    topic: str,
    partition: int,
    copies: Mapping[int, Place | None],
    *,
    copy_topic: str,
    ranges: bool = False,
    reason: str | None = None,
) -> Iterator[NewRecord]:
    """Yield records with end markers for messages of partition `partition` of `topic`.

    copies  by offset of each message, ascending: where in `copy_topic` its copy stands; None: there is no
            copy, or Kafka did not tell where
    ranges  True: range markers, if there is more than one message; a range marker names its copies only if
            all are known and in one partition
    reason  why messages end without a copy
    """
    if ranges and len(copies) > 1:
        places = iter(copies.values())
        for marker in codec.ranges(partition, Op.END, list(copies), by_tracker=True, reason=reason):
            key, value, headers = codec.encode(marker)
            named = copy_header(topic, copy_topic, list(islice(places, marker.count)))
            yield NewRecord(partition, key, value, headers + named)
        return
    _, value, headers = codec.encode(replace(codec.tick(partition), reason=reason))  # only the key differs
    prefix = prefix_of(topic, copy_topic)
    for offset, place in copies.items():
        named = [] if place is None else [(COPY, b"%s%d:%d" % (prefix, *place))]
        yield NewRecord(partition, codec.encode_key(partition, offset), value, headers + named)
