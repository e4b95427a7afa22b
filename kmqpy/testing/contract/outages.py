"""Tests killed clients and servers, cut connections and wrong clocks.

Most of these tests need a hook of `Target`; a test is skipped where its hook is missing.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import Unavailable
from kmqpy.message import Message
from kmqpy.queue import Queue
from kmqpy.testing import ManualClock
from kmqpy.testing.contract.target import LEASE_S, PAST_LEASE_S, Target, skip_without, take, take_one

_KILLED_TAKER_PROGRAM = """
import os, signal, sys
from kmqpy.queue import storage_for
queue = storage_for(sys.argv[1]).open(sys.argv[2])
taken = []
while len(taken) < 5:
    taken += queue.receive(5 - len(taken), wait=10, lease=float(sys.argv[3]))
os.kill(os.getpid(), signal.SIGKILL)
"""
_HOUR_S = 3600


def test_what_a_killed_taker_had_is_redelivered_after_its_lease(kmq_target: Target, queue: Queue) -> None:
    skip_without(queue.capabilities, "shared")
    if kmq_target.url is None:
        pytest.skip("the target has no url for other processes")
    queue.send_many(["x"] * 5)
    command = [sys.executable, "-c", _KILLED_TAKER_PROGRAM, kmq_target.url, queue.name, str(3 * LEASE_S)]
    taker = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert taker.returncode == -9, taker.stderr
    assert (queue.receive(wait=0), queue.in_flight()) == ([], 5)
    kmq_target.pass_time(3 * PAST_LEASE_S)
    assert [one.attempts for one in take(queue, 5, lease=60)] == [2] * 5


def test_what_was_confirmed_outlives_a_killed_server(kmq_target: Target, queue: Queue) -> None:
    skip_without(queue.capabilities, "durable")
    if kmq_target.kill_server is None:
        pytest.skip("the target has no kill_server")
    ids = queue.send_many(["x"] * 100)
    acked = take(queue, 50, lease=60)
    queue.ack(acked, confirmed=True)
    held = take(queue, 10, lease=3600)
    sent: list[str] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            try:
                sent.append(queue.send("under load"))
            except Unavailable:
                SYSTEM_CLOCK.sleep(0.05)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        SYSTEM_CLOCK.sleep(0.3)
        kmq_target.kill_server()
        SYSTEM_CLOCK.sleep(0.3)
    finally:
        stop.set()
        sender.join()
    left = {one.id for one in _all(queue)}
    assert not left & {one.id for one in acked}
    assert left >= ({*ids} - {one.id for one in [*acked, *held]}) | {*sent}
    assert {one.receipt for one in queue.orphans()} >= {one.receipt for one in held}


def test_cut_connections_lose_and_double_nothing(kmq_target: Target, queue: Queue) -> None:
    if kmq_target.cut_connections is None:
        pytest.skip("the target has no cut_connections")
    cut = kmq_target.cut_connections
    ids = queue.send_many(["x"] * 400)
    acked: list[str] = []
    unsure: set[str] = set()
    stop = threading.Event()

    def cutting() -> None:
        # 15 cuts cost at most 15 batches of 10, so half of the 400 messages get through on any machine.
        for _ in range(15):
            if stop.wait(0.05):
                return
            cut()

    cutter = threading.Thread(target=cutting)
    cutter.start()
    deadline = SYSTEM_CLOCK.monotonic() + 60
    try:
        while len(acked) < 200 and SYSTEM_CLOCK.monotonic() < deadline:
            messages: Sequence[Message] = []
            try:
                messages = queue.receive(10, wait=0.2, lease=60)
                queue.ack(messages, confirmed=True)
                acked += [one.id for one in messages]
            except Unavailable:
                unsure |= {one.id for one in messages}
    finally:
        stop.set()
        cutter.join()
    assert len(acked) == len({*acked}) >= 200
    _retried(partial(queue.receive, wait=0))  # the last cut may have met nobody yet
    _retried(queue.release_all)  # also messages that a cut receive() took
    left = {one.id for one in _all(queue)}
    assert not left & {*acked}
    # Messages may be gone only where a cut ack() may have counted.
    assert {*ids} - left - {*acked} <= unsure


def test_the_clock_of_the_storage_counts_and_not_that_of_its_clients(
    kmq_target: Target, queue: Queue
) -> None:
    if kmq_target.open_with_clock is None:
        pytest.skip("the target has no open_with_clock")
    for ahead_s in (-_HOUR_S, _HOUR_S):
        queue.send("x")
        (right,) = queue.peek()
        clock = ManualClock(right.enqueued_ms + ahead_s * 1000)
        with kmq_target.open_with_clock(clock) as storage, storage.open(queue.name) as wrong:
            message = take_one(wrong)
            assert abs(message.lease_until_ms - (clock.wall_ms() + LEASE_S * 1000)) < 2000
            assert (queue.receive(wait=0), queue.in_flight()) == ([], 1)
            kmq_target.pass_time(PAST_LEASE_S)
            wrong.ack(take_one(queue), confirmed=True)
            assert (queue.size(), queue.in_flight()) == (0, 0)


def _retried(call: Callable[[], object]) -> None:
    for _ in range(10):
        try:
            call()
        except Unavailable:
            continue
        return
    raise AssertionError("the storage does not come back")


def _all(queue: Queue) -> list[Message]:
    found: list[Message] = []
    while messages := queue.receive(100, wait=1, lease=3600):
        found += messages
    return found
