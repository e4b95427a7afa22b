"""Negative controls on real servers: a scenario made for each safeguard, with it and without it.

With the safeguard the checker must find nothing, without it something: each scenario brings about the very
moment that the safeguard is for, so nothing is left to chance.
"""

import os
import signal
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kmqpy.dev.cluster import Cluster
from kmqpy.kafka import partition_reader
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.group_commits import group_commits
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.message import Message
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

from .children import ChildTask
from .journal import Journal, Tail, lanes_of, places
from .judge import Seen, Verdict, judge
from .observe import Times, keep_evidence, read_topics, take_in
from .proxy import Gate, Proxy
from .requests import Api, Hold, Holder, Request, Way
from .stage import Failed, Slot, TrackerSlot, is_stopped, make_queue, until

_COUNT = 40
_LEASE_MS = 600
_SESSION_MS = 2_000
_WAIT_S = 90.0
_LATE_S, _LANDED_S = 2.0, 0.3
"""How late the EndTxn is; how long after it the last of the next transaction follows."""
_PRODUCED_LAST = 3
"""Of a transaction: claim, copies, end markers. What is sent before its first AddPartitionsToTxn is
no part of it, but a tick."""
_HOST = b"127.0.0.1"


def run_with_cluster(name: str, out: Path, *, sabotaged: bool) -> list[str]:
    """Run a scenario on servers of its own; what the checker found."""
    with Cluster() as cluster:
        connection = KafkaConnection(bootstrap=cluster.bootstrap)
        zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
        return run(name, connection, zookeeper, out, sabotaged=sabotaged).problems


def run(
    name: str,
    connection: KafkaConnection,
    zookeeper: ZooKeeperConnection,
    out: Path,
    *,
    sabotaged: bool,
    changes: str = "",
) -> Verdict:
    """Run a scenario on given servers; raises Failed for an unknown one, or one that gets stuck.

    changes  what else is changed in its trackers and consumers, see `sabotage`
    """
    if name not in SCENARIOS:
        raise Failed(f"--control {name}: there is none of that name; choose from {', '.join(SCENARIOS)}")
    folder = out / f"{name}-{uuid.uuid4().hex[:6]}"
    folder.mkdir(parents=True)
    with ExitStack() as ends:
        scene = _Scene(
            *(replace(connection, root=f"/kmq-{folder.name}"), zookeeper, folder, ends),
            *(name, sabotaged, changes),
        )
        SCENARIOS[name](scene)
        return scene.judge()


