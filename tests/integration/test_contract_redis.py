"""The contract of all storages, on Redis and Valkey."""

from collections.abc import Iterator

import pytest
from redis import Redis

from kmqpy.core.clock import Clock
from kmqpy.dev import Databases
from kmqpy.queue import Storage, parse_url, storage_for
from kmqpy.storages.redis.engine import RedisEngine
from kmqpy.storages.redis.server import Server, ServerSettings
from kmqpy.storages.stored_storage import StoredStorage
from kmqpy.testing.contract import *  # noqa: F403
from kmqpy.testing.contract import Target

SYNCED = {"appendfsync": "always"}


@pytest.fixture(scope="module", params=["redis", pytest.param("valkey", marks=pytest.mark.breadth)])
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """A server that syncs before it answers, so that it is durable; the tests kill it."""
    with Databases(request.param, settings={request.param: SYNCED}) as databases:
        yield databases


@pytest.fixture
def kmq_target(databases: Databases) -> Iterator[Target]:
    ((name, url),) = databases.urls.items()
    server = databases.server(name)
    with Redis.from_url(url, client_name="test") as admin:

        def kill_server() -> None:
            server.kill()
            server.start()

        def cut_connections() -> None:
            for one in admin.client_list():
                if one["name"] != "test":
                    admin.client_kill_filter(_id=one["id"])

        yield Target(
            open=lambda: storage_for(url),
            url=url,
            open_with_clock=lambda clock: _open_with_clock(url, clock),
            kill_server=kill_server,
            cut_connections=cut_connections,
            connections=lambda: len(admin.client_list()) - 1,
        )


def _open_with_clock(url: str, clock: Clock) -> Storage:
    host, _, port = parse_url(url, names_queue=False).address.partition(":")
    return StoredStorage(RedisEngine(Server(ServerSettings(host=host, port=int(port)))), clock=clock)
