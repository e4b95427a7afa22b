"""A process that forks while its clients are at work, and prints what became of both, as a line of JSON.

    forker.py <scenario> <connections> <queue settings>

The child tries every call, closes everything and ends like any Python program. The parent goes on.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from kmqpy.errors import KmqError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, build_connections
from kmqpy.kafka.topics import Topics
from kmqpy.message import Message
from kmqpy.worker.asyncio import AsyncQueue
from kmqpy.worker.worker import Worker
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker

CHILD_TIMEOUT_S = 60.0
Calls = dict[str, Callable[[], object]]


def outcome_of(call: Callable[[], object]) -> str:
    try:
        call()
    except KmqError as error:
        return type(error).__name__
    return "returned"


def outcomes(calls: Calls) -> dict[str, str]:
    return {name: outcome_of(call) for name, call in calls.items()}


def in_child(calls: Calls, finish: Callable[[], None] = lambda: None) -> dict[str, str]:
    """The outcomes of `calls` in a forked child that ends with the end of Python, and how it ended."""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(tell, json.dumps(outcomes(calls)).encode())
        finish()
        sys.exit(0)
    deadline = time.monotonic() + CHILD_TIMEOUT_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"child": "hangs"}
        time.sleep(0.02)
    return {**json.loads(os.read(told, 65_536) or b"{}"), "child": str(ended[1])}


def take(client: KmqClient | KmqClient, count: int) -> list[Message]:
    found: list[Message] = []
    deadline = time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        found += client.receive(count - len(found), wait=0.5, lease=60)
    return found


def client(
    connection: KafkaConnection, _zookeeper: ZooKeeperConnection, settings: QueueSettings
) -> dict[str, Any]:
    """Five children beside a client that takes and acknowledges; the last makes a client of its own."""
    children = []
    with KmqClient(settings, connection) as client:
        messages = take(client, 5)
        receipt = messages.pop().receipt
        for message in messages:
            iterator = iter(client)
            calls: Calls = {
                "ack": lambda message=message: client.ack(message),  # type: ignore[misc]
                "ack by receipt": lambda: client.ack(receipt),
                "nack": lambda: client.nack(receipt),
                "extend": lambda: client.extend(receipt, lease=1),
                "dead_letter": lambda: client.dead_letter(receipt),
                "receive": lambda: client.receive(wait=0),
                "next": lambda iterator=iterator: next(iterator),  # type: ignore[misc]
                "flush": client.flush,
                "in_flight": lambda: client.leased,
                "partitions": lambda: client.partitions,
                "close": client.close,
            }
            client.ack(message)  # on its way while the process forks
            children.append(in_child(calls))

        def with_a_client_of_its_own() -> None:
            with KmqClient(settings, connection) as own:
                own.ack(receipt, confirmed=True)

        children.append(in_child({"own client": with_a_client_of_its_own, "close": client.close}))
        more = take(client, 2)
        client.ack(*more, confirmed=True)
    return {"children": children, "parent": len(messages) + len(more)}


def producer(
    connection: KafkaConnection, _zookeeper: ZooKeeperConnection, settings: QueueSettings
) -> dict[str, Any]:
    """Also as multiprocessing forks."""
    with KmqClient(settings, connection) as producer:
        producer.send("before")
        calls: Calls = {"send": lambda: producer.send("lost"), "close": producer.close}
        children = [in_child(calls)]
        context = multiprocessing.get_context("fork")
        tell = context.SimpleQueue()
        process = context.Process(target=lambda: tell.put(outcomes(calls)))
        process.start()
        children.append(tell.get())
        process.join(CHILD_TIMEOUT_S)
        children[-1]["child"] = str(process.exitcode)
        producer.send("after")
    return {"children": children}


def queue(
    connection: KafkaConnection, zookeeper: ZooKeeperConnection, settings: QueueSettings
) -> dict[str, Any]:
    """The kafka: queue, the same over asyncio, and a worker that has been started."""
    handled: list[Message] = []
    with KmqClient(settings, connection, zookeeper) as queue:
        worker = Worker(queue, handled.append, lease=60)
        worker.start()
        idle = Worker(queue, handled.append)
        over_asyncio = AsyncQueue(queue)
        asyncio.run(over_asyncio.send("before"))
        while not handled:
            time.sleep(0.01)
        calls: Calls = {
            "send": lambda: queue.send("lost"),
            "ack": lambda: queue.ack(handled[0]),
            "size": queue.size,
            "peek": queue.peek,
            "redrive": queue.dead_letters.redrive,
            "release_all": queue.release_all,
            "asyncio": lambda: asyncio.run(over_asyncio.ack(handled[0])),
            "idle worker": idle.run,
            "stop": worker.stop,
            "idle stop": idle.stop,
            "asyncio close": lambda: asyncio.run(over_asyncio.close()),
            "close": queue.close,
        }
        children = [in_child(calls)]
        queue.send("after")
        while len(handled) < 2:
            time.sleep(0.01)
        worker.stop()
        asyncio.run(over_asyncio.close())
    return {"children": children, "handled": [one.body.decode() for one in handled]}


def admin(
    connection: KafkaConnection, zookeeper: ZooKeeperConnection, settings: QueueSettings
) -> dict[str, Any]:
    """Administration, which keeps connections to Kafka and ZooKeeper."""
    with (
        Admin(connection, zookeeper) as admin,
        KafkaDeadLetters(settings, connection) as letters,
        connect(zookeeper) as zk,
    ):
        topics = Topics(connection)

        def work() -> list[object]:
            return [
                admin.describe_queue(settings.name).partitions,
                letters.list(),
                zk.exists(connection.root).czxid,
                topics.brokers(),
            ]

        before = work()
        calls: Calls = {
            "describe": lambda: admin.describe_queue(settings.name),
            "create": lambda: admin.create_queue(settings),
            "doctor": admin.doctor,
            "list": letters.list,
            "redrive": letters.redrive,
            "purge": letters.purge,
            "topics": topics.names,
            "brokers": topics.brokers,
            "zookeeper": lambda: zk.exists("/"),
            "letters close": letters.close,
            "close": admin.close,
        }
        # What a program that leaves its `with` blocks in the child does.
        children = [in_child(calls, finish=zk.stop)]
        return {"children": children, "same": before == work()}


def tracker(
    connection: KafkaConnection, zookeeper: ZooKeeperConnection, settings: QueueSettings
) -> dict[str, Any]:
    """The parent's tracker redelivers what is nacked after the child has ended."""
    idle = Tracker(connection, zookeeper, TrackerSettings(session_timeout_ms=2_000, http_port=-1))
    with (
        Tracker(connection, zookeeper, TrackerSettings(session_timeout_ms=2_000, http_port=-1)) as tracker,
        KmqClient(settings, connection) as client,
    ):
        while not tracker.owned():
            time.sleep(0.01)
        calls: Calls = {
            "run": tracker.run,
            "start": tracker.start,
            "owned": tracker.owned,
            "problems": tracker.problems,
            "idle run": idle.run,
            "stop": tracker.stop,
            "idle stop": idle.stop,
        }
        children = [in_child(calls)]
        client.nack(*take(client, 1))
        (again,) = take(client, 1)
        client.ack(again, confirmed=True)
        return {"children": children, "attempts": again.attempts, "owned": len(tracker.owned())}


def main() -> None:
    scenario, where, settings = sys.argv[1:]
    connections = build_connections(json.loads(where))
    found = globals()[scenario](*connections, QueueSettings.from_json(settings.encode()))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
