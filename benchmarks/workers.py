"""Measures workers: how many messages of a backlog they handle a second, and how soon they handle a new one.

Handlers do nothing, or wait for 1 ms. On Kafka, kmqpy is beside the least code for such a worker: a consumer
and a pool of threads, or tasks, that handle each batch and commit its offsets; what is behind one slow
message waits, and a failed one is gone. Beside it and on other storages are the workers of other libraries,
see peers/other_workers.py, each in a venv of its own; every turn on Redis and PostgreSQL begins with an empty
server.

Latency is the time from just before a message is sent, by a process that does the same with the same library
at an even pace, until its handler is called.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from redis import Redis

from benchmarks import children
from benchmarks.lab import Lab
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes
from benchmarks.storage_speed import Peer, python_of
from kmqpy.dev import Databases
from kmqpy.kafka.settings import QueueSettings

PARTITIONS = 4
WORKER, ASYNC_WORKER = "kmqpy Worker", "kmqpy AsyncWorker"
BARE, BARE_TASKS = "consumer and pool", "consumer and tasks"
HANDLERS = 8

_SCRIPT = Path(__file__).resolve().parent / "peers" / "other_workers.py"
_PSYCOPG = "psycopg[binary,pool]==3.3.9"
_PACKAGES = {
    "Kafka": {"faststream": "faststream[confluent]==0.7.8"},
    "Redis": {
        "dramatiq": "dramatiq[redis]==2.2.1",
        "celery": "celery[redis]==5.7.0",
        "taskiq": "taskiq==0.13.0 taskiq-redis==1.2.4",
        "huey": "huey[redis]==3.5.4",
        "rq": "rq==3.0.0",
    },
    "PostgreSQL": {
        "procrastinate": f"procrastinate==3.10.0 {_PSYCOPG}",
        "pgqueuer": f"pgqueuer==1.6.0 {_PSYCOPG}",
    },
    "SQLite": {"huey": "huey==3.5.4"},
}
_ALONE = "rq"
"""It has one handler at a time, so that it stands only where all have."""
_OURS = {WORKER: "threads", ASYNC_WORKER: "asyncio"}
_BARE = {BARE: "threads", BARE_TASKS: "asyncio"}
_CASES = ((1, 0), (HANDLERS, 0), (HANDLERS, 1))
"""How many handlers there are at the same time, and for how many ms each waits."""
_MANY = (100, 1)
_RATES = (100, 1_000)
_WAITING, _STORED = 5, 10
_OTHERS = {"Kafka": 20, "Redis": 40, "PostgreSQL": 100}
"""Handlers that wait, workers on other storages, and other libraries get so many times fewer messages."""

_Turn = Callable[[], Figures]


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case for each storage and number of handlers."""
    with lab.queue(PARTITIONS) as queue:
        lab.preload(queue, PARTITIONS, sizes.worker_messages, 100)
        for handlers, ms in (*_CASES, _MANY):
            count = sizes.worker_messages // (_WAITING if ms else 1)
            options = _options(handlers, ms, count, is_filled=True)
            peers = _on_kafka(lab, lambda: lab.view(queue, PARTITIONS), options, sizes)
            if (handlers, ms) == _MANY:
                peers = {name: peers[name] for name in (ASYNC_WORKER, BARE_TASKS)}
            yield _backlog_case("Kafka", handlers, ms, peers, sizes)
    for name in ("Redis", "PostgreSQL"):
        with Databases(name.lower()) as servers:
            for handlers, ms in _CASES:
                options = _options(handlers, ms, sizes.worker_messages // _STORED)
                yield _backlog_case(name, handlers, ms, _on_storage(name, servers, options, sizes), sizes)
    with tempfile.TemporaryDirectory() as folder:
        files = (f"{folder}/{number}.db" for number in range(1_000_000))
        options = _options(1, 0, sizes.worker_messages // _STORED)
        peers = {
            WORKER: lambda: _ours(
                "stored", {**options, "kind": "threads", "url": f"sqlite:///{next(files)}"}
            ),
            "huey": lambda: _other("SQLite", "huey", {**options, "url": next(files)}),
        }
        yield _backlog_case("SQLite", 1, 0, peers, sizes)


def latency_cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """A case for each storage and rate."""
    # Not counted: a broker that has just started is slow.
    _on_kafka(lab, lambda: lab.queue(PARTITIONS), _options(1, 0, 300, rate=100), sizes)[WORKER]()
    for rate in _RATES:
        options = _options(HANDLERS, 0, int(rate * sizes.worker_latency_s), rate=rate)
        yield _latency_case(
            "Kafka", rate, _on_kafka(lab, lambda: lab.queue(PARTITIONS), options, sizes), sizes
        )
    for name in ("Redis", "PostgreSQL"):
        with Databases(name.lower()) as servers:
            for rate in _RATES:
                options = _options(HANDLERS, 0, int(rate * sizes.worker_latency_s), rate=rate)
                yield _latency_case(name, rate, _on_storage(name, servers, options, sizes), sizes)


def backlog_name(storage: str, handlers: int = HANDLERS, ms: int = 0) -> str:
    """The name of a case of the work `workers`."""
    return f"{storage}, {handlers} handlers of {ms} ms"


def latency_name(storage: str, rate: int = _RATES[0]) -> str:
    """The name of a case of the work `latency of workers`."""
    return f"{storage}, {rate:,} msg/s, {HANDLERS} handlers, send to handler called"


def _backlog_case(storage: str, handlers: int, ms: int, peers: Mapping[str, _Turn], sizes: Sizes) -> Case:
    return Case(
        work="workers",
        name=backlog_name(storage, handlers, ms),
        metrics={"handled_per_s": "handled/s"},
        peers=peers,
        repeats=sizes.repeats,
    )


def _latency_case(storage: str, rate: int, peers: Mapping[str, _Turn], sizes: Sizes) -> Case:
    return Case(
        work="latency of workers",
        name=latency_name(storage, rate),
        metrics={"p50_ms": "ms p50", "p99_ms": "ms p99"},
        peers=peers,
        repeats=sizes.repeats,
    )


def _options(
    handlers: int, ms: int, messages: int, *, rate: int = 0, is_filled: bool = False
) -> dict[str, Any]:
    return {"handlers": handlers, "ms": ms, "messages": messages, "rate": rate, "is_filled": is_filled}


def _on_kafka(
    lab: Lab,
    fresh: Callable[[], AbstractContextManager[QueueSettings]],
    options: dict[str, Any],
    sizes: Sizes,
) -> dict[str, _Turn]:
    bootstrap = lab.connection.bootstrap

    def ours(work: str, kind: str) -> Figures:
        with fresh() as queue:
            given = {"bootstrap": bootstrap, "queue": queue.to_json().decode(), "kind": kind}
            return _ours(work, {**options, **given})

    def other(library: str) -> Figures:
        with fresh() as queue:
            given = {"url": bootstrap, "topic": queue.name, "group": queue.consumer_group}
            return _other("Kafka", library, {**_fewer("Kafka", options, sizes), **given})

    return {
        **{name: partial(ours, "kmqpy", kind) for name, kind in _OURS.items()},
        **{name: partial(ours, "bare", kind) for name, kind in _BARE.items()},
        **{library: partial(other, library) for library in _PACKAGES["Kafka"]},
    }


def _on_storage(name: str, servers: Databases, options: dict[str, Any], sizes: Sizes) -> dict[str, _Turn]:
    url = servers.urls[name.lower()]

    def ours(kind: str) -> Figures:
        _empty(url)
        return _ours("stored", {**options, "url": url, "kind": kind})

    def other(library: str) -> Figures:
        _empty(url)
        return _other(name, library, {**_fewer(name, options, sizes), "url": url})

    return {
        **{peer: partial(ours, kind) for peer, kind in _OURS.items()},
        **{
            library: partial(other, library)
            for library in _PACKAGES[name]
            if library != _ALONE or options["handlers"] == 1
        },
    }


def _fewer(storage: str, options: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    return options if options["rate"] else {**options, "messages": sizes.worker_messages // _OTHERS[storage]}


def _empty(url: str) -> None:
    if url.startswith("redis:"):
        with Redis.from_url(url) as client:
            client.flushall()
    else:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


def _ours(work: str, options: dict[str, Any]) -> Figures:
    with children.peer("worker", work, **options) as child:
        return child.result()


def _other(storage: str, library: str, options: dict[str, Any]) -> Figures:
    peer = Peer(name=library, package=_PACKAGES[storage][library], script=_SCRIPT)
    command = [python_of(peer), str(_SCRIPT), library, json.dumps(options)]
    with children.Child(command) as child:
        return child.result()
