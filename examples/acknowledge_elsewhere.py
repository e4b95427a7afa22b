"""Takes messages in one process, and acknowledges them in another, which needs only their receipts.

    python examples/acknowledge_elsewhere.py

Uses the servers that KMQ_BOOTSTRAP and KMQ_ZOOKEEPER name: `kmq dev up` prints a line that sets both. Makes a
queue of its own, and deletes it.
"""

import os
import subprocess
import sys
import uuid

from kmqpy import Admin, KafkaConnection, KmqClient, QueueSettings, ZooKeeperConnection
from kmqpy.errors import KmqError

connection = KafkaConnection.from_environment()
zookeeper = ZooKeeperConnection.from_environment()


def acknowledge(queue: str) -> None:
    """Acknowledge the messages whose receipts are on stdin, one a line; runs in the other process."""
    receipts = sys.stdin.read().split()
    with KmqClient(queue, connection) as client:
        client.ack(*receipts, confirmed=True)
    print(f"acknowledged {len(receipts)} messages in process {os.getpid()}")


def main() -> None:
    queue = QueueSettings(name=f"elsewhere-{uuid.uuid4().hex[:6]}")
    with Admin(connection, zookeeper) as admin:
        admin.create_queue(queue, partitions=1)
        try:
            run(queue, admin)
        finally:
            admin.delete_queue(queue.name)


def run(queue: QueueSettings, admin: Admin) -> None:
    with KmqClient(queue, connection) as producer:
        producer.send_many(["one", "two", "three"])
    with KmqClient(queue, connection) as client:
        messages = client.receive(10, wait=10, lease=60)
    # The client is closed; the messages stay taken until their leases end.
    assert len(admin.in_flight(queue)) == 3
    subprocess.run(
        [sys.executable, __file__, queue.name],
        input="\n".join(message.receipt for message in messages),
        text=True,
        check=True,
    )
    assert len(admin.in_flight(queue)) == 0
    print("nothing is in flight any more")


if __name__ == "__main__":
    try:
        acknowledge(sys.argv[1]) if len(sys.argv) > 1 else main()
    except KmqError as error:
        sys.exit(f"error: {error} (KMQ_BOOTSTRAP and KMQ_ZOOKEEPER: the line that kmq dev up prints)")
