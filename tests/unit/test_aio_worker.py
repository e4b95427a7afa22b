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
from kmqpy.errors import ConfigError
from kmqpy.worker.asyncio import AsyncWorker
from kmqpy.worker.outcome import Reject

pytestmark = pytest.mark.usefixtures("short_waits")


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
