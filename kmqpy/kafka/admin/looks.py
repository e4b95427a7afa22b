"""Messages of a queue that nobody takes by looking at them: those that wait, and those that others have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kmqpy.errors import DecodeError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.admin.stats import InFlightMessage, waiting_records
from kmqpy.kafka.client.record_message import Acknowledges, KafkaMessage, ReceiveContext
from kmqpy.kafka.markers.log_cuts import cuts_behind
from kmqpy.kafka.message_headers import DELIVER_AT, int_header
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.message import Message
from kmqpy.queue import Orphan
from kmqpy.telemetry.base import Telemetry


def waiting_messages(
    connection: KafkaConnection, lanes: Iterable[QueueSettings], telemetry: Telemetry, now_ms: int, limit: int
) -> list[KafkaMessage]:
    """The oldest messages that nobody has taken; delayed ones count towards `limit` and are left out."""
    found: list[KafkaMessage] = []
    for queue in lanes:
        if len(found) < limit:
            records, cuts = waiting_records(connection, queue, limit=limit - len(found))
            context = ReceiveContext(queue, "", now_ms, telemetry, cuts=cuts)
            found += [KafkaMessage(record, context) for record in records]
    return [message for message in found if not _is_delayed(message, now_ms)]


def orphans_of(
    connection: KafkaConnection,
    lanes: Mapping[str, QueueSettings],
    leased: Sequence[InFlightMessage],
    telemetry: Telemetry,
    client: Acknowledges,
) -> list[Orphan]:
    """The same messages with their records, in the same order; `client` acknowledges them."""
    receipts = {one.receipt: Receipt.parse(one.receipt) for one in leased}
    found: dict[str, Orphan] = {}
    for lane in lanes.values():
        there = [one for one in leased if receipts[one.receipt].queue == lane.name]
        places = [(one.partition, one.offset) for one in there]
        records = partition_reader.read_at(connection, lane.name, places) if places else {}
        for one, place in zip(there, places, strict=True):
            receipt, record = receipts[one.receipt], records.get(place)
            cuts = {one.partition: cuts_behind(receipt.offset)}
            context = ReceiveContext(lane, receipt.topic_id, one.lease_until_ms, telemetry, client, cuts)
            found[one.receipt] = Orphan(
                receipt=one.receipt,
                holder=one.holder,
                since_ms=one.since_ms,
                lease_until_ms=one.lease_until_ms,
                message=None if record is None else KafkaMessage(record, context),
            )
    return [found[one.receipt] for one in leased]


def _is_delayed(message: Message, now_ms: int) -> bool:
    try:
        deliver_at = int_header(message.headers, DELIVER_AT)
    except DecodeError:
        return False
    return deliver_at is not None and deliver_at > now_ms
