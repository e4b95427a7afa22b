"""The published JVM kmq, `com.softwaremill.kmq:core_2.12:0.2`, in this process through JPype.

Its classes are described in tests/interop/jvm.py, where its jars are pinned too. Python calls the JVM for
each batch, not for each message: method handles of `KmqClient.processed` acknowledge the messages of a batch
within the JVM.
"""

import sys
from collections.abc import Iterable
from typing import Any

import jpype

from benchmarks.children import ROOT
from benchmarks.peers.works import WINDOW
from kmqpy.dev.jars import jar_set
from kmqpy.dev.java import find_java
from kmqpy.kafka.settings import QueueSettings

_POLL_MS = 100
_SILENCE_MS = 50  # the default of kmqpy's tracker


def _start_jvm() -> None:
    home = find_java().resolve().parent.parent
    library = next(path for path in home.rglob("*jvm.*") if path.suffix in {".so", ".dylib", ".dll"})
    jpype.startJVM(
        str(library),
        "-Xmx2g",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
        classpath=[str(jar) for jar in jar_set("kmq-jvm", ROOT / "tests" / "interop" / "jars.json")],
    )


def _config(options: dict[str, Any]) -> Any:
    queue = QueueSettings.from_json(options["queue"].encode())
    return jpype.JClass("com.softwaremill.kmq.KmqConfig")(
        queue.name,
        queue.markers_topic,
        queue.consumer_group,
        f"{queue.consumer_group}-redelivery",
        queue.lease_ms,
        _SILENCE_MS,
    )


class JvmClient:
    def __init__(self, options: dict[str, Any]) -> None:
        _start_jvm()
        # Only stamped bodies are read: each has to cross from the JVM to Python, which would slow a drain.
        self._stamped = "warm_up_s" in options
        kmq_client = jpype.JClass("com.softwaremill.kmq.KmqClient")
        deserializer = jpype.JClass("org.apache.kafka.common.serialization.ByteArrayDeserializer").class_
        clients = jpype.JClass("com.softwaremill.kmq.KafkaClients")(options["bootstrap"])
        self._client = kmq_client(_config(options), clients, deserializer, deserializer, _POLL_MS)
        self._collections = jpype.JClass("java.util.Collections")
        self._window = jpype.JClass("java.util.ArrayList")()
        # Consumers made of method handles: forEach(self._processed) never comes back to Python.
        handles = jpype.JClass("java.lang.invoke.MethodHandles").publicLookup()
        method_type = jpype.JClass("java.lang.invoke.MethodType")
        anything = jpype.JClass("java.lang.Object").class_
        processed = handles.findVirtual(
            kmq_client.class_,
            "processed",
            method_type.methodType(
                jpype.JClass("java.util.concurrent.Future").class_,
                jpype.JClass("org.apache.kafka.clients.consumer.ConsumerRecord").class_,
            ),
        ).bindTo(self._client)
        add = handles.findVirtual(
            jpype.JClass("java.util.ArrayList").class_,
            "add",
            method_type.methodType(jpype.JClass("java.lang.Boolean").TYPE, anything),
        ).bindTo(self._window)
        proxies = jpype.JClass("java.lang.invoke.MethodHandleProxies")
        consumer = jpype.JClass("java.util.function.Consumer").class_
        self._processed = proxies.asInterfaceInstance(consumer, processed)
        self._collect = proxies.asInterfaceInstance(consumer, add)
        producer = kmq_client.class_.getDeclaredField("markerProducer")
        producer.setAccessible(True)
        self._producer = producer.get(self._client)

    def take(self) -> "_Batch":
        return _Batch(self._client.nextBatch())

    def bodies(self, batch: "_Batch") -> Iterable[bytes]:
        return [bytes(record.value()) for record in batch.records] if self._stamped else []

    def ack(self, batch: "_Batch", *, shuffled: bool) -> None:
        if not shuffled:
            batch.records.forEach(self._processed)
            return
        batch.records.forEach(self._collect)
        if self._window.size() >= WINDOW:
            self._finish_window()

    def confirm(self) -> None:
        self._finish_window()
        self._producer.flush()

    def _finish_window(self) -> None:
        self._collections.shuffle(self._window)
        self._window.forEach(self._processed)
        self._window.clear()


class _Batch:
    def __init__(self, records: Any) -> None:
        self.records = records
        self._count = int(records.count())

    def __len__(self) -> int:
        return self._count


def connect(options: dict[str, Any]) -> JvmClient:
    return JvmClient(options)


def track(options: dict[str, Any]) -> dict[str, bool]:
    """Run the redelivery tracker of the JVM kmq until stdin ends."""
    _start_jvm()
    clients = jpype.JClass("com.softwaremill.kmq.KafkaClients")(options["bootstrap"])
    tracker = jpype.JClass("com.softwaremill.kmq.RedeliveryTracker").start(clients, _config(options))
    sys.stdout.write('{"started": true}\n')
    sys.stdout.flush()
    sys.stdin.read()
    tracker.close()
    return {"stopped": True}


def leave() -> None:
    """End the process: Kafka's and Akka's threads would keep the JVM waiting."""
    sys.stdout.flush()
    jpype.JClass("java.lang.Runtime").getRuntime().halt(0)
