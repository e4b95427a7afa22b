"""A consumer of the demo, as a process of its own: fails as it is told, and tells what it does.

Prints a line for everything it does: `<what> <partition> <offset> <attempts> <body>`, where what is
`ack`, `nack`, `drop` (left unacknowledged) or `fail`.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading

from kmqpy.errors import Unavailable
from kmqpy.kafka.client.client import KmqClient
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.message import Message

_NACK_DELAY_S = 0.3
_TRIES = 5


def fate(number: int) -> str:
    """The fate of message `number`: 0.5 % always fail, 5 % are dropped once, 2 % nacked once."""
    if number % 200 == 7:
        return "fail"
    if number % 20 == 3:
        return "drop"
    if number % 50 == 11:
        return "nack"
    return "ack"


def what_to_do(message: Message) -> str:
    """Return the fate of this delivery: poison fails every delivery, other messages only their first."""
    chosen = fate(int(message.body))
    return chosen if chosen == "fail" or message.attempts == 1 else "ack"


def _client(queue: QueueSettings, connection: KafkaConnection, name: str) -> KmqClient:
    """Make the client, in several tries if need be: a broker on a busy machine may have only just started."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(Unavailable):
            return KmqClient(queue, connection, holder=name)
    return KmqClient(queue, connection, holder=name)


def main() -> None:
    """Consume until SIGTERM: `bootstrap queue lease_ms name`."""
    bootstrap, queue, lease_ms, name = sys.argv[1:]
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = QueueSettings(name=queue, redeliver_after_ms=int(lease_ms))
    with _client(settings, KafkaConnection(bootstrap=bootstrap), name) as client:
        while not stop.is_set():
            messages = client.receive(200, wait=0.2)
            lines = []
            for message in messages:
                action = what_to_do(message)
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
