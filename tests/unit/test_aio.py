import asyncio
import contextlib
import contextvars
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_queue import FakeQueue

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SystemClock
from kmqpy.errors import Closed, ConfigError, KmqError, MessageError, NotSupported, Unavailable
from kmqpy.testing import ManualClock, memory_storage
from kmqpy.worker.asyncio import AsyncQueue, AsyncWorker
from kmqpy.worker.batches import Batches
from kmqpy.worker.outcome import Reject


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("kmqpy.worker.worker._RECEIVE_WAIT_S", 0.02)


@pytest.fixture
def short_leases(monkeypatch):
    """Gives a queue a default lease of so many seconds."""

    def shorten(fake, lease_s):
        take = fake.receive
        monkeypatch.setattr(
            fake, "receive", lambda most, *, wait, lease: take(most, wait=wait, lease=lease or lease_s)
        )
        monkeypatch.setattr(fake, "default_lease", lease_s)
        return fake

    return shorten


async def until(condition, timeout=60.0):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


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
                await until(lambda: fake.calls)
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
                await until(lambda: fake.calls)
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
                        await until(lambda: len(fake.of("nack")) == 2, 0.75)  # before their leases end
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

    def test_what_was_submitted_too_late_is_refused(self):
        """Another event loop may close the queue between the check of a send() and its submission."""

        async def main():
            batches = Batches("late", lambda items: items)
            assert await batches.submit(5) == 5
            batches.close()
            with pytest.raises(Closed):
                await batches.submit(6)

        asyncio.run(main())

    @pytest.mark.parametrize("threads", [0, -1, "4", 1.5, True, None])
    def test_a_bad_number_of_threads_is_refused(self, threads):
        with pytest.raises(ConfigError, match="threads"):
            AsyncQueue(FakeQueue(), threads=threads)

    def test_after_close_everything_raises_closed(self):
        async def main():
            queue = AsyncQueue(FakeQueue())
            await queue.close()
            await queue.close()
            for operation in (queue.send("x"), queue.receive(), queue.ack("r1")):
                with pytest.raises(Closed):
                    await operation

        asyncio.run(main())

    def test_errors_of_the_queue_come_through(self):
        async def main():
            async with AsyncQueue(FakeQueue()) as queue:
                with pytest.raises(NotSupported):
                    await queue.call(queue.queue.purge)

        asyncio.run(main())


