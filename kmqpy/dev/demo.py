"""Runs the demo: kmqpy's main job end to end on real servers, with failing consumers and a killed tracker.

The demo sends messages to a queue of 4 partitions. 3 consumer processes take them, and 2 tracker processes
redeliver. The demo kills one tracker (SIGKILL) when leases on the partitions of this tracker have just ended.
Then it counts, as Jepsen's total-queue test does: each sent message must be acknowledged or dead-lettered, no
other message may be delivered, and no tracker may have made a duplicate.

A *poison* message fails at each delivery, so a tracker dead-letters it at last. A *copy* is a record with
which a tracker redelivers a message.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, wait_until
from kmqpy.dev.cluster import Cluster
from kmqpy.dev.demo_consumer import fate
from kmqpy.errors import ClusterError, DecodeError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.records import message_headers, read_marker
from kmqpy.kafka.message_headers import ORIGINAL_OFFSET
from kmqpy.kafka.partition_reader import bounds, scan
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.message import last_header
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

PARTITIONS = 4
CONSUMERS = 3
TRACKERS = 2
_LEASE_MS = 1_000
_SESSION_MS = 4_000
_SEND_SECONDS = 8.0  # the sender sends its batches over about this time
_STUCK_AFTER_S = 40.0  # seconds without a delivery or dead letter: the demo stops waiting
_ADMIN_TIMEOUT_S = 60.0  # a broker that has just started on a busy machine is slow
_KILL_AFTER_AT_MOST_S = 20.0  # after this time the tracker is killed though no lease has just ended


@dataclass(frozen=True)
class DemoReport:
    """The figures with which a demo ends.

    sent                messages that were sent
    delivered           deliveries to consumers, all attempts
    acknowledged        distinct messages that were acknowledged
    redelivered         copies in the queue
    dead_lettered       dead letters
    duplicates          deliveries of a record that had been delivered before
    tracker_duplicates  copies and dead letters, less the records that trackers moved, by their end markers
    unexpected          deliveries of messages that were never sent
    lost                messages that were sent, but neither acknowledged nor dead-lettered
    wrong_dead_letters  dead letters that are not poison or come twice, and poison without a dead letter
    due_at_kill         records of the killed tracker's partitions that were due at the kill, and copied later
    recovery_seconds    from the kill to the next copy on the killed tracker's partitions; 0.0: no copy came
    seconds             how long the demo took
    """

    sent: int
    delivered: int
    acknowledged: int
    redelivered: int
    dead_lettered: int
    duplicates: int
    tracker_duplicates: int
    unexpected: int
    lost: int
    wrong_dead_letters: int
    due_at_kill: int
    recovery_seconds: float
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the demo found no fault, and each sent message was acknowledged or dead-lettered."""
        broken = self.lost + self.unexpected + self.tracker_duplicates + self.wrong_dead_letters
        return broken == 0 and self.acknowledged + self.dead_lettered == self.sent

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return {**asdict(self), "ok": self.ok}


@dataclass
class Progress:
    """Live figures; the demo, its sender and the threads that read the output of consumers write them."""

    total: int
    sent: int = 0
    delivered: int = 0
    acknowledged: set[int] = field(default_factory=set)
    deliveries: Counter[tuple[int, int]] = field(default_factory=Counter)
    unexpected: int = 0
    dropped: dict[tuple[int, int], float] = field(default_factory=dict)
    """(partition, offset) of a record that a consumer left unacknowledged -> when it did, in monotonic s."""
    dead_lettered: int = 0
    note: str = "starting"

    def count_line(self, line: str) -> None:
        """Count one line of a consumer's output; demo_consumer.py says what it holds."""
        action, partition, offset, _attempts, body = line.split()
        number, place = int(body), (int(partition), int(offset))
        self.delivered += 1
        self.deliveries[place] += 1
        if not 0 <= number < self.total:
            self.unexpected += 1
        elif action == "ack":
            self.acknowledged.add(number)
        elif action == "drop":
            self.dropped[place] = SYSTEM_CLOCK.monotonic()


Show = Callable[[Progress], None]


def run(total: int, show: Show, folder: Path | None = None) -> DemoReport:
    """Run the demo with `total` messages and return its figures; call `show` several times a second.

    If nothing happens for 40 s the demo stops waiting, and its figures show how many messages are missing.
    Raises ClusterError if a server does not start, or if a tracker or consumer ends by itself.
    """
    started = SYSTEM_CLOCK.monotonic()
    with Cluster(keep=folder) as cluster:
        connection = KafkaConnection(bootstrap=cluster.bootstrap)
        queue = QueueSettings(name=f"demo-{uuid.uuid4().hex[:6]}", lease_ms=_LEASE_MS)
        zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
        with Admin(connection, zookeeper, timeout=_ADMIN_TIMEOUT_S) as admin:
            admin.create_queue(queue, partitions=PARTITIONS)
        with connect(zookeeper) as client:
            progress, folder = Progress(total), Path(cluster.folder or ".")
            where = (connection, cluster.zookeeper, queue, Registry(client))
            return _Demo(*where, progress, show, folder).run(started)


