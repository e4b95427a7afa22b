"""A request whose action and sender are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kmqpy.gateway.dialects.sqs.addresses import Addresses, queue_of_url
from kmqpy.gateway.dialects.sqs.errors import missing
from kmqpy.gateway.http import Call


@dataclass(frozen=True, slots=True)
class Asked:
    """What actions know of a request beside its values.

    spend  counts bytes of bodies for the sender's limit
    """

    call: Call
    addresses: Addresses
    spend: Callable[[int], None]

    def queue(self, url: str | None) -> str:
        """The name of the queue that a request is about; raises SqsError."""
        if url is None:
            raise missing("QueueUrl")
        self.call.queue = name = queue_of_url(url)
        return name
