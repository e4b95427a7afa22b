"""Logs that are cut back: after a power cut of all brokers, or an election among those that had not all.

From then on Kafka gives the offsets behind the cut once more, under the same topic id. Consumers that had
read beyond the cut notice it or not: librdkafka compares leader epochs where it knows them (KIP-320), and
begins at the start of the log if its position is not there any more; else it reads on when the log has grown
beyond its position.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from . import clients
from .connection import Connection
from .model import Log
from .surroundings import QUEUE
from .world import Process

if TYPE_CHECKING:
    from .simulate import Simulation

SHARE = 0.2
"""In so many of the seeds without a control logs may be cut back."""
_MOST_CUTS = 2


class CutLogs:
    """Of one seed: which logs are cut back, when, where, and what happens around it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._broker = simulation.broker
        self._topics = simulation.queue.lane_names
        self._rng = rng = Random(f"cuts of {simulation.seed}")
        self._world.validates = rng.random() < 0.5
        self._refuses = rng.choice((0.0, 0.5, 1.0))
        self.due: list[float] = []
        """When logs are to be cut back."""
        self.aim = rng.choice(("anything", "client", "redelivery"))
        """During what: a cut that is due waits until such an actor acts, for a second at most."""

    def plan(self, quiet_at: float) -> None:
        """Elections, and one cut or two, until faults stop."""
        rng = self._rng
        some = rng.choice((1, 1, _MOST_CUTS))
        self.due = sorted(quiet_at * (0.1 + 0.8 * rng.random()) for _ in range(some))
        for _ in range(rng.choice((0, 1, 3, 6))):
            log = rng.choice(list(self._broker.logs.values()))
            self._world.at(quiet_at * rng.random(), log.elect)

    def is_aimed_at(self, is_client: bool, redelivers: bool) -> bool:
        """Whether the next cut comes now, where this actor acted."""
        late = self._world.now > self.due[0] + 1_000
        hit = redelivers if self.aim == "redelivery" else is_client
        return late or self.aim == "anything" or (hit and self._rng.random() < 0.3)

    def cut(self) -> None:
        """Cut the logs of some partitions back, all at once."""
        self.due.pop(0)
        rng, world = self._rng, self._world
        topics = [one for one in self._topics if one not in self._broker.missing]
        logs = [self._broker.logs[topic, p] for topic in topics for p in range(self._broker.partitions)]
        chosen = [log for log in logs if rng.random() < 0.6] or [rng.choice(logs)]
        for log in chosen:
            at = self._place_in(log)
            for consumer in self._consumers_of(log):
                if rng.random() < 0.5:
                    consumer.keep_fetched(log.partition, rng.randint(1, 10))
            world.trace("broker", f"{log.topic} {log.partition}@{log.end} is cut back to {at}")
            self._simulation.counts["logs cut"] += 1
            self._simulation.counts["records cut away"] += log.end - at
            self._broker.cut(log, at, refuses=lambda: rng.random() < self._refuses)
            if log.hanging:
                world.at(6_000 * rng.random(), log.end_hanging)
        away_ms = rng.choice((0.0, 0.0, 100.0, 1_500.0)) * rng.random()
        for process in self._simulation.processes:
            if process.alive and process.main is not None:
                self._happens_to(process, away_ms)
        if rng.random() < 0.8:
            self._send_more()

    def _consumers_of(self, log: Log) -> list[Any]:
        if log.topic == QUEUE:
            return self._simulation.group.members
        alive = [one.client for one in self._world.clients if one.alive]
        lanes = [lane for one in alive if isinstance(one, clients.LanesConsumer) for lane in one.consumers]
        return [lane.receiver.join().consumer for lane in lanes if lane.name == log.topic]

    def _happens_to(self, process: Process, away_ms: float) -> None:
        luck = self._rng.random()
        if luck < 0.15:
            self._simulation.kill(process)
        elif luck < 0.25:
            self._simulation.pause(process, 3_000 * self._rng.random())
        if process.alive and away_ms:
            process.kafka_cut_until = max(process.kafka_cut_until, self._world.now + away_ms)
            self._simulation.went_silent(process)

    def _place_in(self, log: Log) -> int:
        """Where to cut: anywhere, near the end, or within a transaction."""
        rng = self._rng
        luck = rng.random()
        if luck < 0.3:
            inside = [one.at for one in log.records[log.start :] if one.txn is not None]
            if inside:
                return rng.choice(inside[-10:]) + rng.randint(0, 1)
        first = log.start if luck < 0.6 else max(log.start, log.end - 8)
        return rng.randint(first, log.end)

    def _send_more(self) -> None:
        """Messages soon stand at the offsets at which others stood before."""
        rng = self._rng
        number = len(self.due)
        process = Process(self._world, f"producer-{number}")
        self._simulation.add_sender(
            process,
            clients.producer(
                Connection(process, self._broker, self._simulation.group, None),
                self._simulation.history,
                name=f"c{number}",
                count=rng.randint(3, 20),
                gap_ms=rng.choice((5, 50, 300)),
                delays=False,
            ),
        )


def end_all_hanging(logs: list[Log]) -> None:
    """Faults are over."""
    for log in logs:
        log.end_hanging()
