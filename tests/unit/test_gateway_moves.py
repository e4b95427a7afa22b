"""Moves: jobs that are none, moves at one time, sizes that take long."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, Unavailable
from kmqpy.gateway.dialects.sqs import move_tasks
from kmqpy.gateway.dialects.sqs.catalog import Catalog
from kmqpy.gateway.dialects.sqs.move_tasks import MoveTasks
from kmqpy.gateway.service import moves as service
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.gateway.service.moves import MOVES_QUEUE, Move, Moves, MoveStatus, UnknownMove
from kmqpy.gateway.service.served_queue import ServedQueue
from kmqpy.testing import memory_storage

A_TO_B = Move(QueueName("a"), QueueName("b"))


class AwayStorage:
    """A storage that does not answer."""

    def __init__(self, storage):
        self.capabilities = storage.capabilities

    def open(self, name):
        raise Unavailable("away")

    def close(self):
        pass


@asynccontextmanager
async def running(storages):
    hub = Hub(storages)
    moves = Moves(hub, list(storages.values()))
    task = asyncio.ensure_future(moves.run())
    try:
        yield moves
    finally:
        task.cancel()
        await asyncio.wait([task])
        moves.close()


@asynccontextmanager
async def running_moves():
    with memory_storage(SYSTEM_CLOCK) as storage:
        async with running({"": storage}) as moves:
            yield moves, storage


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
async def test_a_message_that_is_no_job_stops_no_other(job):
    async with running_moves() as (moves, storage):
        filled(storage, "a")
        storage.create(MOVES_QUEUE, max_redeliveries=None)
        storage.open(MOVES_QUEUE).send(job)
        await asyncio.sleep(0.1)
        assert await ended(moves, await moves.start("s", A_TO_B)) is MoveStatus.COMPLETE
        assert len(storage.open("b").peek()) + len(storage.open("a").peek()) == 3


async def test_sqs_s_move_tasks_go_on_after_any_error(monkeypatch, caplog):
    monkeypatch.setattr(move_tasks, "_LOOK_EVERY_S", 0.01)
    results, has_asked_again = iter([RuntimeError("can't start new thread")]), asyncio.Event()
    with memory_storage() as storage:
        hub = Hub({"": storage})
        with_queue = hub.with_queue

        async def failing_once(*args, **keywords):
            for error in results:
                raise error
            has_asked_again.set()
            return await with_queue(*args, **keywords)

        monkeypatch.setattr(hub, "with_queue", failing_once)
        tasks = MoveTasks(hub, Catalog(hub, 0, ()), None)
        running = asyncio.ensure_future(tasks.run())
        async with asyncio.timeout(10):
            await has_asked_again.wait()
            tasks.stop()
            await running
    (record,) = caplog.records
    assert "can't start new thread" in record.exc_text


async def test_a_moved_message_keeps_its_group():
    async with running_moves() as (moves, storage):
        filled(storage, "a", 1).send("y", group="g")
        assert await ended(moves, await moves.start("s", A_TO_B)) is MoveStatus.COMPLETE
        assert [one.group for one in storage.open("b").peek()] == [None, "g"]


async def test_a_move_counts_however_long_that_takes(monkeypatch):
    def count(queue, limit):
        time.sleep(0.5)  # an answer for clients would be a guess by now
        return queue._queue.size(limit)

    monkeypatch.setattr(ServedQueue, "_count", count)
    monkeypatch.setattr("kmqpy.gateway.service.hub._executor", lambda _: ThreadPoolExecutor(4))

    async with running_moves() as (moves, storage):
        filled(storage, "a")
        assert await ended(moves, await moves.start("s", A_TO_B)) is MoveStatus.COMPLETE
        assert len(storage.open("b").peek()) == 3


async def test_how_far_a_move_is_is_answered_in_time(monkeypatch):
    async with running_moves() as (moves, storage):
        filled(storage, "a")
        reference = await moves.start("s", A_TO_B)
        searching, find = threading.Event(), moves._find
        monkeypatch.setattr(moves, "_find", lambda *what: searching.wait(30) and find(*what))
        assert (await moves.status("s", reference))[1] is MoveStatus.IN_PROGRESS
        searching.set()
        assert await ended(moves, reference) is MoveStatus.COMPLETE
        searching.clear()
        assert await moves.status("s", reference) == (A_TO_B, MoveStatus.COMPLETE)
        searching.set()
        with pytest.raises(UnknownMove):
            await moves.status("s", "x")


async def test_a_long_move_lets_no_other_wait(monkeypatch):
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


@pytest.mark.parametrize("first", ["good", "away"])
async def test_a_storage_that_is_away_hides_no_move_of_another(first):
    with memory_storage(SYSTEM_CLOCK) as storage:
        both = {"": storage, "x": AwayStorage(storage)}
        async with running(both if first == "good" else dict(reversed(both.items()))) as moves:
            filled(storage, "a")
            reference = await moves.start("s", A_TO_B)
            assert await ended(moves, reference) is MoveStatus.COMPLETE
            with pytest.raises(Unavailable):
                await moves.status("s", reference.replace(reference[:2], "??"))


@pytest.mark.parametrize("error", [Unavailable("away"), ConfigError("no such setting")])
async def test_a_move_that_can_t_send_gives_back_what_it_took_and_nothing_else(monkeypatch, error):
    async with running_moves() as (moves, storage):
        queue = filled(storage, "a")
        others = queue.receive(1)
        tried = asyncio.Event()

        async def fail(hub, name, use, **options):
            tried.set()
            raise error

        monkeypatch.setattr(Hub, "with_made", fail)
        await moves.start("s", A_TO_B)
        async with asyncio.timeout(30):
            await tried.wait()
            while queue.size() < 2:
                await asyncio.sleep(0.01)
        assert [one.message.id for one in queue.orphans()] == [others[0].id]


async def test_a_gateway_that_knows_the_storages_by_other_names_leaves_a_move_to_others(monkeypatch):
    monkeypatch.setattr(service, "_LOOK_EVERY_S", 0.1)

    with memory_storage(SYSTEM_CLOCK) as storage, memory_storage(SYSTEM_CLOCK) as orders:
        filled(orders, "mails")
        filled(storage, "a")
        both = {"": storage, "orders": orders}
        async with running({"": orders}), running({"": storage}), running(both) as moves:
            of_orders = Move(QueueName("orders:mails"), QueueName("orders:b"))
            to_orders = Move(QueueName("a"), QueueName("orders:c"))
            for reference in [await moves.start("s", move) for move in (of_orders, to_orders)]:
                assert await ended(moves, reference) is MoveStatus.COMPLETE
        assert orders.open("b").size() == orders.open("c").size() == 3
        assert storage.list() == [MOVES_QUEUE, "a"]


async def test_the_queue_of_jobs_may_be_deleted():
    async with running_moves() as (moves, storage):
        for _ in range(2):
            filled(storage, "a")
            assert await ended(moves, await moves.start("s", A_TO_B)) is MoveStatus.COMPLETE
            storage.delete(MOVES_QUEUE)
            storage.delete("a")
        assert storage.open("b").size() == 6


async def test_an_outcome_that_is_being_forgotten_is_not_run_again(monkeypatch):
    monkeypatch.setattr(service, "_LOOK_EVERY_S", 0.1)

    async with running_moves() as (moves, storage):
        queue = filled(storage, "a")
        assert await ended(moves, await moves.start("s", A_TO_B)) is MoveStatus.COMPLETE
        queue.send(b"later")
        monkeypatch.setattr(service, "_KEPT_MS", 10)
        await asyncio.sleep(0.05)
        jobs = storage.open(MOVES_QUEUE)
        jobs.dead_letters.redrive()  # and its gateway is killed
        async with asyncio.timeout(30):
            while jobs.size() + jobs.in_flight():
                await asyncio.sleep(0.01)
        assert queue.size() == 1
        assert not jobs.dead_letters.list()


async def test_a_gateway_that_stops_gives_its_move_to_others_and_moves_nothing_twice(monkeypatch):
    with memory_storage(SYSTEM_CLOCK) as storage:
        filled(storage, "a", 500)
        async with running({"": storage}) as moves:
            sending = asyncio.Event()
            send = ServedQueue.send

            async def noted(queue, messages):
                sending.set()
                return await send(queue, messages)

            monkeypatch.setattr(ServedQueue, "send", noted)
            reference = await moves.start("s", A_TO_B)
            await sending.wait()
            moves.stop()
            jobs = storage.open(MOVES_QUEUE)
            async with asyncio.timeout(5):  # half the lease
                while not jobs.size():
                    await asyncio.sleep(0.01)
        assert 0 < storage.open("a").size() < 500
        async with running({"": storage}) as others:
            assert await ended(others, reference) is MoveStatus.COMPLETE
        assert storage.open("b").size() == 500


async def test_a_lease_is_extended_again_whatever_error_the_last_try_had(monkeypatch):
    monkeypatch.setattr(service, "_EXTEND_EVERY_S", 0.01)
    tries = asyncio.Queue()

    class Jobs:
        def extend(self, job, **options):
            tries.put_nowait(job)
            raise OSError("connection reset")

    async with running_moves() as (moves, storage):
        keeping = asyncio.ensure_future(moves._keep_lease(service._Job(storage, Jobs(), "job")))
        async with asyncio.timeout(30):
            while tries.qsize() < 3:
                await asyncio.sleep(0.01)
        keeping.cancel()


async def test_the_lease_of_a_job_is_short_whoever_made_the_queue():
    async with running_moves() as (moves, storage):
        storage.create(MOVES_QUEUE, lease_ms=3_600_000)
        filled(storage, "a", 1)
        moves.stop()
        await moves.start("s", A_TO_B)
        job = moves._take_job(storage)
        assert job.message.lease_until_ms - SYSTEM_CLOCK.wall_ms() <= 10_000


async def test_a_storage_that_is_away_makes_nobody_hurry_with_another(monkeypatch):
    with memory_storage(SYSTEM_CLOCK) as storage:
        away = AwayStorage(storage)
        async with running({"": storage, "x": away}) as moves:
            hub = moves._hub
            hub.note(away, answered=False)
            assert hub.is_silent(away)
            assert not hub.is_silent(storage)
            monkeypatch.setattr(service, "PATIENCE_WHEN_AWAY_S", 0.0)
            assert await moves.start("s", A_TO_B)
            with pytest.raises(Unavailable):
                await moves.start("s", Move(QueueName("x:a"), QueueName("b")))


async def test_a_move_gives_up_no_batch_that_takes_longer_than_clients_wait(monkeypatch):
    monkeypatch.setattr("kmqpy.gateway.service.hub._executor", lambda _: ThreadPoolExecutor(4))
    monkeypatch.setitem(Hub.with_made.__kwdefaults__, "patience_s", 0.1)
    send_all = ServedQueue._send_all

    def slow(queue, given):
        time.sleep(0.5)
        return send_all(queue, given)

    monkeypatch.setattr(ServedQueue, "_send_all", slow)

    async with running_moves() as (moves, storage):
        filled(storage, "a")
        assert await ended(moves, await moves.start("s", A_TO_B)) is MoveStatus.COMPLETE
        assert storage.open("b").size() == 3


@pytest.fixture
def slow_sends(monkeypatch):
    """Lets each batch of a move take 0.1 s."""
    monkeypatch.setattr("kmqpy.gateway.service.hub._executor", lambda _: ThreadPoolExecutor(4))
    monkeypatch.setattr(service, "_TURN_EVERY_S", 0.02)
    monkeypatch.setattr(service, "_LOOK_EVERY_S", 0.02)
    send_all = ServedQueue._send_all

    def slow(queue, given):
        time.sleep(0.1)
        return send_all(queue, given)

    monkeypatch.setattr(ServedQueue, "_send_all", slow)


@pytest.mark.parametrize("gateways", [1, 2])
async def test_moves_of_one_queue_do_not_overlap(slow_sends, gateways):
    with memory_storage(SYSTEM_CLOCK) as storage:
        filled(storage, "a", 550)
        async with running({"": storage}) as first, running({"": storage}) as second:
            if gateways == 1:
                second.stop()
            ways = [Move(QueueName("a"), QueueName(name)) for name in "bcde"]
            starters = [first, second] if gateways == 2 else [first, first]
            references = [await starters[n % 2].start("s", move) for n, move in enumerate(ways)]
            for reference in references:
                assert await ended(first, reference) is MoveStatus.COMPLETE
        found = [storage.open(name).size() for name in storage.list() if name in "bcde"]
        assert (sum(found), storage.open("a").size()) == (550, 0)


async def test_a_move_whose_lease_has_ended_is_left_to_others(monkeypatch, slow_sends):
    monkeypatch.setattr(service, "_EXTEND_EVERY_S", 0.01)

    async with running_moves() as (moves, storage):
        filled(storage, "a", 500)
        with monkeypatch.context() as patch:
            sent = asyncio.Event()
            with_made = Hub.with_made

            async def noted(hub, *args, **options):
                sent.set()
                return await with_made(hub, *args, **options)

            patch.setattr(Hub, "with_made", noted)
            await moves.start("s", A_TO_B)
            await sent.wait()
        jobs = storage.open(MOVES_QUEUE)
        monkeypatch.setattr(moves, "_take_job", lambda _: None)
        await asyncio.sleep(0.05)
        jobs.release_all()
        await asyncio.sleep(1.5)
        assert 100 <= storage.open("b").size() <= 300
        assert (jobs.size(), jobs.in_flight(), jobs.dead_letters.list()) == (1, 0, [])


async def test_a_storage_that_hangs_holds_no_move_of_another(monkeypatch):
    monkeypatch.setattr(service, "PATIENCE_S", 0.2)

    gate = threading.Event()
    with memory_storage(SYSTEM_CLOCK) as storage:
        away = AwayStorage(storage)
        away.open = lambda _: gate.wait(60)
        async with running({"": storage, "x": away}) as moves:
            filled(storage, "a")
            to_away = Move(QueueName("x:a"), QueueName("b"))
            tries = [moves.start("s", to_away) for _ in range(30)]
            assert {*map(type, await asyncio.gather(*tries, return_exceptions=True))} == {Unavailable}
            monkeypatch.setattr(service, "PATIENCE_S", 5)
            assert await moves.start("s", A_TO_B)
            async with asyncio.timeout(5):
                while storage.open("a").size():
                    await asyncio.sleep(0.01)
            gate.set()
