"""Runs one seed: a small cluster, faults for a while, then quiet until everything is finished."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from kmqpy.kafka.markers import codec, entry_groups, packed
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.settings import QueueSettings
from tracker.partition.owned_partition import OwnedPartition, TrackingPhase
from tracker.settings import TrackerSettings

from . import clients, trackers
from .checker import Checker
from .clients import CrashRecovery, GroupMember, LateAckCheck, MarkerWriter, TopicWatch
from .collapsing import SHARE as _COLLAPSE
from .collapsing import Collapsing
from .connection import Connection
from .cut_logs import SHARE as _CUT_LOGS
from .cut_logs import CutLogs, end_all_hanging
from .history import History, SetBack
from .lanes import PRIORITIES as _PRIORITIES
from .lanes import SHARE as _LANES
from .lanes import LaneRemoval, Lanes, lane_topics, open_in, parts_of
from .model import LANE_SUFFIXES, LIAR, Broker, Group, Log, main_partition, part_of, topic_of
from .producers import Transactions
from .surroundings import CLOCK, QUEUE, number_of
from .trackers import (
    LastAttempts,
    MarkerReader,
    OffsetKeeper,
    OriginalsReader,
    PartitionLifecycle,
    PartitionRedelivery,
    Redeliverer,
    Takeover,
    TopicProbe,
    Tracker,
    TrackerClaim,
)
from .world import Actor, Process, Steps, World
from .zookeeper import ZooKeeper

QUEUE_SETTINGS = QueueSettings(name=QUEUE, max_redeliveries=2, max_lease_ms=60_000, max_delay_ms=60_000)
_OWN_TOPICS = [QUEUE, QUEUE_SETTINGS.markers_topic]
TOPICS = [*_OWN_TOPICS, QUEUE_SETTINGS.dead_letter_topic]
QUIET_WITHIN_MS = 120_000
_SEEDS_A_LIAR = 5
"""In every fifth seed somebody writes markers that lie; in every tenth, their timestamps do, too."""
_CLOCK_LEAD_MS = 10_000
"""By how much a tracker may take the broker's time for later than it is: for as long as its tick took."""
_TOPICS_CHANGE = 0.15
"""In so many of the seeds the topics of the queue are recreated, once or twice."""
_SET_BACK = 0.15
"""In so many of the seeds the group is set back, once or twice, and takes some messages again."""
_LATE_ACKS = 0.6
"""In so many of the seeds the queue has late acks."""
_LATE_REQUESTS = 0.3
"""In so many of the seeds without a control requests of transactional producers come twice."""
_RETRIES = 0.3
"""In so many of the seeds without a control the queue has delays of its own before redeliveries."""
_AIMED_FOR_MS = 1_000
MAX_STEPS = 100_000
_LOOK_EVERY_MS = 500
_KEY = bytes(12)
_ODD_RECORDS = [(b"?", b"?"), (None, b"\x00"), (_KEY, None), (_KEY, b"9"), (_KEY, b"\x0f")]
"""Undecodable markers, and one of a newer version (cases F6, R3)."""


Trace = Callable[[str], None]


@dataclass(frozen=True)
class Controls:
    """What is switched off in a negative control: the checker must then find something."""

    lifecycle: Any = PartitionLifecycle
    marker_reader: Any = MarkerReader
    offset_keeper: Any = OffsetKeeper
    takeover: Any = Takeover
    topic_probe: Any = TopicProbe
    transactions: Any = Transactions
    marker_writer: Any = MarkerWriter
    redelivery: Any = PartitionRedelivery
    redeliverer: Any = Redeliverer
    member: Any = GroupMember
    recovery: Any = CrashRecovery
    reader: Any = OriginalsReader
    watch: Any = TopicWatch
    claim: Any = TrackerClaim
    late_ack_check: Any = LateAckCheck
    collapsing: Any = Collapsing
    last_attempts: Any = LastAttempts
    topics_change: bool = False
    lane_removal: Any = LaneRemoval
    lanes: bool | None = None
    priorities: bool | None = None
    """Both: in every seed, or in none; None: as the seed says. Without lanes there are no priorities."""
    late_requests: bool = False
    cut_logs: bool = False
    old_broker: bool = False
    set_back: bool = False
    late_acks: bool = False
    collapse: bool = False
    retries: bool = False
    """Each: in every seed. An old broker is one before 3.6, where transactions may hang for ever."""


