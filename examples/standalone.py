"""Runs a sender, a client and a tracker in three processes, like in production.

    python examples/standalone.py                   all three, with a queue that is deleted at the end
    python examples/standalone.py send QUEUE        only the sender, with a queue of yours (kmq queue create)
    python examples/standalone.py receive QUEUE     only the client, until Ctrl-C

Uses the servers that KMQ_BOOTSTRAP and KMQ_ZOOKEEPER name: `kmq dev up` prints a line that sets both. When
all three run, the first process of the client is killed with messages in flight, and the tracker redelivers
these to the second one.
"""

import contextlib
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

from kmqpy import KafkaConnection, KafkaStorage, KmqClient, ZooKeeperConnection
from kmqpy.errors import KmqError

MESSAGES = 100
connection = KafkaConnection.from_environment()
zookeeper = ZooKeeperConnection.from_environment()


def send(name: str) -> None:
    with KmqClient(name, connection) as queue:
        queue.send_many([f"{number}" for number in range(MESSAGES)])
    print(f"sent {MESSAGES} messages to queue {name}", flush=True)


def receive(name: str, crash: bool) -> None:
    done: set[str] = set()
    with KmqClient(name, connection) as queue:
        for message in queue:
            if crash and len(done) == MESSAGES // 2:
                queue.flush()
                os.kill(os.getpid(), 9)  # messages taken and not acknowledged stay in flight
            queue.ack(message)
            done.add(message.body.decode())
            print(message.body.decode(), flush=True)
            if message.body == b"last":
                return


def main() -> None:
    name = f"standalone-{uuid.uuid4().hex[:6]}"
    with KafkaStorage(connection, zookeeper) as storage:
        storage.create(name, partitions=1, lease_ms=1_500)  # clients and trackers find the settings
        try:
            with tracker(name):
                run(name)
        finally:
            storage.delete(name)


@contextlib.contextmanager
def tracker(name: str) -> Iterator[None]:
    """Run a tracker in a process of its own; it finds the servers in the environment, like this process."""
    options = ["--queue", name, "--http-port", "-1", "--log-level", "error"]
    process = subprocess.Popen([sys.executable, "-m", "tracker", *options])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def run(name: str) -> None:
    me = [sys.executable, __file__]
    subprocess.run([*me, "send", name], check=True)
    first = subprocess.run([*me, "receive", name, "crash"], stdout=subprocess.PIPE, text=True, check=False)
    print(f"the first client was killed after {len(first.stdout.split())} messages")
    done = set(first.stdout.split())
    with subprocess.Popen([*me, "receive", name], stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None
        for line in second.stdout:
            done.add(line.strip())
            if len(done) == MESSAGES:
                with KmqClient(name, connection) as queue:
                    queue.send("last")
    assert done >= {f"{number}" for number in range(MESSAGES)}, "a message was lost"
    print(f"all {MESSAGES} messages were processed")


if __name__ == "__main__":
    # Leases of 1.5 s are short, and a client warns when a slow machine lets one run down.
    logging.basicConfig(level=logging.ERROR)
    try:
        match sys.argv[1:]:
            case []:
                main()
            case ["send", queue]:
                send(queue)
            case ["receive", queue, *crash]:
                receive(queue, bool(crash))
            case _:
                sys.exit(__doc__)
    except KeyboardInterrupt:
        sys.exit(130)
    except KmqError as error:
        sys.exit(f"error: {error} (KMQ_BOOTSTRAP and KMQ_ZOOKEEPER: the line that kmq dev up prints)")
