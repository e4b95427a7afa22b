"""Kills gateways, and what is behind them, while clients send, poll and acknowledge.

Several gateways over one storage; some are killed (-9) once, and started again. On Kafka a broker is killed,
too, and with each gateway its tracker; on PostgreSQL all connections are cut. Clients go to another gateway
after each error, as EmoDB's do. Half of them use a queue, half a dedup queue, to which they send each body
several times. In the end, what a gateway accepted must have been handed out since, nothing that it
acknowledged may be handed out again more than a second later, and no two equal messages that waited together
were both handed out; on Kafka, unless a gateway had just come or gone.
"""

import http.client
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kmqpy.core.clock import wait_until
from kmqpy.dev import Cluster
from kmqpy.dev.databases import Databases
from kmqpy.dev.ports import free_ports

from .clocks import of_any_program, spread

QUEUES = ("/queue/1/chaos", "/dedupq/1/chaos")
STORAGES = ("postgresql", "kafka")
_BATCH = 10
_TTL_S = 4
_START_S = 60.0
_DRAIN_S = 120.0
_AFTER_ACK_S = 1.0
"""A poll that began so much later, in seconds, must not show what was acknowledged."""
_TIMEOUT_S = 3.0
_TAKEOVER_S = 30.0
"""So long after a fault, in seconds, a client of Kafka may take a partition over, and know no twins there."""


@dataclass(frozen=True)
class Size:
    """How much of it.

    gateways  how many there are; all over one storage
    kills     how many of them are killed
    clients   threads that send and receive
    clocks_s  a third of the gateways has a clock that is slow by so much, a third a fast one
    """

    gateways: int = 3
    kills: int = 3
    clients: int = 8
    clocks_s: float = 0.0


LARGE, SMALL = Size(), Size(gateways=2, kills=1, clients=3)


@dataclass(eq=False)
class Gateway:
    """One `kmq gateway` in a process of its own, on a port that it keeps; its clock is wrong by `wrong_s`."""

    url: str
    port: int
    log: Path
    wrong_s: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", "from kmqpy.cli import main; main()", "gateway"]
        options = ["--port", str(self.port), "--admin-port", "0", "--no-access-log", "--log-format", "text"]
        with self.log.open("ab") as log:
            clock = of_any_program(self.wrong_s) if self.wrong_s else {}
            env = {**os.environ, "KMQ_QUEUE_URL": self.url, **clock}
            self.process = subprocess.Popen([*command, *options], env=env, stdout=log, stderr=log)
        assert wait_until(self.answers, _START_S, every_s=0.1), self.log.read_text()[-2000:]

    def answers(self) -> bool:
        try:
            return ask(self.port, "GET", "/queue/1/ping")[0] == 200
        except OSError:
            return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)


class Span(NamedTuple):
    """When something was asked for and answered; what has no answer may happen at any time."""

    asked_s: float
    answered_s: float = float("inf")


@dataclass
class Body:
    """What became of one body: its sends, and the first time that each message of it was handed out."""

    accepted_s: float = 0.0  # when the last one was asked for that was accepted
    first_s: float = float("inf")
    last_s: float = 0.0
    shown_s: float = 0.0
    messages: dict[str, Span] = field(default_factory=dict)