class TestBatches:
    """send() and ack() of concurrent coroutines are gathered."""

    @pytest.fixture
    def queue(self):
        """Notes how many messages each call had in `sizes`; the first call waits for `gate`."""
        with memory_storage(SystemClock()) as storage:
            storage.create("q")
            queue = storage.open("q")
            queue.sizes, queue.gate = [], threading.Event()
            send_many, ack = queue.send_many, queue.ack

            def sent(bodies, **given):
                queue.sizes.append(len(bodies))
                assert queue.gate.wait(60)
                return send_many(bodies, **given)

            def acked(*messages, wait=False):
                queue.sizes.append(len(messages))
                assert queue.gate.wait(60)
                ack(*messages, wait=wait)

            queue.send_many, queue.ack = sent, acked
            yield queue

    @staticmethod
    async def submitted(queue, calls):
        """The tasks of the calls; all but the first wait while the first call is under way."""
        first = asyncio.ensure_future(calls[0])
        await until(lambda: queue.sizes, 60)
        rest = [asyncio.ensure_future(call) for call in calls[1:]]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        queue.gate.set()
        return [first, *rest]

    def test_concurrent_sends_go_together_in_order_each_with_its_id(self, queue):
        async def main():
            aio = AsyncQueue(queue)
            calls = [aio.send(str(number), headers=iter([("n", b"1")])) for number in range(500)]
            ids = await asyncio.gather(*await self.submitted(queue, calls))
            messages = await aio.receive(1000)
            return ids, messages

        ids, messages = asyncio.run(main())
        assert ids == [message.id for message in messages]
        assert [int(message.body) for message in messages] == list(range(500))
        assert {message.headers for message in messages} == {(("n", b"1"),)}
        assert queue.sizes == [1, 499]

    def test_messages_keep_their_own_keys_and_delays(self, queue):
        async def main():
            aio = AsyncQueue(queue)
            calls = [aio.send(key, key=key) for key in "aabbc"]
            await asyncio.gather(*await self.submitted(queue, calls))
            return await aio.receive(10)

        messages = asyncio.run(main())
        assert [(message.key, message.body) for message in messages] == [(x.encode(),) * 2 for x in "aabbc"]

    def test_a_bad_message_costs_only_itself(self, queue):
        async def main():
            aio = AsyncQueue(queue)
            calls = [aio.send(5 if number == 17 else str(number)) for number in range(100)]
            done = await asyncio.gather(*await self.submitted(queue, calls), return_exceptions=True)
            with pytest.raises(MessageError):
                await aio.send("x", headers=5)
            return done, await aio.receive(1000)

        done, messages = asyncio.run(main())
        assert [number for number, one in enumerate(done) if isinstance(one, MessageError)] == [17]
        assert sorted(int(message.body) for message in messages) == sorted({*range(100)} - {17})

    def test_what_the_storage_can_not_do_costs_only_the_message_that_asked_for_it(self, queue):
        send_many = queue.send_many

        def without_priorities(bodies, **arguments):
            if any(body.priority for body in bodies):
                raise NotSupported("priority")
            return send_many(bodies, **arguments)

        queue.send_many = without_priorities

        async def main():
            aio = AsyncQueue(queue)
            calls = [aio.send("x", priority=int(number == 17)) for number in range(100)]
            return await asyncio.gather(*await self.submitted(queue, calls), return_exceptions=True)

        done = asyncio.run(main())
        assert [number for number, one in enumerate(done) if isinstance(one, KmqError)] == [17]

    def test_where_nobody_knows_what_was_sent_all_of_the_batch_hear_of_it(self, queue):
        calls = []

        def away(bodies, **_):
            calls.append(len(bodies))
            raise Unavailable("away")

        queue.send_many = away

        async def main():
            aio = AsyncQueue(queue)
            return await asyncio.gather(*(aio.send("x") for _ in range(50)), return_exceptions=True)

        done = asyncio.run(main())
        assert {type(one) for one in done} == {Unavailable}
        assert sum(calls) == 50

    def test_a_cancelled_send_holds_up_no_other_and_may_be_sent(self, queue):
        async def main():
            aio = AsyncQueue(queue)
            first = asyncio.ensure_future(aio.send("0"))
            await until(lambda: queue.sizes, 60)
            others = [asyncio.ensure_future(aio.send(str(number))) for number in (1, 2)]
            await asyncio.sleep(0)
            first.cancel()
            others[0].cancel()
            await asyncio.gather(first, others[0], return_exceptions=True)
            queue.gate.set()
            await others[1]
            return await aio.receive(10)

        assert [message.body for message in asyncio.run(main())] == [b"0", b"1", b"2"]

    def test_close_waits_for_what_was_submitted(self, queue):
        async def main():
            aio = AsyncQueue(queue)
            tasks = await self.submitted(queue, [aio.send(str(number)) for number in range(10)])
            await aio.close()
            return await asyncio.gather(*tasks)

        assert len(asyncio.run(main())) == 10
        assert sum(queue.sizes) == 10

    def test_concurrent_acknowledgements_go_together_and_a_bad_one_costs_only_itself(self, queue):
        queue.gate.set()
        queue.send_many([str(number) for number in range(100)])
        messages = queue.receive(100)
        queue.sizes.clear()
        queue.gate.clear()

        async def main():
            aio = AsyncQueue(queue)
            calls = [
                aio.ack(*(["nonsense"] if number == 50 else [message]), wait=number % 2 == 0)
                for number, message in enumerate(messages)
            ]
            return await asyncio.gather(*await self.submitted(queue, calls), return_exceptions=True)

        done = asyncio.run(main())
        assert [number for number, one in enumerate(done) if one is not None] == [50]
        assert isinstance(done[50], KmqError)
        assert queue.in_flight() == 1
        assert len(queue.sizes) < 40


def test_on_an_at_most_once_queue_nothing_is_lost_by_a_cancelled_receive_or_a_break(caplog):
    async def main():
        with memory_storage(SystemClock()) as storage:
            storage.create("q", ephemeral=False)
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


