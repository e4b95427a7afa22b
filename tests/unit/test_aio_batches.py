"""send() and ack() of concurrent coroutines are gathered."""

import asyncio
import threading

import pytest
from worker_support import eventually

from kmqpy.core.clock import SystemClock
from kmqpy.errors import KmqError, MessageError, NotSupported, Unavailable
from kmqpy.testing import memory_storage
from kmqpy.worker.asyncio import AsyncQueue

pytestmark = pytest.mark.usefixtures("short_waits")


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

            def acked(*messages, confirmed=False):
                queue.sizes.append(len(messages))
                assert queue.gate.wait(60)
                ack(*messages, confirmed=confirmed)

            queue.send_many, queue.ack = sent, acked
            yield queue

    @staticmethod
    async def submitted(queue, calls):
        """The tasks of the calls; all but the first wait while the first call is under way."""
        first = asyncio.ensure_future(calls[0])
        await eventually(lambda: queue.sizes, 60)
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
            await eventually(lambda: queue.sizes, 60)
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
                aio.ack(*(["nonsense"] if number == 50 else [message]), confirmed=number % 2 == 0)
                for number, message in enumerate(messages)
            ]
            return await asyncio.gather(*await self.submitted(queue, calls), return_exceptions=True)

        done = asyncio.run(main())
        assert [number for number, one in enumerate(done) if one is not None] == [50]
        assert isinstance(done[50], KmqError)
        assert queue.in_flight() == 1
        assert len(queue.sizes) < 40
