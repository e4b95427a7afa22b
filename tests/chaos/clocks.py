"""Clocks that are wrong: of the processes of a run, and of its brokers."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kmqpy.dev.server import Server
from kmqpy.errors import ClusterError

WRONG_BY = "KMQ_CHAOS_CLOCK_S"
"""The variable of the environment that says by how many seconds a process's clock is wrong."""
_LIBRARIES = "/usr/lib/*/faketime/libfaketimeMT.so.1"


class Process(Protocol):
    environment: Mapping[str, str]


def library() -> Path | None:
    """libfaketime, which gives the JVM of a broker another time; None where it is not installed."""
    return next(iter(sorted(Path("/").glob(_LIBRARIES[1:]))), None)


def spread(by_s: float, count: int) -> list[float]:
    """Right clocks, slow and fast ones, in turn."""
    return [by_s * (0, -1, 1)[number % 3] for number in range(count)]


def set_wrong(processes: Sequence[Process], by_s: float) -> None:
    """Those that start later have wrong clocks."""
    for process, wrong_s in zip(processes, spread(by_s, len(processes)), strict=True):
        process.environment = {**process.environment, WRONG_BY: str(wrong_s)}


def restart_wrong(brokers: Sequence[Server], by_s: float) -> None:
    """Restart brokers, one by one, with wrong clocks."""
    for broker, wrong_s in zip(brokers, spread(by_s, len(brokers)), strict=True):
        broker.stop()
        broker.environment = {**broker.environment, **of_any_program(wrong_s)}
        broker.start(180)


def of_any_program(wrong_s: float) -> dict[str, str]:
    """Variables of the environment that give any program a clock that is wrong by so much."""
    found = library()
    if found is None:
        raise ClusterError("no program can be given a wrong clock: install libfaketime")
    return {"LD_PRELOAD": str(found), "FAKETIME": f"{wrong_s:+.0f}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def shift(by_s: float) -> None:
    """From now on, this process's wall clock is wrong by so much; only C code reads the right one."""
    right, by_ns = time.time_ns, round(by_s * 1e9)

    def wrong_ns() -> int:
        return right() + by_ns

    time.time_ns = wrong_ns
    time.time = lambda: wrong_ns() / 1e9
