"""The capabilities of a storage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of a storage; the contract suite (kmqpy.testing) holds each of them against it.

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

    Where one of these is missing, something is weaker, but nothing raises NotSupported:

    immediate          the end of a lease, nack() and dead_letter() take effect at once, and receive(wait=0)
                       finds what is there. Else they take effect a moment later, when another process has
                       seen to it, and receive() has to wait for what is on its way
    stable_ids         a redelivered message keeps its id, also as a dead letter, and after
                       nack(count=False) its `enqueued_ms`. Else it is a copy with new ones
    late_ack           an acknowledgement after the lease counts, until the message is taken again. Else it
                       does nothing once the message is redelivered
    tells_lost         extend() returns the receipts of all messages whose lease could not be extended. Else
                       it returns none of them, or some
    exact_sizes        size() and in_flight() are exact also while others send and take. Else they are when
                       nobody does, and an upper bound where very many messages wait
    any_name           a queue may have any name of 1 to 200 printable characters. Else the storage has
                       rules of its own
    bound_handles      a queue that was opened before it was deleted and recreated raises QueueNotFound. Else
                       it goes on with the new queue
    many_queues        thousands of queues may be in use, since they share connections and threads. Else each
                       one that receives has some of its own
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
    immediate: bool = True
    stable_ids: bool = True
    late_ack: bool = True
    tells_lost: bool = True
    exact_sizes: bool = True
    any_name: bool = True
    bound_handles: bool = True
    many_queues: bool = True
