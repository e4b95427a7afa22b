"""Peers of queues on Redis, run with the Python of a venv that has them.

`redis_queues.py PEER URL TAKERS BATCH SECONDS DEPTH`

bare-redis  a stream and its group, by the same redis-py: the ceiling. EXISTS and XADD; XAUTOCLAIM, for leases
            that have ended, and XREADGROUP; XPENDING, XACK and XDEL in one script, because XACK alone would
            acknowledge messages that another taker has taken meanwhile; each in one round trip
rq          jobs that do nothing, by the methods that its worker uses; it takes them one by one
rq-unique   the same, each enqueued by itself with an id that no other may have (`unique`)
taskiq      its broker over a stream, without the tasks; a batch is awaited at once

Prints JSON: messages per second, put, and taken and acknowledged.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.queue_load import BODY, Worker, measure, next_ids

_LEASE_MS = 30_000
_FILLED_AT_ONCE = 50_000
_FINISH = """local held = {}
for _, one in ipairs(redis.call('XPENDING', KEYS[1], 'g', ARGV[2], ARGV[#ARGV], #ARGV, ARGV[1])) do
  held[one[1]] = true
end
local ids = {}
for i = 2, #ARGV do
  if held[ARGV[i]] then ids[#ids + 1] = ARGV[i] end
end
if #ids > 0 then
  redis.call('XACK', KEYS[1], 'g', unpack(ids))
  redis.call('XDEL', KEYS[1], unpack(ids))
end"""
_FILL = "for _ = 1, ARGV[1] do redis.call('XADD', KEYS[1], '*', 'd', ARGV[2]) end"


class BareRedis:
    def __init__(self, url: str) -> None:
        import redis

        self._redis = redis.Redis.from_url(url, protocol=2)
        self._name = uuid4().hex
        self._finish = self._redis.register_script(_FINISH)

    @staticmethod
    def prepare(url: str, depth: int) -> None:
        import redis

        bare = BareRedis(url)
        bare._redis.delete("bare")
        with contextlib.suppress(redis.ResponseError):  # the group exists
            bare._redis.xgroup_create("bare", "g", "0", mkstream=True)
        for first in range(0, depth, _FILLED_AT_ONCE):
            bare._redis.eval(_FILL, 1, "bare", min(_FILLED_AT_ONCE, depth - first), BODY)
        bare.close()

    def put(self, count: int) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.exists("bare")
            for _ in range(count):
                pipe.xadd("bare", {b"d": BODY})
            pipe.execute()

    def take(self, count: int) -> Sequence[Any]:
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.xautoclaim("bare", "g", self._name, _LEASE_MS, count=count)
            pipe.xreadgroup("g", self._name, {"bare": ">"}, count=count)
            claimed, found = pipe.execute()
        return [*claimed[1], *(found[0][1] if found else ())]

    def finish(self, taken: Sequence[Any]) -> None:
        self._finish(keys=["bare"], args=[self._name, *(row[0] for row in taken)])

    def close(self) -> None:
        self._redis.close()


class Rq:
    def __init__(self, url: str) -> None:
        from redis import Redis
        from rq import Queue

        self._redis = Redis.from_url(url)
        self._queue = Queue("speed", connection=self._redis)

    def put(self, count: int) -> None:
        if count == 1:
            self._queue.enqueue("time.monotonic", result_ttl=0)
        else:
            data = [self._queue.prepare_data("time.monotonic", result_ttl=0) for _ in range(count)]
            self._queue.enqueue_many(data)

    def take(self, count: int) -> Sequence[Any]:
        found = (self._queue.dequeue_any([self._queue], None, self._redis) for _ in range(count))
        return [one[0] for one in found if one is not None]

    def finish(self, taken: Sequence[Any]) -> None:
        for job in taken:
            job.delete()

    def close(self) -> None:
        self._redis.close()


class RqUnique(Rq):
    def put(self, count: int) -> None:
        for one in next_ids(count):
            self._queue.enqueue("time.monotonic", result_ttl=0, job_id=one.replace(" ", "-"), unique=True)


class Taskiq:
    def __init__(self, url: str) -> None:
        from taskiq.message import BrokerMessage
        from taskiq_redis import RedisStreamBroker

        self._loop = asyncio.new_event_loop()
        self._broker = RedisStreamBroker(url, queue_name="tq", consumer_id="0", xread_count=100)
        self._message = BrokerMessage(task_id="1", task_name="t", message=BODY, labels={})
        self._loop.run_until_complete(self._broker.startup())
        self._messages = self._broker.listen()

    def put(self, count: int) -> None:
        self._loop.run_until_complete(self._put(count))

    def take(self, count: int) -> Sequence[Any]:
        return self._loop.run_until_complete(self._take(count))

    def finish(self, taken: Sequence[Any]) -> None:
        self._loop.run_until_complete(self._finish(taken))

    def close(self) -> None:
        self._loop.run_until_complete(self._broker.shutdown())
        self._loop.close()

    async def _put(self, count: int) -> None:
        await asyncio.gather(*(self._broker.kick(self._message) for _ in range(count)))

    async def _take(self, count: int) -> Sequence[Any]:
        found: list[Any] = []
        with contextlib.suppress(TimeoutError, StopAsyncIteration):  # nothing is left
            while len(found) < count:
                found.append(await asyncio.wait_for(anext(self._messages), 1))
        return found

    async def _finish(self, taken: Sequence[Any]) -> None:
        await asyncio.gather(*(one.ack() for one in taken))


PEERS: dict[str, Callable[[str], Worker]] = {
    "bare-redis": BareRedis,
    "rq": Rq,
    "rq-unique": RqUnique,
    "taskiq": Taskiq,
}


def main(peer: str, url: str, takers: str, batch: str, seconds: str, depth: str = "0") -> None:
    if peer == "bare-redis":
        BareRedis.prepare(url, int(depth))
    figures = measure(lambda: PEERS[peer](url), takers=int(takers), batch=int(batch), seconds=float(seconds))
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
