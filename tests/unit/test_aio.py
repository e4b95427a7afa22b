"""AsyncQueue: a queue for coroutines."""

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_queue import FakeQueue
from worker_support import eventually

from kmqpy.core.clock import SystemClock
from kmqpy.errors import Closed, ConfigError, NotSupported
from kmqpy.testing import ManualClock, memory_storage
from kmqpy.worker.asyncio import AsyncQueue
from kmqpy.worker.batches import Batches

pytestmark = pytest.mark.usefixtures("short_waits")


class TestQueue:
    def test_send_receive_ack(self):
        async def main():
            async with AsyncQueue(FakeQueue()) as queue:
                assert await queue.send("a") == "m1"
                assert await queue.send_many(["b", "c"]) == ["m2", "m3"]
                messages = await queue.receive()
                assert [message.body for message in messages] == [b"a", b"b", b"c"]
                await queue.ack(messages[0])
                await queue.extend(messages[1], lease=5)
                await queue.nack(messages[1], delay=3, reason="why")
                await queue.dead_letter(messages[2], reason="bad")
                assert await queue.call(queue.queue.in_flight) == 0
                return [op for op, _, _ in queue.queue.calls]

        assert asyncio.run(main()) == ["ack", "extend", "nack", "dead_letter"]

    def test_the_event_loop_goes_on_while_receive_waits(self):
        async def main():
            turns = 0
            async with AsyncQueue(FakeQueue()) as queue:
                waiting = asyncio.ensure_future(queue.receive(wait=0.2))
                while not waiting.done():
                    await asyncio.sleep(0.01)
                    turns += 1
                assert waiting.result() == []
            return turns

        assert asyncio.run(main()) > 5

    def test_a_cancelled_receive_gives_back_what_arrives_later(self):
        async def main():
            fake = FakeQueue()
            async with AsyncQueue(fake) as queue:
                waiting = asyncio.ensure_future(queue.receive(wait=30))
                await asyncio.sleep(0.05)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                fake.put("late")
                await eventually(lambda: fake.calls)
            return fake

        fake = asyncio.run(main())
        assert fake.arguments("nack") == [{"delay": 0, "count": False, "reason": None}]
        assert fake.taken == {}

    def test_close_waits_for_what_a_cancelled_receive_still_takes(self):
        async def main():
            fake = FakeQueue()
            queue = AsyncQueue(fake)
            receiving = asyncio.ensure_future(queue.receive(wait=30))
            await asyncio.sleep(0.05)
            receiving.cancel()
            closing = asyncio.ensure_future(queue.close())
            await asyncio.sleep(0.05)
            fake.put("late")
            await closing
            return fake

        fake = asyncio.run(main())
        assert (fake.of("nack"), fake.taken, fake.closed) == (["r1"], {}, True)

    def test_cancellation_at_any_moment_loses_nothing(self):
        """Every message is either returned or given back, wherever the cancellation falls."""

        async def main():
            fake = FakeQueue()
            returned = []
            async with AsyncQueue(fake) as queue:
                for turn in range(100):
                    waiting = asyncio.ensure_future(queue.receive(wait=0.05))
                    await asyncio.sleep(0)
                    fake.put("x")
                    for _ in range(turn % 8):
                        await asyncio.sleep(0)
                    if turn % 3 == 0:
                        await asyncio.sleep(0.001)
                    waiting.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        returned += await waiting
            return fake, [message.receipt for message in returned]

        fake, returned = asyncio.run(main())
        # The fake refuses a second end of the same message, so nothing was given back twice.
        assert set(fake.taken) == set(returned)
        assert all(arguments["count"] is False for arguments in fake.arguments("nack"))
        assert len(returned) + len(fake.of("nack")) + len(fake.ready) == 100

    def test_a_receive_that_times_out_loses_nothing(self):
        async def main():
            fake = FakeQueue()
            async with AsyncQueue(fake) as queue:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(queue.receive(wait=30), 0.05)
                fake.put("x")
                await eventually(lambda: fake.calls)
                return fake.of("nack")

        assert asyncio.run(main()) == ["r1"]

    def test_async_for_until_closed_gives_back_what_was_taken_ahead(self):
        async def main():
            fake = FakeQueue("a", "b", "c")
            bodies = []
            queue = AsyncQueue(fake)
            async for message in queue:
                bodies.append(message.body)
                await queue.ack(message)
                if len(bodies) == 2:
                    await queue.close()
            return fake, bodies

        fake, bodies = asyncio.run(main())
        assert bodies == [b"a", b"b"]
        assert fake.of("ack") == ["r1", "r2"]
        assert fake.arguments("nack") == [{"delay": 0, "count": False, "reason": None}]
        assert fake.closed

    def test_async_for_ends_when_close_begins(self):
        async def main():
            fake = FakeQueue("a", "b", "c")
            bodies = []
            queue = AsyncQueue(fake)
            async for message in queue:
                bodies.append(message.body)
                receiving = asyncio.ensure_future(queue.receive(wait=0.2))  # close() waits for it
                await asyncio.sleep(0.05)
                closing = asyncio.ensure_future(queue.close())
                await asyncio.sleep(0.05)
            await closing
            assert await receiving == []
            return fake, bodies

        fake, bodies = asyncio.run(main())
        assert bodies == [b"a"]
        assert fake.of("nack") == ["r2", "r3"]

    def test_close_gives_back_what_async_for_is_just_taking(self):
        async def main():
            fake = FakeQueue()
            queue = AsyncQueue(fake)

            async def work():
                return [message.body async for message in queue]

            working = asyncio.ensure_future(work())
            await asyncio.sleep(0.05)
            closing = asyncio.ensure_future(queue.close())
            await asyncio.sleep(0.05)
            fake.put("late")
            time.sleep(0.1)  # other threads go on before the event loop does
            await closing
            return fake, await working

        fake, bodies = asyncio.run(main())
        assert (bodies, fake.of("nack"), fake.taken, fake.closed) == ([], ["r1"], {}, True)

    @pytest.mark.parametrize("blocks", [False, True])
    def test_async_for_hands_out_nothing_stale(self, short_leases, blocks):
        """What waits behind a slow handler is given back in time, even one that stops the event loop."""

        async def main():
            fake = short_leases(FakeQueue("a", "b", "c"), 0.8)
            bodies = []
            async with AsyncQueue(fake) as queue:
                async for message in queue:
                    bodies.append(message.body)
                    if blocks:
                        time.sleep(0.5)
                    else:
                        await eventually(lambda: len(fake.of("nack")) == 2, 0.75)  # before their leases end
                    if fake.ready or len(bodies) == 2:
                        break
                    fake.put("d")
            return fake, bodies

        fake, bodies = asyncio.run(main())
        assert bodies == [b"a", b"d"]
        assert fake.of("nack")[:2] == ["r2", "r3"]
        assert fake.arguments("nack")[:2] == [{"delay": 0, "count": False, "reason": None}] * 2

    def test_async_for_takes_each_message_once_with_several_at_work(self):
        async def main():
            fake = FakeQueue(*map(str, range(100)))
            receipts = []

            async def work(queue):
                async for message in queue:
                    receipts.append(message.receipt)
                    await queue.ack(message)
                    if len(receipts) == 100:
                        await queue.close()

            queue = AsyncQueue(fake)
            async with asyncio.timeout(10):
                await asyncio.gather(*(work(queue) for _ in range(3)))
            return fake, receipts

        fake, receipts = asyncio.run(main())
        assert sorted(receipts) == sorted(fake.of("ack")) == sorted(f"r{n}" for n in range(1, 101))

    def test_async_for_hands_out_messages_whatever_the_clock_of_the_storage_says(self):
        async def main():
            clock = ManualClock()  # decades behind ours
            with memory_storage(clock) as storage:
                storage.create("q")
                queue = storage.open("q")
                queue.send_many(["0", "1", "2"])
                bodies = []
                async with asyncio.timeout(60), AsyncQueue(queue) as aio:
                    async for message in aio:
                        bodies.append(message.body)
                        if len(bodies) == 3:
                            break
                return bodies

        assert asyncio.run(main()) == [b"0", b"1", b"2"]

    def test_event_loops_of_several_threads_share_it(self):
        fake = FakeQueue(*map(str, range(100)))
        queue = AsyncQueue(fake)
        receipts = []

        async def work():
            async for message in queue:
                receipts.append(message.receipt)
                await queue.ack(message)
                if len(receipts) == 100:
                    await queue.close()

        with ThreadPoolExecutor(3) as threads:
            for one in [threads.submit(asyncio.run, work()) for _ in range(3)]:
                one.result(60)
        assert sorted(receipts) == sorted(fake.of("ack")) == sorted(f"r{n}" for n in range(1, 101))

    def test_it_can_be_closed_where_the_event_loop_that_took_ahead_is_gone(self):
        fake = FakeQueue()
        queue = AsyncQueue(fake)

        async def work():
            async for _ in queue:
                pass

        loop = asyncio.new_event_loop()
        working = loop.create_task(work())
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()
        asyncio.run(asyncio.wait_for(queue.close(), 60))
        assert fake.closed
        working._log_destroy_pending = False

    async def test_what_was_submitted_too_late_is_refused(self):
        """Another event loop may close the queue between the check of a send() and its submission."""

        with ThreadPoolExecutor(1) as threads:
            batches = Batches(threads, lambda items: items)
            assert await batches.submit(5) == 5
            batches.close()
            with pytest.raises(Closed):
                await batches.submit(6)
        shut = Batches(threads, lambda items: items)
        with pytest.raises(Closed):
            await shut.submit(7)

    def test_heavy_items_get_batches_of_their_own_and_nobody_s_result_is_told(self):
        first_began, may_end = threading.Event(), threading.Event()
        done, unclaimed = [], []

        def do(items):
            first_began.set()
            may_end.wait(60)
            done.append(list(items))
            return [f"result of {item}" for item in items]

        async def main():
            with ThreadPoolExecutor(1) as threads:
                batches = Batches(threads, do, weigh=lambda item: item, unclaimed=unclaimed.append)
                first = batches.submit(1)
                await asyncio.to_thread(first_began.wait, 60)
                rest = [batches.submit(weight) for weight in (600, 300, 200, 5_000, 1)]
                rest[1].cancel()
                may_end.set()
                await asyncio.gather(first, *rest, return_exceptions=True)
                batches.close()
                assert batches.idle

        asyncio.run(main())
        assert done == [[1], [600, 300], [200], [5_000], [1]]
        assert unclaimed == ["result of 300"]

    @pytest.mark.parametrize("threads", [0, -1, "4", 1.5, True, None])
    def test_a_bad_number_of_threads_is_refused(self, threads):
        with pytest.raises(ConfigError, match="threads"):
            AsyncQueue(FakeQueue(), threads=threads)

    async def test_after_close_everything_raises_closed(self):
        queue = AsyncQueue(FakeQueue())
        await queue.close()
        await queue.close()
        for operation in (queue.send("x"), queue.receive(), queue.ack("r1")):
            with pytest.raises(Closed):
                await operation

    async def test_errors_of_the_queue_come_through(self):
        async with AsyncQueue(FakeQueue()) as queue:
            with pytest.raises(NotSupported):
                await queue.call(queue.queue.purge)


