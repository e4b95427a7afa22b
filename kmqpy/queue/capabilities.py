"""What a storage can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a storage can do; the contract suite (kmqpy.testing) holds each of them against it.

    Asking a storage for what it can't do raises NotSupported. Every storage redelivers, has dead letters,
    and hands out no message twice within its lease.

    fifo               messages of one priority are handed out in the order they were sent
    priority           send(priority=…)
    delay              send(delay=…) and nack(delay=…)
    requeue_to_front   a queue may put a redelivered message back in its own place
    manual_redelivery  a queue may leave redelivery to the application
    at_most_once       a queue may hand out each message once, and forget it (ephemeral=False)
    durable            what send() and ack() confirmed outlives a kill -9 of the server
    shared             other processes that open the same url find the same queues
    transactions       send(connection=…) and ack(connection=…) are part of the application's transaction
    blocking_take      a receive() that waits learns at once of a new message; else it asks again and again
    max_body_bytes     the largest body; None: as large as memory allows
    """

    fifo: bool = True
    priority: bool = True
    delay: bool = True
    requeue_to_front: bool = True
    manual_redelivery: bool = True
    at_most_once: bool = True
    durable: bool = True
    shared: bool = True
    transactions: bool = False
    blocking_take: bool = False
    max_body_bytes: int | None = None
