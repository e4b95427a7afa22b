"""kmqpy and the published JVM kmq on the same topics; jvm.py says what its classes do."""

import contextlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK, wait_until
from kmqpy.errors import ConfigError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Kind
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM_ID
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.message_headers import ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TIMESTAMP
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.session import connect
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker

pytestmark = pytest.mark.interop

PARTITIONS = 3
COUNT = 30
LEASE_MS = 2_000
JVM = Path(__file__).with_name("jvm.py")


@pytest.fixture
def connection(cluster: Any, queue_name: str) -> KafkaConnection:
    return KafkaConnection(bootstrap=cluster.bootstrap, root=f"/kmq-{queue_name}")


@pytest.fixture
def queue(connection: KafkaConnection, queue_name: str) -> QueueSettings:
    settings = QueueSettings(name=queue_name, lease_ms=LEASE_MS)
    Topics(connection).create(settings, PARTITIONS)
    return settings


def jvm(mode: str, connection: KafkaConnection, queue: QueueSettings) -> "subprocess.Popen[str]":
    options = {"bootstrap": connection.bootstrap, "queue": queue.name, "lease_ms": LEASE_MS, "take": COUNT}
    return subprocess.Popen(
        [sys.executable, str(JVM), mode, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def jvm_client(connection: KafkaConnection, queue: QueueSettings) -> list[dict[str, Any]]:
    """Let the JVM client take COUNT messages and acknowledge the even ones; returns what it says."""
    with jvm("client", connection, queue) as process:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    return [json.loads(line) for line in output.splitlines()]


@contextlib.contextmanager
def jvm_tracker(connection: KafkaConnection, queue: QueueSettings) -> Iterator[None]:
    with jvm("tracker", connection, queue) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"started": True}
        yield
        process.communicate(timeout=60)
        assert process.returncode == 0


def send(connection: KafkaConnection, queue: QueueSettings, first: int, count: int) -> None:
    with KmqClient(queue, connection) as producer:
        for partition in range(PARTITIONS):
            producer.send_many(
                [b"%d" % n for n in range(first, first + count) if n % PARTITIONS == partition],
                key=b"key-%d" % partition,
                headers=[("trace", b"t-1"), ("trace", b"t-2")],
                partition=partition,
            )


def records_of(connection: KafkaConnection, topic: str) -> list[Any]:
    records: list[Any] = []
    partition_reader.scan(connection, topic, dict.fromkeys(range(PARTITIONS), 0), records.append)
    return records


def in_flight(connection: KafkaConnection, queue: QueueSettings) -> set[tuple[int, int]]:
    """What our trackers and stats take for in flight, from all markers in the topic."""
    states = [InFlight() for _ in range(PARTITIONS)]
    for record in records_of(connection, queue.markers_topic):
        marker = codec.decode(record.key(), record.value(), record.headers())
        assert marker.partition == record.partition()
        states[marker.partition].apply(marker, record.offset(), record.timestamp()[1])
    return {(partition, entry.offset) for partition, state in enumerate(states) for entry in state}


def take(client: KmqClient, done: Callable[[list[Any]], bool], timeout_s: float) -> list[Any]:
    """What `client` gets until `done`, or until the time is over."""
    taken: list[Any] = []
    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
    while not done(taken) and SYSTEM_CLOCK.monotonic() < deadline:
        taken += client.receive(wait=0.2, lease=LEASE_MS / 1000)
    return taken


def test_markers_of_the_jvm_client_are_ours_byte_for_byte(connection, queue):
    send(connection, queue, 0, COUNT)
    taken = jvm_client(connection, queue)
    assert sorted(int(one["value"]) for one in taken) == list(range(COUNT))

    expected: Counter[tuple[int, bytes, bytes]] = Counter()
    for one in taken:
        place = (one["partition"], one["offset"])
        start, end = Marker(*place, Op.TAKE, LEASE_MS), Marker(*place, Op.END)
        written = [start, end] if one["acknowledged"] else [start]
        for marker in written:
            key, value, headers = codec.encode(marker)
            assert headers == []
            assert key.hex() == one["marker_key"]
            assert value.hex() == one["end_marker" if marker.op is Op.END else "start_marker"]
            # Where our tracker looks for them: in the partition of the same number.
            expected[marker.partition, key, value] += 1
    found = records_of(connection, queue.markers_topic)
    assert Counter((record.partition(), record.key(), record.value()) for record in found) == expected
    assert in_flight(connection, queue) == {
        (one["partition"], one["offset"]) for one in taken if not one["acknowledged"]
    }


@pytest.mark.breadth
def test_our_client_goes_on_where_the_jvm_client_stopped(connection, queue):
    """Same group; its commits say nothing of markers, so ours takes the committed offset as it is."""
    send(connection, queue, 0, COUNT)
    jvm_client(connection, queue)
    send(connection, queue, COUNT, 6)
    with KmqClient(queue, connection) as client:
        taken = take(client, lambda taken: len(taken) >= 6, 10)
        taken += take(client, bool, 0.5)
    assert sorted(int(message.body) for message in taken) == list(range(COUNT, COUNT + 6))


def test_the_jvm_tracker_redelivers_what_our_client_does_not_acknowledge(connection, queue):
    with jvm_tracker(connection, queue), KmqClient(queue, connection) as client:
        send(connection, queue, 0, COUNT)
        first = take(client, lambda taken: len(taken) >= COUNT, 10)
        assert sorted(int(message.body) for message in first) == list(range(COUNT))
        client.ack(*(message for message in first if int(message.body) % 2 == 0), confirmed=True)

        again = take(client, lambda taken: len(taken) >= COUNT // 2, 15)
        client.ack(*again, confirmed=True)
        again += take(client, bool, LEASE_MS / 1000 + 0.5)

    assert sorted(int(message.body) for message in again) == list(range(1, COUNT, 2))
    assert in_flight(connection, queue) == set()
    # This JVM version counts nothing and drops headers.
    assert {(message.attempts, message.headers) for message in again} == {(1, ())}
    places = {int(message.body): (message.partition, message.key) for message in first}
    assert all(places[int(message.body)] == (message.partition, message.key) for message in again)


def test_our_tracker_redelivers_what_the_jvm_client_does_not_acknowledge(connection, zookeeper, queue):
    with connect(zookeeper) as zk:
        Registry(zk, connection.root).register(queue, PARTITIONS)
    send(connection, queue, 0, COUNT)
    originals = {int(record.value()): record for record in records_of(connection, queue.name)}

    with Tracker(connection, zookeeper, TrackerSettings(session_timeout_ms=2_000, http_port=-1)):
        jvm_client(connection, queue)
        wait_until(lambda: not in_flight(connection, queue), 15, every_s=0.1)
        SYSTEM_CLOCK.sleep(LEASE_MS / 1000 + 0.5)  # a second redelivery would come now

    copies = [
        record
        for record in records_of(connection, queue.name)
        if record.offset() > originals[int(record.value())].offset()
    ]
    assert sorted(int(record.value()) for record in copies) == list(range(1, COUNT, 2))
    for record in copies:
        original = originals[int(record.value())]
        assert (record.partition(), record.key()) == (original.partition(), original.key())
        assert [header for header in record.headers() if header[0] != CLAIM_ID] == [
            *original.headers(),
            (ORIGINAL_PARTITION, str(original.partition()).encode()),
            (ORIGINAL_OFFSET, str(original.offset()).encode()),
            (ORIGINAL_TIMESTAMP, str(original.timestamp()[1]).encode()),
            ("kmq-ancestors", b"%d:%d" % (original.partition(), original.offset())),
            (queue.redelivery_count_header, codec.encode_count(1)),
        ]
    assert in_flight(connection, queue) == set()


@pytest.mark.breadth
def test_jvm_programs_are_seen_where_they_could_not_read_range_markers(connection, zookeeper, queue):
    def kinds() -> set[Kind]:
        found = {one.kind for one in admin.doctor(queue.name)}
        return found & {Kind.RANGES_WITH_JVM_CLIENTS, Kind.RANGES_WITH_JVM_TRACKER}

    with contextlib.ExitStack() as ends, Admin(connection, zookeeper) as admin:
        client = ends.enter_context(jvm("client", connection, queue))
        ends.callback(client.kill)
        with jvm_tracker(connection, queue):
            wait_until(lambda: queue.markers_topic in Topics(connection).members(), 30, every_s=0.2)
            with pytest.raises(ConfigError, match=rf"markers: .*{queue.consumer_group}-redelivery reads"):
                admin.create_queue(queue)
            admin.create_queue(replace(queue, markers="jvm"))
            with pytest.raises(ConfigError, match=r"markers: .* as trackers of the JVM library do"):
                admin.alter_queue(queue.name, markers="range")
            wait_until(lambda: queue.name in Topics(connection).members(), 30, every_s=0.2)
            assert kinds() == set()
            with connect(zookeeper) as zk:  # as if the tracker had been started later
                Registry(zk, connection.root).register(queue, PARTITIONS)
            assert kinds() == {Kind.RANGES_WITH_JVM_TRACKER}
        wait_until(lambda: queue.markers_topic not in Topics(connection).members(), 60, every_s=0.2)
        assert kinds() == {Kind.RANGES_WITH_JVM_CLIENTS}
        admin.alter_queue(queue.name, markers="jvm")
        admin.alter_queue(queue.name, markers="range")
