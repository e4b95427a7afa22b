"""Measures groups, fair queues, caps and dedup ids beside a plain queue (`benchmarks.shares --help`).

throughput  messages a second of a backlog of many groups, taken and acknowledged; `ratio` to the plain queue
deep        the same, by turns out of one backlog of which one group has nine tenths
sends       messages a second that are sent without and with a dedup id, one by one and `batch` at once
backlog     the same of a hundred groups, while a group at its cap has a backlog; `ratio` to that without it
noisy       how long messages of quiet groups wait (ms, median and p99), with handlers that take some ms,
            alone and beside a group with a backlog; with a cap a handler is always free for them. Each
            taker has HANDLERS: 40 in flight are enough to make a group noisy, which 30 are not
peers       messages a second, put, and taken and acknowledged, of plain queues and of those with groups or
            unique ids, here and of libraries that have the like

Kinds of queues take turns, so that other load of the machine meets them all. No figure is ever asserted.
"""

import json
import random
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import click

from benchmarks.results import Case, Figures, run_case
from benchmarks.storage_speed import OURS, Server, ours, server_of, theirs
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.dev import Databases
from kmqpy.message import Message, OutgoingMessage
from kmqpy.queue import Queue, Storage, storage_for

KINDS: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "in order": {"order": "group"},
    "fair": {"fair": True},
    "fair by noise": {"fair": True, "fair_by": "noise"},
    "capped": {"max_in_flight_per_group": 50},
    "fair and capped": {"fair": True, "max_in_flight_per_group": 50},
}
PEERS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "postgresql": {"groups": ("pgmq", "procrastinate"), "unique": ("pgqueuer", "procrastinate")},
    "redis": {"unique": ("rq",)},
}
"""By storage, who else has groups or unique ids; huey's locks let what waits fail."""
TAKERS = 4
CAP = 5
HANDLERS, HANDLER_S, QUIET_S, QUIET_GAP_S = 10, 0.2, 10.0, 0.05
LEASE_S = 600


@contextmanager
def queue_with(storage: Storage, **settings: object) -> Iterator[Queue]:
    """A new queue, which is deleted at the end."""
    storage.create(name := uuid4().hex, **settings)
    try:
        with storage.open(name) as queue:
            yield queue
    finally:
        storage.delete(name)


def fill(queue: Queue, groups: Sequence[str], count: int) -> None:
    """Send `count` messages, by turns of each group."""
    for first in range(0, count, 1_000):
        numbers = range(first, min(count, first + 1_000))
        queue.send_many([OutgoingMessage(b"x" * 100, group=groups[one % len(groups)]) for one in numbers])


def in_threads(work: Callable[[], None]) -> float:
    """Call `work` in TAKERS threads; returns the seconds until all have ended."""
    threads = [threading.Thread(target=work) for _ in range(TAKERS)]
    began = SYSTEM_CLOCK.monotonic()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return SYSTEM_CLOCK.monotonic() - began


def drained(queue: Queue, count: int, batch: int) -> float:
    """Take and acknowledge `count` messages; returns how many a second."""
    left = [count]
    lock = threading.Lock()

    def work() -> None:
        while left[0] > 0:
            found = queue.receive(batch, wait=0.05, lease=LEASE_S)
            queue.ack(found, confirmed=True)
            with lock:
                left[0] -= len(found)

    return round(count / in_threads(work), 1)


def throughput(
    storage: Storage, kinds: Sequence[str], groups: int, count: int, batch: int, turns: int
) -> dict[str, object]:
    """The rates of these kinds of queues; the first one is what others are compared with."""
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(turns):
        for kind in kinds:
            with queue_with(storage, **KINDS[kind]) as queue:
                fill(queue, [f"g{one}" for one in range(groups)], count)
                rates[kind].append(drained(queue, count, batch))
    return compared(rates)