@dataclass
class Result:
    """What came of a seed."""

    seed: int
    problems: list[str]
    steps: int
    stats: Counter[str] = field(default_factory=Counter)


class Simulation:
    """The cluster of one seed."""

    def __init__(self, seed: int, controls: Controls | None = None, trace: Trace | None = None) -> None:
        self.seed = seed
        self.world = world = World(seed, trace)
        world.controls = self.controls = controls or Controls()
        CLOCK.world = world
        rng = self.rng = world.rng
        # Swarm testing: each seed has its own mix of faults, so that some are without most of them.
        world.error_rate = rng.choice((0.0, 0.01, 0.03, 0.1))
        world.slow_rate = rng.choice((0.0, 0.01, 0.05))
        self.crash_rate = rng.choice((0.0, 0.001, 0.004))
        self.other_faults = [
            fault
            for fault in (
                self.pause,
                self._cut_zookeeper,
                self._cut_kafka,
                self.leave,
                self._lose_dead_letter_topic,
                self._garbage,
                self._jump_clock,
                self._delete_messages,
                self._delete_markers,
            )
            if rng.random() < (0.05 if fault in (self._delete_markers, self._jump_clock) else 0.4)
        ]
        self.aim = rng.choice((1, 8))
        self.fault_rate = rng.choice((0.002, 0.008))
        self.lease_ms = rng.choice((150, 400, 1_000))
        self._late_rng = Random(f"late acks of {seed}")
        late_acks = self.controls.late_acks or self._late_rng.random() < _LATE_ACKS
        is_usual = replace(self.controls, lanes=None, priorities=None) == Controls()
        some_late = is_usual and Random(f"lateness of {seed}").random() < _LATE_REQUESTS
        if self.controls.late_requests or some_late:
            world.late.begin()
        some_lanes = is_usual and Random(f"lanes of {seed}").random() < _LANES
        lanes = some_lanes if self.controls.lanes is None else self.controls.lanes
        priorities = Random(f"priorities of {seed}").random() < _PRIORITIES
        priorities = lanes and (priorities if self.controls.priorities is None else self.controls.priorities)
        some_cut = is_usual and Random(f"cut logs of {seed}").random() < _CUT_LOGS
        world.cut_logs = self.controls.cut_logs or some_cut
        some_collapse = is_usual and not lanes and Random(f"twins of {seed}").random() < _COLLAPSE
        retries_rng = Random(f"retries of {seed}")
        some_retries = is_usual and retries_rng.random() < _RETRIES
        delays = retries_rng.choice((("300ms",), ("0s", "700ms"), ("1s", "100ms")))
        self.queue = replace(
            QUEUE_SETTINGS,
            retry_delays=delays if self.controls.retries or some_retries else (),
            lease_ms=self.lease_ms,
            late_acks=late_acks,
            collapse=self.controls.collapse or some_collapse,
            retry_lane=lanes,
            priorities=1 + priorities,
        )
        self.partitions = rng.choice((1, 2, 3))
        suffixes = LANE_SUFFIXES[2 - priorities :] if lanes else ()
        more_topics = [topic for suffix in suffixes for topic in lane_topics(QUEUE, suffix)]
        self.broker = Broker(world, [*TOPICS, *more_topics], self.partitions)
        self.broker.verifies = not self.controls.old_broker
        self.group = Group(world, self.partitions)
        self.zookeeper = ZooKeeper(world)
        self.history = History(broker=self.broker, taking_again=self.group.taking_again)
        self.history.collapses.committed = lambda p: self.group.committed.get(p, (0, ""))[0]
        self.group.set_back_to = self._partition_set_back
        self.processes: list[Process] = []
        self.counts: Counter[str] = Counter()
        world.clients = []
        world.kill = self.kill
        world.stall = self._stall
        world.history = self.history
        world.stall_client = self._stall_client
        self.stall_rate = rng.choice((0.0, 0.0, 0.1))
        self._client_rng = Random(f"late takes of {seed}")
        self._client_stall_rate = self._client_rng.choice((0.0, 0.0, 0.1, 0.3))
        self._set_back = self.controls.set_back or self._client_rng.random() < _SET_BACK
        self._lanes = self.zookeeper.lanes = Lanes(self) if lanes else None
        self._running = {"tracker": 0, "client": 0}
        self._liar = Random(seed)
        world.topics_change = world.topics_rng.random() < _TOPICS_CHANGE or self.controls.topics_change
        world.topics_change = world.topics_change and not (world.cut_logs or lanes)
        self._cut_logs = CutLogs(self) if world.cut_logs else None
        self._senders: list[Process] = []
        self._changes: list[float] = []
        """When topics are to be recreated, and during what."""
        self._aim_of_changes = ""

    def run(self) -> Result:
        """Faults first; then they stop, and everything must be finished."""
        world, rng = self.world, self.rng
        quiet_at = 3_000 + 6_000 * rng.random()
        self._start_producers(quiet_at)
        if world.topics_change:
            some = world.topics_rng.choice((1, 1, 2))
            self._changes = sorted(quiet_at * (0.1 + 0.8 * world.topics_rng.random()) for _ in range(some))
            self._aim_of_changes = world.topics_rng.choice(("anything", "client", "redelivery"))
        if self._cut_logs is not None:
            self._cut_logs.plan(quiet_at)
        if self._lanes is not None:
            self._lanes.plan(quiet_at)
        if self.seed % _SEEDS_A_LIAR == 0:
            for number in range(20):
                self.world.at(quiet_at * number / 20, self._lie)
        if self._set_back and not (world.topics_change or world.cut_logs):
            world.at(quiet_at * (0.2 + 0.7 * self._client_rng.random()), self._set_group_back)
        for _ in range(rng.choice((1, 2, 3))):
            self._start("tracker")
        for _ in range(rng.choice((1, 2)) + (self._client_stall_rate > 0)):
            self._start("client")
        while self._goes_on(quiet_at) and world.steps < MAX_STEPS:
            actor = world.next()
            if actor is not None and actor.process.alive and actor.process not in self._senders:
                self._maybe_fault(actor)
        self._stop_faults()
        look_at = world.now
        give_up_at = world.now + QUIET_WITHIN_MS
        while world.now < give_up_at and world.steps < MAX_STEPS:
            world.next()
            if world.now >= look_at:
                look_at = world.now + _LOOK_EVERY_MS
                if self._is_finished():
                    break
        checker = Checker(self.broker, self.history, self.queue, strict_time=not self.history.clock_jumped)
        problems = world.internal_errors + checker.check()
        if world.steps >= MAX_STEPS:
            problems.append(f"no end after {MAX_STEPS} steps")
        problems += self._held_without_existing()
        problems += [f"stuck: {one}, which was cut away" for one in self._held_of_lost()]
        problems += [
            f"stuck: nobody looks whether {part.key} was cut"
            for part in self._led()
            if part.may_be_cut and part.last_known.offset >= 0
        ]
        for process in self.processes:
            process.kill()
        self.counts["told to be lost"] = self.history.lost.total()
        return Result(self.seed, problems, world.steps, checker.stats + self.counts)

    def _goes_on(self, quiet_at: float) -> bool:
        """Whether faults do."""
        return self.world.now < quiet_at or any(one.actors for one in self._senders)

    def _held_without_existing(self) -> list[str]:
        """Rule R22: trackers know of no message that does not exist."""
        return [
            f"R22: {part.key} holds {entry.offset}, which does not exist"
            for part in self._led()
            if number_of(part.topic_ids[0]) == self.broker.number
            for entry in part.state
            if entry.offset >= self.broker.logs[part.key].end
            if not self.world.cut_logs or self.history.names.of((part_of(*part.key), entry.offset)) is None
        ][:3]

    def _held_of_lost(self) -> list[str]:
        """Messages that trackers know of, and that were cut away."""
        if not self.broker.was_cut:
            return []
        return [
            f"{part.key} holds {entry.offset}"
            for part in self._led()
            for entry in part.state
            if (named := self.history.names.of((part_of(*part.key), entry.offset))) is not None
            and named.is_cut
        ][:3]

    # --- processes --------------------------------------------------------------------------------

    def _start_producers(self, until_ms: float) -> None:
        rng = self.rng
        self.count = rng.randint(5, 30)
        delays = rng.random() < 0.4
        process = Process(self.world, "producer", skew_ms=self._skew())
        connection = Connection(process, self.broker, self.group, None)
        for number in range(2):
            name = f"m{number}"
            if rng.random() < 0.2:
                self.history.poison.add(f"{name}-0".encode())
            process.spawn(
                clients.producer(
                    connection,
                    self.history,
                    name=name,
                    count=self.count // 2 + 1,
                    gap_ms=1.6 * until_ms / self.count,
                    delays=delays,
                    forwards=self._late_rng if self.queue.late_acks else None,
                    urgent=Random(f"urgent of {self.seed}") if self.queue.priorities > 1 else None,
                )
            )
        self._senders.append(process)
        self.processes.append(process)

    def add_sender(self, process: Process, steps: Steps) -> None:
        """Somebody sends messages from now on; faults go on until it is done."""
        self.processes.append(process)
        self._senders.append(process)
        process.spawn(steps)

    def _skew(self) -> float:
        return self.rng.choice((0.0, 0.0, 60_000 * (self.rng.random() - 0.5)))

    def _start(self, kind: str) -> None:
        if kind == "admin":
            assert self._lanes is not None
            self._lanes.go_on()
            return
        self._running[kind] += 1
        process = Process(self.world, f"{kind}-{self._running[kind]}", skew_ms=self._skew())
        self.processes.append(process)
        self.world.trace(process.name, "starts")
        rng = self.rng
        if kind == "client":
            connection = Connection(process, self.broker, self.group, None)
            self.world.clients.append(process)
            batch, fmt = rng.choice((1, 5, 20)), rng.choice(("jvm", "range"))
            steps = clients.client(
                connection,
                self.queue if self._lanes is None else self._lanes.settings,
                self.history,
                lease_ms=self.lease_ms,
                batch=batch,
                fmt=fmt if self._lanes is None else self.queue.markers,
            )
        else:
            # As before and after `kmq queue alter`; the clients' formats differ, too.
            markers = Random(f"markers of {process.name} in {self.seed}").choice(("jvm", "range"))
            queue = self.queue if self._lanes is not None else replace(self.queue, markers=markers)
            zookeeper = (self.zookeeper, process, queue, self.partitions)
            connection = Connection(process, self.broker, self.group, zookeeper)
            settings = TrackerSettings(
                tracker_id=process.name,
                offset_interval_ms=rng.choice((100, 500, 2_000)),
                max_batch_messages=rng.choice((1, 3, 10)),
                snapshot_after_markers=rng.choice((1, 5, 20_000)),
                # Only where timestamps lie: it would take each small jump of the broker's clock for a fault.
                max_clock_lead_ms=1 if self._timestamps_lie else 5_000,
                http_port=-1,
            )
            tracker = Tracker(connection, settings)
            process.tracker = tracker
            steps = tracker.steps()
        process.main = process.spawn(steps)

    def kill(self, process: Process) -> None:
        if not process.alive:
            return
        self.counts["kills"] += 1
        self.world.trace(process.name, "killed")
        process.kill()
        self.went_silent(process)
        self._restart_later(process)

    def _restart_later(self, process: Process) -> None:
        kind = process.name.split("-")[0]
        self.world.at(2_000 * self.rng.random(), lambda: self._start(kind))

    def went_silent(self, process: Process) -> None:
        self.zookeeper.silent(process)
        for member in list(self.group.members):
            if member.process is process:
                self.group.silent(member)

    # --- faults -----------------------------------------------------------------------------------

    def _maybe_fault(self, actor: Actor) -> None:
        """Between any two I/O operations of a process."""
        if self._changes and self.world.now >= self._changes[0] and self._is_aimed_at(actor):
            self._changes.pop(0)
            self._delete_topics()
        if self._cut_logs is not None and self._cut_logs.due and self.world.now >= self._cut_logs.due[0]:
            redelivers = hasattr(actor.process, "tracker") and actor is not actor.process.main
            if self._cut_logs.is_aimed_at(actor.process in self.world.clients, redelivers):
                self._cut_logs.cut()
                if not actor.process.alive:
                    return
        luck = self.world.random()
        if actor is not actor.process.main and hasattr(actor.process, "tracker"):
            luck /= self.aim  # most of what can go wrong in a tracker does so while it redelivers
        if luck < self.crash_rate:
            self.kill(actor.process)
        elif luck < self.crash_rate + self.fault_rate and self.other_faults:
            self.rng.choice(self.other_faults)(actor.process)

    def pause(self, process: Process, duration_ms: float | None = None) -> None:
        """SIGSTOP, in half of the cases beyond the session."""
        if duration_ms is None:
            duration_ms = self.rng.choice((500, 4_000)) * (0.5 + self.world.random())
        process.paused_until = self.world.now + duration_ms
        process.stood_still = True
        self.counts["pauses"] += 1
        self.world.trace(process.name, f"paused for {duration_ms:.0f} ms")
        self.went_silent(process)

    def _stall(self, process: Process) -> None:
        """A tracker stands still where it must be fenced afterwards: it has decided, nothing is sent."""
        if self.world.faults and self.world.random() < self.stall_rate:
            self.pause(process, 5_000)

    def _stall_client(self, process: Process) -> None:
        """A client stands still between fetching messages and writing their start markers."""
        if self.world.cut_logs:
            return  # a gap of rule R39: whoever is halted takes messages of the log before the cut
        if self.world.faults and self._client_rng.random() < self._client_stall_rate:
            self.pause(process, self._client_rng.choice((2_500, 4_000)))

    def _set_group_back(self) -> None:
        """All clients are stopped, the group is set back, and clients begin again."""
        self.counts["groups set back"] += 1
        self.world.trace("group", "is set back")
        for process in [process for process in self.world.clients if process.alive]:
            self.kill(process)
        self.group.set_back = {part: self._client_rng.random() for part in parts_of(self.broker, QUEUE)}

    def _partition_set_back(self, part: int, offset: int) -> None:
        topic = topic_of(QUEUE_SETTINGS.markers_topic, part)
        log = self.broker.logs[topic, main_partition(part)]
        self.history.set_backs.append(SetBack(log.number, part, offset, log.end))
        self.world.trace("group", f"{part} set back to {offset}, markers end at {log.end}")

    def _cut_zookeeper(self, process: Process) -> None:
        process.zk_cut_until = self.world.now + 5_000 * self.world.random()
        self.counts["cuts"] += 1
        self.world.trace(process.name, "cut off from ZooKeeper")
        self.went_silent(process)

    def _cut_kafka(self, process: Process) -> None:
        process.kafka_cut_until = self.world.now + 3_000 * self.world.random()
        self.counts["cuts"] += 1
        self.world.trace(process.name, "cut off from Kafka")
        self.went_silent(process)

    def leave(self, process: Process) -> None:
        """SIGTERM."""
        if process.leaving or process.main is None:
            return
        process.leaving = True
        tracker = getattr(process, "tracker", None)
        if tracker is not None:
            tracker.leaving = True
        self.counts["stops"] += 1
        self.world.trace(process.name, "is to stop")
        self._restart_later(process)

    def _lose_dead_letter_topic(self, _process: Process) -> None:
        topic = QUEUE_SETTINGS.dead_letter_topic
        self.broker.missing.add(topic)
        self.world.at(2_000 * self.world.random(), lambda: self.broker.missing.discard(topic))

    def _some_log(self, topic: str) -> Log:
        """One of this topic of the main lane, or of that of another lane."""
        partition = int(self.partitions * self.world.random())
        return self.broker.logs[topic if self._lanes is None else self._lanes.some(topic), partition]

    def _garbage(self, _process: Process) -> None:
        log = self._some_log(QUEUE_SETTINGS.markers_topic)
        record = self.rng.choice(_ODD_RECORDS)
        log.append(*record, [], "somebody")

    @property
    def _timestamps_lie(self) -> bool:
        return self.seed % (2 * _SEEDS_A_LIAR) == 0

    def _lie(self) -> None:
        """Rules R21 to R23: a marker that is not to be believed, or its timestamp."""
        rng = self._liar
        partition = rng.randrange(self.partitions)
        log = self.broker.logs[QUEUE_SETTINGS.markers_topic, partition]
        beyond = self.broker.logs[QUEUE, partition].end + 1_000
        number = rng.choice((partition, partition, partition + 1, -1, -3))
        first = beyond if number == partition else rng.randrange(20)
        key = codec.encode_key(number, first)
        after_ms = rng.choice((0, 300, 2**63 - 1))
        content = rng.choice(
            (
                codec.encode_start(after_ms),
                codec.encode(codec.ranges(0, Op.TAKE, range(9, 999), redeliver_after_ms=after_ms)[0])[1],
                codec.encode_end(),
            )
        )
        at = log.append(key, content, [], LIAR)
        if self._timestamps_lie:
            self.history.clock_lead_ms = _CLOCK_LEAD_MS
            log.records[at].ms += rng.choice((0, 0, 120_000, 10**12))

    def _is_aimed_at(self, actor: Actor) -> bool:
        """Whether topics are to be recreated now."""
        if self.world.now > self._changes[0] + _AIMED_FOR_MS or self._aim_of_changes == "anything":
            return True
        redelivers = hasattr(actor.process, "tracker") and actor is not actor.process.main
        hit = redelivers if self._aim_of_changes == "redelivery" else actor.process in self.world.clients
        return hit and self.world.topics_rng.random() < 0.3

    def _delete_topics(self) -> None:
        """They are recreated, at once or later, and so does Kafka forget what was committed for them."""
        world, rng = self.world, self.world.topics_rng
        if QUEUE in self.broker.missing:
            return
        self.counts["topics recreated"] += 1
        world.trace("broker", "the topics are deleted")
        self.broker.delete(_OWN_TOPICS)
        world.at(rng.choice((0, 0, 500)) * rng.random(), self.group.committed.clear)
        pause_ms = rng.choice((0, 0, 50, 3_000)) * rng.random()
        if pause_ms:
            world.at(pause_ms, self._create_topics)
        else:
            self._create_topics()

    def _create_topics(self) -> None:
        if QUEUE in self.broker.missing:
            self.broker.create(_OWN_TOPICS, self.world.topics_rng.choice((0, 0, 300)))
            self.world.trace("broker", "the topics are recreated")
            self._start_producer_of_new()

    def _start_producer_of_new(self) -> None:
        """Messages soon stand at the offsets at which others stood before."""
        process = Process(self.world, f"producer-{self.broker.number}")
        rng = self.world.topics_rng
        self.add_sender(
            process,
            clients.producer(
                Connection(process, self.broker, self.group, None),
                self.history,
                name=f"n{self.broker.number}",
                count=rng.randint(3, 15),
                gap_ms=rng.choice((5, 50, 300)),
                delays=False,
            ),
        )

    def _jump_clock(self, _process: Process) -> None:
        """The partition leader is another broker, whose clock is not the same."""
        self.history.clock_jumped = True
        self.broker.skew_ms = 1_000 * (self.world.random() - 0.5)

    def _delete_messages(self, _process: Process) -> None:
        log = self._some_log(QUEUE)
        if self.world.random() < 0.1 and log.stable > log.start:
            up_to = log.start + 1 + int(3 * self.world.random())
            up_to = min(up_to, log.stable)
            self.history.deletes(log, up_to)
            log.start = up_to
            self.counts["deletions"] += 1
            self.world.trace("broker", f"{log.topic} {log.partition} begins at {up_to}")

    def _delete_markers(self, _process: Process) -> None:
        log = self._some_log(QUEUE_SETTINGS.markers_topic)
        self.history.markers_deleted = True
        log.start = max(log.start, int(log.stable * self.world.random()))
        self.counts["deletions"] += 1
        self.world.trace("broker", f"{log.topic} {log.partition} begins at {log.start}")

    def _stop_faults(self) -> None:
        world = self.world
        world.trace("simulation", "faults stop")
        world.faults = False
        world.slow_rate = 0.0
        self._create_topics()
        self.broker.end_lag()
        self.broker.missing.clear()
        if self._lanes is not None:
            self._lanes.allow_copies()
            self.broker.missing.update(self._lanes.gone_topics())
        end_all_hanging(list(self.broker.logs.values()))
        for process in self.processes:
            if process.alive:
                process.paused_until = process.zk_cut_until = process.kafka_cut_until = 0.0
                world.wake(process.main)
                for actor in process.actors:
                    world.wake(actor, 100.0)

    def _is_finished(self) -> bool:
        """Whether, by a naive look, each message is acknowledged, dead or deleted, and each copy is named."""
        if self.world.topics_change and not self._all_know_topics():
            return False
        if self._held_of_lost() or self._look_for_lost_copies():
            return False
        if self._lanes is not None and self._lanes.is_busy:
            return False
        for part in parts_of(self.broker, QUEUE):
            partition = main_partition(part)
            topic, markers_topic = (topic_of(one, part) for one in _OWN_TOPICS)
            queue = self.broker.logs[topic, partition]
            if queue.open:
                return False
            if topic in self.broker.missing:
                continue
            copies = [*queue.records, *self.broker.logs[QUEUE_SETTINGS.dead_letter_topic, partition].records]
            torn = any(r.is_data and r.txn is not None and r.txn.early and not r.has_end for r in copies)
            if torn and not self.broker.past:
                return False
            is_open = open_in(self.broker.logs[markers_topic, partition])
            # Also where there is no message, but the topic before had one when somebody took that.
            if any(is_open.get(at) for at in range(queue.end)):
                return False
            collapsed = self.history.collapses.has
            if any(
                r.is_data and r.at >= queue.start and r.at not in is_open and not collapsed(r)
                for r in queue.records
            ):
                return False
        return True

    def _look_for_lost_copies(self) -> bool:
        """Whether some tracker does, or has not begun: then ended messages may be in flight again."""
        parts = self._led()
        is_led = {part.number for part in parts if part.phase is TrackingPhase.ACTIVE}
        return any(part.searches or part.may_be_cut for part in parts) or (
            self.broker.was_cut and len(is_led) < self.partitions
        )

    def _led(self) -> list[OwnedPartition]:
        """The partitions of the trackers that are alive."""
        alive = (one.tracker for one in self.processes if one.alive and hasattr(one, "tracker"))
        return [part for tracker in alive for part in tracker._partitions.values()]

    def _all_know_topics(self) -> bool:
        """Whether every client and tracker knows which topics there are."""
        known = {process.topics_of for process in self.world.clients if process.alive and process.client}
        known |= {number_of(part.topic_ids[0]) for part in self._led() if part.reading}
        return known <= {self.broker.number}


def simulate(seed: int, controls: Controls | None = None, trace: Trace | None = None) -> Result:
    """Run one seed."""
    stepwise = (*clients.STEPWISE, *trackers.STEPWISE)
    loggers = [logging.getLogger(module.__name__) for module in stepwise]
    for logger in loggers:
        logger.disabled = True
    # Runs of messages that are taken together, in sizes that small runs of the simulation reach.
    sizes = entry_groups.BLOCK, packed.MIN_RUN, packed._MAX_ROWS, packed._TOO_FEW_ROWS
    small = ((1024, 16, 64, 8), (8, 3, 4, 1), (4, 2, 2, 0))[seed % 3]
    entry_groups.BLOCK, packed.MIN_RUN, packed._MAX_ROWS, packed._TOO_FEW_ROWS = small
    try:
        return Simulation(seed, controls, trace).run()
    finally:
        entry_groups.BLOCK, packed.MIN_RUN, packed._MAX_ROWS, packed._TOO_FEW_ROWS = sizes
