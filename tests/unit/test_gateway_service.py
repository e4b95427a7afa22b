"""The gateway's service: batches, takes, queues that are opened and made, storages that do not answer."""

import asyncio
import gzip
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from fake_queue import FakeQueue
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.errors import ConfigError, QueueNotFound, Unavailable
from kmqpy.gateway.limits import BadEncoding, Held, Overloaded, Rate, Share, TooLarge, read_body
from kmqpy.gateway.service.estimate import Estimate
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.gateway.service.pulse import Pulse
from kmqpy.gateway.service.served_queue import ServedQueue, dealt
from kmqpy.gateway.service.shelf import Shelf
from kmqpy.queue import Capabilities
from kmqpy.queue_policy import QueuePolicy
from kmqpy.testing import ManualClock, memory_storage

JOBS = QueueName("jobs", settings={"max_redeliveries": None})


@asynccontextmanager
async def a_hub():
    with memory_storage() as storage:
        hub = Hub({"": storage})
        yield hub, storage
        await asyncio.to_thread(hub.close)


def test_a_call_that_is_watched_shows_whether_the_storage_answers():
    async def main():
        clock, answered = ManualClock(), asyncio.Event()
        with memory_storage() as storage, memory_storage() as other:
            hub = Hub({"": storage, "same": storage, "other": other}, clock=clock)
            watching = asyncio.ensure_future(hub.watch(storage, answered.wait()))
            await asyncio.sleep(0)
            assert hub.silent_storages() == []
            clock.advance(2.1)
            assert hub.silent_storages() == ["", "same"]
            answered.set()
            await watching
            assert hub.silent_storages() == []

            async def fail():
                raise Unavailable("away")

            with pytest.raises(Unavailable):
                await hub.watch(other, fail())
            assert hub.silent_storages() == ["other"]
            clock.advance(5.1)
            assert hub.silent_storages() == []

    asyncio.run(main())


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


def test_sends_of_many_requests_are_one_call():
    async def main():
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

    asyncio.run(main())


def test_takes_of_one_lease_share_a_receive_and_are_served_in_turns():
    async def main():
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

    asyncio.run(main())


def test_a_cancelled_take_gives_back_what_arrives_uncounted():
    async def main():
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

    asyncio.run(main())


def test_acks_extensions_and_releases_act_by_ids_whoever_has_the_message():
    async def main():
        async with a_served_queue() as (served, _):
            ids = await served.send([b"1", b"2", b"3"])
            await served.extend(ids[:1], 60)  # nobody had it
            assert await served.in_flight() == 1
            assert [one.id for one in (await served.take(5, 30))[0]] == ids[1:]
            await served.release(ids[:2])
            assert [one.id for one in (await served.take(5, 30))[0]] == ids[:2]
            await served.ack([*ids, "4711"])
            assert await served.size(None) == 0

    asyncio.run(main())


def test_what_is_handed_out_without_a_claim_can_be_taken_at_once_and_is_no_attempt():
    async def main():
        async with a_served_queue() as (served, counting):
            await served.send([b"1", b"2"])
            for _ in range(3):
                assert [one.body for one in await served.hand_out(5)] == [b"1", b"2"]
            assert [one.attempts for one in counting.receive(5)] == [1, 1]

    asyncio.run(main())


def test_peek_shows_the_oldest_first_taken_ones_included():
    async def main():
        async with a_served_queue() as (served, _):
            await served.send([b"%d" % n for n in range(6)])
            await served.take(3, 30)
            assert [one.body for one in await served.peek(4)] == [b"0", b"1", b"2", b"3"]

    asyncio.run(main())


def test_a_take_of_large_messages_ends_before_the_memory_does():
    async def main():
        async with a_served_queue() as (served, _):
            for _ in range(4):
                await served.send([bytes(1_000_000)] * 10)
            assert len((await served.take(40, 30))[0]) == 17  # 16 fit; one more, as sizes are learned
            assert len(await served.peek(40)) == 16
            assert len(await served.taken(40)) == 16

    asyncio.run(main())


