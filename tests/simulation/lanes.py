"""A queue with a retry lane: when that takes copies, and how it is added and removed while it is in use.

In some seeds it has a lane of urgent messages, too. See model.part_of for how the simulation numbers the
partitions of all lanes.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kmqpy.errors import Unavailable
from kmqpy.kafka.admin.lane_removal import with_draining
from kmqpy.kafka.settings import MARKERS_SUFFIX, RETRY_SUFFIX, QueueSettings

from .model import LANE_SUFFIXES, Broker, Log, decoded, part_of, topic_of
from .stepwise import stepwise
from .world import Process, Steps

if TYPE_CHECKING:
    from .simulate import Simulation

SHARE = 0.3
"""In so many of the seeds without a control the queue has a retry lane."""
PRIORITIES = 0.5
"""In so many of these it has two priorities, and clients iterate over its messages."""
_REFUSED_FOR_MS = 3_000
_CLIENTS_NOTICE_MS = 2_000


def lane_topics(queue: str, suffix: str = RETRY_SUFFIX) -> list[str]:
    """The topics of the retry lane, or of the one with this suffix."""
    return [f"{queue}{suffix}", f"{queue}{suffix}{MARKERS_SUFFIX}"]


def parts_of(broker: Broker, queue: str) -> list[int]:
    """All partitions of all lanes; the retry lane's come last, since copies go from the others to it."""
    topics = [f"{queue}{suffix}" for suffix in LANE_SUFFIXES]
    return sorted(part_of(*place) for place in broker.logs if place[0] in topics)


