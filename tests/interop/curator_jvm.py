"""Runs the real Curator 5.9.0, whose jars come with PySpark, in a process of its own.

    python tests/interop/curator_jvm.py put     '{"zookeeper": …, "path": …, "kind": "queue", "items": …}'
    python tests/interop/curator_jvm.py consume '{"zookeeper": …, "path": …, "kind": "queue", "locks": …}'
    python tests/interop/curator_jvm.py lead    '{"zookeeper": …, "path": …}'
    python tests/interop/curator_jvm.py select  '{"zookeeper": …, "path": …}'

`put` puts each list of items in one znode (with `extras[i]`, the id, priority or time of the i-th), and ends.
`consume` says each item as a line of JSON until stdin ends, and waits for `pause_ms` after each; an item that
is "bad" fails. `lead` takes part in an election by the lock under LeaderSelector, `select` by LeaderSelector
itself; each says when it leads.
"""

import json
import sys
import threading
import time
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


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


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


def interfaces(pause_ms: int = 0) -> tuple[Any, Any, Any]:
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
            say(item=str(item))
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


def put(options: dict[str, Any]) -> None:
    client = started_client(options["zookeeper"])
    serializer, _, items_of = interfaces()
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


def consume(options: dict[str, Any]) -> None:
    client = started_client(options["zookeeper"])
    serializer, consumer, _ = interfaces(options.get("pause_ms", 0))
    queue = queue_of(client, options, consumer(), serializer())
    queue.start()
    say(started=True)
    sys.stdin.read()
    queue.close()
    client.close()


def lead(options: dict[str, Any]) -> None:
    client = started_client(options["zookeeper"])
    latch = jpype.JClass("org.apache.curator.framework.recipes.locks.InterProcessMutex")(
        client, options["path"]
    )
    latch.acquire()
    say(leads=True)
    sys.stdin.read()
    latch.release()
    client.close()


def select(options: dict[str, Any]) -> None:
    client = started_client(options["zookeeper"])
    ended = threading.Event()
    leader = "org.apache.curator.framework.recipes.leader."

    @JImplements(leader + "LeaderSelectorListener")
    class Listener:
        @JOverride
        def takeLeadership(self, client):  # noqa: N802
            say(leads=True)
            ended.wait()

        @JOverride
        def stateChanged(self, client, state):  # noqa: N802
            pass

    selector = jpype.JClass(leader + "LeaderSelector")(client, options["path"], Listener())
    selector.start()
    sys.stdin.read()
    ended.set()
    selector.close()
    client.close()


if __name__ == "__main__":
    start_jvm("-XX:TieredStopAtLevel=1", "-Xmx128m")
    {"put": put, "consume": consume, "lead": lead, "select": select}[sys.argv[1]](json.loads(sys.argv[2]))
    sys.stdout.flush()
    jpype.JClass("java.lang.Runtime").getRuntime().halt(0)
