"""What tests of the storage on Redis share."""

from contextlib import closing, contextmanager

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.storages.engine import TakeRef
from kmqpy.storages.redis.engine import RedisEngine
from kmqpy.storages.redis.server import Server, ServerSettings
from kmqpy.storages.settings import StoredQueueSettings

LONG_MS = 3_600_000
PATIENCE_S = 60


@contextmanager
def engine_at(url, prefix="kmq", **settings):
    host, _, port = url.partition("://")[2].partition("/")[0].partition(":")
    with closing(
        RedisEngine(Server(ServerSettings(host=host, port=int(port), **settings)), prefix=prefix)
    ) as made:
        yield made


def queue_of(engine, name="q", **settings):
    assert engine.create_queue(StoredQueueSettings(name=name, **settings))
    return engine.find_queue(name)


def refs(rows):
    return [TakeRef(row.id, row.take) for row in rows]


def until(check):
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while not check():
        assert SYSTEM_CLOCK.monotonic() < deadline
        SYSTEM_CLOCK.sleep(0.01)
