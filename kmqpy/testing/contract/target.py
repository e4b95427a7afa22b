"""The `Target` that describes a storage to the contract suite; the fixtures and helpers of the suite."""

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
"""The lease of the queues under test, in seconds."""
PAST_LEASE_S = 1.3
"""Seconds that a test lets pass so that a lease of LEASE_S is over, also on a slow machine."""
PATIENCE_S = 60.0
"""Seconds that a test waits for an expected message or state before the test fails."""
ALIKE = (
    "a",
    "A",
    "a ",
    " a",
    "\xe4",
    "a\u0308",
    "ss",
    "\xdf",
    "\uff41",
    "1",
    "01",
    "a\x01",
    "x" * 200,
    "x" * 199,
    "\U0001f600" * 200,
)
"""Ids that a collation, a normal form or a column that is too short would take for one another."""
_CHECK_INTERVAL_S = 0.25
"""Seconds between two checks of assert_becomes()."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Tells the suite how to open a storage, and how to disturb it. A test whose hook is None is skipped.

    Args:
        open: Opens the storage: returns a Storage object, each time another one with the same queues.
        url: Url of the storage without `queue=`, for tests that start other processes.
        pass_time: Lets the given number of seconds pass on the storage's clock.
        real_time: False: the storage's clock moves only by pass_time.
        open_with_clock: Opens the storage with this clock as the clock of the client's machine.
        kill_server: Kills the server with -9, and starts it again.
        cut_connections: Breaks all connections to the server; new connections work.
        connections: Returns the number of connections of this process to the server.
        threads: Returns the number of threads of this process, without those of a server that runs in it.
    """

    open: Callable[[], Storage]
    url: str | None = None
    pass_time: Callable[[float], None] = SYSTEM_CLOCK.sleep
    real_time: bool = True
    open_with_clock: Callable[[Clock], Storage] | None = None
    kill_server: Callable[[], None] | None = None
    cut_connections: Callable[[], None] | None = None
    connections: Callable[[], int] | None = None
    threads: Callable[[], int] = threading.active_count


class MakeQueue(Protocol):
    """The type of the fixture make_queue: makes an empty queue with these settings, and opens it."""

    def __call__(self, **settings: Any) -> Queue: ...  # noqa: D102


@pytest.fixture
def kmq_target(request: pytest.FixtureRequest) -> Target:
    """The Target of `--kmq-storage=URL`; a test module of a storage overrides this fixture to add hooks."""
    url = request.config.getoption("--kmq-storage", default=None)
    if url is None:
        pytest.skip("no storage given; run pytest --kmq-storage=URL")
    return Target(open=lambda: storage_for(url), url=url)


@pytest.fixture
def kmq_storage(kmq_target: Target) -> Iterator[Storage]:
    """The storage under test; afterwards the fixture deletes the queues that the test made."""
    with kmq_target.open() as storage:
        before = set(storage.list())
        yield storage
        for name in set(storage.list()) - before:
            if name.startswith(PREFIX):  # other programs may use the storage, too
                storage.delete(name)


PREFIX = "kmq-contract-"
"""The beginning of the names of all queues that the suite makes."""


@pytest.fixture
def make_queue(kmq_storage: Storage) -> MakeQueue:
    """A function that makes queues; their lease is LEASE_S unless the test gives another."""

    def make(**settings: Any) -> Queue:
        name = new_name()
        kmq_storage.create(name, **{"lease_ms": int(LEASE_S * 1000), **settings})
        return kmq_storage.open(name)

    return make


@pytest.fixture
def queue(make_queue: MakeQueue) -> Queue:
    """An empty queue with a lease of LEASE_S."""
    return make_queue()


def new_name() -> str:
    """A new name for a queue."""
    return PREFIX + uuid4().hex[:12]


def skip_without(capabilities: Capabilities, *names: str) -> None:
    """Skip the test if the storage lacks one of these capabilities."""
    for name in names:
        if not getattr(capabilities, name):
            pytest.skip(f"the storage says that it can't: {name}")


def take(queue: Queue, number: int = 1, **arguments: Any) -> list[Message]:
    """Take `number` messages, in as many calls of receive() as are needed."""
    found: list[Message] = []
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while len(found) < number:
        assert SYSTEM_CLOCK.monotonic() < deadline, f"{len(found)} of {number} messages came"
        found += queue.receive(number - len(found), **{"wait": 1.0, **arguments})
    return found


def take_one(queue: Queue, **arguments: Any) -> Message:
    """Take one message."""
    return take(queue, 1, **arguments)[0]


def drain(queue: Queue, count: int) -> list[bytes]:
    """Take and acknowledge `count` messages, and assert that no other comes; returns the bodies in order."""
    messages = take(queue, count, lease=60)
    queue.ack(messages, confirmed=True)
    assert queue.receive(wait=0) == []
    return [message.body for message in messages]


def assert_becomes(queue: Queue, look: Callable[[], T], expected: T) -> None:
    """Assert that `look()` returns `expected`: now, or in PATIENCE_S if the storage is not `immediate`."""
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while (found := look()) != expected and not queue.capabilities.immediate:
        if SYSTEM_CLOCK.monotonic() > deadline:
            break
        SYSTEM_CLOCK.sleep(_CHECK_INTERVAL_S)
    assert found == expected


def assert_sizes(queue: Queue, *, waiting: int, in_flight: int) -> None:
    """Assert that size() is `waiting` and in_flight() is `in_flight`, as assert_becomes() does."""
    assert_becomes(queue, lambda: (queue.size(), queue.in_flight()), (waiting, in_flight))


def assert_dead(queue: Queue, count: int) -> Sequence[DeadLetter]:
    """Assert that a queue has `count` dead letters; returns them, without bodies."""
    assert_becomes(queue, lambda: len(queue.dead_letters.list()), count)
    return queue.dead_letters.list()


def own_headers(message: Message | DeadLetter) -> Headers:
    """The headers that the sender gave: without those named kmq-…, which the storage adds."""
    return tuple(header for header in message.headers if not header[0].startswith("kmq-"))


def at_once(count: int, job: Callable[[int], T]) -> list[T]:
    """Call `job(0)` … `job(count - 1)` in `count` threads that start together; returns the results."""
    barrier = threading.Barrier(count)

    def started(number: int) -> T:
        barrier.wait(PATIENCE_S)
        return job(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(started, range(count)))