@dataclass
class _Demo:
    """Runs one demo: starts trackers and consumers, sends messages, kills a tracker, and counts."""

    _connection: KafkaConnection
    _zookeeper: str
    _queue: QueueSettings
    _registry: Registry
    _progress: Progress
    _show: Show
    _folder: Path
    _processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _killed_at: float = 0.0
    _killed_at_ms: int = 0
    _victim_partitions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._poison = {number for number in range(self._progress.total) if fate(number) == "fail"}

    def run(self, started: float) -> DemoReport:
        with self._trackers() as trackers, self._consumers():
            self._wait_for_owners()
            self._progress.note = "running"
            sender = threading.Thread(target=self._send, daemon=True)
            sender.start()
            self._watch_until(lambda: len(self._progress.acknowledged) >= self._progress.total // 2, "half")
            self._kill(trackers)
            self._watch_until(self._finished, "the end")
            sender.join()
        return self._report(started)

    @contextlib.contextmanager
    def _trackers(self) -> Iterator[dict[str, subprocess.Popen[str]]]:
        with contextlib.ExitStack() as stack:
            servers = ("--bootstrap", self._connection.bootstrap, "--zookeeper", self._zookeeper)
            others = ("--session-timeout", f"{_SESSION_MS}ms", "--http-port", "-1", *servers)
            running = {}
            for number in range(1, TRACKERS + 1):
                own = ("--tracker-id", name := f"tracker-{number}", "--queue", self._queue.name)
                running[name] = stack.enter_context(self._process(name, "-m", "tracker", *own, *others))
            yield running

    @contextlib.contextmanager
    def _consumers(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for number in range(1, CONSUMERS + 1):
                name = f"consumer-{number}"
                own = (self._connection.bootstrap, self._queue.name, str(_LEASE_MS), name)
                process = stack.enter_context(self._process(name, "-m", "kmqpy.dev.demo_consumer", *own))
                follower = threading.Thread(target=self._follow, args=(process,), daemon=True)
                follower.start()
                stack.callback(follower.join)
            try:
                yield
            finally:  # all processes at once; the thread that reads the output of a process waits for its end
                for process in self._processes.values():
                    process.terminate()

    @contextlib.contextmanager
    def _process(self, name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        with (
            (self._folder / f"{name}.log").open("w") as log,
            subprocess.Popen(
                [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=log, text=True
            ) as process,
        ):
            self._processes[name] = process
            try:
                yield process
            finally:
                del self._processes[name]
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()

    def _last_log_line(self, name: str) -> str:
        lines = (self._folder / f"{name}.log").read_text().split("\n")
        return next((line for line in reversed(lines) if line.strip()), "without a word")

    def _follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._progress.count_line(line)

    def _wait_for_owners(self) -> None:
        self._progress.note = "waiting for the trackers"
        self._watch_until(lambda: len(self._registry.owners(self._queue.name)) == PARTITIONS, "the trackers")

    def _send(self) -> None:
        progress, batch = self._progress, max(1, self._progress.total // 200)
        with KmqClient(self._queue, self._connection) as producer:
            for first in range(0, progress.total, batch):
                numbers = range(first, min(first + batch, progress.total))
                progress.sent += len(producer.send_many([str(number) for number in numbers]))
                SYSTEM_CLOCK.sleep(_SEND_SECONDS / 200)

    def _kill(self, trackers: dict[str, subprocess.Popen[str]]) -> None:
        """Kill the tracker with the most partitions, when leases of these partitions have just ended."""
        owners = self._registry.owners(self._queue.name)
        victim = Counter(owners.values()).most_common(1)[0][0]
        self._victim_partitions = sorted(partition for partition, owner in owners.items() if owner == victim)
        wait_until(self._leases_just_ended, _KILL_AFTER_AT_MOST_S, every_s=0.002)
        trackers[victim].kill()
        self._killed_at, self._killed_at_ms = SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.wall_ms()
        self._progress.note = f"killed {victim}, owner of partitions {self._victim_partitions}"

    def _leases_just_ended(self) -> bool:
        """True if a lease of the victim's partitions has ended in the last 20 ms."""
        now = SYSTEM_CLOCK.monotonic()
        ended = (
            now - at - _LEASE_MS / 1000
            for (partition, _), at in self._progress.dropped.copy().items()
            if partition in self._victim_partitions
        )
        return any(0 <= since <= 0.02 for since in ended)

    def _finished(self) -> bool:
        """True if consumers have acknowledged all messages but poison, and all poison is dead-lettered."""
        progress = self._progress
        ends = bounds(self._connection, self._queue.dead_letter_topic, range(PARTITIONS))
        # Offsets count transaction markers too, so this sum only says when to count the dead letters.
        if sum(end for _, end in ends.values()) >= len(self._poison):
            progress.dead_lettered = len(self._dead_letters())
        poison = len(self._poison)
        return len(progress.acknowledged) >= progress.total - poison and progress.dead_lettered >= poison

    def _watch_until(self, condition: Callable[[], bool], what: str) -> None:
        """Show figures until `condition()` is true, or until nothing has changed for _STUCK_AFTER_S.

        Raises ClusterError if a process has ended that the demo did not kill.
        """
        last, changed_at = (-1, -1), SYSTEM_CLOCK.monotonic()
        while not condition():
            self._show(self._progress)
            for name, process in self._processes.items():
                if process.poll() not in (None, -signal.SIGKILL):
                    raise ClusterError(f"the demo's {name} ended: {self._last_log_line(name)}")
            now = SYSTEM_CLOCK.monotonic()
            figures = (self._progress.delivered, self._progress.dead_lettered)
            if figures != last:
                last, changed_at = figures, now
            elif now - changed_at > _STUCK_AFTER_S:
                self._progress.note = f"stuck while waiting for {what}"
                return
            SYSTEM_CLOCK.sleep(0.1)
        self._show(self._progress)

    def _dead_letters(self) -> list[int]:
        found: list[int] = []
        scan(
            self._connection,
            self._queue.dead_letter_topic,
            dict.fromkeys(range(PARTITIONS), 0),
            lambda record: found.append(int(record.value())),
        )
        return found

    def _report(self, started: float) -> DemoReport:
        self._progress.note = "counting"
        self._show(self._progress)
        progress = self._progress
        copies: list[Any] = []
        moved: set[tuple[int, int]] = set()

        def queue_record(record: Any) -> None:
            if last_header(message_headers(record), ORIGINAL_OFFSET) is not None:
                copies.append(record)

        def marker_record(record: Any) -> None:
            with contextlib.suppress(DecodeError):
                marker = read_marker(record)
                is_move = marker.by_tracker and marker.reason not in (codec.ACKNOWLEDGED, codec.TAKEN_LATE)
                if is_move and marker.offset != codec.TICK_OFFSET:
                    moved.update((marker.partition, offset) for offset in marker.offsets())

        starts = dict.fromkeys(range(PARTITIONS), 0)
        scan(self._connection, self._queue.name, starts, queue_record)
        scan(self._connection, self._queue.markers_topic, starts, marker_record)
        dead = self._dead_letters()
        after = [r.timestamp()[1] for r in copies if r.partition() in self._victim_partitions]
        later = [at for at in after if at > self._killed_at_ms]
        return DemoReport(
            sent=progress.sent,
            delivered=progress.delivered,
            acknowledged=len(progress.acknowledged),
            redelivered=len(copies),
            dead_lettered=len(dead),
            duplicates=sum(count - 1 for count in progress.deliveries.values()),
            tracker_duplicates=len(copies) + len(dead) - len(moved),
            unexpected=progress.unexpected,
            lost=len(set(range(progress.sent)) - progress.acknowledged - set(dead)),
            wrong_dead_letters=len(set(dead) ^ self._poison) + len(dead) - len(set(dead)),
            due_at_kill=self._due_at_kill(copies),
            recovery_seconds=round((min(later) - self._killed_at_ms) / 1000, 2) if later else 0.0,
            seconds=round(SYSTEM_CLOCK.monotonic() - started, 1),
        )

    def _due_at_kill(self, copies: list[Any]) -> int:
        """Count the records that were dropped before the kill, due at the kill, and copied after the kill."""
        copied_at: dict[tuple[int, int], int] = {}
        for record in copies:
            headers = message_headers(record)
            origin = int(last_header(headers, ORIGINAL_OFFSET) or b"-1")
            place = (record.partition(), origin)
            copied_at[place] = min(record.timestamp()[1], copied_at.get(place, 2**62))
        return sum(
            partition in self._victim_partitions
            and at + _LEASE_MS / 1000 <= self._killed_at
            and copied_at.get((partition, offset), 0) > self._killed_at_ms
            for (partition, offset), at in self._progress.dropped.items()
        )
