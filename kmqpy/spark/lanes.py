"""Numbers the partitions of all lanes of a queue, so that one query has them all.

Partition p of the main lane has the number p, that of priority n has n * 100,000,000 + p, and that of the
retry lane 1,000,000,000 + p. Whatever names a message by partition and offset here (reports of tasks, sinks,
files of checkpoints) uses these numbers: offsets of two lanes never mean the same message, and what was kept
before a queue had lanes is of its main lane. Only this module turns them into topics and partitions again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError
from kmqpy.kafka.client.marker_writer import Item, MarkerWriter
from kmqpy.kafka.markers.codec import Marker
from kmqpy.kafka.message_headers import first_place
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import LANE_SUFFIXES, KafkaConnection, QueueSettings
from kmqpy.message import Headers

_STEP = 100_000_000
"""More than the partitions of any topic."""
_BASES = dict(zip(reversed(LANE_SUFFIXES), range(_STEP, 2**31, _STEP), strict=False))
"""The number of partition 0 of each lane but the main one, by the ending of its topic."""

T = TypeVar("T")


def base_of(topic: str, queue: QueueSettings) -> int | None:
    """The number of partition 0 of this topic; None if it can't be a lane of the queue."""
    name = queue.queue_name
    return 0 if topic == name else _BASES.get(topic.removeprefix(name)) if topic.startswith(name) else None


def numbered_partition(queue: QueueSettings) -> Column:
    """The number of the partition of each row; null in rows of other topics.

    It needs the column `topic`, which executors then need not have.
    """
    main, *others = Lanes(queue).bases()
    topic, partition = F.col("topic"), F.col("partition")
    found = F.when(topic == main[1].name, partition)
    for base, lane in others:
        found = found.when(topic == lane.name, partition + base)
    return found


def first_record(headers: Headers, lane: QueueSettings, own: Place) -> Place | None:
    """The place, with its numbered partition, where the message at `own` of this lane was sent first.

    None if it is no copy, or its headers can't be true: see first_place().
    """
    first = first_place(headers, lane, own)
    if first is None or first.partition >= _STEP:
        return None
    return (_BASES[f"__{first.lane}"] if first.lane else 0) + first.partition, first.number


def first_record_columns(
    queue: QueueSettings, partition: Column, offset: Column, topic: Column
) -> tuple[Column, Column]:
    """The same as first_record() of each row, but for a message that is no copy its own place.

    partition, offset, topic  the headers that say so on copies
    """
    bases = {"": 0, **{f"{queue.queue_name}{suffix}": base for suffix, base in _BASES.items()}}
    known = F.create_map(*(F.lit(one) for pair in bases.items() for one in pair))
    first = partition.try_cast("int") + F.try_element_at(known, F.coalesce(topic, F.lit("")))
    own = numbered_partition(queue) if queue.has_lanes and queue.lane_of is None else F.col("partition")
    own = own + (base_of(queue.name, queue) or 0) if queue.lane_ending else own
    may_be = first.isNotNull() & (offset >= 0) & ((first != own) | (offset < F.col("offset")))
    place = F.when(may_be, F.struct(first.alias("partition"), offset.alias("offset")))
    # A `when` within a `when`, so that only copies are searched for the other headers.
    place = F.when(partition.between(0, _STEP - 1), place)
    return F.coalesce(place["partition"], own), F.coalesce(place["offset"], "offset")


def lane_numbers(base: int) -> range:
    """The numbers that partitions of a lane have, by that of its partition 0."""
    return range(base, base + _STEP)


class Lanes:
    """The lanes of a queue that one query reads, by the numbers of their partitions.

    Raises ConfigError for one of QueueSettings.lanes_apart(), of which a query would take part of a queue.
    """

    def __init__(self, queue: QueueSettings) -> None:
        if queue.lane_of is not None:
            raise ConfigError(
                f"queue: {queue.name!r} is a lane of {queue.lane_of!r}: give the queue itself; one query "
                "has all its lanes"
            )
        self._lanes = {base_of(lane.name, queue) or 0: lane for lane in reversed(queue.lanes())}

    def __len__(self) -> int:
        return len(self._lanes)

    def bases(self) -> Iterator[tuple[int, QueueSettings]]:
        """The number of partition 0 of each lane, with the lane; the main lane is the first."""
        return iter(self._lanes.items())

    def place(self, number: int) -> tuple[QueueSettings, int]:
        """The lane, and the partition in it, that has this number."""
        return self._lanes[number - number % _STEP], number % _STEP

    def has(self, number: int) -> bool:
        """False for the number of a partition of other lanes."""
        return number - number % _STEP in self._lanes


def by_base(known: Mapping[int, T]) -> dict[int, dict[int, T]]:
    """What is known by numbers of partitions, by the lanes: the numbers of their partitions 0."""
    found: dict[int, dict[int, T]] = {}
    for number, value in known.items():
        found.setdefault(number - number % _STEP, {})[number] = value
    return found


class LaneWriter:
    """Writes markers that name numbered partitions; has these methods of MarkerWriter."""

    def __init__(self, connection: KafkaConnection, queue: QueueSettings) -> None:
        self._writers = {base: MarkerWriter(connection, lane) for base, lane in Lanes(queue).bases()}

    def put(self, items: Iterable[Item]) -> None:
        """See MarkerWriter."""
        if len(self._writers) == 1:
            self._writers[0].put(items)
            return
        for base, ones in by_lane(items).items():
            self._writers[base].put(ones)

    def flush(self, timeout_s: float) -> int:
        """See MarkerWriter."""
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        writers = self._writers.values()
        return sum(one.flush(max(0.0, deadline - SYSTEM_CLOCK.monotonic())) for one in writers)

    def close(self, timeout_s: float) -> None:
        """See MarkerWriter."""
        deadline = SYSTEM_CLOCK.monotonic() + timeout_s
        for one in self._writers.values():
            one.close(max(0.0, deadline - SYSTEM_CLOCK.monotonic()))


def by_lane(items: Iterable[Item]) -> dict[int, list[Item]]:
    """Markers that name numbered partitions, by the base of their lane, as ones of that lane."""
    found: dict[int, list[Item]] = {}
    for item in items:
        number = item.partition if isinstance(item, Marker) else item[0]
        partition = number % _STEP
        own: Item = replace(item, partition=partition) if isinstance(item, Marker) else (partition, item[1])
        found.setdefault(number - partition, []).append(own)
    return found
