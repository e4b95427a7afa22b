"""Runs the real Curator 5.9.0, whose jars come with PySpark, in a process of its own.

A line of JSON on stdin opens a session, `{"session": 0, "mode": …, "zookeeper": …, "path": …}`, or ends it,
`{"session": 0}`. Sessions have clients and threads of their own. Each line on stdout is what one of them
says; the last is `"ended": true`, or `"failed"` and the traceback. The modes, with their further options:

put      puts each list of `items` in one znode (with `extras[i]`, the id, priority or time of the i-th) of a
         queue of a `kind`, and ends
consume  says each item of a queue of a `kind`, with `locks` or without, and waits for `pause_ms` after each;
         an item that is "bad" fails
simple   offers `items` to a SimpleDistributedQueue, takes as many as `takes` says, and says each
shard    puts `items` by a QueueSharder, says the paths when it knows as many queues as `queues` says, and
         with `consumes` says each item
lead     takes part in an election by the lock under LeaderSelector, and says when it leads
select   the same by LeaderSelector itself
"""

import json
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import jpype
import pyspark
from jpype import JImplements, JOverride

from kmqpy.dev.java import find_java

JARS = Path(pyspark.__file__).parent / "jars"
NEEDED = (
    "curator-", "zookeeper-", "guava-", "slf4j-api-", "log4j-", "netty-all", "netty-buffer", "netty-codec-",
    "netty-common", "netty-handler", "netty-resolver", "netty-transport-", "metrics-core", "snappy-java",
)  # fmt: skip
QUEUES = "org.apache.curator.framework.recipes.queue."


class Session:
    """What one of those that the process serves says, and when it is to end."""

    _writing = threading.Lock()

    def __init__(self, number: int) -> None:
        self._number = number
        self.to_end = threading.Event()

    def say(self, **what: Any) -> None:
        with self._writing:
            sys.stdout.write(json.dumps({"session": self._number, **what}) + "\n")
            sys.stdout.flush()

    def run(self, mode: str, options: dict[str, Any]) -> None:
        try:
            MODES[mode](self, options)
        except Exception:  # whatever it is, the test shows it
            self.say(failed=traceback.format_exc())
        else:
            self.say(ended=True)


def start_jvm(*options: str) -> None:
    home = find_java().resolve().parent.parent
    library = next(path for path in home.rglob("*jvm.*") if path.suffix in {".so", ".dylib", ".dll"})
    jpype.startJVM(
        str(library),
        *options,
        "-Dlog4j2.level=OFF",
        "-Dzookeeper.sasl.client=false",
        classpath=[str(jar) for jar in JARS.glob("*.jar") if jar.name.startswith(NEEDED)],
    )


def started_client(address: str) -> Any:
    retry = jpype.JClass("org.apache.curator.retry.RetryOneTime")(100)
    factory = jpype.JClass("org.apache.curator.framework.CuratorFrameworkFactory")
    client = factory.newClient(address, 4_000, 4_000, retry)
    client.start()
    return client


def interfaces(session: Session, pause_ms: int = 0) -> tuple[Any, Any, Any]:
    @JImplements(QUEUES + "QueueSerializer")
    class Serializer:
        @JOverride
        def serialize(self, item):
            return jpype.JArray(jpype.JByte)(str(item).encode())

        @JOverride
        def deserialize(self, data):
            return jpype.JString(bytes(data).decode())

    @JImplements(QUEUES + "QueueConsumer")
    class Consumer:
        @JOverride
        def consumeMessage(self, item):  # noqa: N802
            session.say(item=str(item))
            time.sleep(pause_ms / 1000)
            if str(item) == "bad":
                raise jpype.JClass("java.lang.IllegalStateException")("bad")

        @JOverride
        def stateChanged(self, client, state):  # noqa: N802
            pass

    @JImplements(QUEUES + "MultiItem")
    class Items:
        def __init__(self, items):
            self._items = iter(items)

        @JOverride
        def nextItem(self):  # noqa: N802
            item = next(self._items, None)
            return None if item is None else jpype.JString(item)

    return Serializer, Consumer, Items


def queue_of(client: Any, options: dict[str, Any], consumer: Any, serializer: Any) -> Any:
    builder = jpype.JClass(QUEUES + "QueueBuilder").builder(client, consumer, serializer, options["path"])
    builder = builder.putInBackground(False)  # noqa: FBT003 - Java's
    if options.get("locks"):
        builder = builder.lockPath(options["locks"])
    kind = options["kind"]
    if kind == "priority":
        return builder.buildPriorityQueue(0)
    return {"queue": builder.buildQueue, "id": builder.buildIdQueue, "delay": builder.buildDelayQueue}[kind]()