@given(st.lists(st.integers(0, 8), max_size=6), st.integers(0, 30))
def test_messages_are_dealt_fairly(limits, count):
    shares = dealt(range(count), limits)
    assert sorted(one for share in shares for one in share) == [*range(min(count, sum(limits)))]
    assert all(len(share) <= limit for share, limit in zip(shares, limits, strict=True))
    hungry = [len(share) for share, limit in zip(shares, limits, strict=True) if len(share) < limit]
    assert not hungry or max(map(len, shares)) <= max(hungry) + 1 or count >= sum(limits)


def test_a_queue_is_made_by_the_first_send_and_by_nothing_else():
    async def main():
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

    asyncio.run(main())


def test_a_request_that_meets_a_deleted_queue_does_not_close_the_new_one():
    async def main():
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

    asyncio.run(main())


def test_a_queue_that_is_deleted_as_soon_as_it_is_made_is_made_again(monkeypatch):
    async def main():
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

    asyncio.run(main())


def test_who_asks_for_queues_that_are_missing_closes_no_other(monkeypatch):
    monkeypatch.setattr("kmqpy.gateway.service.hub._MAX_OPEN", 3)

    async def main():
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

    asyncio.run(main())


def test_a_queue_that_was_deleted_or_made_again_is_found_again():
    async def main():
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

    asyncio.run(main())


def test_names_find_their_storage():
    async def main():
        with memory_storage() as one, memory_storage() as other:
            hub = Hub({"": one, "orders": other})
            for name in ("jobs", "orders:mails", "others:mails", "orders:"):
                await hub.with_made(QueueName(name), lambda queue: queue.send([b"x"]))
            assert one.list() == ["jobs", "orders:", "others:mails"]
            assert other.list() == ["mails"]
            await asyncio.to_thread(hub.close)

    asyncio.run(main())


def test_where_all_storages_have_names_a_mistyped_one_is_refused():
    async def main():
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

    asyncio.run(main())


class Slow:
    """A storage whose queues take `seconds` for each send and count, and fail if `away`."""

    def __init__(self, storage):
        self._storage = storage
        self.capabilities = Capabilities()
        self.seconds = 0.0
        self.away = False

    def __getattr__(self, name):
        return getattr(self._storage, name)

    def open(self, name):
        queue = self._storage.open(name)
        for call in ("send_many", "in_flight"):
            setattr(queue, call, self._slowly(getattr(queue, call)))
        return queue

    def _slowly(self, call):
        def slow(*args):
            time.sleep(self.seconds)
            if self.away:
                raise Unavailable("away")
            return call(*args)

        return slow


@asynccontextmanager
async def a_slow_hub():
    with memory_storage() as memory:
        storage = Slow(memory)
        hub = Hub({"": storage}, quick_s=0.2)
        await send(hub)
        yield hub, storage
        await asyncio.to_thread(hub.close)


async def send(hub):
    """Send a message; returns the seconds until it is stored, or the error."""
    begun_s = time.monotonic()
    try:
        await hub.with_made(JOBS, lambda queue: queue.send([b"x"]))
    except Unavailable as error:
        return error
    return time.monotonic() - begun_s


def test_the_first_request_that_a_storage_does_not_answer_is_given_up_soon():
    async def main():
        async with a_slow_hub() as (hub, storage):
            storage.seconds, storage.away = 2.5, True
            begun_s = time.monotonic()
            assert isinstance(await send(hub), Unavailable)
            assert 0.15 < time.monotonic() - begun_s < 1
            assert hub.silent_storages() == [], "it may just be slow"
            await asyncio.sleep(2.1)
            assert hub.silent_storages() == [""]
            storage.seconds, storage.away = 0, False
            await asyncio.sleep(0.5)
            assert isinstance(await send(hub), float)
            assert hub.silent_storages() == []

    asyncio.run(main())


