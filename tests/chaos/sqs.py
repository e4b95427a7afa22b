"""Kills gateways and cuts PostgreSQL's connections while clients of SQS send, receive and delete.

Half of the clients use a standard queue, for tasks of Celery with an ETA that is later than the visibility
timeout: each is sent once. The others use a FIFO queue, and send again what got no answer. Some messages are
dropped, as by a worker that dies. In the end nothing that was accepted may be lost; no task may run before
its ETA, by the clocks of the gateways, and none twice unless its first run was not deleted in time; in a FIFO
queue the runs of a group are in order, and none is doubled by a send that was repeated.
"""

import base64
import itertools
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from kmqpy.core.clock import wait_until
from kmqpy.dev.ports import free_ports

from .gateways import LARGE, Size, Span, backend, break_things, gateways_at

_QUEUES = ("chaos", "chaos.fifo")
_LEASE_S = 4
_ETA_S = (5.0, 10.0)
"""Tasks wait so long, in seconds: longer than the lease."""
_DROPPED = 0.03
_EARLY_S = 0.05
_DRAIN_S, _DRAINED_PER_S = 120.0, 40
_BATCH = 10
_GROUPS = 10
"""Of each client of the FIFO queue: one stands still for a lease when one of its messages was dropped."""


@dataclass
class Run:
    """One receive of a message, and when its delete was confirmed."""

    message: str
    received: Span
    deleted: Span | None = None


@dataclass
class Journal:
    """What clients were told. Times are those of the monotonic clock, in seconds.

    clocks_s  by so much clocks of gateways are wrong, which tell when a task is due
    """

    clocks_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    accepted: set[str] = field(default_factory=set)
    runs: defaultdict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    by_group: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    early: list[str] = field(default_factory=list)
    errors: int = 0

    def ran(self, name: str, message: str, received: Span, due_s: float) -> Run:
        run = Run(message, received)
        with self.lock:
            if time.time() < due_s - _EARLY_S - self.clocks_s:
                self.early.append(name)
            group, _, place = name.partition("_")
            if group.startswith("g") and not self.runs[name]:
                self.by_group[group].append(int(place))
            self.runs[name].append(run)
        return run

    def problems(self) -> list[str]:
        lost = sorted(name for name in self.accepted if name not in self.runs)
        found = {
            "accepted and lost": lost,
            "run before the ETA": self.early,
            "run twice for no reason": [*filter(self._is_doubled, self.runs)],
            "stored twice": [
                name for name, runs in self.runs.items() if len({one.message for one in runs}) > 1
            ],
            "group out of order": [one for one, places in self.by_group.items() if places != sorted(places)],
        }
        return [f"{len(names)} {what}: {names[:10]}" for what, names in found.items() if names]

    def _is_doubled(self, name: str) -> bool:
        runs = sorted(self.runs[name], key=lambda run: run.received)
        for first, second in itertools.pairwise(runs):
            is_early = second.received.answered_s < first.received.asked_s + _LEASE_S
            if is_early or (first.deleted and first.deleted.answered_s < second.received.asked_s):
                return True
        return False


