"""What the tests of the worker share."""

import asyncio
import time

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SystemClock
from kmqpy.telemetry.base import Telemetry

EXACT = Backoff(0.5, 2, 4, jitter=0)


class JumpingClock(SystemClock):
    ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead


class Failures(Telemetry):
    def __init__(self):
        self.what: list[str] = []

    def failed(self, queue, what, count=1):
        self.what.append(what)


def until(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


async def eventually(condition, timeout=60.0):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