def test_on_an_at_most_once_queue_nothing_is_lost_by_a_cancelled_receive_or_a_break(caplog):
    async def main():
        with memory_storage(SystemClock()) as storage:
            storage.create("q", delivery="at-most-once")
            queue = storage.open("q")
            aio = AsyncQueue(queue)
            waiting = asyncio.ensure_future(aio.receive(wait=30))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            queue.send_many(["0", "1", "2"])
            bodies = []
            async for message in aio:
                bodies.append(message.body)
                break
            bodies += [message.body for _ in range(3) for message in await aio.receive(1, wait=0.2)]
            await aio.close()
            return bodies

    assert sorted(asyncio.run(main())) == [b"0", b"1", b"2"]
    assert not caplog.records


async def test_async_for_hands_out_nothing_of_a_group_before_what_was_given_back():
    with memory_storage(SystemClock()) as storage:
        storage.create("q", order="group")
        handled = []
        async with AsyncQueue(storage.open("q")) as queue:
            await queue.send_many(["1", "2"], group="a")
            (first,) = await queue.receive(9, one_per_group=True)
            await queue.nack(first, count=False)
            async for message in queue:
                handled.append(message.body)
                if len(handled) == 3:
                    break
                await (queue.nack(message) if len(handled) == 1 else queue.ack(message))
    assert handled == [b"1", b"1", b"2"]
