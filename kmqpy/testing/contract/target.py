"""What the contract suite needs to know of a storage, its fixtures, and what its tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.message import Message
from kmqpy.queue import Capabilities, Queue, Storage, storage_for

T = TypeVar("T")
LEASE_S = 1.0
"""The lease of the queues under test."""
OVER_S = 1.3
"""After that a lease of LEASE_S is over, also on a slow machine."""
_PATIENCE_S = 20.0


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
        pytest.skip("no storage given; run pytest -p kmqpy.testing.plugin --kmq-storage=URL")
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
    deadline = SYSTEM_CLOCK.monotonic() + _PATIENCE_S
    while len(found) < number:
        assert SYSTEM_CLOCK.monotonic() < deadline, f"{len(found)} of {number} messages came"
        found += queue.receive(number - len(found), **{"wait": 0.2, **arguments})
    return found


def take_one(queue: Queue, **arguments: Any) -> Message:
    """Take one message."""
    return take(queue, 1, **arguments)[0]


def drain(queue: Queue) -> list[bytes]:
    """Acknowledge all that can be taken; returns the bodies in order."""
    bodies: list[bytes] = []
    while messages := queue.receive(wait=0.05, lease=60):
        bodies += [message.body for message in messages]
        queue.ack(messages, wait=True)
    return bodies


def at_once(count: int, job: Callable[[int], T]) -> list[T]:
    """The results of `job(0)` … `job(count - 1)`, called by as many threads that begin together."""
    barrier = threading.Barrier(count)

    def started(number: int) -> T:
        barrier.wait(_PATIENCE_S)
        return job(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(started, range(count)))
