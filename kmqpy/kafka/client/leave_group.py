"""Leaves a consumer group without hanging, although some calls of librdkafka may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable

from confluent_kafka import Consumer, ConsumerGroupState, KafkaException

from kmqpy.core.clock import Clock
from kmqpy.kafka import librdkafka
from kmqpy.kafka.settings import KafkaConnection

_CALL_TIMEOUT_S = 5.0
"""leave_group() waits this long for the end of a rebalance, and then returns_in_time() waits this long
for the call of librdkafka to return."""


def leave_group(
    consumer: Consumer,
    connection: KafkaConnection,
    group: str,
    *,
    static: bool,
    in_rebalance: Callable[[], bool],
    clock: Clock,
) -> bool:
    """Close `consumer`; returns False if that takes longer than 5 s.

    static        True: a static member, which keeps its partitions for a while; other members give them up
    in_rebalance  returns True while partitions are revoked and new ones are not assigned yet
    """
    # librdkafka hangs for ever, and Python with it, when it is closed in the middle of a rebalance
    # (its issue 4884). So first wait until the rebalance has ended, or unsubscribe before closing.
    deadline = clock.monotonic() + _CALL_TIMEOUT_S
    if not static or not _wait_until_stable(consumer, connection, group, in_rebalance, deadline, clock):
        consumer.unsubscribe()
        while consumer.assignment() and clock.monotonic() < deadline:
            consumer.consume(1, 0.02)
    return returns_in_time(consumer.close)


def returns_in_time(call: Callable[[], object], timeout_s: float = _CALL_TIMEOUT_S) -> bool:
    """Make a call of librdkafka that has no time-out; returns False if it has not returned in time."""
    thread = threading.Thread(target=call, name="kmq-close", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _wait_until_stable(
    consumer: Consumer,
    connection: KafkaConnection,
    group: str,
    in_rebalance: Callable[[], bool],
    deadline: float,
    clock: Clock,
) -> bool:
    """Wait until no rebalance is going on; returns False if one lasts, or if Kafka does not answer."""
    admin = librdkafka.new_admin(connection)
    while (left := deadline - clock.monotonic()) > 0:
        try:
            asked = admin.describe_consumer_groups([group], request_timeout=librdkafka.GROUP_REQUEST_S)[group]
            stable = asked.result(left).state is ConsumerGroupState.STABLE
        except (KafkaException, TimeoutError):
            return False
        consumer.consume(1, 0.05)  # runs the callbacks that are due
        if stable and not in_rebalance():
            return True
    return False