class Lanes:
    """Of one seed: what the registry says of the retry lane, and what happens to it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._broker = simulation.broker
        self._rng = rng = Random(f"what happens to lanes of {simulation.seed}")
        self.settings = simulation.queue
        """As the registry has them."""
        self.topic, _ = self._topics = lane_topics(self.settings.name)
        self._lane = [self.settings.lanes()[0]]
        self.deleting = False
        """The lane is registered, and its trackers are to let go of it."""
        luck = rng.random()
        self._never_writable = luck < 0.15
        self._refuses = 0.15 < luck < 0.5
        self._is_removed = 0.4 < luck < 0.8
        self._is_added = luck > 0.85
        self.is_busy = False
        """Its removal is planned, or under way."""

    def plan(self, quiet_at: float) -> None:
        """What happens until faults stop."""
        rng, world = self._rng, self._world
        if self._never_writable:
            self._broker.refusing.add(self.topic)
        if self._refuses:
            for _ in range(rng.choice((1, 2, 3))):
                world.at(quiet_at * rng.random(), self._refuse)
        if self._is_removed:
            self.is_busy = True
            world.at(quiet_at * rng.random(), self._remove)
        if self._is_added:
            self.settings = replace(self.settings, retry_lane=False)
            world.at(0.5 * quiet_at * rng.random(), self._add)

    def some(self, topic: str) -> str:
        """This topic of the main lane, or that of another lane."""
        others = [part_of(name, 0) for name in self.settings.lane_names[:-1]] or [part_of(self.topic, 0)]
        return topic_of(topic, self._rng.choice(others) if self._rng.random() < 0.5 else 0)

    def allow_copies(self) -> None:
        """From now on copies can be written, if they ever could."""
        if not self._never_writable:
            self._broker.refusing.clear()

    def gone_topics(self) -> list[str]:
        """Those that were deleted."""
        return [] if self.deleting or self.has_retry_lane else self._topics

    @property
    def has_retry_lane(self) -> bool:
        """Whether the settings name it, perhaps as one that is to go."""
        return self.topic in self.settings.lane_names

    def registered_only(self) -> list[QueueSettings]:
        """The lane that trackers are to let go of."""
        return self._lane if self.deleting else []

    def _refuse(self) -> None:
        """Say, no leader of the retry lane answers."""
        self._world.trace("broker", "the retry lane refuses copies")
        self._broker.refusing.add(self.topic)
        self._world.at(_REFUSED_FOR_MS * self._rng.random(), self.allow_copies)

    def _add(self) -> None:
        self.change(replace(self.settings, retry_lane=True), deleting=False)
        self._simulation.counts["lanes added"] += 1
        self._let_clients_notice()

    def _remove(self) -> None:
        self.change(with_draining(self.settings, replace(self.settings, retry_lane=False)), deleting=False)
        self.go_on()

    def go_on(self) -> None:
        """Somebody removes the lane, as far as that is not done."""
        process = Process(self._world, "admin")
        self._simulation.processes.append(process)
        process.main = process.spawn(self._removal(process))

    def _removal(self, process: Process) -> Steps:
        """`kmq queue alter q --no-retry-lane`, again and again until it is done."""
        topics = SimpleNamespace(check=self._check, offsets=self._offsets, delete=self._delete)
        context = SimpleNamespace(
            registry=_Registry(self, self._simulation.zookeeper, self._broker.partitions),
            topics=topics,
            connection=self._broker,
            clock=process,
            mirror_settings=lambda settings: settings,
            tracked=lambda *_: None,
            registered=lambda _: None,
        )
        removal = self._world.controls.lane_removal(context)
        while self.is_busy and not process.leaving:
            try:
                yield from removal.finish(self.settings.name, 10 * self._rng.random())
                self.is_busy = False
            except Unavailable as error:
                self._world.trace(process.name, str(error))
                yield 1_000.0

    def change(self, settings: QueueSettings, *, deleting: bool) -> None:
        """Write to the registry."""
        self.settings, self.deleting = settings, deleting
        self._world.trace("zookeeper", f"lanes {settings.lane_names}, deleting {deleting}")
        self._simulation.zookeeper.changed()

    def _check(self, _lane: QueueSettings) -> Steps:
        yield self._world.latency()
        return SimpleNamespace(partitions=self._broker.partitions)

    def _offsets(self, topic: str, partitions: range) -> dict[int, tuple[int, int]]:
        logs = {p: self._broker.logs[topic, p] for p in partitions}
        return {p: (log.start, log.stable) for p, log in logs.items()}

    def _delete(self, topics: list[str]) -> None:
        self._world.trace("broker", f"{topics} are deleted")
        self._broker.delete(topics)
        self._simulation.counts["lanes removed"] += 1
        self._let_clients_notice()

    def _let_clients_notice(self) -> None:
        """They begin anew, with the lanes that there are."""
        for process in self._world.clients:
            if process.alive:
                self._world.at(
                    _CLIENTS_NOTICE_MS * self._rng.random(),
                    lambda process=process: self._simulation.leave(process),
                )


class _Registry:
    """The registry of the queue, as far as the removal of its lane needs it."""

    def __init__(self, lanes: Lanes, zookeeper: Any, partitions: int) -> None:
        self._lanes = lanes
        self._zookeeper = zookeeper
        self._partitions = partitions

    def get(self, _name: str) -> Any:
        of = self._lanes
        return SimpleNamespace(settings=of.settings, partitions=self._partitions, deleting=of.deleting)

    def register(self, after: QueueSettings, _partitions: int, *, before: QueueSettings) -> bool:
        assert before == self._lanes.settings
        self._lanes.change(after, deleting=self._lanes.topic not in after.lane_names)
        return True

    def lanes(self, _name: str) -> list[Any]:
        topic, markers = lane_topics(self._lanes.settings.name)
        is_there = self._lanes.has_retry_lane or self._lanes.deleting
        return [SimpleNamespace(name=topic, markers_topic=markers)] if is_there else []

    def remove(self, lane: str, _timeout_s: float, *, on_released: Any) -> Steps:
        while any(key[0] == lane for key in self._zookeeper.leaders):
            yield 50.0
        on_released()
        self._lanes.change(self._lanes.settings, deleting=False)


def _queue_stats(broker: Broker, lane: QueueSettings, **_: Any) -> Any:
    """kmqpy.kafka.admin.stats.queue_stats, of the logs as they are."""
    depth = in_flight = 0
    for partition in range(broker.partitions):
        queue = broker.logs[lane.name, partition]
        is_open = open_in(broker.logs[lane.markers_topic, partition])
        in_flight += sum(is_open.values())
        seen = [one for one in queue.records[queue.start : queue.stable] if one.is_data]
        depth += sum(one.at not in is_open for one in seen)
    return SimpleNamespace(depth=depth, in_flight=in_flight)


def open_in(markers: Log) -> dict[int, bool]:
    """Of messages with a start marker: False where it was followed by an end marker."""
    open_now: dict[int, bool] = {}
    for record in markers.records:
        if record.is_data:
            for marker in decoded(record):
                if marker.op in ("take", "delay"):
                    open_now[marker.offset] = True
                elif marker.op == "end" and marker.offset in open_now:
                    open_now[marker.offset] = False
    return _by_offset(markers, open_now) if markers.broker.was_cut else open_now


def _by_offset(markers: Log, is_open: dict[int, bool]) -> dict[int, bool]:
    """The same for the messages that are there, whatever their numbers are."""
    names, part = markers.broker.world.history.names, part_of(markers.topic, markers.partition)
    found: dict[int, bool] = {}
    for number, open_now in is_open.items():
        record = names.of((part, number))
        if record is not None and not record.is_cut:
            found[record.at] = open_now or found.get(record.at, False)
    return found


_lane_removal = stepwise(
    "kmqpy.kafka.admin.lane_removal",
    {"finish", "_remove_unnamed", "remove_others", "_wait_until_drained"},
    stats=SimpleNamespace(queue_stats=_queue_stats),
)
_lane_removal.QUIET_S = 6.0  # longer than sessions, transactions and their ends last here
LaneRemoval = _lane_removal.LaneRemoval
