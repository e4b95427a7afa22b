"""AsyncWorker: handlers that are coroutines."""

import asyncio
import contextvars
import os
import signal
import threading
import time

import pytest
from fake_queue import FakeQueue
from worker_support import eventually

from kmqpy.core.backoff import Backoff
from kmqpy.errors import ConfigError, KmqError
from kmqpy.worker.asyncio import AsyncQueue, AsyncWorker
from kmqpy.worker.outcome import Reject

pytestmark = pytest.mark.usefixtures("short_waits")


class TestWorker:
    @pytest.mark.parametrize("given", [lambda queue: queue, AsyncQueue])
    def test_handlers_run_together_on_the_callers_loop(self, given):
        async def main():
            fake = FakeQueue(*["x"] * 8)
            together = asyncio.Barrier(8)
            loops = set()

            async def handler(message):
                loops.add(asyncio.get_running_loop())
                await together.wait()

            worker = AsyncWorker(given(fake), handler, concurrency=8)
            running = asyncio.ensure_future(worker.run())
            await eventually(lambda: len(fake.of("ack")) == 8)
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
            await eventually(lambda: len(fake.calls) == 5)
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

    async def test_run_raises_what_ended_the_worker(self):
        fake = FakeQueue()

        def broken():
            raise ConfigError("lease: too long")

        fake.before_receive = broken

        async def handler(message):
            """Nothing."""

        with pytest.raises(ConfigError, match="too long"):
            await AsyncWorker(fake, handler).run()

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

    def test_what_a_handler_sets_in_its_context_is_gone_with_it(self):
        current = contextvars.ContextVar("current", default="none")

        async def main():
            current.set("of the application")
            fake, seen = FakeQueue("x", "x"), []

            async def handler(message):
                seen.append(current.get())
                current.set(message.id)

            worker = AsyncWorker(fake, handler, concurrency=1)
            running = asyncio.ensure_future(worker.run())
            await eventually(lambda: len(seen) == 2)
            worker.stop()
            await running
            return seen

        assert asyncio.run(main()) == ["none", "none"]

    def test_a_hundred_handlers_take_no_thread_each_and_no_more_run_than_asked_for(self):
        async def main():
            fake, gate, running_now, most = FakeQueue(*["x"] * 300), asyncio.Event(), 0, 0

            async def handler(message):
                nonlocal running_now, most
                running_now += 1
                most = max(most, running_now)
                await gate.wait()
                running_now -= 1

            worker = AsyncWorker(fake, handler, concurrency=100)
            before = threading.active_count()
            running = asyncio.ensure_future(worker.run())
            await eventually(lambda: running_now == 100)
            threads = threading.active_count() - before
            gate.set()
            await eventually(lambda: len(fake.of("ack")) == 300)
            worker.stop()
            await running
            return threads, most

        threads, most = asyncio.run(main())
        assert threads <= 3
        assert most == 100

    def test_one_of_a_key_at_a_time_in_order(self):
        async def main():
            fake, seen, busy, together = FakeQueue(), [], set(), []
            for number in range(30):
                fake.put(str(number), key="abc"[number % 3])

            async def handler(message):
                together.append(message.key in busy)
                busy.add(message.key)
                await asyncio.sleep(0.001)
                busy.discard(message.key)
                seen.append((message.key, int(message.body)))

            worker = AsyncWorker(fake, handler, concurrency=8, ordering="key")
            running = asyncio.ensure_future(worker.run())
            await eventually(lambda: len(fake.of("ack")) == 30)
            worker.stop()
            await running
            return seen, together

        seen, together = asyncio.run(main())
        assert not any(together)
        for key in (b"a", b"b", b"c"):
            order = [number for one, number in seen if one == key]
            assert order == sorted(order)
            assert len(order) == 10

    def test_at_most_once_what_was_taken_is_handled_before_run_returns(self):
        async def main():
            fake, handled = FakeQueue(*["x"] * 12), []
            fake.at_most_once = True

            async def handler(message):
                worker.stop()
                await asyncio.sleep(0.01)
                handled.append(message.receipt)

            worker = AsyncWorker(fake, handler, concurrency=2, prefetch=8)
            await worker.run()
            return fake, handled

        fake, handled = asyncio.run(main())
        assert len(handled) == 12 - len(fake.ready) >= 10
        assert fake.of("nack") == []

    def test_a_handler_that_is_cancelled_before_it_began_gives_back_uncounted(self):
        async def main():
            fake, worker = FakeQueue("x"), None

            async def handler(message):
                """Not called."""

            worker = AsyncWorker(fake, handler, drain_timeout=60)
            running = asyncio.ensure_future(worker.run())
            ours = {asyncio.current_task(), running}
            while not fake.calls:
                for task in asyncio.all_tasks() - ours:
                    task.cancel()
                await asyncio.sleep(0)
            worker.stop()
            await running
            return fake

        fake = asyncio.run(main())
        assert fake.arguments("nack") == [{"delay": 0, "count": False, "reason": None}]

    def test_on_a_loop_that_was_closed_the_worker_ends_and_gives_back(self):
        fake, loop = FakeQueue(), asyncio.new_event_loop()

        async def handler(message):
            """Not called."""

        worker = AsyncWorker(fake, handler)._worker
        worker.start_on(loop)
        loop.close()
        fake.put("x")
        fake.wait_until_finished(1)
        assert fake.arguments("nack") == [{"delay": 0, "count": False, "reason": None}]
        assert "closed" in str(worker.failure)
        worker.stop()

    async def test_a_second_run_is_refused_and_leaves_the_first_alone(self):
        fake, worker = FakeQueue("x", "x"), None

        async def handler(message):
            if message.receipt == "r1":
                with pytest.raises(KmqError, match="started before"):
                    await asyncio.to_thread(asyncio.run, worker.run())

        worker = AsyncWorker(fake, handler, concurrency=1)
        running = asyncio.ensure_future(worker.run())
        await eventually(lambda: len(fake.of("ack")) == 2)
        worker.stop()
        await running

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