class Client(threading.Thread):
    """Sends, receives and deletes, now at this gateway, now at another."""

    def __init__(self, number: int, ports: list[int], journal: Journal, seed: int) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._number = number
        self._queue = _QUEUES[number % len(_QUEUES)]
        self._journal = journal
        self._dice = random.Random(seed * 100 + number)
        self._at = itertools.cycle([client(port) for port in ports[number % len(ports) :] + ports])
        self._sqs = next(self._at)
        self._unanswered: list[dict[str, Any]] = []
        self.sending, self.running = threading.Event(), threading.Event()
        self.sending.set()
        self.running.set()

    def run(self) -> None:
        for count in itertools.count():
            if not self.running.is_set():
                return
            if self._unanswered or self.sending.is_set():
                self._send(count)
            self._take()

    def _send(self, count: int) -> None:
        entries = self._unanswered or [self._entry(_BATCH * count + index) for index in range(_BATCH)]
        answer = self._ask("send_message_batch", Entries=entries)
        if self._queue.endswith(".fifo"):  # it knows what it has already
            self._unanswered = entries if answer is None or answer.get("Failed") else []
        with self._journal.lock:
            for one in (answer or {}).get("Successful", ()):
                self._journal.accepted.add(one["Id"])

    def _entry(self, place: int) -> dict[str, Any]:
        if self._queue.endswith(".fifo"):
            group = f"g{self._number}-{place // _BATCH % _GROUPS}"
            name = f"{group}_{place}"
            same = dict.fromkeys(("Id", "MessageBody", "MessageDeduplicationId"), name)
            return {**same, "MessageGroupId": group}
        eta_s = time.time() + self._dice.uniform(*_ETA_S)
        task = {
            "body": base64.b64encode(b"[[], {}, {}]").decode(),
            "headers": {
                "task": "run",
                "id": f"t{self._number}_{place}",
                "eta": datetime.fromtimestamp(eta_s, UTC).isoformat(),
            },
            "properties": {},
        }
        body = base64.b64encode(json.dumps(task).encode()).decode()
        return {"Id": f"t{self._number}_{place}", "MessageBody": body}

    def _take(self) -> None:
        asked_s = time.monotonic()
        wait_s = 0 if self.sending.is_set() else 1
        answer = self._ask("receive_message", MaxNumberOfMessages=10, WaitTimeSeconds=wait_s)
        received = Span(asked_s, time.monotonic())
        done = []
        for one in (answer or {}).get("Messages", ()):
            name, due_s = _named(one["Body"])
            run = self._journal.ran(name, one["MessageId"], received, due_s)
            if self._dice.random() > _DROPPED:
                done.append((one["ReceiptHandle"], run))
        asked_s = time.monotonic()
        handles = [{"Id": str(index), "ReceiptHandle": handle} for index, (handle, _) in enumerate(done)]
        answer = self._ask("delete_message_batch", Entries=handles) if handles else None
        for one in (answer or {}).get("Successful", ()):
            done[int(one["Id"])][1].deleted = Span(asked_s, time.monotonic())

    def _ask(self, call: str, **values: Any) -> dict[str, Any] | None:
        """The answer; None after an error, and the next call goes to another gateway."""
        try:
            return getattr(self._sqs, call)(QueueUrl=self._queue, **values)
        except (BotoCoreError, ClientError):
            with self._journal.lock:
                self._journal.errors += 1
            self._sqs = next(self._at)
            time.sleep(0.02)
            return None


def client(port: int) -> Any:
    """boto3's client, which asks once."""
    return boto3.session.Session("x", "y", region_name="us-east-1").client(
        "sqs",
        endpoint_url=f"http://127.0.0.1:{port}",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=5, connect_timeout=3),
    )


def _named(body: str) -> tuple[str, float]:
    """The name of a message, and when it may run (s since 1970)."""
    if body.startswith("g"):
        return body, 0
    headers = json.loads(base64.b64decode(body))["headers"]
    return headers["id"], datetime.fromisoformat(headers["eta"]).timestamp()


def run(count: int, seed: int, out: Path, tell: Callable[[str], None], size: Size = LARGE) -> list[str]:
    """Let at least `count` messages be accepted; returns what was wrong."""
    with backend("postgresql") as (url, cut):
        return run_on(url, cut, count, seed, out, tell, size)


def run_on(
    url: str,
    cut: Callable[[], None],
    count: int,
    seed: int,
    out: Path,
    tell: Callable[[str], None],
    size: Size = LARGE,
) -> list[str]:
    """The same on a storage that runs already."""
    tell(f"seed {seed}")
    ports = free_ports(size.gateways)
    gateways = gateways_at(url, ports, out, size)
    journal = Journal(size.clocks_s)
    clients = [Client(number, ports, journal, seed) for number in range(size.clients)]
    try:
        for gateway in gateways:
            gateway.start()
        for name in _QUEUES:
            more = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
            attributes = {"VisibilityTimeout": str(_LEASE_S), **more}
            client(ports[0]).create_queue(QueueName=name, Attributes=attributes)
        for one in clients:
            one.start()
        break_things(gateways, cut, lambda: len(journal.accepted), count, random.Random(seed), size, tell)
        for one in clients:
            one.sending.clear()
        drain_s = max(_DRAIN_S, len(journal.accepted) / _DRAINED_PER_S) + size.clocks_s
        quiet = wait_until(lambda: _is_empty(ports[0]), drain_s, every_s=0.5)
    finally:
        for one in clients:
            one.running.clear()
        for one in clients:
            if one.is_alive():
                one.join(20)
        for gateway in gateways:
            gateway.stop()
    again = sum(len(runs) > 1 for runs in journal.runs.values())
    tell(f"{len(journal.accepted)} accepted, {again} ran again, {journal.errors} errors")
    return journal.problems() + ([] if quiet else [f"not empty after {drain_s} s"])


def _is_empty(port: int) -> bool:
    """True if nothing is left."""
    try:
        for name in _QUEUES:
            found = client(port).get_queue_attributes(QueueUrl=name, AttributeNames=["All"])["Attributes"]
            if any(found[one] != "0" for one in found if one.startswith("ApproximateNumber")):
                return False
    except (BotoCoreError, ClientError):
        return False
    return True
