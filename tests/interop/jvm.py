"""Runs the published JVM library, com.softwaremill.kmq:core_2.12:0.2, in a process of its own.

    python tests/interop/jvm.py client  '{"bootstrap": …, "queue": …, "lease_ms": …, "take": 30}'
    python tests/interop/jvm.py tracker '{"bootstrap": …, "queue": …, "lease_ms": …}'

What a reader needs to know of its classes:

KmqConfig(msgTopic, markerTopic, msgConsumerGroupId, redeliveryConsumerGroupId, msgTimeoutMs,
    useNowForRedeliverDespiteNoMarkerSeenForMs): names and ms. This version knows neither a redelivery
    count nor dead letters.
KafkaClients(bootstrap): makes consumers and producers. Consumers are read_uncommitted.
KmqClient(config, clients, keyDeserializer, valueDeserializer, pollTimeoutMs): nextBatch() polls, writes a
    start marker for each record, waits for them, commits the offsets, returns the records;
    processed(record) sends the end marker and returns a Future.
RedeliveryTracker.start(clients, config): starts actors (Akka) that read the markers topic as a consumer
    group and append copies (key and value, no headers) to the queue topic, then end markers. close()
    stops them. It stores no offsets: after a restart it reads the whole markers topic.
MarkerKey, StartMarker, EndMarker: serialize() gives the bytes on the wire.

Its own kafka-clients (0.10.2) can't talk to today's brokers; 3.9 is the last that has what it calls. The
jars are pinned in jars.json beside this file. To pin them anew, from here:

    python -c 'from pathlib import Path; from kmqpy.dev.jars import relock
    relock(["kmq-jvm"], Path("jars.json"))'

Each thing that happens is a line of JSON on stdout. `client` ends by itself, `tracker` at the end of its
stdin.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jpype

from kmqpy.dev.jars import jar_set
from kmqpy.dev.java import find_java
from kmqpy.kafka.settings import QueueSettings

LOCK = Path(__file__).with_name("jars.json")
POLL_MS = 100


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def start_jvm() -> None:
    home = find_java().resolve().parent.parent
    library = next(path for path in home.rglob("*jvm.*") if path.suffix in {".so", ".dylib", ".dll"})
    jpype.startJVM(
        str(library),
        "-XX:TieredStopAtLevel=1",
        "-Xmx256m",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        classpath=[str(jar) for jar in jar_set("kmq-jvm", LOCK)],
    )


def jvm_config(options: dict[str, Any]) -> Any:
    queue = QueueSettings(name=options["queue"])
    use_now_after_ms = 200
    return jpype.JClass("com.softwaremill.kmq.KmqConfig")(
        queue.name,
        queue.markers_topic,
        queue.consumer_group,
        f"{queue.consumer_group}-redelivery",
        options["lease_ms"],
        use_now_after_ms,
    )


def run_client(options: dict[str, Any]) -> None:
    """Take `take` messages; acknowledge those whose value is an even number."""
    deserializer = jpype.JClass("org.apache.kafka.common.serialization.ByteArrayDeserializer").class_
    marker_key = jpype.JClass("com.softwaremill.kmq.MarkerKey")
    start = jpype.JClass("com.softwaremill.kmq.StartMarker")(options["lease_ms"])
    end = jpype.JClass("com.softwaremill.kmq.EndMarker").INSTANCE
    clients = jpype.JClass("com.softwaremill.kmq.KafkaClients")(options["bootstrap"])
    client = jpype.JClass("com.softwaremill.kmq.KmqClient")(
        jvm_config(options), clients, deserializer, deserializer, POLL_MS
    )
    taken = 0
    while taken < options["take"]:
        for record in client.nextBatch():
            taken += 1
            value = bytes(record.value()).decode()
            acknowledged = int(value) % 2 == 0
            if acknowledged:
                client.processed(record).get()
            say(
                value=value,
                partition=int(record.partition()),
                offset=int(record.offset()),
                acknowledged=acknowledged,
                marker_key=bytes(marker_key.fromRecord(record).serialize()).hex(),
                start_marker=bytes(start.serialize()).hex(),
                end_marker=bytes(end.serialize()).hex(),
            )
    client.close()


def run_tracker(options: dict[str, Any]) -> None:
    """Redeliver until stdin ends."""
    clients = jpype.JClass("com.softwaremill.kmq.KafkaClients")(options["bootstrap"])
    tracker = jpype.JClass("com.softwaremill.kmq.RedeliveryTracker").start(clients, jvm_config(options))
    say(started=True)
    sys.stdin.read()
    tracker.close()


if __name__ == "__main__":
    start_jvm()
    {"client": run_client, "tracker": run_tracker}[sys.argv[1]](json.loads(sys.argv[2]))
    # Kafka's and Akka's threads would keep the JVM waiting.
    sys.stdout.flush()
    jpype.JClass("java.lang.Runtime").getRuntime().halt(0)
