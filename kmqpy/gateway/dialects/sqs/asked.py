"""A request whose action and sender are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kmqpy.gateway.dialects.sqs.addresses import Addresses, queue_of_url
from kmqpy.gateway.dialects.sqs.errors import ACCESS_DENIED, SqsError, missing
from kmqpy.gateway.http import Call
from kmqpy.gateway.keys.keyring import Principal


class Asked(NamedTuple):
    """What actions know of a request beside its values.

    sender  who has sent it
    needs   the permission that its action needs on the queue
    spend   counts bytes of bodies for the sender's limit
    ruled   queues whose policies say of this action whether the sender may do it
    """

    call: Call
    addresses: Addresses
    sender: Principal
    needs: str
    spend: Callable[[int], None]
    ruled: Mapping[str, bool]

    def queue(self, url: str | None) -> str:
        """The name of the queue that a request is about; raises SqsError."""
        if url is None:
            raise missing("QueueUrl")
        return self.about(queue_of_url(url))

    def about(self, name: str, needs: str = "") -> str:
        """The name itself, if the sender may do this with the queue; raises SqsError."""
        self.call.queue = self.call.queue or name
        if not self.may(name, needs):
            why = f"the key needs the permission queue|{needs or self.needs}|{name[:100]}"
            if name in self.ruled:
                why = "the policy of the queue denies it to the key"
            url = self.addresses.url(name)[:300]
            raise SqsError(ACCESS_DENIED, f"Access to the resource {url} is denied: {why}.")
        return name

    def may(self, name: str, needs: str = "") -> bool:
        """True if the sender may do this with the queue."""
        ruled = None if needs else self.ruled.get(name)
        return self.sender.permits(needs or self.needs, name) if ruled is None else ruled
