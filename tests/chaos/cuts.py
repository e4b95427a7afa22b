"""Cuts logs while messages are sent, taken and redelivered: rules R39 and R40 of docs/rules.md.

Three brokers are killed together, as by a power cut. Of each, the logs of the queue, its markers, its dead
letters, their markers, and the group's offsets are cut at places of its own; or, for a real power cut, all
logs are cut back to what the broker had flushed. Then the brokers start, and elect leaders that may lack what
others have. Senders, consumers and trackers live through it; in every other power cut consumers and trackers
are new. In the end, whatever stands in the queue's log must have been delivered and acknowledged, and nothing
may be in flight. Of a power cut it is told how much was lost of what had been confirmed.
"""

import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from kmqpy.core import logs
from kmqpy.core.clock import wait_until
from kmqpy.dev import Cluster
from kmqpy.errors import DecodeError, KmqError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers.records import read_marker
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import CutLog, cut_logs, cut_power, share

QUEUE = QueueSettings(name="cuts", lease_ms=1_000, max_redeliveries=5, late_acks=True)
_PARTITIONS = 3
_QUIET_S = 90.0
_TELL_S = 15.0
"""A cut that is told within this time, of messages that were taken meanwhile, has these taken again."""
_BETWEEN = 300
"""So many messages are sent between two cuts, at least."""
_SETTINGS = {
    "offsets.topic.num.partitions": "3",
    "default.replication.factor": "3",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
}
_AT_RANDOM = {"unclean.leader.election.enable": "true", "transaction.state.log.min.isr": "1"}
_OF_POWER = {
    "min.insync.replicas": "2",
    "transaction.state.log.min.isr": "2",
    # Else the checkpoint is written after 30 s, and each minute: what was flushed would be cut, too.
    "log.initial.task.delay.ms": "100",
    "log.flush.offset.checkpoint.interval.ms": "100",
}
_CHECKPOINT_S = 1.0
"""What was confirmed so long before a power cut is in the checkpoint, if it was flushed."""