def put(session: Session, options: dict[str, Any]) -> None:
    client = started_client(options["zookeeper"])
    serializer, _, items_of = interfaces(session)
    queue = queue_of(client, options, None, serializer())
    queue.start()
    numbers = {"priority": jpype.JInt, "delay": jpype.JLong, "id": jpype.JString}
    for number, items in enumerate(options["items"]):
        if options["kind"] == "queue":
            queue.putMulti(items_of(items))
        else:
            extra = numbers[options["kind"]](options["extras"][number])
            queue.put(jpype.JObject(jpype.JString(items[0])), extra)
    queue.close()
    client.close()


def consume(session: Session, options: dict[str, Any]) -> None:
    client = started_client(options["zookeeper"])
    serializer, consumer, _ = interfaces(session, options.get("pause_ms", 0))
    queue = queue_of(client, options, consumer(), serializer())
    queue.start()
    session.say(started=True)
    session.to_end.wait()
    queue.close()
    client.close()


def simple(session: Session, options: dict[str, Any]) -> None:
    client = started_client(options["zookeeper"])
    queue = jpype.JClass(QUEUES + "SimpleDistributedQueue")(client, options["path"])
    for item in options["items"]:
        queue.offer(jpype.JArray(jpype.JByte)(item.encode()))
    for _ in range(options["takes"]):
        session.say(item=bytes(queue.take()).decode())
    client.close()


def shard(session: Session, options: dict[str, Any]) -> None:
    client = started_client(options["zookeeper"])
    serializer, consumer, _ = interfaces(session)
    made = jpype.JClass(QUEUES + "QueueBuilder")

    @JImplements(QUEUES + "QueueAllocator")
    class Allocator:
        @JOverride
        def allocateQueue(self, client, path):  # noqa: N802
            takes = consumer() if options["consumes"] else None
            return made.builder(client, takes, serializer(), path).putInBackground(False).buildQueue()  # noqa: FBT003

    policies = jpype.JClass(QUEUES + "QueueSharderPolicies").builder()
    policies = policies.newQueueThreshold(options["threshold"]).thresholdCheckMs(100).build()
    sharder = jpype.JClass(QUEUES + "QueueSharder")(
        client, Allocator(), options["path"], options["path"] + "-leader", policies
    )
    sharder.start()
    for item in options["items"]:
        sharder.getQueue().put(jpype.JObject(jpype.JString(item)))
    while sharder.getShardQty() < options["queues"]:
        time.sleep(0.02)
    session.say(paths=sorted(map(str, sharder.getQueuePaths())))
    session.to_end.wait()
    sharder.close()
    client.close()


def lead(session: Session, options: dict[str, Any]) -> None:
    client = started_client(options["zookeeper"])
    latch = jpype.JClass("org.apache.curator.framework.recipes.locks.InterProcessMutex")(
        client, options["path"]
    )
    latch.acquire()
    session.say(leads=True)
    session.to_end.wait()
    latch.release()
    client.close()


def select(session: Session, options: dict[str, Any]) -> None:
    client = started_client(options["zookeeper"])
    leader = "org.apache.curator.framework.recipes.leader."

    @JImplements(leader + "LeaderSelectorListener")
    class Listener:
        @JOverride
        def takeLeadership(self, client):  # noqa: N802
            session.say(leads=True)
            session.to_end.wait()

        @JOverride
        def stateChanged(self, client, state):  # noqa: N802
            pass

    selector = jpype.JClass(leader + "LeaderSelector")(client, options["path"], Listener())
    selector.start()
    session.to_end.wait()
    selector.close()
    client.close()


MODES = {"put": put, "consume": consume, "simple": simple, "shard": shard, "lead": lead, "select": select}


def serve() -> None:
    sessions: dict[int, Session] = {}
    for line in sys.stdin:
        options = json.loads(line)
        number, mode = options.pop("session"), options.pop("mode", None)
        if mode is None:
            sessions[number].to_end.set()
            continue
        sessions[number] = Session(number)
        threading.Thread(target=sessions[number].run, args=(mode, options), daemon=True).start()


if __name__ == "__main__":
    start_jvm("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx128m")
    serve()
