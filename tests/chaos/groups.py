"""Kills takers and the server while messages of many groups are sent, taken and acknowledged.

Senders and takers are processes of their own; takers let some messages fail once, and bury a few. With
`unique` jobs senders repeat what may be sent already, and dead letters hold their groups until the run has
redriven them. Now and then a taker is killed (-9) and another one started, or the server is killed and
started again. Each process notes in a journal what it was given and what it is about to do; all journals are
judged together in the end.
"""

import heapq
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from kmqpy.core.clock import wait_until
from kmqpy.dev.databases import Databases
from kmqpy.errors import Unavailable
from kmqpy.message import Message, OutgoingMessage
from kmqpy.queue import Queue, storage_for

STORAGES = ("postgresql", "mariadb", "mysql", "redis", "valkey", "sqlite")
_QUEUE = "chaos"
_SENDERS, _TAKERS = 2, 4
_BATCH, _SENT_AT_ONCE = 50, 500
_AT_A_TURN = 3
_LEASE_S = 8.0
_STUCK_S = 5 * _LEASE_S


class Plan(NamedTuple):
    """What is sent: `per_group` messages of each group, by turns of the groups, _AT_A_TURN each time."""

    groups: int
    per_group: int

    def names(self, sender: int) -> Iterator[tuple[int, int]]:
        """The group and number of each message of a sender, in order; a group has one sender."""
        own = range(sender, self.groups, _SENDERS)
        return (
            (group, number)
            for first in range(0, self.per_group, _AT_A_TURN)
            for group in own
            for number in range(first, min(first + _AT_A_TURN, self.per_group))
        )


# --- the processes --------------------------------------------------------------------------------


