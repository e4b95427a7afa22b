"""Takes messages in one process, and acknowledges them in another, which needs only their receipts.

    python examples/acknowledge_elsewhere.py

Uses the servers that KMQ_BOOTSTRAP and KMQ_ZOOKEEPER name: `kmq dev up` prints a line that sets both. Makes a
queue of its own, and deletes it.
"""

import os
import subprocess
import sys
import uuid

from kmqpy import KafkaConnection, KafkaStorage, KmqClient, ZooKeeperConnection
from kmqpy.errors import KmqError

connection = KafkaConnection.from_environment()
zookeeper = ZooKeeperConnection.from_environment()


def acknowledge(name: str) -> None:
    """Acknowledge the messages whose receipts are on stdin, one a line; runs in the other process."""
    receipts = sys.stdin.read().split()
    with KmqClient(name, connection) as queue:
        queue.ack(*receipts, confirmed=True)
    print(f"acknowledged {len(receipts)} messages in process {os.getpid()}")


def main() -> None:
    name = f"elsewhere-{uuid.uuid4().hex[:6]}"
    with KafkaStorage(connection, zookeeper) as storage:
        storage.create(name, partitions=1)
        try:
            run(name, storage)
        finally:
            storage.delete(name)


def run(name: str, storage: KafkaStorage) -> None:
    with KmqClient(name, connection) as queue:
        queue.send_many(["one", "two", "three"])
        messages = queue.receive(10, wait=10, lease=60)
    # The queue is closed; the messages stay taken until their leases end.
    assert len(storage.in_flight(name)) == 3
    subprocess.run(
        [sys.executable, __file__, name],
        input="\n".join(message.receipt for message in messages),
        text=True,
        check=True,
    )
    assert len(storage.in_flight(name)) == 0
    print("nothing is in flight any more")


if __name__ == "__main__":
    try:
        acknowledge(sys.argv[1]) if len(sys.argv) > 1 else main()
    except KmqError as error:
        sys.exit(f"error: {error} (KMQ_BOOTSTRAP and KMQ_ZOOKEEPER: the line that kmq dev up prints)")
