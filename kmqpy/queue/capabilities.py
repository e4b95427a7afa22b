"""Tells callers what a storage can do, and which promises of the `Queue` protocol it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Lists what a storage can do; the contract suite (kmqpy.testing) checks the list of each storage.

    Every storage redelivers messages, has dead letters, and hands out no message twice within its lease.

    A storage raises NotSupported for an operation or setting that needs one of those from `fifo` to
    `at_most_once`, or from `collapse` to `transactions`, if it is False. Where one of the others is missing,
    a promise is weaker, but nothing raises NotSupported.

    Attributes:
        fifo: Messages of one priority are handed out in the order they were sent (order="fifo").
        priority: send(priority=…).
        delay: send(delay=…) and nack(delay=…).
        requeue_to_front: A queue may put a redelivered message back where it stood (requeue_to="front").
        manual_redelivery: A queue may leave redelivery to the application (redelivery="manual").
        at_most_once: A queue may hand out each message once, and forget it (delivery="at-most-once").
        durable: Sends and acknowledgements that the storage confirmed survive a kill -9 of the server, and a
            power cut where settings of the server decide that (on Kafka replicas do).
        lossy_setting: The setting of the server that decides against that, `name=value`, asked when the
            storage is opened; "": there is none. ZooKeeper does not tell: `forceSync=unknown`.
        shared: Other processes that open the same url find the same queues.
        collapse: Of equal messages that wait, a queue may hand out one (collapse=True).
        groups: send(group=…), and a queue may hand out the messages of a group in order, one at a time
            (order="group", on_dead_letter=…).
        fair: A queue may prefer groups of which least is in flight, and limit how many are (fair=True,
            max_in_flight_per_group=…).
        dedup: send(dedup_id=…), and a queue's settings dedup_until and dedup_by.
        retry_delays: A queue may have delays of its own before redeliveries (retry_delays=…).
        transactions: send(transaction=…) and ack(transaction=…) are part of the application's transaction.
        blocking_take: The storage tells a waiting receive() of a new message at once. Otherwise receive()
            asks the storage again and again.
        max_body_bytes: The largest body; send() raises MessageError for a larger one. None: as large as
            memory allows.
        immediate: The end of a lease, nack() and dead_letter() take effect at once, nack(count=False) leaves
            `enqueued_ms` as it was, and receive(wait=0) returns any message that is ready. Otherwise another
            process (a tracker) appends the message again a moment later, or dead-letters it, and receive()
            has to wait for messages to arrive.
        receipts_by_id: Queue.receipt() makes a receipt of a message's id, good for whoever has the message.
        late_ack: An acknowledgement after the lease counts, until the message is taken again. Otherwise it
            does nothing once the message is redelivered.
        tells_lost: extend() returns the receipts of all messages whose lease could not be extended. Otherwise
            it returns some of these receipts, or none.
        exact_sizes: size() and in_flight() are exact even while other clients send and take. Otherwise they
            are exact at rest, and an upper bound where very many messages wait.
        any_name: A queue may have any name of 1 to 200 printable characters. Otherwise the storage has its
            own rules for names.
        bound_handles: Operations of an open queue raise QueueNotFound after the queue was deleted, even if it
            was recreated. Otherwise the open queue works with the new queue.
        many_queues: Thousands of queues may be in use, because they share connections and threads. Otherwise
            each queue that receives has connections and threads of its own.
    """

    fifo: bool = True
    priority: bool = True
    delay: bool = True
    requeue_to_front: bool = True
    manual_redelivery: bool = True
    at_most_once: bool = True
    durable: bool = True
    lossy_setting: str = ""
    shared: bool = True
    collapse: bool = False
    groups: bool = False
    fair: bool = False
    dedup: bool = False
    retry_delays: bool = False
    transactions: bool = False
    blocking_take: bool = False
    max_body_bytes: int | None = None
    immediate: bool = True
    receipts_by_id: bool = True
    late_ack: bool = True
    tells_lost: bool = True
    exact_sizes: bool = True
    any_name: bool = True
    bound_handles: bool = True
    many_queues: bool = True
