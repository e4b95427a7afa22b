"""A client in a process of its own: takes messages and prints each as a line of JSON.

    taker.py <connection> <queue settings> [--ack] [--crash] [--batch N] …

--ack       acknowledge them
--crash     die at the first message, as a handler does that takes its process with it
--batch N   how many to take at once
--lease S   for how long
--instance  static membership
--receipts  acknowledge these instead, and end
--pause-before-start
            say so and stop (SIGSTOP) when the first messages are fetched, before their start markers
"""

import argparse
import json
import os
import signal
import sys
from typing import Any

from kmqpy.kafka.client.start_markers import StartBatch, StartMarkerWriter
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import KafkaConnection, QueueSettings


def show(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def pause_before_start() -> None:
    start = StartMarkerWriter.start

    def paused(writer: StartMarkerWriter, *arguments: Any) -> StartBatch:
        StartMarkerWriter.start = start  # type: ignore[method-assign]
        show({"paused": True})
        os.kill(os.getpid(), signal.SIGSTOP)
        return start(writer, *arguments)

    StartMarkerWriter.start = paused  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("connection")
    parser.add_argument("queue")
    parser.add_argument("--ack", action="store_true")
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--lease", type=float)
    parser.add_argument("--instance")
    parser.add_argument("--receipts", nargs="*")
    parser.add_argument("--pause-before-start", action="store_true")
    options = parser.parse_args()
    if options.pause_before_start:
        pause_before_start()
    settings = QueueSettings.from_json(options.queue.encode())
    connection = KafkaConnection(**json.loads(options.connection))
    with KmqClient(settings, connection, instance_id=options.instance) as client:
        if options.receipts is not None:
            client.ack(*options.receipts, confirmed=True)
            return
        while True:
            for message in client.receive(options.batch, lease=options.lease):
                show(
                    {
                        "body": message.body.decode(),
                        "attempts": message.attempts,
                        "partition": message.partition,
                        "offset": message.offset,
                        "receipt": message.receipt,
                    }
                )
                if options.crash:
                    os._exit(9)
                if options.ack:
                    client.ack(message)


if __name__ == "__main__":
    main()
