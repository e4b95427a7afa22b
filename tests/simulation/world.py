"""The world of a simulation: virtual time, processes, and who is next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from random import Random
from typing import TYPE_CHECKING, Any

from .late_requests import LateRequests

if TYPE_CHECKING:
    from .journal import Journal
    from .model import Log, Record

Steps = Generator[float, None, Any]
"""What yields before and after each I/O operation: how many ms it takes."""

EPOCH_MS = 1_700_000_000_000
FIRST = 0
"""The number of the topics that there are at first; those that are recreated have the next one."""


class Process:
    """One process: its actors run, stop and die together."""

    def __init__(self, world: World, name: str, *, skew_ms: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.skew_ms = skew_ms
        self.alive = True
        self.leaving = False
        self.client: Any = None
        self.stood_still = False
        self.was_expelled = False
        """Once between fetching messages and writing their start markers."""
        self.recovered: dict[int, tuple[Log, int]] = {}
        """Of which log of markers, and up to where, it has read what was started before."""
        self.topics_of = FIRST
        """Of which topics the client takes itself to be; see Broker.ids."""
        self.taking: dict[tuple[int, int], Record] = {}
        """By partition and offset, the message for which the client wrote a start marker last."""
        self.paused_until = 0.0
        self.zk_cut_until = 0.0
        self.kafka_cut_until = 0.0
        self.actors: list[Actor] = []
        self.zk_session: int | None = None
        self.main: Actor | None = None

    def spawn(self, steps: Steps, delay_ms: float = 0.0) -> Actor:
        actor = Actor(self, steps)
        self.actors.append(actor)
        self.world.schedule(actor, delay_ms)
        return actor

    def kill(self) -> None:
        self.alive = False
        for actor in self.actors:
            actor.turn = -1
            if not actor.steps.gi_running:  # the one that does this to itself ends by itself
                actor.steps.close()
        self.actors = []

    @property
    def silent_to_zookeeper(self) -> bool:
        return not self.alive or max(self.paused_until, self.zk_cut_until) > self.world.now

    @property
    def silent_to_kafka(self) -> bool:
        return not self.alive or max(self.paused_until, self.kafka_cut_until) > self.world.now

    # The Clock of this process.

    def wall_ms(self) -> int:
        return EPOCH_MS + int(self.world.now + self.skew_ms)

    def monotonic(self) -> float:
        return (self.world.now + self.skew_ms) / 1000 + 1_000_000

    def sleep(self, seconds: float) -> Steps:
        """For code that is stepwise; other code can't sleep inside a step."""
        yield seconds * 1000


class Actor:
    """One thread of a process, as a generator."""

    __slots__ = ("due", "process", "steps", "turn")

    def __init__(self, process: Process, steps: Steps) -> None:
        self.process = process
        self.steps = steps
        self.turn = -1
        self.due = 0.0


class World:
    """Virtual time in ms, and who is next. One random number generator decides everything."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.rng = Random(seed)
        self.random = self.rng.random
        self.topics_rng = Random(f"topics of {seed}")
        """For all that has to do with topics recreated, so that runs without that stay what they were."""
        self.topics_change = False
        self.now = 0.0
        self.steps = 0
        self.faults = True
        self.error_rate = 0.0
        self.slow_rate = 0.01
        self.late = LateRequests(seed, self.at)
        self.cut_logs = False
        """Whether logs may be cut back, so that offsets are given twice; see cut_logs.py."""
        self.validates = True
        """Whether consumers look if their position is still in the log when they hear of a new leader."""
        self._agenda: list[tuple[float, int, Any]] = []
        self._turn = 0
        self._trace = trace
        self.tracing = trace is not None
        self.internal_errors: list[str] = []
        """What kmqpy caught and went on after, although nobody expects it (rule R21)."""
        self.journal: Journal = []
        # Set by the simulation, for whoever acts in it.
        self.controls: Any = None
        self.clients: list[Process] = []
        self.kill: Callable[[Process], None]
        self.stall: Callable[[Process], None]

    def trace(self, who: str, what: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:9.1f} {who:<14} {what}")

    def schedule(self, actor: Actor, delay_ms: float) -> None:
        self._turn += 1
        actor.turn = self._turn
        actor.due = self.now + delay_ms
        heapq.heappush(self._agenda, (actor.due, self._turn, actor))

    def wake(self, actor: Actor | None, delay_ms: float = 0.0) -> None:
        """Let a sleeping actor go on earlier."""
        if actor is not None and actor.turn >= 0 and actor.due > self.now + delay_ms:
            self.schedule(actor, delay_ms)

    def at(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do something later, whoever is alive then."""
        self._turn += 1
        heapq.heappush(self._agenda, (self.now + delay_ms, self._turn, action))

    def next(self) -> Actor | None:
        """Advance to the next event and do it; the actor that ran, if one did."""
        while True:
            due, turn, target = heapq.heappop(self._agenda)
            if isinstance(target, Actor):
                if target.turn != turn:
                    continue
                self.now = due
                paused_until = target.process.paused_until
                if paused_until > due:
                    self.schedule(target, paused_until - due)
                    continue
                self.steps += 1
                target.turn = -1
                try:
                    delay_ms = target.steps.send(None)
                except StopIteration:
                    if target in target.process.actors:
                        target.process.actors.remove(target)
                    return target
                if target.turn < 0 and target.process.alive:
                    self.schedule(target, delay_ms)
                return target
            self.now = due
            target()
            return None

    def latency(self) -> float:
        """How long one way of a request takes, in ms."""
        luck = self.random()
        if luck < self.slow_rate:
            return 50 + 600 * self.random()
        return 12 * luck * luck

    def unlucky(self, rate: float = 1.0) -> bool:
        """Whether this operation fails."""
        return self.faults and self.random() < self.error_rate * rate
