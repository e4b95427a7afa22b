"""A consumer process of the demo: processes each message as `fate` prescribes, and prints what it did.

It prints one line for each delivery: `<action> <partition> <offset> <attempts> <body>`. The action is `ack`,
`nack`, `drop` (the consumer leaves the message unacknowledged) or `fail` (it nacks a poison message, which
fails at each delivery).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading

from kmqpy.errors import Unavailable
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.message import Message

_NACK_DELAY_S = 0.3
_CONNECT_ATTEMPTS = 5


def fate(number: int) -> str:
    """Return how message `number` is processed: 0.5 % fail always, 5 % are dropped once, 2 % nacked once."""
    if number % 200 == 7:
        return "fail"
    if number % 20 == 3:
        return "drop"
    if number % 50 == 11:
        return "nack"
    return "ack"


def action_for(message: Message) -> str:
    """Return the action for this delivery: poison fails at each delivery; a first delivery follows fate()."""
    chosen = fate(int(message.body))
    return chosen if chosen == "fail" or message.attempts == 1 else "ack"


def _client(queue: QueueSettings, connection: KafkaConnection, name: str) -> KmqClient:
    """Make the client, in several attempts if need be: on a busy machine the broker may just have started."""
    for _ in range(_CONNECT_ATTEMPTS - 1):
        with contextlib.suppress(Unavailable):
            return KmqClient(queue, connection, holder=name)
    return KmqClient(queue, connection, holder=name)


def main() -> None:
    """Consume until SIGTERM or SIGINT; the arguments are `bootstrap queue lease_ms name`."""
    bootstrap, queue, lease_ms, name = sys.argv[1:]
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = QueueSettings(name=queue, lease_ms=int(lease_ms))
    with _client(settings, KafkaConnection(bootstrap=bootstrap), name) as client:
        while not stop.is_set():
            messages = client.receive(200, wait=0.2)
            lines = []
            for message in messages:
                action = action_for(message)
                if action == "ack":
                    client.ack(message)
                elif action == "nack":
                    client.nack(message, delay=_NACK_DELAY_S, reason="not now")
                elif action == "fail":
                    client.nack(message, delay=_NACK_DELAY_S, reason="poison")
                fields = (action, message.partition, message.offset, message.attempts, message.body.decode())
                lines.append(" ".join(map(str, fields)) + "\n")
            sys.stdout.write("".join(lines))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
