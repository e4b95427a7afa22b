"""Logs with a damaged batch that their broker had flushed. On a Kafka of this file's own.

All queues are prepared, then their logs are damaged together, and each test looks at one of them.
"""

import os
from collections.abc import Iterator

import pytest
from support import LiveQueue, bodies, collect, nothing_comes, until

from kmqpy.dev import Cluster
from kmqpy.errors import KmqError
from kmqpy.kafka import damaged_logs, hanging, partition_reader
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Finding, Kind
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import damage, log_folder

COUNT = 20
AT = 12
FORMAT, LENGTH, OFFSET = 16, 8, 1
"""Where these stand in a batch. The checksum covers none of them."""
HARMED: dict[str, int | None] = {"bits": None, "format": FORMAT}
ZEROS: tuple[str, ...] = ()
if "KMQ_TEST_ALL" in os.environ:
    HARMED |= {"length": LENGTH, "offset": OFFSET}
    ZEROS = ("zeros",)
MARKERS = {"markers": None, "lies": OFFSET}


def sent(queue: LiveQueue, partition: int = 0) -> list[str]:
    """Bodies of 600 bytes: behind the damage, the broker knows from its index where the log goes on."""
    return [f"{queue.name}-{partition}-{number}".ljust(600) for number in range(COUNT)]


class Scene:
    """Queues of two partitions, by the harm to partition 0, or to its markers."""

    def __init__(self, cluster: Cluster) -> None:
        where = KafkaConnection(bootstrap=cluster.bootstrap), ZooKeeperConnection(hosts=cluster.zookeeper)
        self.broker = cluster.broker()
        names, lease_ms = (*HARMED, *MARKERS, *ZEROS), 600_000
        self.queues = {name: LiveQueue(*where, name, 2, root="/kmq", lease_ms=lease_ms) for name in names}
        for queue in self.queues.values():
            for partition in (0, 1):
                for body in sent(queue, partition):  # each in a batch of its own
                    queue.append(None, body.encode(), topic=queue.name, partition=partition)
        for name in MARKERS:
            for number in range(COUNT):
                self.queues[name].mark(Marker(0, number, Op.TAKE, 1))
        self.broker.stop()
        self.undo = [damage(log_folder(cluster, name), AT, at) for name, at in HARMED.items()]
        self.undo += [damage(log_folder(cluster, f"{name}__markers"), AT, at) for name, at in MARKERS.items()]
        self.undo += [damage(log_folder(cluster, name), AT, zeros=True) for name in ZEROS]
        self.broker.start(180)

    def mend(self) -> None:
        self.broker.stop()
        for undo in self.undo:
            undo()
        self.broker.start(180)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Cluster() as cluster:
        made = Scene(cluster)
        yield made
        for queue in made.queues.values():
            queue.__exit__()


def damage_found(queue: LiveQueue, *, reads_logs: bool = False) -> list[Finding]:
    with Admin(queue.connection, queue.zookeeper) as admin:
        found = admin.doctor(queue.name, reads_logs=reads_logs)
    return [one for one in found if one.kind is Kind.DAMAGED_LOG]


@pytest.mark.breadth
def test_the_doctor_survives_what_ends_each_process_that_reads_it_and_reads_ahead_when_told(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damaged_logs, "_SILENT_S", 1.0)
    (found,) = damage_found(scene.queues["zeros"])
    assert f"zeros, partition 0: nobody can read on from offset {AT}: nothing comes" in found.what
    assert damage_found(scene.queues["bits"]) == []
    (found,) = damage_found(scene.queues["bits"], reads_logs=True)
    assert f"bits, partition 0: nobody can read on from offset {AT}: MessageSet" in found.what


def test_messages_before_the_damage_and_of_other_partitions_come_and_it_is_named(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hanging, "LOOK_EVERY_S", 0.3)
    monkeypatch.setattr(damaged_logs, "_SILENT_S", 3.0)
    clients = {}
    for name in HARMED:
        queue = scene.queues[name]
        clients[name] = queue.client()
        came = bodies(collect(clients[name], COUNT + AT))
        assert sorted(came) == sorted(sent(queue)[:AT] + sent(queue, 1))
        until(lambda name=name: nothing_comes(clients[name], 0.5) or (0, AT) in damage_named(caplog))
        until(lambda queue=queue: queue.committed() == AT, every=0.5)
        (found,) = damage_found(queue)
        assert f"{name}, partition 0: nobody can read on from offset {AT}" in found.what
        caplog.clear()
    queue = scene.queues["markers"]
    with pytest.raises(KmqError, match=r"partition 0: MessageSet at offset 12 .* failed CRC"):
        partition_reader.scan(queue.connection, "markers__markers", {0: 0}, lambda _: None)
    tracker = queue.tracker(wait=False)
    until(lambda: len(tracker.owned()) == 2 * len(scene.queues) - 2, what=tracker.problems)
    for why in ("MessageSet at offset 12", "a batch says offset 45"):
        until(lambda why=why: why in str(tracker.problems()), what=tracker.problems)

    scene.mend()

    for name, client in clients.items():
        assert bodies(collect(client, COUNT - AT)) == sent(scene.queues[name])[AT:]
    until(lambda: len(tracker.owned()) == 2 * len(scene.queues), what=tracker.problems)
    until(lambda: queue.copies() == dict.fromkeys(sent(queue), 2) | dict.fromkeys(sent(queue, 1), 1))


def damage_named(caplog: pytest.LogCaptureFixture) -> set[tuple[int, int]]:
    return {(one.partition, one.offset) for one in caplog.records if "damaged log" in one.getMessage()}