def deep(
    storage: Storage, kinds: Sequence[str], groups: int, depth: int, count: int, batch: int, turns: int
) -> dict[str, object]:
    """The rates of these kinds of queues, of each `count` messages of a backlog of `depth`."""
    names = ["large"] * 9 * groups + [f"g{one}" for one in range(groups)]
    random.Random(1).shuffle(names)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    with ExitStack() as queues:
        filled = {kind: queues.enter_context(queue_with(storage, **KINDS[kind])) for kind in kinds}
        for queue in filled.values():
            fill(queue, names, depth)
        for _ in range(turns):
            for kind, queue in filled.items():
                rates[kind].append(drained(queue, count, batch))
    return compared(rates)


def sends(storage: Storage, count: int, batch: int, turns: int) -> dict[str, object]:
    """The rates of sends, without and with dedup ids, each in a queue of its own."""
    shown: dict[str, object] = {}
    for at_once in (1, batch):
        rates: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(turns):
            for kind, found in rates.items():
                with queue_with(storage) as queue:
                    given = [
                        OutgoingMessage(b"x" * 100, dedup_id=f"id {number}" if kind == "with" else None)
                        for number in range(count if at_once > 1 else count // 10)
                    ]
                    began = SYSTEM_CLOCK.monotonic()
                    for first in range(0, len(given), at_once):
                        queue.send_many(given[first : first + at_once])
                    found.append(len(given) / (SYSTEM_CLOCK.monotonic() - began))
        shown[f"{at_once} at once"] = compared(rates)
    return shown


def compared(rates: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """The medians, and the ratio of each to the first one."""
    medians = {kind: statistics.median(found) for kind, found in rates.items()}
    first = next(iter(medians.values()))
    return {
        kind: {"per second": round(median), "ratio": round(median / first, 2)}
        for kind, median in medians.items()
    }


def backlog(storage: Storage, depth: int, count: int, batch: int, turns: int) -> dict[str, object]:
    """The rates of quiet groups, without and with a group at its cap that has `depth` messages."""
    settings = {"fair": True, "max_in_flight_per_group": CAP}
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    # In one table, so that its size and its vacuums are the same for both.
    with queue_with(storage, **settings) as alone, queue_with(storage, **settings) as beside:
        fill(beside, ["noisy"], depth)
        beside.receive(CAP, wait=0, lease=LEASE_S)
        for _ in range(turns):
            for kind, queue in (("alone", alone), ("beside", beside)):
                fill(queue, [f"g{one}" for one in range(100)], count)
                rates[kind].append(drained(queue, count, batch))
    medians = {kind: statistics.median(found) for kind, found in rates.items()}
    return {**medians, "ratio": round(medians["beside"] / medians["alone"], 2)}


def waits(storage: Storage, depth: int, settings: Mapping[str, object]) -> list[float]:
    """The ms that messages of quiet groups waited, beside a group with a backlog of `depth` messages."""
    with queue_with(storage, **settings) as queue:
        fill(queue, ["noisy"], depth)
        ends = threading.Event()
        found: list[float] = []

        def handle(message: Message) -> None:
            if message.group != "noisy":
                found.append((SYSTEM_CLOCK.monotonic() - float(message.body)) * 1000)
            SYSTEM_CLOCK.sleep(random.uniform(0, 2 * HANDLER_S))  # equal ones would end together
            queue.ack(message, confirmed=True)

        def work() -> None:
            free = threading.Semaphore(HANDLERS)
            with ThreadPoolExecutor(HANDLERS) as handlers:
                while not ends.is_set():
                    free.acquire()
                    messages = queue.receive(1, wait=0.2, lease=LEASE_S)
                    for message in messages:
                        handlers.submit(handle, message).add_done_callback(lambda _: free.release())
                    if not messages:
                        free.release()

        def send() -> None:
            end = SYSTEM_CLOCK.monotonic() + QUIET_S
            number = 0
            while (now := SYSTEM_CLOCK.monotonic()) < end:
                number += 1
                queue.send(str(now), group=f"quiet{number % 10}")
                SYSTEM_CLOCK.sleep(QUIET_GAP_S)
            ends.set()

        sender = threading.Thread(target=send)
        sender.start()
        in_threads(work)
        sender.join()
        return found[len(found) // 10 :]  # without the beginning


def noisy(storage: Storage, depth: int, turns: int) -> dict[str, object]:
    """What quiet messages wait in each kind of queue, alone and beside a backlog."""
    kinds: dict[str, dict[str, object]] = {
        "plain": {},
        "fair": {"fair": True},
        "fair by noise": {"fair": True, "fair_by": "noise"},
        "fair and capped": {"fair": True, "max_in_flight_per_group": TAKERS * HANDLERS // 2},
    }
    shown: dict[str, object] = {}
    for kind, settings in kinds.items():
        both = []
        for large in (0, depth):
            found = [one for _ in range(turns) for one in waits(storage, large, settings)]
            both.append(
                [round(one, 1) for one in (statistics.median(found), statistics.quantiles(found, n=100)[98])]
                if len(found) > 1
                else None
            )
        alone, beside = both
        shown[kind] = {
            "alone": alone,
            "beside": beside or "none came",
            "ratio of p99": round(beside[1] / alone[1], 2) if alone and beside else None,
        }
    return shown


def peers(server: Server, batch: int, seconds: float, turns: int) -> dict[str, object]:
    """The medians of kmqpy and peers, plain and of each kind, of `seconds` that each puts."""
    shown: dict[str, dict[str, dict[str, float]]] = {}
    for kind, names in PEERS.get(server.name, {}).items():
        works: dict[str, Callable[[], Figures]] = {}
        for of in ("", kind):
            works[f"{OURS} {of}".strip()] = ours(server, 0, TAKERS, batch, seconds, of)
            for one in server.peers:
                if one.name in names:
                    other = replace(one, name=f"{one.name}-{of}") if of else one
                    works[f"{one.name} {of}".strip()] = theirs(other, server, 0, TAKERS, batch, seconds)
        case = Case(
            work=f"{kind} on {server.name}",
            name=f"{TAKERS} takers, by {batch}",
            metrics={"put": "put/s", "take": "take+ack/s"},
            peers=works,
            repeats=turns,
        )
        for row in run_case(case):
            shown.setdefault(kind, {}).setdefault(row.peer, {})[row.unit] = round(row.median or 0)
    return {**shown}


@click.command()
@click.option("--on", "names", default="postgresql,mariadb,mysql,sqlite,redis", show_default=True)
@click.option("--groups", default=10_000, show_default=True)
@click.option("--count", default=20_000, show_default=True, help="Messages of a turn.")
@click.option("--depth", default=1_000_000, show_default=True, help="The backlog of the noisy group.")
@click.option("--batch", default=100, show_default=True)
@click.option("--turns", default=3, show_default=True)
@click.option("--only", default="throughput,deep,sends,backlog,noisy,peers", show_default=True)
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="For throughput and deep.")
def main(
    *, names: str, groups: int, count: int, depth: int, batch: int, turns: int, only: str, kinds: str
) -> None:
    """Print the figures of each storage as JSON."""
    for name in names.split(","):
        with (
            tempfile.TemporaryDirectory() as folder,
            Databases(*{name} - {"sqlite"}) as started,
            storage_for(
                f"sqlite:///{folder}/kmqpy.db" if name == "sqlite" else started.urls[name]
            ) as storage,
        ):
            works: dict[str, Callable[[], object]] = {
                "throughput": partial(throughput, storage, kinds.split(","), groups, count, batch, turns),
                "deep": partial(deep, storage, kinds.split(","), groups, depth, count, batch, turns),
                "sends": partial(sends, storage, count, batch, turns),
                "backlog": partial(backlog, storage, depth, count, batch, turns),
                "noisy": partial(noisy, storage, min(depth, 100_000), turns),
                "peers": partial(peers, server_of(name, started, Path(folder)), batch, count / 10_000, turns),
            }
            for work in only.split(","):
                click.echo(json.dumps({"on": name, "work": work, "found": works[work]()}))


if __name__ == "__main__":
    main()