def test_a_slow_storage_is_given_up_once_at_most():
    async def main():
        async with a_slow_hub() as (hub, storage):
            storage.seconds = 0.5
            assert isinstance(await send(hub), Unavailable)
            await asyncio.sleep(0.5)
            for _ in range(3):
                assert isinstance(await send(hub), float)
            assert hub.silent_storages() == []

    asyncio.run(main())


def test_a_slow_call_of_a_storage_that_answers_others_is_not_given_up():
    async def main():
        async with a_slow_hub() as (hub, storage):
            storage.seconds = 0.6
            sending = asyncio.ensure_future(send(hub))
            await asyncio.sleep(0.05)
            storage.seconds = 0
            while not sending.done():
                await hub.with_queue(JOBS, lambda queue: queue.release_all(), missing=lambda: None)
                await asyncio.sleep(0.02)
            assert sending.result() > 0.5

    asyncio.run(main())


def test_what_is_known_to_take_long_is_waited_for():
    async def main():
        async with a_slow_hub() as (hub, storage):
            storage.seconds = 0.5

            async def slow(queue):
                return await queue.send([b"x"])

            assert await hub.with_queue(JOBS, slow, missing=lambda: None, patience_s=60)

    asyncio.run(main())


def test_the_last_number_of_a_storage_that_is_away_is_no_answer():
    async def main():
        async with a_slow_hub() as (hub, storage):

            async def count():
                return await hub.with_queue(JOBS, lambda queue: queue.in_flight(), missing=lambda: None)

            assert await count() == 0
            storage.seconds, storage.away = 0.4, True
            assert await count() == 0, "it may just be slow"
            await asyncio.sleep(0.4)
            with pytest.raises(Unavailable):
                await count()

    asyncio.run(main())


def test_an_answer_that_was_known_before_is_no_sign_of_a_storage():
    async def main():
        async with a_slow_hub() as (hub, storage):
            storage.away = True

            async def known(_):
                return 7

            assert isinstance(await send(hub), Unavailable)
            assert await hub.with_queue(JOBS, known, missing=lambda: None) == 7
            assert hub.silent_storages() == [""]
            storage.away = False
            assert isinstance(await send(hub), float)
            assert hub.silent_storages() == []

    asyncio.run(main())


def test_the_pulse_of_a_storage():
    pulse = Pulse(0.4)
    assert not pulse.is_away(0)
    pulse.begin("slow", 0)
    assert pulse.give_up_at(0, 0) == 0.4
    assert not pulse.is_away(1)
    assert pulse.is_away(3)
    pulse.answer(4, 4)
    pulse.end("slow")
    assert not pulse.is_away(4)
    assert pulse.give_up_at(4, 4) == 9, "no more than 5 s, though it needs 4"
    assert pulse.give_up_at(604, 604) == 606, "after two half-lives: 2 * 4 s / 4"
    assert pulse.give_up_at(4000, 4000) == 4000.4
    pulse.fail(4005)
    assert pulse.is_away(4009)
    assert pulse.give_up_at(4009, 4009) == 4009.35
    assert not pulse.is_away(4011)
    pulse.begin("lost", 4020)
    pulse.answer(4020.2)
    assert pulse.give_up_at(4020, 4020.4) == pytest.approx(4020.6)
    pulse.give_up("lost", 4020.6)
    assert not pulse.is_away(4022)
    assert pulse.is_away(4023)
    assert not pulse.is_away(4026), "nobody has asked it since"


def test_a_process_that_is_held_up_does_not_take_its_storage_to_be_away():
    async def main():
        async with a_hub() as (hub, _):
            sending = asyncio.ensure_future(hub.with_made(JOBS, lambda queue: queue.send([b"x"])))
            await asyncio.sleep(0)
            time.sleep(0.6)
            assert len(await sending) == 1

    asyncio.run(main())


def test_a_number_that_takes_long_is_answered_in_time():
    async def main():
        gate = asyncio.Event()
        counted = []

        async def count(limit):
            counted.append(limit)
            await gate.wait()
            return 7

        number = Estimate(count)
        number.change(5)
        number.change(-2)
        assert await asyncio.gather(number.get(), number.get(), number.get(10)) == [3, 3, 3]
        assert counted == [None, 10]
        gate.set()
        assert await number.get() == 7
        gate.clear()
        assert await number.get() == 7  # the last one
        number.change(2)
        assert await number.get() == 9
        number.become(0)
        number.change(-1)
        assert await number.get() == 0
        gate.set()
        assert await number.get() == 7

    asyncio.run(main())


