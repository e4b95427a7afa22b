"""Queues on one Redis, driven alike: kmqpy, the bare commands of a stream, rq, taskiq-redis.

    python redis_queues.py <system> <put|take> <url> <batch> <count>

It imports nothing else of this repository, so that rq and taskiq run in an environment of their own.
A process says `ready`, begins when it reads a line, and says as JSON how long it took and its CPU time.
"""

import asyncio
import contextlib
import json
import resource
import sys
import time
from typing import Any, Protocol

BODY = bytes(100)


class System(Protocol):
    """Puts and takes a number of messages; a batch is what it does at a time."""

    def put(self, count: int, batch: int) -> None: ...

    def take(self, count: int, batch: int) -> None: ...


class Kmqpy:
    def __init__(self, url: str) -> None:
        from kmqpy.queue import queue_for

        self._queue = queue_for(f"{url}?queue=speed&create=true&redeliver_after_ms=10m")

    def put(self, count: int, batch: int) -> None:
        for _ in range(count // batch):
            if batch == 1:
                self._queue.send(BODY)
            else:
                self._queue.send_many([BODY] * batch)

    def take(self, count: int, batch: int) -> None:
        while count:
            messages = self._queue.receive(batch, wait=10)
            if not messages:
                raise RuntimeError("nothing is left")
            self._queue.ack(messages)
            count -= len(messages)


class Bare:
    """XADD; XREADGROUP, XACK and XDEL in one round trip each, by the same redis-py."""

    def __init__(self, url: str) -> None:
        import redis

        self._redis = redis.Redis.from_url(url)
        with contextlib.suppress(redis.ResponseError):  # it is there
            self._redis.xgroup_create("bare", "g", "0", mkstream=True)

    def put(self, count: int, batch: int) -> None:
        for _ in range(count // batch):
            with self._redis.pipeline(transaction=False) as pipe:
                for _ in range(batch):
                    pipe.xadd("bare", {b"d": BODY})
                pipe.execute()

    def take(self, count: int, batch: int) -> None:
        name = str(time.monotonic_ns())
        while count:
            found: Any = self._redis.xreadgroup("g", name, {"bare": ">"}, count=batch, block=10_000)
            rows = next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]
            ids = [row[0] for row in rows]
            with self._redis.pipeline(transaction=False) as pipe:
                pipe.xack("bare", "g", *ids)
                pipe.xdel("bare", *ids)
                pipe.execute()
            count -= len(ids)


class Rq:
    """Jobs that do nothing; its worker takes them one by one."""

    def __init__(self, url: str) -> None:
        import logging

        from redis import Redis
        from rq import Queue

        logging.disable(logging.CRITICAL)
        self._redis = Redis.from_url(url)
        self._queue = Queue("speed", connection=self._redis)

    def put(self, count: int, batch: int) -> None:
        for _ in range(count // batch):
            if batch == 1:
                self._queue.enqueue("time.monotonic", result_ttl=0)
            else:
                job = self._queue.prepare_data("time.monotonic", result_ttl=0)
                self._queue.enqueue_many([job] * batch)

    def take(self, count: int, batch: int) -> None:  # noqa: ARG002
        from rq import SimpleWorker

        SimpleWorker([self._queue], connection=self._redis).work(burst=True, max_jobs=count)


class Taskiq:
    """Its broker over a stream, without the tasks; a batch is awaited at once."""

    def __init__(self, url: str) -> None:
        self._url = url

    def put(self, count: int, batch: int) -> None:
        asyncio.run(self._put(count, batch))

    def take(self, count: int, batch: int) -> None:
        asyncio.run(self._take(count, batch))

    async def _put(self, count: int, batch: int) -> None:
        from taskiq.message import BrokerMessage

        broker = self._broker(batch)
        await broker.startup()
        message = BrokerMessage(task_id="1", task_name="t", message=BODY, labels={})
        for _ in range(count // batch):
            await asyncio.gather(*(broker.kick(message) for _ in range(batch)))
        await broker.shutdown()

    async def _take(self, count: int, batch: int) -> None:
        broker = self._broker(batch)
        await broker.startup()
        waiting: list[Any] = []
        async for message in broker.listen():
            waiting.append(message.ack())
            count -= 1
            if len(waiting) == batch or not count:
                await asyncio.gather(*waiting)
                waiting.clear()
            if not count:
                break
        await broker.shutdown()

    def _broker(self, batch: int) -> Any:
        from taskiq_redis import RedisStreamBroker

        return RedisStreamBroker(self._url, queue_name="tq", consumer_id="0", xread_count=batch)


SYSTEMS: dict[str, type[System]] = {"kmqpy": Kmqpy, "bare": Bare, "rq": Rq, "taskiq": Taskiq}


def main() -> None:
    name, work, url, batch, count = sys.argv[1:]
    system = SYSTEMS[name](url)
    print("ready", flush=True)
    sys.stdin.readline()
    before, began = _cpu_s(), time.monotonic()
    getattr(system, work)(int(count), int(batch))
    print(json.dumps({"s": time.monotonic() - began, "cpu_s": _cpu_s() - before}), flush=True)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
