"""What is in the journals and topics of a queue."""

import json
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from kmqpy import message as m
from kmqpy.errors import DecodeError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import ACKNOWLEDGED, TAKEN_LATE, Op
from kmqpy.kafka.message_headers import ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TOPIC, int_header
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

from .claims import ClaimOrder, LateAckOrder
from .journal import LANE, lanes_of
from .judge import Place, Seen, Stored, Verdict, concerned

_TIMEOUT_S = 60.0
_SHOWN = 50
"""Of how many messages of each finding all records are kept."""


class Times:
    """When things happened, in ms, by partition."""

    def __init__(self) -> None:
        self.deliveries: dict[int, list[int]] = defaultdict(list)
        self.copies: dict[int, list[int]] = defaultdict(list)
        self.sends: dict[int, int] = defaultdict(int)
        """Messages by second."""


def take_in(lines: Iterable[list[str]], seen: Seen, times: Times) -> None:
    """Lines of journals; see children.py for what they mean."""
    for what, at_ms, *fields in lines:
        numbers = [int(field) for field in fields]
        if what == "d":
            partition, offset, body = numbers
            seen.handed_out[partition, offset] += 1
            seen.delivered[body] += 1
            times.deliveries[partition % LANE].append(int(at_ms))
        elif what == "a":
            seen.acked.add(numbers[2])
        elif what == "l":
            seen.acked_late += 1
        elif what == "t":
            seen.attempted.update(range(numbers[0], numbers[0] + numbers[1]))
        elif what == "k":
            seen.sent.update(range(numbers[0], numbers[0] + numbers[1]))
            times.sends[int(at_ms) // 1000] += numbers[1]


def read_topics(
    connection: KafkaConnection, queue: QueueSettings, partitions: int, seen: Seen, times: Times
) -> None:
    """Every committed record of the queue's topics."""

    open_places: set[Place] = set()
    lanes = lanes_of(queue)
    order, late = ClaimOrder(), LateAckOrder(lanes)

    def in_queue(record: Any) -> None:
        place = (record.partition() + lanes[record.topic()], record.offset())
        stored = _stored(record, place, lanes)
        seen.records[place] = stored
        if stored.origin != place:
            insort(times.copies[record.partition()], record.timestamp()[1])

    def in_markers(lane: str, record: Any) -> None:
        try:
            marker = codec.decode(record.key(), record.value(), record.headers())
        except DecodeError:
            seen.undecodable += 1
            return
        if marker.offset == codec.TICK_OFFSET and not marker.runs:
            order.read_claim(marker.partition, record.offset(), record.headers(), lanes[lane])
            late.read_claim(lane, marker.partition, record.offset(), record.headers())
            return
        late.read_marker(lane, marker, record.offset(), record.headers(), record.timestamp()[1])
        for offset in marker.offsets():
            place = (marker.partition + lanes[lane], offset)
            order.read_marker(place, marker, record.offset())
            if marker.op in (Op.TAKE, Op.DELAY):
                seen.lives[place] += place not in open_places
                open_places.add(place)
            elif marker.op is Op.END:
                open_places.discard(place)
            if marker.op is Op.TAKE:
                seen.taken.add(place)
            elif marker.op is Op.END and marker.reason == TAKEN_LATE:
                pass  # it had been ended before (rule R30)
            elif marker.op is Op.END and marker.reason == ACKNOWLEDGED:
                seen.ended.add(place)  # by an earlier consumer, before it became a dead letter (rule R32)
            elif marker.op is Op.END and marker.by_tracker:
                seen.moved[place] += 1
            elif marker.op is Op.END:
                seen.ended.add(place)

    def in_dead_letters(record: Any) -> None:
        seen.dead.append(_stored(record, (-1, -1), lanes))

    starts = dict.fromkeys(range(partitions), 0)
    for lane in queue.lanes():
        reached = partition_reader.scan(connection, lane.name, starts, in_queue, timeout_s=_TIMEOUT_S)
        seen.log_start |= {partition + lanes[lane.name]: place.low for partition, place in reached.items()}
        visit = partial(in_markers, lane.name)
        partition_reader.scan(connection, lane.markers_topic, starts, visit, timeout_s=_TIMEOUT_S)
    partition_reader.scan(connection, queue.dead_letter_topic, starts, in_dead_letters, timeout_s=_TIMEOUT_S)
    seen.copied_after_ack = order.copied
    after_late_ack = set(late.copies_after_late_ack())
    seen.ended_unseen = {place for place in after_late_ack & seen.ended if not seen.handed_out[place]}
    if queue.late_acks:
        seen.handed_out_late = {place for place in after_late_ack if seen.handed_out[place]}


def keep_evidence(
    connection: KafkaConnection,
    queue: QueueSettings,
    partitions: int,
    seen: Seen,
    verdict: Verdict,
    folder: Path,
) -> None:
    """Write down what the topics hold of what was found, if anything was: they end with the servers."""
    if not verdict.found:
        return
    shown = {name: items[:_SHOWN] for name, items in verdict.found.items()}
    places = concerned(seen, chain.from_iterable(shown.values()))
    records = _evidence(connection, queue, partitions, places)
    text = json.dumps({"found": shown, "records": records}, indent=1)
    (folder / f"evidence-{queue.name}.json").write_text(text + "\n")


def _evidence(
    connection: KafkaConnection, queue: QueueSettings, partitions: int, places: Set[Place]
) -> list[dict[str, Any]]:
    """What the topics hold of these places, in the order of their logs: all but keys and values."""
    found: list[dict[str, Any]] = []

    def note(record: Any, **more: Any) -> None:
        found.append(
            {
                "topic": record.topic(),
                "partition": record.partition(),
                "offset": record.offset(),
                "ms": record.timestamp()[1],
                "headers": [(name, repr(value)) for name, value in record.headers() or []],
                **more,
            }
        )

    lanes = lanes_of(queue)

    def in_queue(record: Any) -> None:
        if (record.partition() + lanes[record.topic()], record.offset()) in places:
            note(record)

    def in_dead_letters(record: Any) -> None:
        if _stored(record, (-1, -1), lanes).origin in places:
            note(record)

    def in_markers(lane: str, record: Any) -> None:
        try:
            marker = codec.decode(record.key(), record.value(), record.headers())
        except DecodeError:
            return
        of = [offset for offset in marker.offsets() if (marker.partition + lanes[lane], offset) in places]
        if of:
            note(record, op=marker.op, redeliver_after_ms=marker.redeliver_after_ms, of=of)

    visits = [(queue.dead_letter_topic, in_dead_letters)]
    for lane in queue.lanes():
        visits += [(lane.name, in_queue), (lane.markers_topic, partial(in_markers, lane.name))]
    for topic, visit in visits:
        partition_reader.scan(
            connection, topic, dict.fromkeys(range(partitions), 0), visit, timeout_s=_TIMEOUT_S
        )
    return found


def _stored(record: Any, place: Place, lanes: Mapping[str, int]) -> Stored:
    headers = m.headers_of(record.headers())
    offset = int_header(headers, ORIGINAL_OFFSET)
    if offset is not None:
        lane = dict(headers).get(ORIGINAL_TOPIC, b"").decode()  # named if it is not the main one
        place = ((int_header(headers, ORIGINAL_PARTITION) or 0) + lanes.get(lane, 0), offset)
    return Stored(int(record.value()), place)
