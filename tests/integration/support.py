"""What tests of clients and trackers on real servers share."""

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from confluent_kafka import OFFSET_INVALID, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import NewTopic

from kmqpy.core.clock import wait_until
from kmqpy.dev.ports import free_ports
from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.shared_connections import SharedConnections
from kmqpy.kafka.topics import QueueTopics, Topics
from kmqpy.message import Message
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.chaos.served_page import page_of
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker

LEASE_S = 0.3
SESSION_MS = 2_000
TICK_S = 0.5  # of the embedded ZooKeeper: it ends sessions that much late
TAKER = Path(__file__).with_name("taker.py")


def until(
    condition: Callable[[], Any], timeout: float = 60.0, what: object = "", every: float = 0.03
) -> float:
    """Wait for `condition`; returns the seconds that it took. `what`: shown when it never comes.

    A condition that takes long to answer is asked less often than `every`.
    """
    started = time.monotonic()
    found = wait_until(condition, timeout, every_s=every)
    assert found, f"not within {timeout} s: {what() if callable(what) else what}"
    return time.monotonic() - started


def committed_records(
    connection: KafkaConnection, topic: str, *, topics: Topics | None = None, at_once: bool = False
) -> list[Any]:
    """Every committed record of `topic`, partition by partition.

    Readers see what was committed a moment after the commit has returned, so this waits for what is in
    the log now; `at_once`: not for transactions that are open.
    """
    partitions = range((topics or Topics(connection)).describe([topic])[topic].partitions)
    ends = partition_reader.bounds(connection, topic, partitions, uncommitted=True)
    if not any(end for _, end in ends.values()):
        return []
    found: list[Any] = []

    def all_is_seen() -> bool:
        found.clear()
        reached = partition_reader.scan(connection, topic, dict.fromkeys(partitions, 0), found.append)
        return at_once or all(reached[partition].end >= end for partition, (_, end) in ends.items())

    until(all_is_seen, what=f"a transaction in {topic} stays open")
    return sorted(found, key=lambda record: (record.partition(), record.offset()))


def configure(topics: Topics, topic: str, settings: dict[str, str]) -> None:
    """Change settings of a topic; returns when the broker goes by them, a moment after it has said so."""
    # A broker shows one change before it has carried it out, but not the next one.
    for change in (settings, {"file.delete.delay.ms": str(next(_UNUSED_MS))}):
        topics.configure(topic, change)
        until(lambda wanted=change: wanted.items() <= _config(topics, topic).items())


_UNUSED_MS = itertools.count(60_001)


def _config(topics: Topics, topic: str) -> dict[str, str]:
    return topics.describe([topic], with_config=True)[topic].config


def delete_topic(topics: Topics, topic: str) -> None:
    """Delete a topic; returns when the broker does not show it any more."""
    topics._admin.delete_topics([topic])[topic].result(60)
    until(lambda: not topics.describe([topic]) and topic not in topics.names())


def make_topic(topics: Topics, topic: str, partitions: int = 1) -> None:
    """Make a topic as Kafka's tools do; again, while old brokers are deleting one that they do not show."""

    def made() -> bool:
        topics._create({topic: NewTopic(topic, partitions, 1)})
        return topic in topics.describe([topic])

    until(made)