@dataclass
class Journal:
    """What clients were told. Times are those of the monotonic clock, in seconds."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    bodies: defaultdict[str, Body] = field(default_factory=lambda: defaultdict(Body))
    acked: dict[str, float] = field(default_factory=dict)
    again: list[str] = field(default_factory=list)
    faults: list[Span] = field(default_factory=list)
    lost_polls: list[float] = field(default_factory=list)
    accepted: int = 0
    errors: int = 0

    def sent(self, bodies: Iterable[str], when: Span) -> None:
        with self.lock:
            for one in bodies:
                body = self.bodies[one]
                body.first_s, body.last_s = min(body.first_s, when.asked_s), max(body.last_s, when.answered_s)
                if when.answered_s < float("inf"):
                    self.accepted += 1
                    body.accepted_s = max(body.accepted_s, when.asked_s)

    def handed_out(self, messages: Iterable[dict], when: Span) -> None:
        with self.lock:
            for message in messages:
                body, message_id = self.bodies[message["payload"]], message["id"]
                body.shown_s = max(body.shown_s, when.answered_s)
                body.messages.setdefault(message_id, when)
                passed_s = when.asked_s - self.acked.get(message_id, float("inf"))
                if passed_s > _AFTER_ACK_S:
                    self.again.append(f"{message['payload']}: {passed_s:.1f} s after its acknowledgement")

    def lost(self) -> list[str]:
        """Bodies that were accepted, and not handed out since they were sent."""
        return sorted(text for text, body in self.bodies.items() if body.accepted_s > body.shown_s)

    def twins(self, *, exact: bool) -> list[str]:
        """Bodies of which two messages waited when the first was taken, and the second came all the same."""
        return sorted(text for text, body in self.bodies.items() if self._has_twins(body, exact))

    def _has_twins(self, body: Body, exact: bool) -> bool:
        shown = sorted(body.messages.values())
        for first, second in itertools.pairwise(shown):
            if body.last_s > first.asked_s or second.asked_s < first.answered_s:
                continue  # it may have been sent later, or taken at the same time
            if any(body.first_s - _TIMEOUT_S < asked_s < first.answered_s for asked_s in self.lost_polls):
                continue  # that may have taken the second one before
            if not exact and any(
                fault.asked_s < second.answered_s and fault.answered_s + _TAKEOVER_S > body.first_s
                for fault in self.faults
            ):
                continue
            return True
        return False


class Client(threading.Thread):
    """Sends, polls and acknowledges, now at this gateway, now at another."""

    def __init__(self, number: int, ports: list[int], journal: Journal, seed: int) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._number = number
        self._queue = QUEUES[number % len(QUEUES)]
        self._is_dedup = self._queue == QUEUES[1]
        self._last: list[str] = []
        self._journal = journal
        self._dice = random.Random(seed * 100 + number)
        self._ports = itertools.cycle(ports[number % len(ports) :] + ports[: number % len(ports)])
        self._port = next(self._ports)
        self.sending, self.running = threading.Event(), threading.Event()
        self.sending.set()
        self.running.set()

    def run(self) -> None:
        for count in itertools.count():
            if not self.running.is_set():
                return
            if self.sending.is_set():
                bodies = [f"{self._number}-{count}-{index}" for index in range(_BATCH)]
                asked_s = time.monotonic()
                given = [*bodies, *bodies, *self._last] if self._is_dedup else bodies
                is_sent = self._ask("POST", "sendbatch", given) is not None
                self._journal.sent(given, Span(asked_s, *[time.monotonic()] * is_sent))
                self._last = bodies
            self._take()

    def _take(self) -> None:
        asked_s = time.monotonic()
        found = self._ask("GET", f"poll?limit={2 * _BATCH}&ttl={_TTL_S}")
        if found is None:
            with self._journal.lock:
                self._journal.lost_polls.append(asked_s)
        if not found:
            time.sleep(0 if self.sending.is_set() else 0.1)
            return
        self._journal.handed_out(found, Span(asked_s, time.monotonic()))
        kept = [message for message in found if self._dice.random() > 0.05]
        if kept and self._ask("POST", "ack", [message["id"] for message in kept]) is not None:
            now_s = time.monotonic()
            with self._journal.lock:
                for message in kept:
                    self._journal.acked.setdefault(message["id"], now_s)

    def _ask(self, method: str, call: str, body: object = None) -> list | dict | None:
        """The answer; None after an error, and the next call goes to another gateway."""
        try:
            status, answer = ask(self._port, method, f"{self._queue}/{call}", body)
            if status == 200:
                return json.loads(answer)
        except (OSError, http.client.HTTPException):
            pass
        with self._journal.lock:
            self._journal.errors += 1
        self._port = next(self._ports)
        time.sleep(0.02)
        return None


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    """One request on a connection of its own; raises OSError, HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextmanager
def backend(storage: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A storage's url, and a function that breaks something behind it."""
    if storage == "kafka":
        settings = {"default.replication.factor": "3", "min.insync.replicas": "2"}
        with Cluster(brokers=3, broker_settings=settings) as cluster:

            def kill_a_broker() -> None:
                cluster.broker(2).kill()
                time.sleep(3)
                cluster.broker(2).start()

            yield f"kafka://{cluster.bootstrap}?zookeeper={cluster.zookeeper}", kill_a_broker
        return
    with Databases("postgresql") as databases:
        url = databases.urls["postgresql"]
        yield url, lambda: cut_connections(url)


def cut_connections(url: str) -> None:
    """End all connections of others to this database of PostgreSQL."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )


def run(
    storage: str, count: int, seed: int, out: Path, tell: Callable[[str], None], size: Size = LARGE
) -> list[str]:
    """Send at least `count` messages through gateways over this storage; returns what was wrong."""
    with backend(storage) as (url, break_something):
        return run_on(url, break_something, count, seed, out, tell, size)


def gateways_at(url: str, ports: Sequence[int], out: Path, size: Size) -> list[Gateway]:
    """Gateways that are not started yet."""
    wrong = spread(size.clocks_s, len(ports))
    return [
        Gateway(url, port, out / f"gateway-{port}.log", by_s) for port, by_s in zip(ports, wrong, strict=True)
    ]


def run_on(
    url: str,
    break_something: Callable[[], None],
    count: int,
    seed: int,
    out: Path,
    tell: Callable[[str], None],
    size: Size = LARGE,
) -> list[str]:
    """The same on a storage that runs already."""
    dice = random.Random(seed)
    tell(f"seed {seed}")
    ports = free_ports(size.gateways)
    gateways = gateways_at(url, ports, out, size)
    journal = Journal()
    clients = [Client(number, ports, journal, seed) for number in range(size.clients)]
    try:
        journal.faults.append(Span(time.monotonic(), time.monotonic()))
        for gateway in gateways:
            gateway.start()
        for client in clients:
            client.start()
        journal.faults += break_things(
            gateways, break_something, lambda: journal.accepted, count, dice, size, tell
        )
        for client in clients:
            client.sending.clear()
        quiet = wait_until(lambda: _is_empty(ports[0]), _DRAIN_S, every_s=0.5)
    finally:
        for client in clients:
            client.running.clear()
        for client in clients:
            if client.is_alive():
                client.join(10)
        for gateway in gateways:
            gateway.stop()
    twins = journal.twins(exact=not url.startswith("kafka:"))
    tell(
        f"{journal.accepted} accepted of {len(journal.bodies)} bodies, {len(journal.acked)} acknowledged, "
        f"{len(journal.twins(exact=True))} twins, {journal.errors} errors"
    )
    problems = [f"handed out again: {one}" for one in journal.again[:10]]
    if len(journal.again) > 10:
        problems.append(f"… and {len(journal.again) - 10} more")
    if lost := journal.lost():
        problems.append(f"{len(lost)} accepted, and not handed out since: {lost[:10]}")
    if twins:
        problems.append(f"{len(twins)} handed out with a twin that waited: {twins[:10]}")
    if not quiet:
        problems.append(f"not empty after {_DRAIN_S} s")
    return problems


def break_things(
    gateways: list[Gateway],
    break_something: Callable[[], None],
    accepted: Callable[[], int],
    count: int,
    dice: random.Random,
    size: Size,
    tell: Callable[[str], None],
) -> list[Span]:
    """Kill gateways, and break what is behind them once, until `count` messages are accepted."""
    spans = []
    faults = [*dice.sample(gateways, size.kills), None]
    dice.shuffle(faults)
    for index, fault in enumerate(faults, 1):
        wanted = count * index // (len(faults) + 1)
        wait_until(lambda wanted=wanted: accepted() >= wanted, 600, every_s=0.05)
        tell(f"{accepted()} accepted; fault {index}")
        began_s = time.monotonic()
        if fault is None:
            break_something()
        else:
            fault.kill()
            time.sleep(dice.uniform(0, 1))
            fault.start()
        spans.append(Span(began_s, time.monotonic()))
    wait_until(lambda: accepted() >= count, 600, every_s=0.05)
    return spans


def _is_empty(port: int) -> bool:
    """True if nothing is left; asks again: a gateway that counts for long answers the number before."""
    try:
        for pause_s in (0, 1, 1):
            time.sleep(pause_s)
            if any(ask(port, "GET", f"{queue}/uncached_size")[1] != b"0" for queue in QUEUES):
                return False
    except (OSError, http.client.HTTPException):
        return False
    return True
