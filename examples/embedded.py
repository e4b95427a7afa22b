"""Runs all parts from one process: a Kafka and a ZooKeeper, a tracker and a queue.

    python examples/embedded.py

A client takes ten messages, acknowledges nine and forgets one; the tracker redelivers that one. Uses the
servers that KMQ_BOOTSTRAP and KMQ_ZOOKEEPER name (`kmq dev up` prints a line that sets both). If they are not
set, it starts its own. Deletes the queue that it makes.
"""

import contextlib
import logging
import os
import uuid

from kmqpy import KafkaConnection, KafkaStorage, ZooKeeperConnection
from kmqpy.dev import Cluster
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker


def main() -> None:
    # A tracker warns of a queue with one replica, which is all that a small cluster has.
    logging.basicConfig(level=logging.ERROR)
    with contextlib.ExitStack() as stack:
        if "KMQ_BOOTSTRAP" in os.environ:
            connection = KafkaConnection.from_environment()
            zookeeper = ZooKeeperConnection.from_environment()
        else:
            cluster = stack.enter_context(Cluster())
            connection = KafkaConnection(bootstrap=cluster.bootstrap)
            zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)

        name = f"embedded-{uuid.uuid4().hex[:6]}"
        storage = stack.enter_context(KafkaStorage(connection, zookeeper))
        storage.create(name, partitions=2, lease_ms=1_000)
        stack.callback(storage.delete, name)

        stack.enter_context(Tracker(connection, zookeeper, TrackerSettings(queues=(name,), http_port=-1)))
        queue = stack.enter_context(storage.open(name))

        queue.send_many([f"message {number}" for number in range(10)])
        acknowledged: list[str] = []
        for message in queue:
            text = message.body.decode()
            if text == "message 3" and message.attempts == 1:
                print(f"{text}: taken and forgotten")
                continue
            queue.ack(message)
            acknowledged.append(text)
            print(f"{text}: acknowledged at attempt {message.attempts}")
            if len(acknowledged) == 10:
                break
        queue.flush()
    assert sorted(acknowledged) == sorted(f"message {number}" for number in range(10))
    assert acknowledged[-1] == "message 3", "the forgotten message comes last"
    print("all ten messages were processed, one of them after a redelivery")


if __name__ == "__main__":
    main()