def test_however_many_limits_are_asked_for_few_counts_run():
    async def main():
        answer = asyncio.Event()
        limits = []

        async def count(limit):
            limits.append(limit)
            await answer.wait()
            return 7

        size = Estimate(count)
        assert await asyncio.gather(*(size.get(limit) for limit in (20, 10, 20, 30, 40, 50, 60))) == [0] * 7
        assert limits == [20, 10, 30]
        answer.set()
        assert await size.get(90) == 7

    asyncio.run(main())


def test_a_number_that_can_t_be_counted_is_an_error_and_counted_again():
    async def main():
        async def count(_limit):
            raise Unavailable("away")

        number = Estimate(count)
        for _ in range(2):
            with pytest.raises(Unavailable):
                await number.get()

    asyncio.run(main())


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


def test_a_poll_does_not_wait_for_a_consumer_that_joins_and_the_next_one_gets_its_messages():
    async def main():
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

    asyncio.run(main())


@pytest.mark.parametrize("call", ["purge", "release_all"])
@pytest.mark.parametrize("is_on_its_way", [False, True])
def test_what_came_late_before_a_purge_is_handed_out_to_nobody(call, is_on_its_way):
    async def main():
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

    asyncio.run(main())


def body_of(chunks, encoding="", most=1_000, held=10_000):
    async def main():
        async def source():
            for chunk in chunks:
                yield chunk

        return await read_body(source(), encoding, Share(Held(held)), most)

    return asyncio.run(main())


@given(st.binary(max_size=900), st.integers(1, 50))
def test_bodies_are_read_plain_and_compressed(body, size):
    packed = gzip.compress(body)
    assert body_of([body[at : at + size] for at in range(0, len(body), size)]) == body
    assert body_of([packed[at : at + size] for at in range(0, len(packed), size)], "gzip") == body
    assert body_of([packed], "GZIP, identity") == body
    assert body_of([packed + packed[:7], packed[7:]], "gzip", most=1_800) == body + body


def test_bodies_that_are_too_large_or_no_gzip_are_refused():
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(TooLarge):
        body_of([bomb], "gzip")
    with pytest.raises(TooLarge):
        body_of([b"x" * 1_001])
    assert body_of([b"x" * 1_000]) == b"x" * 1_000
    with pytest.raises(Overloaded):
        body_of([b"x" * 900], held=800)
    packed = gzip.compress(b"hello")
    for bad in (
        b"hello",
        packed[:-3],
        packed[:5],
        packed + b"more",
        zlib.compress(b"hello"),
    ):
        with pytest.raises(BadEncoding):
            body_of([bad], "gzip")
    for encoding in ("br", "gzip, gzip", "deflate"):
        with pytest.raises(BadEncoding):
            body_of([packed], encoding)


def test_a_share_is_given_back_as_a_whole():
    everybody, key = Held(100), Held(50)
    share = Share(everybody)
    share.join(key)
    share.add(50)
    with pytest.raises(Overloaded):
        share.add(1)
    with pytest.raises(Overloaded):
        share.add(0)  # nothing has room for what is to come
    assert (everybody.count, key.count) == (50, 50)
    share.close()
    share.close()
    assert (everybody.count, key.count) == (0, 0)


def test_a_rate_allows_a_burst_of_one_second():
    clock = ManualClock()
    rate = Rate(10, clock)
    assert [rate.spend(1) for _ in range(10)] == [0.0] * 10
    assert rate.spend(1) > 0
    clock.advance(0.1)
    assert rate.spend(1) == 0
    clock.advance(60)
    assert [rate.spend(1) for _ in range(10)] == [0.0] * 10
    assert rate.spend(1) > 0
