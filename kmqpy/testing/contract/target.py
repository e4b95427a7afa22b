"""The `Target` that describes a storage to the contract suite, its fixtures, and helpers of its tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.message import Headers, Message
from kmqpy.queue import Capabilities, DeadLetter, Queue, Storage, storage_for

T = TypeVar("T")
LEASE_S = 1.0
"""The lease of the queues under test."""
OVER_S = 1.3
"""After that a lease of LEASE_S is over, also on a slow machine."""
PATIENCE_S = 60.0
"""How long what must come may take."""
_LOOK_EVERY_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Target:
    """A storage under test. Tests whose hook is None are skipped.

    open             opens the storage; each call gives one of its own, over the same queues
    url              its url without `queue=`, for tests with other processes
    pass_time        lets seconds pass on the storage's clock
    real_time        False: the clock stands still but for pass_time
    open_with_clock  opens the storage as from a machine with this clock
    kill_server      kills the server with -9, and starts it again
    cut_connections  breaks all connections to the server; new ones work
    connections      how many connections to the server this process has
    """

    open: Callable[[], Storage]
    url: str | None = None
    pass_time: Callable[[float], None] = SYSTEM_CLOCK.sleep
    real_time: bool = True
    open_with_clock: Callable[[Clock], Storage] | None = None
    kill_server: Callable[[], None] | None = None
    cut_connections: Callable[[], None] | None = None
    connections: Callable[[], int] | None = None


class MakeQueue(Protocol):
    """Makes an empty queue with these settings, and opens it."""

    def __call__(self, **settings: Any) -> Queue: ...  # noqa: D102


@pytest.fixture
def kmq_target(request: pytest.FixtureRequest) -> Target:
    """The storage of `--kmq-storage`; a test module of a storage overrides it, to give hooks."""
    url = request.config.getoption("--kmq-storage", default=None)
    if url is None:
        pytest.skip("no storage given; run pytest --kmq-storage=URL")
    return Target(open=lambda: storage_for(url), url=url)


@pytest.fixture
def kmq_storage(kmq_target: Target) -> Iterator[Storage]:
    """The storage under test; the queues that the test made are deleted."""
    with kmq_target.open() as storage:
        before = set(storage.list())
        yield storage
        for name in set(storage.list()) - before:
            if name.startswith(PREFIX):  # others may use the storage, too
                storage.delete(name)


PREFIX = "kmq-contract-"


@pytest.fixture
def make_queue(kmq_storage: Storage) -> MakeQueue:
    """Makes queues with leases of LEASE_S, unless the test says otherwise."""

    def make(**settings: Any) -> Queue:
        name = new_name()
        kmq_storage.create(name, **{"redeliver_after_ms": int(LEASE_S * 1000), **settings})
        return kmq_storage.open(name)

    return make


@pytest.fixture
def queue(make_queue: MakeQueue) -> Queue:
    """An empty queue."""
    return make_queue()


def new_name() -> str:
    """A name for a queue that no other has."""
    return PREFIX + uuid4().hex[:12]


def needs(capabilities: Capabilities, *names: str) -> None:
    """Skip the test unless the storage can do all of these."""
    for name in names:
        if not getattr(capabilities, name):
            pytest.skip(f"the storage says that it can't: {name}")


def take(queue: Queue, number: int = 1, **arguments: Any) -> list[Message]:
    """Take that many messages, in as many calls as it needs."""
    found: list[Message] = []
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while len(found) < number:
        assert SYSTEM_CLOCK.monotonic() < deadline, f"{len(found)} of {number} messages came"
        found += queue.receive(number - len(found), **{"wait": 0.2, **arguments})
    return found


def take_one(queue: Queue, **arguments: Any) -> Message:
    """Take one message."""
    return take(queue, 1, **arguments)[0]


def drain(queue: Queue, count: int) -> list[bytes]:
    """Acknowledge all messages, which are `count`; returns the bodies in the order in which they came."""
    messages = take(queue, count, lease=60)
    queue.ack(messages, wait=True)
    assert queue.receive(wait=0) == []
    return [message.body for message in messages]


def settles(queue: Queue, look: Callable[[], T], expected: T) -> None:
    """Assert that `look()` is `expected`: now, or a moment later where the storage is not immediate."""
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while (found := look()) != expected and not queue.capabilities.immediate:
        if SYSTEM_CLOCK.monotonic() > deadline:
            break
        SYSTEM_CLOCK.sleep(_LOOK_EVERY_S)
    assert found == expected


def has(queue: Queue, size: int, in_flight: int) -> None:
    """Assert the sizes of a queue, as settles() does."""
    settles(queue, lambda: (queue.size(), queue.in_flight()), (size, in_flight))


def has_dead(queue: Queue, count: int) -> Sequence[DeadLetter]:
    """The dead letters of a queue, which are `count`, without bodies."""
    settles(queue, lambda: len(queue.dead_letters.list()), count)
    return queue.dead_letters.list()


def own_headers(message: Message | DeadLetter) -> Headers:
    """The headers that were sent; those named kmq-… are the storage's."""
    return tuple(header for header in message.headers if not header[0].startswith("kmq-"))


def at_once(count: int, job: Callable[[int], T]) -> list[T]:
    """The results of `job(0)` … `job(count - 1)`, called by as many threads that begin together."""
    barrier = threading.Barrier(count)

    def started(number: int) -> T:
        barrier.wait(PATIENCE_S)
        return job(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(started, range(count)))
