"""Handlers of workers that count, or say how old messages are. Needs nothing but Python."""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import Any

from benchmarks.results import percentile

SIZE = 100
_DIGITS = 20
_AT_ONCE = 100
_PATIENCE_S = 60.0


class Handlers:
    """Handlers of `messages` messages, which wait for `ms` each. The first tenth of these is not timed.

    With a `rate`, messages are stamped, and one more comes before them: when it is handled the worker is
    ready, and a process of its own begins to send. It has the same command as this one.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._wait_s = options["ms"] / 1000
        self._rate = options["rate"]
        self._messages = options["messages"] + bool(self._rate)
        self._options = options
        self._numbers = itertools.count(1)  # safe to use by several threads, as is list.append
        self._began = self._ended = 0.0
        self._ages_ms: list[float] = []
        self._is_ready = Event()
        self.done = Event()

    def handle(self, body: str | bytes) -> None:
        self._note_age(body)
        if self._wait_s:
            time.sleep(self._wait_s)
        self._count()

    async def handle_in_task(self, body: str | bytes) -> None:
        self._note_age(body)
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
        self._count()

    def figures(self) -> dict[str, float]:
        """Wait for the last message; raises TimeoutError if it does not come."""
        if self._rate and self._is_ready.wait(_PATIENCE_S):
            command = [*sys.orig_argv[:-1], json.dumps({**self._options, "is_sender": True})]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_PATIENCE_S)
        if not self.done.wait(_PATIENCE_S):
            raise TimeoutError(f"{next(self._numbers) - 1} of {self._messages} messages, and no more")
        if not self._rate:
            timed = self._messages - self._messages // 10
            return {"handled_per_s": timed / (self._ended - self._began)}
        ages = self._ages_ms[self._messages // 10 :]
        return {"p50_ms": percentile(ages, 50), "p99_ms": percentile(ages, 99), "max_ms": max(ages)}

    def _note_age(self, body: str | bytes) -> None:
        if self._rate:
            self._ages_ms.append((time.monotonic_ns() - int(body[:_DIGITS])) / 1e6)
            self._is_ready.set()

    def _count(self) -> None:
        number = next(self._numbers)
        if number == self._messages // 10:
            self._began = time.perf_counter()
        elif number == self._messages:
            self._ended = time.perf_counter()
            self.done.set()


def stamp() -> str:
    """A body of SIZE characters that begins with the time, by the clock that all processes share."""
    return f"{time.monotonic_ns():0{_DIGITS}}".ljust(SIZE, "x")


def send_first(options: Mapping[str, Any], send: Callable[[Sequence[str]], object]) -> None:
    """Send what a worker finds when it starts; in the sender's process, send at an even pace.

    `is_filled` says that the messages are there already.
    """
    if options.get("is_sender"):
        began = time.monotonic()
        for number in range(options["messages"]):
            time.sleep(max(0.0, began + number / options["rate"] - time.monotonic()))
            send([stamp()])
    elif options["rate"]:
        send([stamp()])
    elif not options.get("is_filled"):
        for first in range(0, options["messages"], _AT_ONCE):
            send(["x" * SIZE] * min(_AT_ONCE, options["messages"] - first))
