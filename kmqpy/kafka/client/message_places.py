"""Finds partition and number of the messages that a caller names, and refuses messages of other topics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_

from kmqpy.errors import ReceiptError
from kmqpy.kafka.client.record_message import KafkaMessage, ReceiveContext
from kmqpy.kafka.client.topics_in_use import TopicsInUse
from kmqpy.kafka.places import Offsets, Place
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_identity import stale_markers_error
from kmqpy.message import Message

_place_of = attrgetter("place")
_context_of = attrgetter("_context")

_NOTHING_HANDED_OUT: tuple[tuple[Message, ...], Offsets] = ((), {})


class MessagePlaces:
    """Finds the places (partition and number) of messages of one queue, given as messages or as receipts.

    Safe to use from any thread. The methods raise ReceiptError for messages of another queue, and of a
    deleted topic (rule R24 of docs/rules.md); TopicError if the markers topic was not recreated with the
    queue topic.

    watch_topics     called before topic ids are compared: starts to watch the ids, unless somebody does
    look_for_topics  waits until Kafka has told which topics there are now
    """

    def __init__(
        self,
        queue: QueueSettings,
        topics: TopicsInUse,
        *,
        watch_topics: Callable[[], None],
        look_for_topics: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._topics = topics
        self._watch_topics = watch_topics
        self._look_for_topics = look_for_topics
        self._handed_out = _NOTHING_HANDED_OUT

    def remember(self, messages: Sequence[Message], offsets: Offsets) -> None:
        """Keep the messages handed out last and their numbers: callers often name all of them together."""
        self._handed_out = tuple(messages), offsets

    def forget(self) -> None:
        """Drop the messages of remember(), which are of a former topic."""
        self._handed_out = _NOTHING_HANDED_OUT

    def offsets_of(self, messages: Sequence[Message | str]) -> Offsets:
        """Return the numbers of messages, by partition; see log_cuts."""
        handed_out, offsets = self._handed_out
        if len(messages) == len(handed_out) and all(map(is_, messages, handed_out)):  # the usual case
            self._handed_out = _NOTHING_HANDED_OUT
            return offsets
        if set(map(type, messages)) == {KafkaMessage}:
            for context in set(map(_context_of, messages)):
                self._check_received(context)
            return offsets_by_partition(map(_place_of, messages))
        return offsets_by_partition(map(self.place_of, messages))

    def places_of(self, messages: Sequence[Message | str]) -> list[Place]:
        """Return the places of messages, in their order."""
        return [self.place_of(message) for message in messages]

    def place_of(self, message: Message | str) -> Place:
        if type(message) is KafkaMessage:
            self._check_received(_context_of(message))
            return message.place
        # Messages that were copied or pickled, and those of other storages, are known by their receipts.
        receipt = Receipt.parse(message.receipt if isinstance(message, Message) else message)
        self._check_topic("receipt", receipt.queue, receipt.topic_id)
        if not self._topics.has(receipt.partition):
            raise ReceiptError(f"receipt: queue {receipt.queue!r} has no partition {receipt.partition}")
        return receipt.partition, receipt.offset

    def _check_received(self, context: ReceiveContext) -> None:
        if context.client is None:
            raise ReceiptError(f"message: this one of queue {context.queue.name!r} was only looked at")
        self._check_topic("message", context.queue.name, context.topic_id)

    def _check_topic(self, what: str, queue: str, topic_id: str) -> None:
        if queue != self._queue.name:
            raise ReceiptError(f"{what}: it belongs to queue {queue!r}, not to {self._queue.name!r}")
        self._watch_topics()
        if topic_id != self._topics.ids.queue:
            self._look_for_topics()
        if topic_id != self._topics.ids.queue:
            if self._topics.has_stale_markers:
                raise stale_markers_error(self._queue)
            raise ReceiptError(f"{what}: it belongs to another topic named {queue!r}, deleted since")


def some_are_receipts(messages: Sequence[Message | str]) -> bool:
    """Return True if some of these are known by their receipts, not as what this process has taken."""
    return not set(map(type, messages)) <= {KafkaMessage}


def offsets_by_partition(places: Iterable[Place]) -> dict[int, list[int]]:
    """Return the offsets of places by partition, in the order of the places."""
    offsets: dict[int, list[int]] = {}
    for partition, offset in places:
        offsets.setdefault(partition, []).append(offset)
    return offsets
