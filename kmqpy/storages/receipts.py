"""Makes and parses receipts of queues on storages other than Kafka. Pure: no I/O.

The text is `2.` + base64url of the JSON list [storage id, queue, generation] + `.` + message id + `.` + take.
A generation is the id of one queue, a take the number of one delivery of a message, or `any` for whoever
has it, or nobody yet (ANY_TAKE). The part before the last two dots is equal in all receipts of a queue, so
Receipts computes it once.
"""

from __future__ import annotations

import base64
import json

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ReceiptError, shown
from kmqpy.storages.engine import ANY_TAKE, QueueRow, TakeRef

_PREFIX_OF_STORAGES = "2."
_PREFIX_OF_KAFKA = "1."
_ANY = "any"
_DAMAGED = "is damaged or cut off; give it whole, as it was printed"
_MAX_DIGITS = len(str(INT64_MAX))


class Receipts:
    """Makes and reads the receipts of one queue."""

    def __init__(self, storage_id: str, queue: QueueRow) -> None:
        self._origin = [storage_id, queue.name, queue.generation]
        text = json.dumps(self._origin, separators=(",", ":")).encode()
        self._prefix = f"{_PREFIX_OF_STORAGES}{base64.urlsafe_b64encode(text).decode().rstrip('=')}"

    def make(self, message_id: int, take: int) -> str:
        """The receipt of one take of a message, or of any."""
        return f"{self._prefix}.{message_id}.{_ANY if take == ANY_TAKE else take}"

    def parse(self, text: object) -> TakeRef:
        """The take that a receipt names.

        Raises ReceiptError for anything but a receipt, and for a receipt of another storage, of another
        queue, or of a deleted queue of the same name.
        """
        if not isinstance(text, str):
            raise ReceiptError(f"receipt: an object of type {type(text).__name__} is not a receipt")
        prefix, *named = text.rsplit(".", 2)
        if prefix != self._prefix:
            raise ReceiptError(f"receipt: {shown(text)} {self._difference(prefix, text)}")
        message_id, take = map(parse_number, named)
        if named[1] == _ANY:
            take = ANY_TAKE
        if message_id is None or take is None:
            raise ReceiptError(
                f"receipt: {shown(text)} is damaged or cut off; give it whole, as it was printed"
            )
        return TakeRef(message_id, take)

    def _difference(self, prefix: str, text: str) -> str:
        """Why a receipt is not one of this queue, for an error text."""
        match _origin(prefix):
            case [str() as storage, str() as queue, str()]:
                if storage != self._origin[0]:
                    return "is one of another storage"
                if queue != self._origin[1]:
                    return f"is one of queue {queue!r}, not of {self._origin[1]!r}"
                return f"is one of a queue {queue!r} that was deleted; another has its name now"
        return _not_a_receipt(text)


def queue_named_in(receipt: str) -> str:
    """The name of the queue in a receipt of any storage but Kafka; raises ReceiptError for any other text."""
    match _origin(receipt.rsplit(".", 2)[0]):
        case [str(), str() as queue, str()]:
            return queue
    raise ReceiptError(f"receipt: {shown(receipt)} {_not_a_receipt(receipt)}")


def _not_a_receipt(text: str) -> str:
    if text.startswith(_PREFIX_OF_KAFKA):
        return "is not a receipt of this storage, but perhaps of a queue on Kafka (leave --queue-url out)"
    if parse_number(text):
        return "is an id, not a receipt; make one of it with queue.receipt(id)"
    if text.startswith(_PREFIX_OF_STORAGES):
        return _DAMAGED
    return "is not a receipt of kmqpy"


def _origin(prefix: str) -> object:
    """The JSON value that a receipt encodes before its numbers; None for a text that is not a receipt."""
    if not prefix.startswith(_PREFIX_OF_STORAGES):
        return None
    encoded = prefix.removeprefix(_PREFIX_OF_STORAGES)
    try:
        padded = encoded.encode("ascii") + b"=" * (-len(encoded) % 4)
        return json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        return None


def parse_number(text: object) -> int | None:
    """An id, or the number of a take: decimal digits, at most 2**63 - 1. None for anything else."""
    if not isinstance(text, str) or not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        return None
    number = int(text)
    return number if number <= INT64_MAX else None
