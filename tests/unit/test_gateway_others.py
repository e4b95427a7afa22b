"""Queues of which other gateways have a part, as on Kafka: what is taken for others, and what comes late."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kmqpy.errors import Unavailable
from kmqpy.gateway.service import hub as module
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.testing import ManualClock, memory_storage

JOBS = QueueName("jobs")


class LikeKafka:
    """A storage or queue whose receive() waits for messages that are on their way, as on Kafka.

    gates  by the name of a method: calls of it return when the gate is open
    """

    def __init__(self, inner, gates):
        self._inner = inner
        self.capabilities = replace(inner.capabilities, immediate=False)
        self.gates = gates
        self.calls = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def open(self, name):
        return LikeKafka(self._inner.open(name), self.gates)

    def close(self):
        """Tests look at what is left."""

    def receive(self, *args, wait=0, **options):
        return self._gated("receive", *args, wait=0, **options)

    def extend(self, *args, **options):
        return self._gated("extend", *args, **options)

    def _gated(self, name, *args, **options):
        result = getattr(self._inner, name)(*args, **options)
        self.calls.append(name)
        if name in self.gates:
            assert self.gates[name].wait(60)
        return result


@asynccontextmanager
async def a_hub(gates=(), clock=None, **others):
    """A hub over storages like Kafka: the default one, which is given, too, and its queue jobs."""
    with memory_storage() as memory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_executor", lambda _: ThreadPoolExecutor(4))
        memory.create("jobs")
        hub = Hub(
            {"": LikeKafka(memory, dict(gates)), **others}, **({} if clock is None else {"clock": clock})
        )
        try:
            yield hub, memory.open("jobs")
        finally:
            for gate in dict(gates).values():
                gate.set()
            await asyncio.to_thread(hub.close)


async def poll(hub):
    async def take(queue):
        return (await queue.take(10, 3600))[0]

    return await hub.with_queue(JOBS, take, missing=list)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_another_gateway_gets_messages_of_the_very_queue_that_it_asks_for():
    with memory_storage() as other:
        other.create("jobs")
        async with a_hub(other=other) as (hub, jobs):
            async with asyncio.timeout(30):
                assert await poll(hub) == []
                name = QueueName("other:jobs")
                await hub.with_queue(name, lambda queue: queue.take(1, 30), missing=list)
            namesake = other.open("jobs")
            for queue in (jobs, namesake):
                queue.send(b"x")
            assert await hub.take_for_other(namesake.unique_id, 10, 30) == []
            assert await hub.take_for_other("jobs", 10, 30) == []
            taken = await hub.take_for_other(jobs.unique_id, 10, 30)
            assert [one.body for one in taken] == [b"x"]
            assert (jobs.in_flight(), namesake.in_flight()) == (1, 0)
            await hub.give_back(jobs.unique_id, taken)
            assert (jobs.in_flight(), jobs.size()) == (0, 1)


async def test_a_queue_that_is_left_to_others_is_closed_but_not_one_that_was_opened_meanwhile():
    clock, gate = ManualClock(), threading.Event()
    gate.set()
    async with a_hub({"receive": gate}, clock) as (hub, jobs):
        await poll(hub)
        former = hub._entries["", "jobs"]
        clock.advance(11)
        async with asyncio.timeout(30):
            while hub.open_queues:  # unless its last call is just ending
                assert await hub.take_for_other(jobs.unique_id, 1, 30) == []
        assert await hub.take_for_other(jobs.unique_id, 1, 30) == []
        await poll(hub)
        gate.clear()
        clock.advance(11)
        asking = asyncio.ensure_future(hub.take_for_other(jobs.unique_id, 1, 30))
        await asyncio.sleep(0)
        hub._entries["", "jobs"] = former
        gate.set()
        assert await asking == []
        assert hub._entries["", "jobs"] is former


async def test_errors_are_not_reported_once_nobody_waits():
    unheard, opened = [], asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    gate = threading.Event()

    class Away:
        def __init__(self, storage):
            self.capabilities = storage.capabilities

        def open(self, name):
            gate.wait(60)
            loop.call_soon_threadsafe(opened.set)
            raise Unavailable("away")

        def close(self):
            pass

    with memory_storage() as memory:
        async with a_hub(away=Away(memory)) as (hub, _):
            with pytest.raises(Unavailable):
                await hub.with_queue(QueueName("away:q"), None, missing=list, patience_s=0.05)
            gate.set()
            await opened.wait()
            await until(lambda: not hub._opening)
            gc.collect()
            await asyncio.sleep(0)
    assert unheard == []


@pytest.mark.parametrize("call", ["receive", "extend"])
async def test_a_take_that_is_cancelled_gives_back_what_it_brings(call):
    gates = {"receive": threading.Event(), "extend": threading.Event()}
    async with a_hub(gates) as (hub, jobs):
        jobs.send_many([b"x"] * 3)
        if call == "extend":  # of messages that came too late for a poll
            assert await poll(hub) == []
            gates["receive"].set()
            await until(lambda: hub.late_messages == 3)
        taking = asyncio.ensure_future(poll(hub))
        await until(lambda: hub._entries and call in hub._entries["", "jobs"].queue._queue.calls)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        for gate in gates.values():
            gate.set()
        await until(lambda: jobs.size() == 3)
        assert [one.attempts for one in jobs.receive(3)] == [1] * 3


@pytest.mark.parametrize("comes", ["before", "during"])
async def test_what_came_too_late_is_given_back_when_the_gateway_ends(monkeypatch, comes):
    gate = threading.Event()
    with memory_storage() as memory:
        memory.create("jobs")
        jobs = memory.open("jobs")
        jobs.send_many([b"x"] * 3)
        monkeypatch.setattr(module, "_executor", lambda _: ThreadPoolExecutor(4))
        hub = Hub({"": LikeKafka(memory, {"receive": gate})})
        assert await poll(hub) == []
        if comes == "before":
            gate.set()
            await until(lambda: hub.late_messages == 3)
        closing = asyncio.ensure_future(asyncio.to_thread(hub.close))
        await until(lambda: hub._entries["", "jobs"].queue._closing)
        gate.set()
        await closing
        assert (jobs.size(), jobs.in_flight()) == (3, 0)


def test_a_renewal_at_another_gateway_counts_once(monkeypatch):
    monkeypatch.setattr(module, "_executor", lambda _: ThreadPoolExecutor(4))

    class First:
        """The first gateway, as the second one has it."""

        async def take(self, unique_id, limit, lease_s):
            return [], ""

        async def tell(self, unique_id, said):
            return set(first.hear(unique_id, said))

    async def renew(hub, ids):
        await hub.with_queue(JOBS, lambda queue: queue.extend(ids, 60), missing=list)
        return await hub.with_queue(JOBS, lambda queue: queue.in_flight(), missing=list)

    async def main():
        nonlocal first
        with memory_storage() as memory:
            memory.create("jobs")
            memory.open("jobs").send_many([b"x"] * 3)
            first = Hub({"": LikeKafka(memory, {})})
            second = Hub({"": LikeKafka(memory, {})}, elsewhere=First())
            taken = [one.id for one in await poll(first)]
            assert await renew(second, taken) == await renew(first, taken) == 3
            assert await renew(second, ["4711"]) == 4
            for hub in (first, second):
                await asyncio.to_thread(hub.close)

    first = None
    asyncio.run(main())