@dataclass
class _Scene:
    """A queue of one partition with messages in it, and who takes part."""

    connection: KafkaConnection
    zookeeper: ZooKeeperConnection
    folder: Path
    ends: ExitStack
    control: str
    sabotaged: bool
    also: str

    def __post_init__(self) -> None:
        late_acks, late_ends = self.control == "no-late-look", self.control == "late-end-txn"
        self.queue = QueueSettings(
            name=f"chaos-{self.folder.name}",
            lease_ms=_LEASE_MS,
            max_redeliveries=None if late_ends else 3,
            late_acks=late_acks,
        )
        make_queue(self.connection, self.zookeeper, self.queue, 1)
        self.seen = Seen(max_in_flight=_COUNT, interruptions=1)
        self.send(range(_COUNT))

    def send(self, numbers: Sequence[int]) -> None:
        self.seen.attempted.update(numbers)
        with KmqClient(self.queue, self.connection) as producer:
            producer.send_many([str(number) for number in numbers])
        self.seen.sent.update(numbers)

    def changes(self, *more: str) -> str:
        """What is changed in a process: `more`, and the safeguard taken out if it is to be."""
        return ",".join(filter(None, [*more, self.also, self.control if self.sabotaged else ""]))

    def tracker(
        self, name: str, sabotage: str = "", connection: KafkaConnection | None = None
    ) -> TrackerSlot:
        slot = TrackerSlot(
            name,
            connection or self.connection,
            self.zookeeper.hosts,
            self.folder / f"{name}.log",
            session_ms=_SESSION_MS,
            sabotage=sabotage,
        )
        self._begin(slot)
        return slot

    def consumer(self, name: str, sabotage: str = "", *, drop: int = 0, lease_ms: int = _LEASE_MS) -> Slot:
        task = ChildTask(
            name=name,
            journal=str(self.folder / f"{name}.journal"),
            bootstrap=self.connection.bootstrap,
            queue=replace(self.queue, lease_ms=lease_ms).to_json().decode(),
            kafka={"session.timeout.ms": "6000"},
            drop=drop,
            nack=0,
            poison=0,
            sabotage=sabotage,
        )
        slot = Slot(name, lambda _: task.command("consumer"), self.folder / f"{name}.log")
        self._begin(slot)
        return slot

    def _begin(self, slot: Slot) -> None:
        slot.start()
        self.ends.callback(slot.kill)

    def all_are_taken(self) -> None:
        until(lambda: self._delivered() == _COUNT, _WAIT_S, "all messages are taken")

    def rest(self) -> None:
        """Wait until nothing is left to do; one more message, behind all others, is finished by then."""
        self.send([_COUNT])
        self.consumer("acks")
        self.until_empty()
        time.sleep(1.0)  # for copies too many

    def until_empty(self) -> None:
        """Wait until no message waits or is in flight; some may be lost by then."""
        with Admin(self.connection, self.zookeeper) as admin:

            def is_empty() -> bool:
                stats = admin.stats(self.queue)
                return stats.depth == stats.in_flight == 0

            until(is_empty, _WAIT_S, "the queue is empty")

    def _delivered(self) -> int:
        """How many of the messages consumers were given."""
        return len({fields[-1] for fields in Tail(self.folder).lines() if fields[0] == "d"})

    def committed(self) -> int:
        ids = Topics(self.connection).check(self.queue).ids
        commit = group_commits(self.connection, self.queue, [0], ids).get(0)
        return 0 if commit is None else commit.offset

    def stored_offset(self) -> int | None:
        """The markers offset from which the next tracker would read; None until a tracker has stored one."""
        with connect(self.zookeeper) as client:
            stored = Registry(client, self.connection.root).offsets(self.queue.name).get(0)
        return None if stored is None else stored.offset

    def copies(self) -> int:
        bounds = partition_reader.bounds(self.connection, self.queue.name, [0])
        return bounds[0][1] - _COUNT

    def judge(self) -> Verdict:
        take_in(Tail(self.folder).lines(), self.seen, Times())
        read_topics(self.connection, self.queue, 1, self.seen, Times())
        verdict = judge(self.seen)
        keep_evidence(self.connection, self.queue, 1, self.seen, verdict, self.folder)
        return verdict


def behind(connection: KafkaConnection, proxy: Proxy, gate: Gate) -> KafkaConnection:
    """The same brokers through a gate, which changes the addresses that they tell."""
    ports: dict[int, int] = {}
    for address in connection.bootstrap.split(","):
        port = int(address.rpartition(":")[2])
        ports[port] = proxy.listen(gate, lambda port=port: port)  # type: ignore[misc]
    told = {_HOST + struct.pack(">i", port): _HOST + struct.pack(">i", own) for port, own in ports.items()}

    def rewrite(answer: bytes) -> bytes:
        for real, instead in told.items():
            answer = answer.replace(real, instead)
        return answer

    gate.rewrite = rewrite
    return replace(connection, bootstrap=",".join(f"127.0.0.1:{own}" for own in ports.values()))


class _LateEnd(Holder):
    """An EndTxn reaches the broker within the next transaction: behind its copies, before its end markers.

    met  how many did
    """

    def __init__(self) -> None:
        super().__init__(Way.AFTER_RESET, "")
        self.met = 0
        self._lands_at = 0.0
        self._ends = self._added = self._produced = 0

    def hold(self, request: Request) -> Hold | None:
        now = time.monotonic()
        if request.api == Api.END_TXN:
            self._ends = self._ends % 2 + 1  # the third: a transaction that ended too soon to be met
            self._added = self._produced = 0
            if self._ends == 1:
                self._lands_at = now + _LATE_S
                return Hold(self.way, _LATE_S)
        elif request.api == Api.ADD_PARTITIONS_TO_TXN:
            self._added += 1
        elif request.api == Api.PRODUCE and self._added and self._ends == 2:  # behind the repetition
            self._produced += 1
            if self._produced == _PRODUCED_LAST:
                self._ends = 0
                self.met += now < self._lands_at
                return Hold(Way.LATE, max(0.0, self._lands_at + _LANDED_S - now))
        return None