class LiveQueue:
    """A queue of its own, under a ZooKeeper root of its own (or a given one), and what tests do to it.

    Everything it makes (clients, producers, trackers, processes) is ended with it.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection,
        name: str,
        partitions: int = 1,
        *,
        register: bool = True,
        replication: int | None = None,
        root: str = "",
        **settings: Any,
    ) -> None:
        self.zookeeper = zookeeper
        self.connection = replace(connection, root=root or f"/kmq-{name}")
        settings = {"lease_ms": int(LEASE_S * 1000), "markers": "range", **settings}
        self.settings = QueueSettings(name=name, **settings)
        self.name = name
        self.partitions = partitions
        self._ends = contextlib.ExitStack()
        self._shared = SharedConnections(self.connection, zookeeper)
        self._ends.callback(self._shared.close)
        self.topics = self._shared.topics()
        self.found: QueueTopics = self.topics.create(self.settings, partitions, replication)
        self._raw: Producer | None = None
        if register:
            self.register()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    # --- what takes part ----------------------------------------------------------------------------

    def register(self, partitions: int | None = None) -> None:
        with self.registry() as registry:
            registry.register(self.settings, partitions or self.partitions)

    @contextlib.contextmanager
    def registry(self):
        with connect(self.zookeeper) as zk:
            yield Registry(zk, self.connection.root)

    def client(self, **arguments: Any) -> KmqClient:
        return self._ends.enter_context(KmqClient(self.settings, self.connection, **arguments))

    def producer(self, **arguments: Any) -> KmqClient:
        return self._ends.enter_context(KmqClient(self.settings, self.connection, **arguments))

    def tracker(self, *, wait: bool = True, **settings: Any) -> Tracker:
        """A tracker in this process, running; `wait`: until it redelivers for all partitions."""
        settings = {"session_timeout_ms": SESSION_MS, "offset_interval_ms": 200, "http_port": -1, **settings}
        tracker = Tracker(self.connection, self.zookeeper, TrackerSettings(**settings)).start()
        self._ends.callback(tracker.stop)
        if wait:
            owned = self.partitions * len(self.settings.lanes())
            until(lambda: len(tracker.owned()) == owned, what=tracker.problems)
        return tracker

    def tracker_process(self, **settings: Any) -> "TrackerProcess":
        """A tracker in a process of its own, which a test may kill or pause."""
        return self._ends.enter_context(TrackerProcess(self, settings))

    def taker_process(self, *arguments: str) -> "Taker":
        """A client in a process of its own; see taker.py."""
        return self._ends.enter_context(Taker(self, arguments))

    # --- topics, as they are ------------------------------------------------------------------------

    def send(self, *bodies: bytes | str, **arguments: Any) -> list[str]:
        """Send by the settings that the queue was made with."""
        known = QueueSettings.stored(asdict(self.settings))  # else kmq.queues is read each time
        with KmqClient(known, self.connection, shared=self._shared) as producer:
            return producer.send_many(bodies, **{"partition": 0, **arguments})

    def records(self, topic: str | None = None, *, at_once: bool = False) -> list[Any]:
        """See committed_records; default: those of the queue."""
        return committed_records(self.connection, topic or self.name, topics=self.topics, at_once=at_once)

    def copies(self, *, at_once: bool = False) -> Counter[str]:
        """How often each body stands in the queue topic."""
        return Counter(record.value().decode() for record in self.records(at_once=at_once))

    def configure(self, topic: str, settings: dict[str, str]) -> None:
        """Change settings of one of its topics."""
        configure(self.topics, topic, settings)

    def committed(self, partition: int = 0) -> int:
        """The group's offset; below 0 while there is none."""
        place = TopicPartition(self.name, partition)
        reader = librdkafka.new_consumer(self.connection, {"group.id": self.settings.consumer_group})
        try:
            return reader.committed([place], timeout=10)[0].offset
        except KafkaException as exception:  # the coordinator is not there yet, again
            if not exception.args[0].retriable():
                raise
            return OFFSET_INVALID
        finally:
            reader.close()

    def started(self, partition: int = 0) -> set[int]:
        """The offsets that have a start marker."""
        return self.marked(Op.TAKE, partition)

    def ended(self, partition: int = 0) -> set[int]:
        """The offsets that have an end marker."""
        return self.marked(Op.END, partition)

    def marked(self, op: Op, partition: int) -> set[int]:
        """The offsets that have a marker with this operation."""
        records = self.records(self.settings.markers_topic)
        found = (codec.decode(r.key(), r.value(), r.headers()) for r in records)
        those = (marker for marker in found if (marker.partition, marker.op) == (partition, op))
        return {offset for marker in those for offset in marker.offsets() if offset != codec.TICK_OFFSET}

    def dead_letters(self) -> list[Any]:
        return self.records(self.settings.dead_letter_topic)

    def append(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes]] = (),
        *,
        partition: int = 0,
        timestamp_ms: int = 0,
        topic: str | None = None,
    ) -> int:
        """Write any record to the markers topic (or another); returns its offset."""
        report = self._append(
            key, value, headers, partition=partition, timestamp_ms=timestamp_ms, topic=topic
        )
        until(lambda: self._producer().flush(0.05) == 0)
        return report[0]

    def _producer(self) -> Producer:
        if self._raw is None:
            self._raw = Producer({"bootstrap.servers": self.connection.bootstrap, "linger.ms": 1})
        return self._raw

    def _append(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]],
        *,
        partition: int,
        timestamp_ms: int = 0,
        topic: str | None = None,
    ) -> list[int]:
        """Its result holds the offset once that is known."""
        at: list[int] = []

        def delivered(error: Any, record: Any) -> None:
            assert error is None, error
            at.append(record.offset())

        self._producer().produce(
            topic or self.settings.markers_topic,
            value,
            key,
            partition,
            headers=list(headers),
            timestamp=timestamp_ms,
            on_delivery=delivered,
        )
        return at

    def fill(self, count: int, partition: int = 0) -> None:
        """Send so many empty messages, quickly."""
        for first in range(0, count, 10_000):
            batch = [{"value": b""}] * min(10_000, count - first)
            assert self._producer().produce_batch(self.name, batch, partition) == len(batch)
            until(lambda: self._producer().flush(0.05) == 0)

    def mark(self, marker: Marker, **where: Any) -> int:
        """Write a marker to the partition of its message; returns its markers offset."""
        return self.mark_all([marker], **where)[0]

    def mark_all(self, all_of_them: Iterable[Marker], **where: Any) -> list[int]:
        """Write markers; returns their markers offsets, in order within a partition."""
        reports = [
            self._append(*codec.encode(marker), **{"partition": marker.partition, **where})
            for marker in all_of_them
        ]
        until(lambda: self._producer().flush(0.05) == 0)
        return [report[0] for report in reports]