class _Notes:
    """A journal: a line per event, with the time of the machine's monotonic clock; survives a kill."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def add(self, kind: str, batch: str, *names: str) -> None:
        os.write(self._file, f"{time.monotonic():.4f} {kind} {batch} {' '.join(names)}\n".encode())


def _send(queue: Queue, notes: _Notes, plan: Plan, sender: int, *, is_unique: bool) -> None:
    numbers = plan.names(sender)
    while some := list(itertools.islice(numbers, _SENT_AT_ONCE)):
        names = [f"{group}:{number}" for group, number in some]
        given = [
            OutgoingMessage(name, group=f"g{group}", dedup_id=name if is_unique else None)
            for name, (group, _) in zip(names, some, strict=True)
        ]
        for kind in itertools.chain(["sent"], itertools.repeat("again")):
            with suppress(Unavailable):  # nobody knows then whether they are sent
                queue.send_many(given)
                notes.add(kind, "-", *names)
                break
            if not is_unique:
                break


def _take(queue: Queue, notes: _Notes, *, is_held: bool) -> None:
    for number in itertools.count():
        ends_s = time.monotonic() + _LEASE_S
        with suppress(Unavailable):
            messages = queue.receive(_BATCH, wait=1, lease=_LEASE_S)
            if messages:
                batch = f"{os.getpid()}-{number}@{ends_s:.3f}"
                notes.add("got", batch, *map(_name, messages))
                _handle(queue, notes, batch, messages, is_held=is_held)


def _handle(queue: Queue, notes: _Notes, batch: str, messages: Sequence[Message], *, is_held: bool) -> None:
    failed: dict[str | None, list[Message]] = {}
    done: list[Message] = []
    for message in messages:
        if message.group in failed or (crc32(message.body) % 20 == 0 and message.attempts == 1):
            failed.setdefault(message.group, []).append(message)
        else:
            done.append(message)
    bad = [one for one in done if crc32(one.body) % 1000 == 1 and not (is_held and random.random() < 0.5)]
    for kind, finish, some in (
        ("back" if is_held else "ending", queue.dead_letter, bad),
        ("ending", queue.ack, [one for one in done if one not in bad]),
        ("back", queue.nack, [one for group in failed.values() for one in group]),
    ):
        if some:
            notes.add(kind, batch, *map(_name, some))
            finish(some, confirmed=True)
            if kind == "ending":
                notes.add("ended", batch, *map(_name, some))


def _name(message: Message) -> str:
    return message.body.decode()


def main(url: str, role: str, number: str, groups: str, per_group: str, folder: str, kind: str) -> None:
    """One sender or taker, until it is killed or has sent everything."""
    with storage_for(url) as storage, storage.open(_QUEUE) as queue:
        notes = _Notes(Path(folder) / f"{role}-{number}.txt")
        if role == "sender":
            plan = Plan(int(groups), int(per_group))
            _send(queue, notes, plan, int(number), is_unique=kind == "unique")
        else:
            _take(queue, notes, is_held=kind == "unique")


# --- the judge ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """What is known of a group, by number.

    over     what is finished, or may be, and since when: somebody was about to finish it
    sure     what was finished while its lease lasted
    open     what is in flight, with its batch
    top      the largest number that was handed out, and those that were in the same batch
    """

    over: dict[int, float] = field(default_factory=dict)
    sure: set[int] = field(default_factory=set)
    open: dict[int, str] = field(default_factory=dict)
    low: int = 0
    top: int = -1
    beside_top: set[int] = field(default_factory=set)
    batch: str = ""


class Judge:
    """Reads the lines of all journals in the order of time, and finds what must not be.

    sent      says of a group and a number whether the message was sent for sure
    repeated  names of messages whose send was repeated, and when that was done: if the first one was
              finished before, this one is another
    """

    def __init__(self, sent: Callable[[int, int], bool], repeated: Mapping[str, float] | None = None) -> None:
        self._sent = sent
        self._repeated = repeated or {}
        self._groups: dict[int, _Group] = {}
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def read(self, line: str) -> None:
        """One line: the time, what happened, the batch with the end of its lease, and names of messages."""
        at_s, kind, batch, *names = line.split()
        self.counts[kind] += len(names)
        in_time = kind != "sent" and float(at_s) < _ends_s(batch)
        for name in names if kind != "sent" else ():
            group, number = map(int, name.split(":"))
            found = self._groups.setdefault(group, _Group())
            if kind == "got":
                self._got(group, found, number, batch, float(at_s))
                continue
            if found.open.get(number) == batch:
                del found.open[number]
            if kind == "ending":
                found.over.setdefault(number, float(at_s))
            elif kind == "ended" and in_time:
                found.sure.add(number)

    def _got(self, group: int, found: _Group, number: int, batch: str, at_s: float) -> None:
        for other, others in [*found.open.items()]:
            if _ends_s(others) <= at_s:
                del found.open[other]
            elif others != batch:
                self._note("overlap", f"{group}:{number} of {batch} beside {other} of {others}")
        sent_again_s = self._repeated.get(f"{group}:{number}", 0.0)
        if found.over.get(number, sent_again_s) < sent_again_s:
            self.counts["sent again"] += 1
        elif number in found.sure:
            self._note("handed out again", f"{group}:{number} of {batch}")
        elif number < found.top and number not in found.beside_top:
            self._note("inversion", f"{group}:{number} of {batch} behind {found.top}")
        while found.low in found.over or (found.low < number and not self._sent(group, found.low)):
            found.low += 1
        before = [one for one in range(found.low, number) if found.open.get(one) != batch]
        if any(one not in found.over and self._sent(group, one) for one in before):
            self._note("inversion", f"{group}:{number} of {batch} before some of {before}")
        if number > found.top:
            found.top = number
            found.beside_top = {one for one, others in found.open.items() if others == batch} | {number}
        found.open[number] = batch

    def _note(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= 5:
            self.problems.append(f"{kind}: {text}")

    def is_over(self, group: int, number: int) -> bool:
        """Whether somebody has finished the message, or was about to."""
        return group in self._groups and number in self._groups[group].over


def _ends_s(batch: str) -> float:
    return float(batch.partition("@")[2])


def judged(folder: Path, plan: Plan) -> Judge:
    """What the journals in a folder say."""
    sent = bytearray(plan.groups * plan.per_group)
    repeated: dict[str, float] = {}
    for path in folder.glob("sender-*.txt"):
        with path.open() as lines:
            for at_s, kind, _, *names in map(str.split, lines):
                repeated |= dict.fromkeys(names, float(at_s)) if kind == "again" else {}
                for name in names:
                    group, number = map(int, name.split(":"))
                    sent[group * plan.per_group + number] = 1
    judge = Judge(lambda group, number: bool(sent[group * plan.per_group + number]), repeated)
    with ExitStack() as files:
        takers = [files.enter_context(path.open()) for path in folder.glob("taker-*.txt")]
        for line in heapq.merge(*takers, key=lambda line: float(line.split(" ", 1)[0])):
            judge.read(line)
    judge.counts["sent"] = sum(sent)
    lost = [at for at, there in enumerate(sent) if there and not judge.is_over(*divmod(at, plan.per_group))]
    judge.counts["lost"] = len(lost)
    if lost:
        judge.problems.append(f"lost: {[':'.join(map(str, divmod(at, plan.per_group))) for at in lost[:10]]}")
    return judge


# --- the run --------------------------------------------------------------------------------------


def run(
    storage: str,
    count: int,
    seed: int,
    out: Path,
    tell: Callable[[str], None],
    **how: Any,
) -> list[str]:
    """Send `count` messages of 10,000 groups (or fewer) to a storage; returns what was wrong.

    seconds  senders, and faults, end after this time; the run ends when all is done, or nobody is handed any
    """
    how = {"pause_s": max(6.0, count / 50_000), **how}  # Redis takes minutes to read a million again
    if storage == "sqlite":
        for old in out.glob("chaos.db*"):
            old.unlink()
        return run_on(f"sqlite:///{out}/chaos.db", None, count, seed, out, tell, **how)
    with Databases(storage) as databases:

        def restart() -> None:
            databases.server(storage).kill()
            databases.server(storage).start(600)  # Redis reads all that it has written

        return run_on(databases.urls[storage], restart, count, seed, out, tell, **how)


def run_on(
    url: str,
    restart: Callable[[], None] | None,
    count: int,
    seed: int,
    out: Path,
    tell: Callable[[str], None],
    pause_s: float = 6.0,
    *,
    seconds: float | None = None,
    is_unique: bool = False,
) -> list[str]:
    """The same on a storage that runs already; `restart` kills its server and starts it again."""
    kind = "unique" if is_unique else "plain"
    for old in (*out.glob("sender-*.txt"), *out.glob("taker-*.txt")):
        old.unlink()
    dice = random.Random(seed)
    plan = Plan(min(10_000, max(4, count // 10)), max(1, count // min(10_000, max(4, count // 10))))
    tell(f"seed {seed}; {plan.per_group} messages of each of {plan.groups} groups")
    running: dict[str, subprocess.Popen[bytes]] = {}
    sizes: dict[str, int] = {}
    kills: Counter[str] = Counter()

    def start(name: str) -> None:
        role, number = name.split("-")
        if role == "taker":
            sizes[name] = _size(out, name)
        given = [url, role, number, str(plan.groups), str(plan.per_group), str(out), kind]
        with (out / f"{role}.log").open("ab") as log:
            command = [sys.executable, "-m", "tests.chaos.groups", *given]
            running[name] = subprocess.Popen(command, stdout=log, stderr=log)

    with storage_for(url) as own:
        strict = {"dedup_until": "acknowledged", "on_dead_letter": "hold"} if is_unique else {}
        own.create(_QUEUE, order="group", **strict)
        queue = own.open(_QUEUE)
        try:
            for role, processes in (("sender", _SENDERS), ("taker", _TAKERS)):
                for number in range(processes):
                    start(f"{role}-{number}")
            before, began_s = 0, time.monotonic()
            told_s = taken_s = began_s
            for step in itertools.count(1):
                is_over = _is_over(running, queue, pause_s)
                if is_unique and queue.dead_letters.redrive():
                    kills["dead letters"] += 1
                elif is_over:
                    break
                taken = sum(path.stat().st_size for path in out.glob("taker-*.txt"))
                if taken > before:
                    before, taken_s = taken, time.monotonic()
                elif time.monotonic() - taken_s > _STUCK_S:
                    break
                if seconds is not None and time.monotonic() - began_s > seconds:
                    for name, process in running.items():
                        if name.startswith("sender"):
                            process.kill()
                    continue
                if time.monotonic() - told_s > 30:
                    told_s = time.monotonic()
                    tell(f"{told_s - began_s:.0f} s; {queue.size():,} wait; killed {dict(kills)}")
                if step % 4 == 0 and restart is not None:
                    restart()
                    kills["server"] += 1
                elif busy := [one for one, size in sizes.items() if _size(out, one) > size]:
                    name = dice.choice(busy)  # on a slow machine others are still starting
                    running[name].kill()
                    running[name].wait()
                    start(name)
                    kills["takers"] += 1
            took_s = time.monotonic() - began_s
        finally:
            for process in running.values():
                process.kill()
                process.wait()
        found = own.describe(_QUEUE)
        left = found.ready + found.delayed + found.in_flight + (found.dead if is_unique else 0)
        judge = judged(out, plan)
        if left:
            judge.problems.append(f"stuck: {left} messages; for {_STUCK_S:g} s nobody was handed any")
    tell(
        f"{took_s:.0f} s; killed {dict(kills)}; {dict(judge.counts)}; {found.dead} dead letters; {left} left"
    )
    return judge.problems


def _size(out: Path, name: str) -> int:
    """The bytes of a process's journal."""
    path = out / f"{name}.txt"
    return path.stat().st_size if path.exists() else 0


def _is_over(running: dict[str, subprocess.Popen[bytes]], queue: Queue, patience_s: float) -> bool:
    """Wait for some seconds; True if everything was sent and finished meanwhile."""

    def is_over() -> bool:
        senders = (one for name, one in running.items() if name.startswith("sender"))
        return all(one.poll() is not None for one in senders) and not queue.size(1) and not queue.in_flight(1)

    return wait_until(is_over, patience_s, every_s=0.5)


if __name__ == "__main__":
    main(*sys.argv[1:])
