"""Storages that do not answer the gateway, or are slow: how long requests wait for them."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from hub_support import JOBS, a_hub

from kmqpy.errors import Unavailable
from kmqpy.gateway.service.estimate import Estimate
from kmqpy.gateway.service.hub import Hub
from kmqpy.gateway.service.pulse import Pulse
from kmqpy.queue import Capabilities
from kmqpy.testing import ManualClock, memory_storage


async def test_a_call_that_is_watched_shows_whether_the_storage_answers():
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


class Slow:
    """A storage whose queues take `seconds` for each send and in_flight(), and fail if `away`."""

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
async def a_slow_hub(quick_s=0.2):
    with memory_storage() as memory:
        storage = Slow(memory)
        hub = Hub({"": storage}, quick_s=quick_s)
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


async def test_the_first_request_that_a_storage_does_not_answer_is_given_up_soon():
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


async def test_a_slow_storage_is_given_up_once_at_most():
    async with a_slow_hub() as (hub, storage):
        storage.seconds = 1
        assert isinstance(await send(hub), Unavailable)
        await asyncio.sleep(1)
        for _ in range(2):
            assert isinstance(await send(hub), float)
        assert hub.silent_storages() == []


async def test_a_slow_call_of_a_storage_that_answers_others_is_not_given_up():
    async with a_slow_hub() as (hub, storage):
        storage.seconds = 0.6
        sending = asyncio.ensure_future(send(hub))
        await asyncio.sleep(0.05)
        storage.seconds = 0
        while not sending.done():
            await hub.with_queue(JOBS, lambda queue: queue.release_all(), missing=lambda: None)
            await asyncio.sleep(0.02)
        assert sending.result() > 0.5


async def test_what_is_known_to_take_long_is_waited_for():
    async with a_slow_hub() as (hub, storage):
        storage.seconds = 0.5

        async def slow(queue):
            return await queue.send([b"x"])

        assert await hub.with_queue(JOBS, slow, missing=lambda: None, patience_s=60)


async def test_the_last_number_of_a_storage_that_is_away_is_no_answer():
    async with a_slow_hub() as (hub, storage):

        async def count():
            return await hub.with_queue(JOBS, lambda queue: queue.in_flight(), missing=lambda: None)

        assert await count() == 0
        storage.seconds, storage.away = 0.4, True
        assert await count() == 0, "it may just be slow"
        await asyncio.sleep(0.4)
        with pytest.raises(Unavailable):
            await count()


async def test_a_first_count_that_takes_long_is_no_guess_and_found_by_who_asks_again():
    async with a_slow_hub(quick_s=0.4) as (hub, storage):
        storage.seconds = 1.5

        async def count():
            return await hub.with_queue(JOBS, lambda queue: queue.size(None), missing=lambda: None)

        with pytest.raises(Unavailable):
            await count()
        await asyncio.sleep(1.2)
        assert await count() == 1
        assert hub.silent_storages() == []


async def test_a_queue_that_is_opened_again_has_the_numbers_of_before():
    async with a_slow_hub(quick_s=5) as (hub, storage):

        async def count():
            return await hub.with_queue(
                JOBS, lambda queue: asyncio.gather(queue.size(None), queue.in_flight()), missing=lambda: None
            )

        await hub.with_queue(JOBS, lambda queue: queue.take(1, 30), missing=lambda: None)
        assert await count() == [1, 1]
        storage.seconds = 1.5
        hub.forget(JOBS)
        async with asyncio.timeout(1):
            assert await count() == [1, 1]
        await asyncio.sleep(1.5)
        storage.delete("jobs")
        storage.create("jobs")
        hub.forget(JOBS)
        assert await count() == [0, 0], "it is another queue"


async def test_an_answer_that_was_known_before_is_no_sign_of_a_storage():
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


async def test_a_process_that_is_held_up_does_not_take_its_storage_to_be_away():
    async with a_hub() as (hub, _):
        sending = asyncio.ensure_future(hub.with_made(JOBS, lambda queue: queue.send([b"x"])))
        await asyncio.sleep(0)
        time.sleep(0.6)
        assert len(await sending) == 1


def slow_estimate():
    """An Estimate of 7, the limits of its counts, and the event for which they wait."""
    gate = asyncio.Event()
    counted = []

    async def count(limit):
        counted.append(limit)
        await gate.wait()
        return 7

    return Estimate(count), counted, gate


async def test_a_number_that_takes_long_is_answered_in_time():
    number, counted, gate = slow_estimate()
    number.change(5)
    first = asyncio.gather(number.get(), number.get(), number.get(10))
    await asyncio.wait([first], timeout=0.4)
    assert counted == [None, 10]
    assert not first.done(), "what we have changed since the start is a guess"
    gate.set()
    assert await first == [7, 7, 7]
    gate.clear()
    assert await number.get() == 7  # the last one
    number.change(2)
    assert await number.get() == 9
    number.become(0)
    number.change(-1)
    assert await number.get() == 0
    gate.set()
    assert await number.get() == 7


async def test_however_many_limits_are_asked_for_few_counts_run():
    size, limits, answer = slow_estimate()
    sizes = asyncio.gather(*(size.get(limit) for limit in (20, 10, 20, 30, 40, 50, 60)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert limits == [20, 10, 30, None]
    answer.set()
    assert await sizes == [7] * 7


async def test_a_count_up_to_a_limit_tells_nothing_of_what_is_beyond():
    seconds, number = 0.0, 7

    async def count(limit):
        await asyncio.sleep(seconds)
        return number if limit is None else min(limit, number)

    size = Estimate(count)
    assert await size.get(5) == 5
    seconds = 0.3
    assert await asyncio.gather(size.get(4), size.get(6), size.get()) == [5, 6, 7]
    number = 9
    assert await size.get() == 7
    await asyncio.sleep(0.3)
    seconds = 0.0
    assert await size.get(5) == 5
    seconds = 0.3
    assert await size.get() == 9, "known exactly"
    await asyncio.sleep(0.3)
    number = 20
    seconds = 0.0
    assert await size.get(15) == 15
    seconds = 0.3
    assert await size.get() == 20, "waited for: there are more than was known"


async def test_of_a_number_that_was_counted_up_to_a_limit_more_are_left_than_are_known():
    size, _, gate = slow_estimate()
    gate.set()
    assert await size.get(7) == 7
    gate.clear()
    size.change(-5)
    asking = asyncio.ensure_future(size.get(7))
    await asyncio.wait([asking], timeout=0.3)
    assert not asking.done(), "2 would be a guess"
    gate.set()
    assert await asking == 7


async def test_a_number_that_can_t_be_counted_is_an_error_and_counted_again():
    async def count(_limit):
        raise Unavailable("away")

    number = Estimate(count)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await number.get()


async def test_after_a_count_that_has_failed_the_next_one_is_waited_for():
    seconds, results = 0.0, iter([7, 0, 8])

    async def count(_limit):
        await asyncio.sleep(seconds)
        return 56 // next(results)

    number = Estimate(count)
    assert await number.get() == 8
    seconds = 0.3
    assert await number.get() == 8
    await asyncio.sleep(0.3)
    assert await number.get() == 7
