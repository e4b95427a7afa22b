"""Sender, client and tracker in three processes, as they would run in production.

    python examples/standalone.py            all three, against KMQ_BOOTSTRAP and KMQ_ZOOKEEPER
    python examples/standalone.py send QUEUE
    python examples/standalone.py receive QUEUE

The client's first process is killed while it holds messages; the tracker redelivers them to the next.
"""

import os
import subprocess
import sys
import uuid

from kmqpy import Connection, KmqClient, KmqProducer, QueueSettings
from kmqpy.admin import Admin

MESSAGES = 100


def connection() -> Connection:
    return Connection(
        bootstrap=os.environ.get("KMQ_BOOTSTRAP", "127.0.0.1:9092"),
        zookeeper=os.environ.get("KMQ_ZOOKEEPER", "127.0.0.1:2181"),
    )


def settings(name: str) -> QueueSettings:
    # Clients and trackers must agree on these; trackers read them from the registry.
    return QueueSettings(name=name, redeliver_after_ms=1_500)


def send(name: str) -> None:
    with KmqProducer(settings(name), connection()) as producer:
        producer.send_many([f"{number}" for number in range(MESSAGES)])


def receive(name: str, crash: bool) -> None:
    done: set[str] = set()
    with KmqClient(settings(name), connection()) as client:
        for message in client:
            if crash and len(done) == MESSAGES // 2:
                client.flush()
                os.kill(os.getpid(), 9)  # holds what it took and did not acknowledge
            client.ack(message)
            done.add(message.body.decode())
            print(message.body.decode(), flush=True)
            if message.body == b"last":
                return


def main() -> None:
    name = f"standalone-{uuid.uuid4().hex[:6]}"
    with Admin(connection()) as admin:
        admin.create_queue(settings(name), partitions=1)
    where = connection()
    tracker = subprocess.Popen(
        [
            *(sys.executable, "-m", "tracker", "--queue", name, "--http-port", "-1"),
            *("--bootstrap", where.bootstrap, "--zookeeper", where.zookeeper),
        ]
    )
    me = [sys.executable, __file__]
    try:
        subprocess.run([*me, "send", name], check=True)
        first = subprocess.run(
            [*me, "receive", name, "crash"], stdout=subprocess.PIPE, text=True, check=False
        )
        print(f"the first client was killed after {len(first.stdout.split())} messages")
        second = subprocess.Popen([*me, "receive", name], stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        done = set(first.stdout.split())
        for line in second.stdout:
            done.add(line.strip())
            if len(done) == MESSAGES:
                with KmqProducer(settings(name), where) as producer:
                    producer.send("last")
        second.wait()
    finally:
        tracker.terminate()
        tracker.wait()
    assert done >= {f"{number}" for number in range(MESSAGES)}, "a message was lost"
    print(f"all {MESSAGES} messages were processed")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["send", queue]:
            send(queue)
        case ["receive", queue, *crash]:
            receive(queue, bool(crash))
        case _:
            main()
