"""Encodes and decodes receipts: texts that name taken messages of queues on Kafka. Pure: no I/O."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from kmqpy.errors import ReceiptError
from kmqpy.kafka.places import place_in_id

_RECEIPT_VERSION = "1."
_STORED_QUEUE_VERSION = "2."
"""Receipts of queues on Kafka begin with the former, receipts of all other storages with the latter."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Names one taken message; any process, and later versions of kmqpy, can use the receipt.

    `offset` is the number of the message, which is its offset unless the log was cut back; see log_cuts.

    As text: `1.` + base64url of the JSON list [queue, topic id, partition, offset].
    """

    queue: str
    topic_id: str
    partition: int
    offset: int

    def __str__(self) -> str:
        fields = json.dumps([self.queue, self.topic_id, self.partition, self.offset], separators=(",", ":"))
        return _RECEIPT_VERSION + base64.urlsafe_b64encode(fields.encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """The receipt in `text`; raises ReceiptError, and nothing else, for any other value."""
        if not isinstance(text, str) or not text.startswith(_RECEIPT_VERSION):
            is_other = isinstance(text, str) and text.startswith(_STORED_QUEUE_VERSION)
            hint = " on Kafka; name its storage (for kmq: --queue-url)" if is_other else ""
            if place_in_id(text) is not None:
                raise ReceiptError(
                    f"receipt: {_shown(text)} is an id, not a receipt; make one of it with queue.receipt(id)"
                )
            raise ReceiptError(f"receipt: {_shown(text)} is not a receipt of kmqpy{hint}")
        encoded = text[len(_RECEIPT_VERSION) :]
        try:
            padded = encoded.encode("ascii") + b"=" * (-len(encoded) % 4)
            fields = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        except (ValueError, binascii.Error, RecursionError):
            raise ReceiptError(
                f"receipt: {_shown(text)} is damaged or cut off; give it whole, as it was printed"
            ) from None
        match fields:
            # A JSON true is an int to Python.
            case [str() as queue, str() as topic_id, int() as partition, int() as offset] if (
                not isinstance(partition, bool)
                and not isinstance(offset, bool)
                and 0 <= partition < 2**31
                and 0 <= offset < 2**63
            ):
                return cls(queue, topic_id, partition, offset)
        raise ReceiptError(f"receipt: {_shown(text)} has other fields than a receipt's")


def _shown(text: object) -> str:
    if not isinstance(text, str):
        return f"an object of type {type(text).__name__}"
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."