class TestWorker:
    def test_handlers_run_together_on_the_callers_loop(self):
        async def main():
            fake = FakeQueue(*["x"] * 8)
            together = asyncio.Barrier(8)
            loops = set()

            async def handler(message):
                loops.add(asyncio.get_running_loop())
                await together.wait()

            worker = AsyncWorker(fake, handler, concurrency=8)
            running = asyncio.ensure_future(worker.run())
            await until(lambda: len(fake.of("ack")) == 8)
            worker.stop()
            await running
            return loops == {asyncio.get_running_loop()}

        assert asyncio.run(main())

    def test_outcomes_are_those_of_worker(self):
        async def main():
            fake = FakeQueue("ok", "reject", "fail", "exit", "cancelled")

            async def handler(message):
                await asyncio.sleep(0)
                match message.body:
                    case b"reject":
                        raise Reject("no")
                    case b"fail":
                        raise ValueError("oops")
                    case b"exit":
                        raise SystemExit(3)
                    case b"cancelled":
                        raise asyncio.CancelledError

            worker = AsyncWorker(fake, handler, concurrency=1, backoff=Backoff(1, jitter=0))
            running = asyncio.ensure_future(worker.run())
            await until(lambda: len(fake.calls) == 5)
            worker.stop()
            await running
            return fake

        fake = asyncio.run(main())
        assert fake.of("ack") == ["r1"]
        assert fake.of("dead_letter") == ["r2"]
        assert fake.of("nack") == ["r3", "r4", "r5"]
        reasons = [arguments["reason"] for arguments in fake.arguments("nack")]
        assert reasons == ["ValueError: oops", "SystemExit: 3", "CancelledError"]

    def test_cancelling_run_drains(self):
        async def main():
            fake = FakeQueue("x")
            begun = asyncio.Event()

            async def handler(message):
                begun.set()
                await asyncio.sleep(0.1)

            running = asyncio.ensure_future(AsyncWorker(fake, handler).run())
            await begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return fake.of("ack")

        assert asyncio.run(main()) == ["r1"]

    def test_a_handler_that_outlasts_the_drain_is_cancelled_and_gives_back(self):
        async def main():
            fake = FakeQueue("x")
            begun, cancelled = asyncio.Event(), asyncio.Event()

            async def handler(message):
                begun.set()
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise

            worker = AsyncWorker(fake, handler, drain_timeout=0.05)
            running = asyncio.ensure_future(worker.run())
            await begun.wait()
            worker.stop()
            await running
            await asyncio.wait_for(cancelled.wait(), 5)
            return fake

        fake = asyncio.run(main())
        assert fake.arguments("nack") == [{"delay": 0, "count": False, "reason": None}]

    def test_run_raises_what_ended_the_worker(self):
        async def main():
            fake = FakeQueue()

            def broken():
                raise ConfigError("lease: too long")

            fake.before_receive = broken

            async def handler(message):
                """Nothing."""

            with pytest.raises(ConfigError, match="too long"):
                await AsyncWorker(fake, handler).run()

        asyncio.run(main())

    def test_signals_are_left_to_the_application_unless_asked_for(self):
        noted = []
        before = signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))
        try:

            async def main():
                async def handler(message):
                    os.kill(os.getpid(), signal.SIGTERM)
                    await asyncio.sleep(0)
                    worker.stop()

                worker = AsyncWorker(FakeQueue("x"), handler)
                await worker.run()

            asyncio.run(main())
        finally:
            signal.signal(signal.SIGTERM, before)
        assert noted == [signal.SIGTERM]

    def test_a_signal_drains_where_it_was_asked_for(self):
        before = signal.getsignal(signal.SIGTERM)

        async def main():
            fake = FakeQueue("x")

            async def handler(message):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.1)

            await AsyncWorker(fake, handler, handle_signals=True).run()
            return fake.of("ack")

        assert asyncio.run(main()) == ["r1"]
        assert signal.getsignal(signal.SIGTERM) is before

    def test_the_handler_sees_the_context_of_its_message(self):
        from contextlib import contextmanager

        from kmqpy.telemetry.base import Telemetry

        current = contextvars.ContextVar("current", default="none")

        class Spans(Telemetry):
            @contextmanager
            def processing(self, message):
                token = current.set(message.id)
                yield
                current.reset(token)

        async def main():
            fake = FakeQueue("x")
            seen = []

            async def handler(message):
                seen.append(current.get())
                worker.stop()

            worker = AsyncWorker(fake, handler, telemetry=Spans())
            await worker.run()
            return seen

        assert asyncio.run(main()) == ["m1"]

    def test_no_thread_is_left(self):
        before = set(threading.enumerate())  # those of other tests are their own matter

        async def main():
            async def handler(message):
                worker.stop()

            worker = AsyncWorker(FakeQueue("x"), handler)
            await worker.run()

        asyncio.run(main())
        deadline = time.monotonic() + 5
        while left := [t.name for t in set(threading.enumerate()) - before if t.name.startswith("kmq-")]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