@contextlib.contextmanager
def stopped_after(tracker: Tracker):
    """Stop it at the end of the block rather than at the end of the test."""
    try:
        yield tracker
    finally:
        tracker.stop()


def value(tracker: Tracker, queue: str, metric: str) -> float:
    """A counter of a tracker in this process, for example `redelivered`."""
    return tracker.metrics.registry.get_sample_value(f"kmq_{metric}_total", {"queue": queue}) or 0.0


def collect(
    client: KmqClient,
    count: int,
    timeout: float = 60.0,
    *,
    ack: bool = False,
    max_messages: int = 100,
    lease: float | None = None,
) -> list[Message]:
    """Receive until there are `count` messages; fails when they do not come."""
    found: list[Message] = []
    deadline = time.monotonic() + timeout
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages in {timeout} s"
        got = client.receive(max_messages, wait=0.2, lease=lease)
        if ack and got:
            client.ack(*got)
        found += got
    return found


class Collector(threading.Thread):
    """Takes and acknowledges in a thread of its own, until stop()."""

    def __init__(self, client: KmqClient) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.messages: list[Message] = []
        self._stopping = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stopping.is_set():
            got = self.client.receive(20, wait=0.1)
            self.client.ack(*got)
            self.messages += got

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def nothing_comes(client: KmqClient, for_s: float) -> None:
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        assert client.receive(wait=0.1) == []


def bodies(messages: Iterable[Message]) -> list[str]:
    return [message.body.decode() for message in messages]


@dataclass(frozen=True)
class Verdict:
    """Jepsen's total-queue checker."""

    lost: set[str]
    unexpected: set[str]
    duplicates: dict[str, int]


def total_queue(sent: Iterable[str], delivered: Iterable[str]) -> Verdict:
    """What was sent (and confirmed) against what was delivered; duplicates are counted apart."""
    wanted, found = Counter(sent), Counter(delivered)
    return Verdict(
        lost=wanted.keys() - found.keys(),
        unexpected=found.keys() - wanted.keys(),
        duplicates={body: times - 1 for body, times in found.items() if times > 1},
    )


class Process:
    """A child process; killed at the end. It writes to its parent's stderr."""

    def __init__(self, command: list[str], stdout: int | None = None) -> None:
        self._process = subprocess.Popen(command, stdout=stdout, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGCONT)
        self._process.kill()
        self._process.communicate()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: the process cleans up nothing."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout: float = 60.0) -> int:
        return self._process.wait(timeout)


class TrackerProcess(Process):
    """`python -m tracker`."""

    def __init__(self, queue: LiveQueue, settings: dict[str, Any]) -> None:
        (self.port,) = free_ports(1)
        settings = {
            "session-timeout": f"{SESSION_MS}ms",
            "offset-interval": "200ms",
            "http-port": self.port,
            "log-level": "ERROR",
            "bootstrap": queue.connection.bootstrap,
            "zookeeper": queue.zookeeper.hosts,
            "root": queue.connection.root,
            **settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        super().__init__([sys.executable, "-m", "tracker", *options])

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an answer; status 0 while it does not listen."""
        return page_of(self.port, path)

    def value(self, metric: str) -> float:
        """The sum of a metric over its labels."""
        lines = (line for line in self.get("/metrics")[1].splitlines() if line.startswith(f"kmq_{metric}{{"))
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def wait_until_it_owns(self, partitions: int, timeout: float = 60.0) -> float:
        def owns() -> bool:
            assert self.running
            return self.value("owned_partitions") == partitions <= self.value("takeovers_total")

        return until(owns, timeout, lambda: self.get("/readyz"))


class Taker(Process):
    """taker.py: takes messages and prints them."""

    def __init__(self, queue: LiveQueue, arguments: Iterable[str]) -> None:
        connection = queue.connection
        where = json.dumps({"bootstrap": connection.bootstrap, "kafka": dict(connection.kafka)})
        command = [sys.executable, str(TAKER), where, queue.settings.to_json().decode()]
        super().__init__([*command, *arguments], stdout=subprocess.PIPE)
        self.taken: list[dict[str, Any]] = []

    def read(self, count: int) -> list[dict[str, Any]]:
        """The next `count` messages that it took; fewer when it ends before."""
        found: list[dict[str, Any]] = []
        stdout = self._process.stdout
        while len(found) < count and (line := stdout.readline()):
            found.append(json.loads(line))
        self.taken += found
        return found