class _Load:
    """Two senders and three consumers in threads; a fifth of the messages is not acknowledged at first."""

    def __init__(self, connection: KafkaConnection) -> None:
        self.connection = connection
        self.delivered: Counter[bytes] = Counter()
        self.acknowledged: set[bytes] = set()
        self.sent = 0
        self.confirmed: dict[bytes, float] = {}
        self.again = 0
        self.errors: list[str] = []
        self._renewals = 0
        self._sending, self._receiving = threading.Event(), threading.Event()
        self._dice = random.Random(7)
        self._threads = [
            threading.Thread(target=self._surviving, args=(work, *arguments), daemon=True)
            for work, *arguments in (
                (self._send, 0),
                (self._send, 1),
                (self._consume, "range"),
                (self._consume, "jvm"),
                (self._consume, "range"),
            )
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def renew(self) -> None:
        """All who consume close their clients and open new ones."""
        self._renewals += 1

    def stop_sending(self) -> None:
        self._sending.set()

    def stop(self) -> None:
        self._sending.set()
        self._receiving.set()
        for thread in self._threads:
            thread.join(30)

    def _surviving(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self.errors.append(f"{work.__name__}{arguments}: {error!r}")
            raise

    def _send(self, sender: int) -> None:
        number = 0
        with KmqClient(QUEUE, self.connection) as producer:
            while not self._sending.wait(0.05):
                bodies = [f"{sender}-{number + index}" for index in range(10)]
                number += 10
                try:
                    producer.send_many(bodies)
                    self.sent += 10
                    self.confirmed |= dict.fromkeys(map(str.encode, bodies), time.monotonic())
                except KmqError:
                    pass  # unknown: they may stand in the log

    def _consume(self, markers: str) -> None:
        settings = QueueSettings.stored({**asdict(QUEUE), "markers": markers})
        while not self._receiving.is_set():
            with suppress(Unavailable), KmqClient(settings, self.connection) as client:
                self._consume_with(client)

    def _consume_with(self, client: KmqClient) -> None:
        renewals = self._renewals
        while self._renewals == renewals and not self._receiving.is_set():
            try:
                messages = client.receive(20, wait=0.2)
            except KmqError as error:
                self.errors.append(f"receive: {error!r}")
                continue
            for message in messages:
                self.delivered[message.body] += 1
                self.again += message.body in self.acknowledged
            kept = [one for one in messages if one.attempts > 1 or self._dice.random() > 0.2]
            self._receiving.wait(self._dice.random() * 0.2)
            client.ack(*kept)
            self.acknowledged.update(one.body for one in kept)


class _Trackers:
    """Two of them. One that ends is started again, as a supervisor does: ZooKeeper may be too slow for it."""

    def __init__(self, cluster: Cluster, out: Path) -> None:
        self._env = {**os.environ, "KMQ_BOOTSTRAP": cluster.bootstrap, "KMQ_ZOOKEEPER": cluster.zookeeper}
        self._log = (out / "trackers.log").open("w")
        self._stopping = threading.Event()
        self._keepers = [threading.Thread(target=self._keep, args=(index,)) for index in range(2)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for keeper in self._keepers:
            keeper.start()
        return self

    def _keep(self, index: int) -> None:
        command = [sys.executable, "-m", "tracker", "--http-port", "0"]
        while not self._stopping.is_set():
            process = subprocess.Popen(command, env=self._env, stdout=self._log, stderr=self._log)
            self._processes[index] = process
            while process.poll() is None and not self._stopping.wait(0.2):
                pass
        process.terminate()
        process.wait(30)

    def renew(self) -> None:
        """Kill them with -9; others start."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for keeper in self._keepers:
            keeper.join()
        self._log.close()


def _cut(cluster: Cluster, dice: random.Random) -> dict[tuple[str, int], CutLog]:
    topics = [QUEUE.name, QUEUE.markers_topic, QUEUE.dead_letter_topic, f"{QUEUE.dead_letter_topic}__markers"]
    logs = [(topic, partition) for topic in topics for partition in range(_PARTITIONS)]
    logs += [("__consumer_offsets", partition) for partition in range(3)]
    chosen = [log for log in logs if dice.random() < 0.5]
    return cut_logs(cluster, {log: share(1 - 0.3 * dice.random() ** 3) for log in chosen}, (1, 2, 3))


def run(count: int, seed: int, out: Path, tell: Callable[[str], None], flush: int | None = None) -> list[str]:
    """Cut logs so many times; returns what was wrong in the end.

    With `flush` the power is cut: brokers flush after so many records of a log, as flush.messages says;
    0: when they like to.
    """
    dice = random.Random(seed)
    settings = _SETTINGS | (_AT_RANDOM if flush is None else _OF_POWER)
    if flush:
        settings["log.flush.interval.messages"] = str(flush)
    tell(f"seed {seed}")
    handler = logging.FileHandler(out / "clients.log", "w")
    handler.setFormatter(logs.TextFormatter())
    logging.getLogger("kmqpy").handlers = [handler]
    logging.getLogger("kmqpy").setLevel("INFO")
    logging.getLogger("kmqpy").propagate = False
    with Cluster(brokers=3, broker_settings=settings) as cluster:
        connection = KafkaConnection(bootstrap=cluster.bootstrap)
        zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
        with Admin(connection, zookeeper) as admin:
            admin.create_queue(QUEUE, partitions=_PARTITIONS, replication=3)
        load = _Load(connection)
        cuts: list[float] = []
        with _Trackers(cluster, out) as trackers:

            def renew() -> None:
                if len(cuts) % 2 == 0:
                    load.renew()
                    trackers.renew()

            load.start()
            for index in range(count):
                enough = load.sent + _BETWEEN
                wait_until(lambda enough=enough: load.sent >= enough, 30.0)
                time.sleep(dice.uniform(0.0, 3.0))
                cuts.append(time.monotonic())
                done = _cut(cluster, dice) if flush is None else cut_power(cluster, (1, 2, 3), renew)
                lost = {f"{topic}-{p}": one.former_end - one.end for (topic, p), one in done.items()}
                tell(f"cut {index + 1}: {load.sent} sent; { ({k: v for k, v in lost.items() if v}) }")
            load.stop_sending()
            with Admin(connection, zookeeper) as admin:
                quiet = wait_until(lambda: _is_quiet(admin), _QUIET_S, every_s=1.0)
                time.sleep(_TELL_S)
                quiet = quiet and wait_until(lambda: _is_quiet(admin), _QUIET_S, every_s=1.0)
                found = admin.stats(QUEUE)
            load.stop()
        there, problems = _judge(connection, load, out / "evidence.txt")
        if flush is not None:
            lost = [at for body, at in load.confirmed.items() if body not in there]
            early = sum(not any(0 < cut - at < _CHECKPOINT_S for cut in cuts) for at in lost)
            tell(
                f"{len(load.confirmed)} sends were confirmed, {len(lost)} of them lost, {early} of these "
                f"confirmed more than a second before a cut; {load.again} messages came again that had been "
                "acknowledged"
            )
            if flush == 1 and early:
                problems.append(f"flushed and lost: {early}")
        if not quiet:
            problems.append(f"not quiet after {_QUIET_S} s: {found}")
        return problems


def _is_quiet(admin: Admin) -> bool:
    try:
        found = admin.stats(QUEUE)
    except KmqError:
        return False
    return found.depth == 0 and found.in_flight == 0


def _judge(connection: KafkaConnection, load: _Load, evidence: Path) -> tuple[Set[bytes], list[str]]:
    """The bodies in the queue's log, and what is wrong with them."""
    everything = dict.fromkeys(range(_PARTITIONS), 0)
    records: dict[bytes, list[Any]] = defaultdict(list)
    partition_reader.scan(connection, QUEUE.name, everything, lambda one: records[one.value()].append(one))
    there = records.keys()
    problems = list(load.errors)
    for what, bodies in (
        ("in the log, and never delivered", there - load.delivered.keys()),
        ("in the log, and never acknowledged", there - load.acknowledged),
    ):
        if bodies:
            problems.append(f"{len(bodies)} {what}: {sorted(bodies)[:10]}")
    if problems:
        wrong = {
            (one.partition(), one.offset()) for body in there - load.acknowledged for one in records[body]
        }
        _write_evidence(connection, evidence, wrong)
    return there, problems


def _write_evidence(connection: KafkaConnection, out: Path, wrong: set[tuple[int, int]]) -> None:
    """Write down the records at these places and their neighbours, and all markers of their partitions."""
    partitions = dict.fromkeys({partition for partition, _ in wrong}, 0)
    near = {(partition, offset + step) for partition, offset in wrong for step in (-1, 0, 1)}
    with out.open("w") as file:

        def tell(record: Any) -> None:
            if (record.partition(), record.offset()) in near:
                place = f"{record.partition()}@{record.offset()}"
                file.write(
                    f"message {place} epoch {record.leader_epoch()}: {record.value()!r} {record.headers()}\n"
                )

        def tell_marker(record: Any) -> None:
            place, at_ms = f"{record.partition()}@{record.offset()}", record.timestamp()[1]
            with suppress(DecodeError):
                marker = read_marker(record)
                file.write(
                    f"marker {place} epoch {record.leader_epoch()} at {at_ms}: {marker} {record.headers()}\n"
                )

        partition_reader.scan(connection, QUEUE.name, partitions, tell)
        partition_reader.scan(connection, QUEUE.markers_topic, partitions, tell_marker)
