"""The gateway's hub: queues are found, opened and made as requests name them."""

import asyncio

import pytest
from hub_support import JOBS, a_hub

from kmqpy.errors import ConfigError, QueueNotFound, Unavailable
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.testing import memory_storage


async def test_a_queue_is_made_by_the_first_send_and_by_nothing_else():
    async with a_hub() as (hub, storage):

        async def size(queue):
            return await queue.size(None)

        assert await hub.with_queue(JOBS, size, missing=lambda: "missing") == "missing"
        assert storage.list() == []
        sends = [hub.with_made(JOBS, lambda queue: queue.send([b"x"])) for _ in range(50)]
        await asyncio.gather(*sends)
        assert await hub.with_queue(JOBS, size, missing=lambda: "missing") == 50
        assert hub.open_queues == 1
        settings = storage.describe("jobs").settings
        assert (settings["max_redeliveries"], settings["requeue_to"]) == (None, "front")


async def test_a_request_that_meets_a_deleted_queue_does_not_close_the_new_one():
    async with a_hub() as (hub, storage):
        storage.create("jobs")
        both_have_it, tries = asyncio.Barrier(2), []

        async def use(queue):
            tries.append(queue)
            if len(tries) <= 2:
                await both_have_it.wait()
                raise QueueNotFound("queue: deleted")
            await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            return await queue.size(None)

        calls = (hub.with_queue(JOBS, use, missing=lambda: "missing") for _ in range(2))
        assert await asyncio.gather(*calls) == [0, 0]
        assert tries[0] is tries[1]
        assert tries[2] is tries[3]

        async def in_vain(queue):
            raise QueueNotFound("queue: deleted")

        with pytest.raises(Unavailable):
            await hub.with_made(JOBS, in_vain)


async def test_a_queue_that_is_deleted_as_soon_as_it_is_made_is_made_again(monkeypatch):
    async with a_hub() as (hub, storage):
        create, made = storage.create, []

        def create_in_vain(name, **settings):
            create(name, **settings)
            made.append(name)
            if len(made) == 1:
                storage.delete(name)

        monkeypatch.setattr(storage, "create", create_in_vain)
        await hub.with_made(JOBS, lambda queue: queue.send([b"1"]))
        assert len(made) == 2


async def test_who_asks_for_queues_that_are_missing_closes_no_other(monkeypatch):
    monkeypatch.setattr("kmqpy.gateway.service.hub._MAX_OPEN", 3)

    async with a_hub() as (hub, storage):
        storage.create("jobs")
        await hub.with_queue(JOBS, lambda queue: queue.size(None), missing=lambda: None)
        for number in range(10):
            name = QueueName(f"missing-{number}")
            assert await hub.with_queue(name, None, missing=lambda: "missing") == "missing"
        assert hub.open_queues == 1
        await asyncio.sleep(0.3)
        for _ in range(10):
            await hub.with_queue(QueueName("one"), None, missing=lambda: None)
            await asyncio.sleep(0.03)
        assert len(hub._missing_since_s) <= 3


async def test_a_queue_that_was_deleted_or_made_again_is_found_again():
    async with a_hub() as (hub, storage):
        await hub.with_made(JOBS, lambda queue: queue.send([b"x"]))
        storage.delete("jobs")
        await hub.with_made(JOBS, lambda queue: queue.send([b"y"]))
        storage.delete("jobs")
        storage.create("jobs")

        async def take(queue):
            return await queue.take(5, 30)

        assert await hub.with_queue(JOBS, take, missing=lambda: None) == ([], "")
        storage.delete("jobs")
        assert await hub.with_queue(JOBS, take, missing=lambda: "missing") == "missing"


async def test_names_find_their_storage():
    with memory_storage() as one, memory_storage() as other:
        hub = Hub({"": one, "orders": other})
        for name in ("jobs", "orders:mails", "others:mails", "orders:"):
            await hub.with_made(QueueName(name), lambda queue: queue.send([b"x"]))
        assert one.list() == ["jobs", "orders:", "others:mails"]
        assert other.list() == ["mails"]
        await asyncio.to_thread(hub.close)


async def test_where_all_storages_have_names_a_mistyped_one_is_refused():
    with memory_storage() as one, memory_storage() as other:
        hub = Hub({"mails": one, "orders": other, "": one})
        for name in ("jobs", "mails:jobs", "orders:jobs"):
            await hub.with_made(QueueName(name), lambda queue: queue.send([b"x"]))
        assert one.list() == other.list() == ["jobs"]
        assert hub.open_queues == 2, "jobs is mails:jobs"
        assert hub.is_one(QueueName("jobs"), QueueName("mails:jobs"))
        assert not hub.is_one(QueueName("jobs"), QueueName("orders:jobs"))
        with pytest.raises(ConfigError, match=r"no storage 'order'; .* one of mails, orders"):
            await hub.with_made(QueueName("order:jobs"), lambda queue: queue.send([b"x"]))
        await asyncio.to_thread(hub.close)