def _late_end_txn(scene: _Scene) -> None:
    """An EndTxn is sent again after a reset of its connection, and comes late into the next transaction."""
    proxy = scene.ends.enter_context(Proxy())
    gate = proxy.gate()
    scene.tracker("tracker", scene.changes(), behind(scene.connection, proxy, gate))
    dropper = scene.consumer("drops", drop=1000)
    gate.holder = holder = _LateEnd()
    until(lambda: holder.met > 0, _WAIT_S, "a transaction was met by a late EndTxn")
    gate.holder = None
    dropper.stop()
    scene.rest()


def _two_sends(scene: _Scene) -> None:
    """A tracker dies in the middle of a redelivery."""
    victim = scene.tracker("victim", scene.changes("die-within-transaction"))
    dropper = scene.consumer("drops", drop=1000)
    until(lambda: victim.died, _WAIT_S, "the tracker died")
    dropper.stop()
    scene.tracker("successor", scene.changes())
    scene.rest()


def _no_fencing(scene: _Scene) -> None:
    """A tracker is halted after it has decided to redeliver, beyond its session, and goes on."""
    victim = scene.tracker("victim", scene.changes("stop-before-transaction"))
    dropper = scene.consumer("drops", drop=1000)
    until(lambda: is_stopped(victim.pid), _WAIT_S, "the tracker stopped")
    dropper.stop()
    scene.tracker("successor")
    until(lambda: scene.copies() > 0, _WAIT_S, "the successor redelivers")
    os.kill(victim.pid, signal.SIGCONT)
    until(lambda: victim.get("/readyz")[0] == 200, _WAIT_S, "the halted tracker is a member again")
    if scene.sabotaged:
        until(lambda: scene.copies() >= 2 * _COUNT, _WAIT_S, "it has redelivered, too")
    scene.rest()


def _safe_offset(scene: _Scene) -> None:
    """A tracker dies after it has stored an offset, with messages in flight."""
    victim = scene.tracker("victim", scene.changes())
    until(lambda: scene.stored_offset() is not None, _WAIT_S, "the tracker reads the markers")
    dropper = scene.consumer("drops", drop=1000, lease_ms=4_000)
    scene.all_are_taken()
    end = partition_reader.bounds(scene.connection, scene.queue.markers_topic, [0])[0][1]
    until(
        lambda: (scene.stored_offset() or 0) >= end, _WAIT_S, "an offset behind the start markers is stored"
    )
    victim.kill()
    dropper.stop()
    successor = scene.tracker("successor")
    until(successor.has_taken_over, _WAIT_S, "the successor has read that offset")
    scene.rest()


def _no_start_wait(scene: _Scene) -> None:
    """A consumer dies when its offsets are committed."""
    scene.tracker("tracker")
    victim = scene.consumer("victim", scene.changes("").strip(","), drop=1000)
    scene.all_are_taken()
    until(lambda: scene.committed() == _COUNT, _WAIT_S, "the offsets are committed")
    victim.kill()
    scene.rest()


def _no_late_look(scene: _Scene) -> None:
    """A consumer acknowledges everything when the copies wait already."""
    scene.tracker("tracker")
    journal = Journal(scene.folder / "late.journal")
    with KmqClient(scene.queue, scene.connection) as client:
        taken: list[Message] = []

        def take() -> bool:
            messages = client.receive(_COUNT - len(taken), wait=0.2)
            journal.write(*(("d", *place) for place in places(messages, lanes_of(scene.queue))))
            taken.extend(messages)
            return len(taken) == _COUNT

        until(take, _WAIT_S, "all messages are taken")
        until(lambda: scene.copies() >= _COUNT, _WAIT_S, "all are copied")
        journal.write(*(("a", *place) for place in places(taken, lanes_of(scene.queue))))
        client.ack(*taken)
    scene.consumer("acks", scene.changes())
    scene.until_empty()


SCENARIOS: dict[str, Callable[[_Scene], None]] = {
    "no-start-wait": _no_start_wait,
    "no-fencing": _no_fencing,
    "safe-offset": _safe_offset,
    "two-sends": _two_sends,
    "no-late-look": _no_late_look,
    "late-end-txn": _late_end_txn,
}
