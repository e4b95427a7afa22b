"""Builds the end markers with which trackers and redrives finish messages; they name the messages' copies.

Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, islice

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
    ranges  True: range markers, each for messages whose copies are in one partition or not known
    reason  why messages end without a copy
    """
    _, value, headers = codec.encode(replace(codec.tick(partition), reason=reason))  # only the key differs
    prefix = prefix_of(topic, copy_topic)
    for group in _by_partition(copies) if ranges else ([item] for item in copies.items()):
        if len(group) > 1:
            places = iter([place for _, place in group])
            offsets = [offset for offset, _ in group]
            for marker in codec.ranges(partition, Op.END, offsets, by_tracker=True, reason=reason):
                named = copy_header(topic, copy_topic, list(islice(places, marker.count)))
                key, range_value, range_headers = codec.encode(marker)
                yield NewRecord(partition, key, range_value, range_headers + named)
            continue
        ((offset, place),) = group
        named = [] if place is None else [(COPY, b"%s%d:%d" % (prefix, *place))]
        yield NewRecord(partition, codec.encode_key(partition, offset), value, headers + named)


def _by_partition(copies: Mapping[int, Place | None]) -> Iterator[list[tuple[int, Place | None]]]:
    """Split into runs whose copies are in one partition, or not known."""
    for _, group in groupby(copies.items(), lambda item: None if item[1] is None else item[1][0]):
        yield list(group)
