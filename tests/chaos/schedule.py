"""Which fault strikes whom and when: pure, the same for the same seed."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum

TRACKERS, CONSUMERS, BROKERS, ZOOKEEPERS = 3, 4, 3, 3


class Kind(StrEnum):
    """A kind of fault; what it does is in faults.py."""

    QUIET = "nothing"
    """For comparison."""
    TRACKER_KILL = "tracker kill -9"
    TRACKER_STOP = "tracker SIGTERM"
    TRACKER_PAUSE = "tracker SIGSTOP"
    TRACKER_JOIN = "tracker joins, leaves"
    ZOOKEEPER_CUT = "tracker cut off ZooKeeper"
    KAFKA_CUT = "tracker cut off Kafka"
    BROKER_KILL = "broker kill -9"
    BROKER_PAUSE = "broker SIGSTOP"
    CONSUMER_KILL = "consumer kill -9"
    CONSUMER_PAUSE = "consumer SIGSTOP"
    ZOOKEEPER_RESTART = "ZooKeeper server restart"
    RETENTION = "messages in flight deleted"
    REQUEST_AFTER_RESET = "requests late after reset"
    REQUEST_LATE = "requests late"
    ANSWER_LOST = "answers lost"


Pair = tuple[Kind, Kind]
"""Faults of which the second begins soon after the first; where both strike a tracker, it is the same."""

_OF_TRACKER = {
    Kind.TRACKER_KILL,
    Kind.TRACKER_STOP,
    Kind.TRACKER_PAUSE,
    Kind.ZOOKEEPER_CUT,
    Kind.KAFKA_CUT,
}
OF_REQUESTS = {Kind.REQUEST_AFTER_RESET, Kind.REQUEST_LATE, Kind.ANSWER_LOST}
"""Those that hold requests back, of all trackers alike."""
_OF_CONSUMER = {Kind.CONSUMER_KILL, Kind.CONSUMER_PAUSE}
# DeleteRecords needs every replica, so it is not done while a broker is away.
_OF_BROKER = {Kind.BROKER_KILL, Kind.BROKER_PAUSE, Kind.RETENTION}
_SETTLE_S = {Kind.BROKER_KILL: 14.0, Kind.BROKER_PAUSE: 8.0, Kind.ZOOKEEPER_RESTART: 8.0}
"""How long after its end nothing else strikes the same: replicas must be in sync again first."""
_SECOND_WITHIN_S = 2.0
"""Of two faults at a time: how long after the first the second begins."""


@dataclass(frozen=True)
class Fault:
    """One fault, or two at a time. Times are seconds from the start of the load.

    target  the number of what it strikes; 0: all of them
    how     the way of a cut, or the seed by which requests are chosen
    beside  what is done meanwhile
    """

    kind: Kind
    target: int
    at_s: float
    hold_s: float
    how: str = ""
    beside: "Fault | None" = None

    @property
    def all(self) -> "list[Fault]":
        return [self, *(self.beside.all if self.beside else [])]

    @property
    def name(self) -> str:
        """Its kind, or both."""
        return " + ".join(fault.kind for fault in self.all)

    @property
    def strikes(self) -> set[str]:
        """What can suffer but one at a time."""
        return {_struck(fault) for fault in self.all}

    @property
    def lasts_s(self) -> float:
        return max(fault.at_s + fault.hold_s for fault in self.all) - self.at_s

    @property
    def settle_s(self) -> float:
        return max(_SETTLE_S.get(fault.kind, 3.0) for fault in self.all)

    @property
    def free_at_s(self) -> float:
        return self.at_s + self.lasts_s + self.settle_s


def _struck(fault: Fault) -> str:
    if fault.kind in _OF_TRACKER:
        return f"tracker-{fault.target}"
    if fault.kind in _OF_CONSUMER:
        return f"consumer-{fault.target}"
    if fault.kind in _OF_BROKER:
        return "brokers"
    if fault.kind in OF_REQUESTS:
        return "requests"
    return {Kind.ZOOKEEPER_RESTART: "zookeepers", Kind.TRACKER_JOIN: "tracker-more"}.get(
        fault.kind, "nothing"
    )


@dataclass(frozen=True, kw_only=True)
class Level:
    """How much of everything.

    pairs       how often two faults at a time, which come on top of `faults`
    gap_s       from one fault to the next; faults that are held may overlap
    hold_s      how long pauses and cuts last, and how long what was killed stays away
    session_ms  of trackers with ZooKeeper; group_ms: of consumers with their group
    late        per mille of the messages that consumers acknowledge when their leases are over, ...
    late_by_s   ... by so many seconds at most; late_acks: so many there must be
    """

    name: str
    messages: int
    faults: dict[Kind, int]
    pairs: dict[Pair, int]
    gap_s: float
    hold_s: dict[Kind, float]
    session_ms: int
    group_ms: int
    lease_ms: int = 2_000
    calm_s: float = 8.0
    tail_s: float = 15.0
    late: int = 40
    late_by_s: float = 0.4
    late_acks: int = 0

    def scaled(self, minutes: float) -> "Level":
        """The same within about so many minutes of load: fewer faults and messages, as long ones."""
        factor = minutes * 60 / (self.calm_s + self.tail_s + self.gap_s * self.count)
        faults = {kind: max(1, round(count * factor)) for kind, count in self.faults.items()}
        pairs = {pair: max(1, round(count * factor)) for pair, count in self.pairs.items()}
        messages, late_acks = max(1_000, round(self.messages * factor)), round(self.late_acks * factor)
        return replace(self, faults=faults, pairs=pairs, messages=messages, late_acks=late_acks)

    @property
    def count(self) -> int:
        """How many faults, where two at a time are one."""
        return sum(self.faults.values()) + sum(self.pairs.values())


def schedule(level: Level, seed: int) -> list[Fault]:
    """The faults in order of time."""
    dice = random.Random(seed)
    chosen: list[tuple[Kind, ...]] = [(kind,) for kind, count in level.faults.items() for _ in range(count)]
    chosen += [pair for pair, count in level.pairs.items() for _ in range(count)]
    dice.shuffle(chosen)
    faults: list[Fault] = []
    at_s = level.calm_s
    free: dict[str, float] = {}
    for kind, *more in chosen:
        fault = _fault(kind, level, dice)
        for second in more:
            beside = _fault(second, level, dice)
            if {kind, second} <= _OF_TRACKER:
                beside = replace(beside, target=fault.target)
            fault = replace(fault, beside=replace(beside, at_s=round(dice.uniform(0.0, _SECOND_WITHIN_S), 1)))
        fault = _later(fault, round(max(at_s, *(free.get(one, 0.0) for one in fault.strikes)), 1))
        free |= dict.fromkeys(fault.strikes, fault.free_at_s)
        faults.append(fault)
        at_s += level.gap_s * dice.uniform(0.7, 1.3)
    return sorted(faults, key=lambda fault: fault.at_s)


def _fault(kind: Kind, level: Level, dice: random.Random) -> Fault:
    counts = {Kind.BROKER_KILL: BROKERS, Kind.BROKER_PAUSE: BROKERS, Kind.ZOOKEEPER_RESTART: ZOOKEEPERS}
    how = ""
    target = dice.randint(1, CONSUMERS if kind in _OF_CONSUMER else counts.get(kind, TRACKERS))
    if kind in OF_REQUESTS:
        target, how = 0, str(dice.randrange(1_000_000))
    elif kind in (Kind.ZOOKEEPER_CUT, Kind.KAFKA_CUT):
        how = dice.choice(["refuse", "blackhole"])
    return Fault(kind, target, 0.0, level.hold_s.get(kind, 1.0), how)


def _later(fault: Fault, by_s: float) -> Fault:
    beside = _later(fault.beside, by_s) if fault.beside else None
    return replace(fault, at_s=round(fault.at_s + by_s, 1), beside=beside)


def load_s(level: Level, faults: list[Fault]) -> float:
    """How long messages are sent: until some time after the last fault has ended."""
    return level.tail_s + max((fault.at_s + fault.lasts_s for fault in faults), default=level.calm_s)


_HOLD_S = {
    Kind.QUIET: 4.0,
    Kind.TRACKER_JOIN: 6.0,
    Kind.TRACKER_PAUSE: 7.0,
    Kind.ZOOKEEPER_CUT: 8.0,
    Kind.KAFKA_CUT: 15.0,  # after 10 s without Kafka a tracker withdraws
    Kind.BROKER_KILL: 4.0,  # as long as the session it had, 3 s
    Kind.BROKER_PAUSE: 6.0,
    Kind.CONSUMER_PAUSE: 9.0,
    Kind.ZOOKEEPER_RESTART: 1.0,
    **dict.fromkeys(OF_REQUESTS, 8.0),
}
_ONE_OF_EACH = dict.fromkeys(Kind, 1)
_PAIRS: tuple[Pair, ...] = (
    (Kind.REQUEST_AFTER_RESET, Kind.TRACKER_KILL),  # a successor opens its producers meanwhile
    (Kind.REQUEST_AFTER_RESET, Kind.BROKER_KILL),
    (Kind.REQUEST_LATE, Kind.BROKER_PAUSE),
    (Kind.ANSWER_LOST, Kind.ZOOKEEPER_RESTART),
    (Kind.ZOOKEEPER_CUT, Kind.TRACKER_PAUSE),
    (Kind.KAFKA_CUT, Kind.ZOOKEEPER_CUT),
    (Kind.CONSUMER_PAUSE, Kind.TRACKER_KILL),
)

TINY = Level(
    name="tiny",
    messages=2_000,
    faults=_ONE_OF_EACH,
    pairs={_PAIRS[0]: 1},
    gap_s=1.8,
    hold_s={**_HOLD_S, Kind.KAFKA_CUT: 12.0, **dict.fromkeys(OF_REQUESTS, 4.0)},
    session_ms=3_000,
    group_ms=6_000,
    calm_s=4.0,
    tail_s=8.0,
)
QUICK = Level(
    name="quick",
    messages=15_000,
    faults={**_ONE_OF_EACH, Kind.TRACKER_KILL: 2},
    pairs=dict.fromkeys(_PAIRS, 1),
    gap_s=5.0,
    hold_s=_HOLD_S,
    session_ms=3_000,
    group_ms=6_000,
)
MEDIUM = Level(
    name="medium",
    messages=60_000,
    faults={**dict.fromkeys(Kind, 2), Kind.TRACKER_KILL: 6, Kind.BROKER_KILL: 4, Kind.CONSUMER_KILL: 4},
    pairs=dict.fromkeys(_PAIRS, 1),
    gap_s=12.0,
    hold_s=_HOLD_S,
    session_ms=3_000,
    group_ms=6_000,
)
FULL = Level(
    name="full",
    messages=1_000_000,
    faults={
        Kind.QUIET: 3,
        Kind.TRACKER_KILL: 30,
        Kind.TRACKER_STOP: 4,
        Kind.TRACKER_PAUSE: 4,
        Kind.TRACKER_JOIN: 3,
        Kind.ZOOKEEPER_CUT: 5,
        Kind.KAFKA_CUT: 5,
        Kind.BROKER_KILL: 20,
        Kind.BROKER_PAUSE: 3,
        Kind.CONSUMER_KILL: 20,
        Kind.CONSUMER_PAUSE: 3,
        Kind.ZOOKEEPER_RESTART: 10,
        Kind.RETENTION: 4,
        **dict.fromkeys(OF_REQUESTS, 4),
    },
    pairs=dict.fromkeys(_PAIRS, 2),
    gap_s=20.0,
    hold_s={
        **_HOLD_S,
        Kind.TRACKER_PAUSE: 14.0,
        Kind.ZOOKEEPER_CUT: 30.0,
        Kind.KAFKA_CUT: 30.0,
        Kind.CONSUMER_PAUSE: 20.0,
        **dict.fromkeys(OF_REQUESTS, 20.0),
    },
    session_ms=6_000,  # both are what a user has who sets nothing
    group_ms=10_000,
    lease_ms=3_000,
    tail_s=30.0,
)
LATE = Level(
    name="late",
    messages=100_000,
    faults={**_ONE_OF_EACH, Kind.TRACKER_KILL: 8, Kind.BROKER_KILL: 4, Kind.CONSUMER_KILL: 6},
    pairs=dict.fromkeys(_PAIRS, 1),
    gap_s=15.0,
    hold_s=_HOLD_S,
    session_ms=3_000,
    group_ms=6_000,
    late=850,
    late_by_s=5.0,
    late_acks=100_000,
)
LEVELS = {level.name: level for level in (TINY, QUICK, MEDIUM, FULL, LATE)}
