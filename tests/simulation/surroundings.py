"""What surrounds kmqpy's own code in a simulation: Kafka's answers about topics, threads, a clock."""

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

from kmqpy.errors import Unavailable
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.kafka.topics import QueueTopics, TopicInfo

from .connection import Connection
from .stepwise import stepwise
from .world import Steps, World

QUEUE = "q"


class Topics:
    """Answers of Kafka about the topics of the queue, without waiting."""

    admin = None

    def __init__(self, connection: Connection, _timeout_s: float = 0.0) -> None:
        self._connection = connection

    def check(self, queue: QueueSettings) -> Any:
        found: QueueTopics = self._connection.checked(queue)
        if self._connection.process.client is None:
            self._connection.process.topics_of = number_of(found.queue.topic_id)
        return found

    def describe(self, _names: Any) -> dict[str, TopicInfo]:
        if self._connection.is_away():
            raise Unavailable("does not answer")
        return self._connection.describe()

    def brokers(self) -> int:
        return 3


class TrackerTopics(Topics):
    """The same, for code that waits for what it checks."""

    def check(self, queue: QueueSettings, _partition: int) -> Steps:
        yield from self._connection.reach()
        return self._connection.checked(queue)


def number_of(topic_id: str) -> int:
    """The number of the topics of which this is an id; see Broker.number."""
    return int(topic_id.rpartition("-")[2] or -1)


class NoWatch:
    """kmqpy.kafka.topic_identity.TopicWatch of topics that keep their ids."""

    def __init__(self, _connection: Connection, _queue: QueueSettings, ids: TopicIds, _clock: Any) -> None:
        self._ids = ids

    def look(self) -> TopicIds:
        return self._ids

    def knows_since(self, _moment: float) -> bool:
        return True


class NothingCutOff:
    """Stands where CutOffKeeper is imported: no client has librdkafka's fault."""

    def __init__(self, *_: object) -> None:
        pass

    def check_silent_consumers(self) -> None:
        pass


class NothingHangs:
    """Stands where HangingKeeper is imported: the broker ends each transaction."""

    def __init__(self, *_: object) -> None:
        pass

    def look(self, _now: float) -> None:
        pass

    def held_back(self, _place: object) -> int:
        return 0


class NothingHangsWatch:
    """Stands where a client's HangingWatch is imported: the broker ends each transaction."""

    def __init__(self, *_: object) -> None:
        pass

    def note_positions(self, *_: object) -> None:
        pass

    def look(self) -> None:
        pass


class NoMirror:
    """Clients are given their settings here."""

    def __init__(self, _connection: Connection, _topics: Any) -> None:
        pass

    def write(self, _queues: Any) -> None:
        pass


class NoMetrics:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class Event:
    """threading.Event, for those who wait step by step."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> Steps:
        until = CLOCK.monotonic() + timeout_s
        while not self._is_set and CLOCK.monotonic() < until:
            yield 3.0


class Condition(contextlib.nullcontext[None]):
    """threading.Condition, where there is one thread."""

    def notify_all(self) -> None:
        pass

    def wait_for(self, condition: Callable[[], bool], _timeout: float | None) -> bool:
        return condition()


class Thread:
    """threading.Thread, where the simulation runs what it would."""

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass


class Lock(contextlib.nullcontext[None]):
    """threading.Lock, where there is one thread."""

    def acquire(self, timeout: float) -> bool:
        return True

    def release(self) -> None:
        pass


class Threading:
    Condition = Condition
    Event = Event
    Lock = Lock
    Thread = Thread


class _GlobalClock:
    """kmqpy.core.clock.SYSTEM_CLOCK where it is used by name: only differences matter."""

    world: World

    def monotonic(self) -> float:
        return self.world.now / 1000


CLOCK = _GlobalClock()


records = stepwise("kmqpy.kafka.markers.records", set())


INTERNAL_ERROR = "internal error"


def internal_error(what: str, error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{INTERNAL_ERROR} in {what}: {error!r} at {place.name}, line {place.lineno}"
