"""The processes of a run: `python -m tests.chaos.children consumer|sender|tracker …`.

They write to journals what they did, and end when their parent is gone.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

from kmqpy.core import logs
from kmqpy.errors import KmqError, Unavailable
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.message import Message, OutgoingMessage

from .clocks import WRONG_BY, shift
from .journal import Journal, lanes_of, places

MAX_IN_FLIGHT = 400
"""Of each consumer."""
_BATCH = 50
_EVERY_S = 0.1
_CATCH_UP = 5


@dataclass(frozen=True, kw_only=True)
class ChildTask:
    """What a consumer or sender is told.

    first, per_second      a sender sends the numbers from `first` on, `per_second` of them, until SIGTERM
    work_s                 how long a consumer has a batch before it acknowledges
    drop, nack, poison     per mille of the messages
    late, late_by_s        per mille of those that a consumer acknowledges when their leases are over, and
                           by how much at most
    """

    name: str
    journal: str
    bootstrap: str
    queue: str
    kafka: dict[str, str]
    first: int = 0
    per_second: float = 0.0
    work_s: float = 0.05
    drop: int = 80
    nack: int = 40
    poison: int = 3
    late: int = 0
    late_by_s: float = 0.0
    sabotage: str = ""

    def command(self, kind: str) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.children", kind, json.dumps(asdict(self))]

    @property
    def settings(self) -> QueueSettings:
        return QueueSettings.from_json(self.queue.encode())

    @property
    def connection(self) -> KafkaConnection:
        return KafkaConnection(bootstrap=self.bootstrap, kafka=self.kafka)


def fate(body: bytes, attempts: int, task: ChildTask) -> str:
    """`poison` (given back every time), `drop`, `nack`, `late` or `ack`: by the message and its attempt."""
    if _dice(body) < task.poison:
        return "poison"
    dice = _dice(body + b"/%d" % attempts)
    for chosen, share in (("drop", task.drop), ("nack", task.nack), ("late", task.late)):
        if dice < share:
            return chosen
        dice -= share
    return "ack"


class LateAcks:
    """Messages that are to be acknowledged late, each at its own moment."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Message]] = []
        self._added = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, at_s: float, message: Message) -> None:
        # The number decides between equal moments: messages have no order.
        heappush(self._heap, (at_s, next(self._added), message))

    def due(self, now_s: float) -> Iterator[Message]:
        """Take out those whose moment has come, the earliest first."""
        while self._heap and self._heap[0][0] < now_s:
            yield heappop(self._heap)[-1]


def _dice(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest()) % 1000


def consume(task: ChildTask) -> None:
    """Take messages until SIGTERM; each delivery and each ack is in the journal before it is done."""
    stopping = _until_sigterm()
    journal, lanes = Journal(Path(task.journal)), lanes_of(task.settings)
    with _opened(task, stopping, max_in_flight=MAX_IN_FLIGHT, holder=task.name) as client:
        late = LateAcks()
        while not stopping.is_set():
            try:
                messages = client.receive(_BATCH, wait=0.05 if late else 0.2)
            except Unavailable:  # the first call connects
                continue
            if messages:
                journal.write(*(("d", *place) for place in places(messages, lanes)))
                stopping.wait(task.work_s)
                over_at = time.monotonic() + task.settings.lease_ms / 1000
                for one in _finish(
                    client, messages, task, journal, lanes
                ):  # while the copy is made, or waits
                    late.add(over_at + _dice(one.body) * task.late_by_s / 1000, one)
            for message in late.due(time.monotonic()):
                journal.write(*(("l", *place) for place in places([message], lanes)))
                _ack(client, [message], journal, lanes)


def _opened(task: ChildTask, stopping: threading.Event, **options: Any) -> KmqClient:
    """Open the client; as whoever supervises a process would, try again while Kafka does not answer."""
    while True:
        try:
            return KmqClient(task.settings, task.connection, **options)
        except Unavailable:
            if stopping.wait(1):
                raise


def _ack(client: KmqClient, messages: list[Message], journal: Journal, lanes: Mapping[str, int]) -> None:
    journal.write(*(("a", *place) for place in places(messages, lanes)))
    client.ack(*messages)


def _finish(
    client: KmqClient,
    messages: list[Message],
    task: ChildTask,
    journal: Journal,
    lanes: Mapping[str, int],
) -> list[Message]:
    """Do with the messages what is their fate; returns those that are to be acknowledged late."""
    chosen: dict[str, list[Message]] = {"ack": [], "drop": [], "nack": [], "late": [], "poison": []}
    for message in messages:
        chosen[fate(message.body, message.attempts, task)].append(message)
    if chosen["ack"]:
        _ack(client, chosen["ack"], journal, lanes)
    if chosen["nack"]:
        client.nack(*chosen["nack"], delay=0.5, reason="not now")
    if chosen["poison"]:
        client.nack(*chosen["poison"], delay=0.3, reason="poison")
    return chosen["late"]


def send(task: ChildTask) -> None:
    """Send numbers; what was tried (t), is acknowledged (k) or of unknown outcome (u) is in the journal."""
    stopping = _until_sigterm()
    journal, priorities = Journal(Path(task.journal)), task.settings.priorities
    every = max(1, round(task.per_second * _EVERY_S))
    started, sent = time.monotonic(), 0
    with _opened(task, stopping) as producer:
        while not stopping.is_set():
            due = int((time.monotonic() - started) * task.per_second) - sent
            if due < every:
                stopping.wait(_EVERY_S)
                continue
            first, size = task.first + sent, min(due, every * _CATCH_UP)
            journal.write(("t", first, size))
            try:
                producer.send_many([_outgoing(number, priorities) for number in range(first, first + size)])
            except KmqError:
                journal.write(("u", first, size))
            else:
                journal.write(("k", first, size))
            sent += size


def _outgoing(number: int, priorities: int) -> OutgoingMessage:
    """A message; where there are priorities, every fourth one is urgent."""
    urgency = max(0, _dice(b"priority of %d" % number) // 125 - 5) if priorities > 1 else 0
    return OutgoingMessage(str(number), priority=urgency)


def track(arguments: list[str]) -> None:
    """`python -m tracker` with these arguments."""
    from kmqpy.cli import main

    sys.argv = ["kmq", "tracker", *arguments]
    main()


def _until_sigterm() -> threading.Event:
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    _end_with_parent()
    shift(float(os.environ.get(WRONG_BY, "0")))
    kind, text, *rest = sys.argv[1:]
    sabotage = text if kind == "tracker" else json.loads(text)["sabotage"]
    if sabotage:
        from .sabotage import apply

        apply(sabotage)
    if kind == "tracker":
        track(rest)
        return
    logs.setup("WARNING", "text")
    fields: dict[str, Any] = json.loads(text)
    {"consumer": consume, "sender": send}[kind](ChildTask(**fields))


if __name__ == "__main__":
    main()
