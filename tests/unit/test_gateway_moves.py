"""Moves: jobs that are none, moves at one time, sizes that take long."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.gateway.service.moves import MOVES_QUEUE, Move, Moves, MoveStatus
from kmqpy.gateway.service.served_queue import ServedQueue
from kmqpy.testing import memory_storage

A_TO_B = Move(QueueName("a"), QueueName("b"))


@asynccontextmanager
async def running_moves():
    with memory_storage(SYSTEM_CLOCK) as storage, ThreadPoolExecutor(8) as threads:
        hub = Hub({"": storage})
        moves = Moves(hub, [storage], threads)
        running = asyncio.ensure_future(moves.run())
        try:
            yield moves, storage
        finally:
            running.cancel()
            await asyncio.wait([running])
            await asyncio.to_thread(hub.close)


async def ended(moves, reference):
    async with asyncio.timeout(30):
        while (status := (await moves.status("s", reference))[1]) is MoveStatus.IN_PROGRESS:
            await asyncio.sleep(0.01)
    return status


def filled(storage, name, count=3):
    storage.create(name)
    queue = storage.open(name)
    queue.send_many([b"x"] * count)
    return queue


def end_of(name, settings=None):
    return {"name": name, "prefix": "", "settings": settings or {}}


GOOD = {"service": "s", "from": end_of("a"), "to": end_of("b")}


@pytest.mark.parametrize(
    "job",
    [
        b"\xff",
        b"[" * 100_000,
        b"7",
        json.dumps({**GOOD, "to": end_of("c", {"no_setting": 1})}).encode(),
        json.dumps({**GOOD, "to": end_of("c", {"storage": 1, "name": 2})}).encode(),
        json.dumps({**GOOD, "to": end_of("\ud800")}).encode(),
        json.dumps({**GOOD, "from": end_of("\ud800")}).encode(),
        json.dumps({**GOOD, "to": end_of("")}).encode(),
        json.dumps({**GOOD, "to": {**end_of("c"), "settings": [1]}}).encode(),
    ],
)
def test_a_message_that_is_no_job_stops_no_other(job):
    async def main():
        async with running_moves() as (moves, storage):
            filled(storage, "a")
            storage.create(MOVES_QUEUE, max_redeliveries=None)
            storage.open(MOVES_QUEUE).send(job)
            await asyncio.sleep(0.1)
            assert await ended(moves, await moves.start("s", A_TO_B)) is MoveStatus.COMPLETE
            assert len(storage.open("b").peek()) + len(storage.open("a").peek()) == 3

    asyncio.run(main())


def test_a_move_counts_however_long_that_takes(monkeypatch):
    def count(queue, limit):
        time.sleep(0.5)  # an answer for clients would be a guess by now
        return queue._queue.size(limit)

    monkeypatch.setattr(ServedQueue, "_count", count)
    monkeypatch.setattr("kmqpy.gateway.service.hub._executor", lambda _: ThreadPoolExecutor(4))

    async def main():
        async with running_moves() as (moves, storage):
            filled(storage, "a")
            assert await ended(moves, await moves.start("s", A_TO_B)) is MoveStatus.COMPLETE
            assert len(storage.open("b").peek()) == 3

    asyncio.run(main())


def test_a_long_move_lets_no_other_wait(monkeypatch):
    async def main():
        held = asyncio.Event()
        count = ServedQueue.count

        async def slow_count(queue):
            if queue._queue.name == "a":
                await held.wait()
            return await count(queue)

        monkeypatch.setattr(ServedQueue, "count", slow_count)
        async with running_moves() as (moves, storage):
            filled(storage, "a")
            filled(storage, "c")
            long_one = await moves.start("s", A_TO_B)
            short_one = await moves.start("s", Move(QueueName("c"), QueueName("d")))
            assert await ended(moves, short_one) is MoveStatus.COMPLETE
            assert (await moves.status("s", long_one))[1] is MoveStatus.IN_PROGRESS
            held.set()
            assert await ended(moves, long_one) is MoveStatus.COMPLETE

    asyncio.run(main())
