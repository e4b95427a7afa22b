"""What the gateway does with one queue: batches, takes, late messages."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from fake_queue import FakeQueue
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.gateway.service.served_queue import ServedQueue, dealt
from kmqpy.gateway.service.shelf import Shelf
from kmqpy.queue import Capabilities
from kmqpy.queue_policy import QueuePolicy
from kmqpy.testing import memory_storage


class Counting:
    """A queue of which the calls are counted, and take long while `gate` is closed."""

    def __init__(self, queue):
        self._queue = queue
        self.calls = []
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name):
        found = getattr(self._queue, name)
        if name not in {"send_many", "receive", "ack", "nack", "extend"}:
            return found

        def call(*args, **kwargs):
            self.calls.append(name)
            self.gate.wait(60)
            return found(*args, **kwargs)

        return call


@asynccontextmanager
async def a_served_queue():
    with memory_storage() as storage, ThreadPoolExecutor(8) as threads:
        storage.create("q", requeue_to="front")
        counting = Counting(storage.open("q"))
        try:
            yield ServedQueue(counting, threads), counting
        finally:
            counting.gate.set()


async def started(counting, name):
    while name not in counting.calls:
        await asyncio.sleep(0.001)


def test_what_went_with_its_queue_need_not_be_given_back(caplog):
    async def main():
        with memory_storage() as storage, ThreadPoolExecutor(2) as threads:
            storage.create("q")
            served = ServedQueue(storage.open("q"), threads)
            await served.send([b"1"])
            taken, _ = await served.take(1, 30)
            storage.delete("q")
            await served.give_back(taken)

    asyncio.run(main())
    assert not caplog.records


async def test_sends_of_many_requests_are_one_call():
    async with a_served_queue() as (served, counting):
        counting.gate.clear()
        first = asyncio.ensure_future(served.send([b"0"]))
        await started(counting, "send_many")
        rest = [asyncio.ensure_future(served.send([b"%d" % n, b"%d'" % n])) for n in range(1, 50)]
        await asyncio.sleep(0)
        counting.gate.set()
        ids = [await one for one in (first, *rest)]
        assert counting.calls == ["send_many", "send_many"]
        assert [len(one) for one in ids] == [1] + [2] * 49
        messages = await served.peek(200)
        assert [one.id for one in messages] == [one for each in ids for one in each]


async def test_takes_of_one_lease_share_a_receive_and_are_served_in_turns():
    async with a_served_queue() as (served, counting):
        counting.gate.clear()
        first = asyncio.ensure_future(served.take(1, 30))
        await started(counting, "receive")
        takes = [asyncio.ensure_future(served.take(10, lease)) for lease in (30, 30, 30, 60)]
        sending = asyncio.ensure_future(served.send([b"%d" % n for n in range(7)]))
        await asyncio.sleep(0)
        counting.gate.set()
        await sending
        found = [len((await one)[0]) for one in (first, *takes)]
        assert sum(found) == 7 or (sum(found) < 7 and found[0] == 0)
        assert counting.calls.count("receive") <= 3
        shares = found[1:4]
        assert max(shares) - min(shares) <= 1


async def test_a_cancelled_take_gives_back_what_arrives_uncounted():
    async with a_served_queue() as (served, counting):
        await served.send([b"1", b"2"])
        counting.calls.clear()
        counting.gate.clear()
        taking = asyncio.ensure_future(served.take(2, 30))
        await started(counting, "receive")
        taking.cancel()
        await asyncio.sleep(0)
        counting.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await taking
        await started(counting, "nack")
        while await served.in_flight():
            await asyncio.sleep(0.001)
        again, _ = await served.take(2, 30)
        assert [one.body for one in again] == [b"1", b"2"]


async def test_acks_extensions_and_releases_act_by_ids_whoever_has_the_message():
    async with a_served_queue() as (served, _):
        ids = await served.send([b"1", b"2", b"3"])
        await served.extend(ids[:1], 60)  # nobody had it
        assert await served.in_flight() == 1
        assert [one.id for one in (await served.take(5, 30))[0]] == ids[1:]
        await served.release(ids[:2])
        assert [one.id for one in (await served.take(5, 30))[0]] == ids[:2]
        await served.ack([*ids, "4711"])
        assert await served.size(None) == 0


async def test_what_is_handed_out_without_a_claim_can_be_taken_at_once_and_is_no_attempt():
    async with a_served_queue() as (served, counting):
        await served.send([b"1", b"2"])
        for _ in range(3):
            assert [one.body for one in await served.hand_out(5)] == [b"1", b"2"]
        assert [one.attempts for one in counting.receive(5)] == [1, 1]


async def test_peek_shows_the_oldest_first_taken_ones_included():
    async with a_served_queue() as (served, _):
        await served.send([b"%d" % n for n in range(6)])
        await served.take(3, 30)
        assert [one.body for one in await served.peek(4)] == [b"0", b"1", b"2", b"3"]


async def test_a_take_of_large_messages_ends_before_the_memory_does():
    async with a_served_queue() as (served, _):
        for _ in range(4):
            await served.send([bytes(1_000_000)] * 10)
        assert len((await served.take(40, 30))[0]) == 17  # 16 fit; one more, as sizes are learned
        assert len(await served.peek(40)) == 16
        assert len(await served.taken(40)) == 16


@given(st.lists(st.integers(0, 8), max_size=6), st.integers(0, 30))
def test_messages_are_dealt_fairly(limits, count):
    shares = dealt(range(count), limits)
    assert sorted(one for share in shares for one in share) == [*range(min(count, sum(limits)))]
    assert all(len(share) <= limit for share, limit in zip(shares, limits, strict=True))
    hungry = [len(share) for share, limit in zip(shares, limits, strict=True) if len(share) < limit]
    assert not hungry or max(map(len, shares)) <= max(hungry) + 1 or count >= sum(limits)


def test_the_shelf_keeps_late_messages_for_a_while():
    shelf = Shelf()
    shelf.put(["a", "b"], 30, 100)
    shelf.put(["c"], 1, 101)
    assert len(shelf) == 3
    assert shelf.take(1, 101) == ["a"]
    assert shelf.stale(101.3) == ["c"]
    assert shelf.stale(102) == []
    assert shelf.take(5, 104) == []
    assert shelf.stale(104) == ["b"]
    assert not shelf


class SlowToJoin(FakeQueue):
    """A queue on Kafka whose first receive() takes longer than a client waits."""

    unique_id = "fake"

    def __init__(self, *bodies):
        super().__init__(*bodies)
        self.joined = threading.Event()
        self.before_receive = lambda: self.joined.wait(60)

    settings = QueuePolicy(name="jobs")

    @property
    def capabilities(self):
        return Capabilities(immediate=False)


async def test_a_poll_does_not_wait_for_a_consumer_that_joins_and_the_next_one_gets_its_messages():
    with ThreadPoolExecutor(4) as threads:
        queue = SlowToJoin("1", "2")
        served = ServedQueue(queue, threads)
        assert await served.take(5, 30) == ([], "")
        queue.joined.set()
        while not queue.of("receive") and not queue.taken:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        messages, _ = await served.take(1, 60)
        more, _ = await served.take(5, 60)
        assert [one.body for one in (*messages, *more)] == [b"1", b"2"]


@pytest.mark.parametrize("call", ["purge", "release_all"])
@pytest.mark.parametrize("is_on_its_way", [False, True])
async def test_what_came_late_before_a_purge_is_handed_out_to_nobody(call, is_on_its_way):
    with ThreadPoolExecutor(4) as threads:
        queue = SlowToJoin("purged")
        setattr(queue, call, lambda: None)
        served = ServedQueue(queue, threads)
        assert await served.take(5, 30) == ([], "")
        if not is_on_its_way:
            queue.joined.set()
            while not served.late:
                await asyncio.sleep(0.001)
        await getattr(served, call)()
        queue.joined.set()
        while not served._takes.idle:
            await asyncio.sleep(0.001)
        queue.put("new")
        messages, _ = await served.take(5, 30)
        assert [one.body for one in messages] == [b"new"]
