"""The contract of all storages, on PostgreSQL, MariaDB, MySQL and SQLite."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import pytest
import sqlalchemy

from kmqpy.core.clock import Clock
from kmqpy.dev import Databases
from kmqpy.queue import storage_for
from kmqpy.storages.stored_storage import StoredStorage
from kmqpy.testing.contract import *  # noqa: F403
from kmqpy.testing.contract import Target, at_most_once, counting, leases

_DRIVERS = {"postgresql": "postgresql+psycopg", "mariadb": "mariadb+pymysql", "mysql": "mysql+pymysql"}
_LIST = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'postgres'",
    **dict.fromkeys(
        ("mariadb", "mysql"),
        "SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND user = 'kmq'",
    ),
}
_CUT = {"postgresql": "SELECT pg_terminate_backend(%s)", "mariadb": "KILL %s", "mysql": "KILL %s"}


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[str], Databases]]:
    """Starts a server of this module's own, which it kills, at its first use."""
    with ExitStack() as started:
        yield cache(lambda name: started.enter_context(Databases(name)))


_OWN_STATEMENTS = (
    at_most_once.test_at_most_once_puts_back_what_is_given_back,
    at_most_once.test_at_most_once_puts_back_in_order,
    counting.test_dead_letters_are_redriven_as_new,
    counting.test_release_all_gives_back_what_is_in_flight_uncounted,
    leases.test_a_nack_with_a_delay_is_redelivered_after_it,
    leases.test_a_requeued_message_goes_to_the_back,
    leases.test_a_requeued_message_goes_to_its_place_at_the_front,
)
"""What MariaDB has statements of its own for that sql_storage/ does not test."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    breadth = ["sqlite", "mysql"]  # tests/unit has SQLite with a clock that stands still
    if metafunc.function not in _OWN_STATEMENTS:
        breadth.append("mariadb")
    kinds = [
        pytest.param(name, marks=pytest.mark.breadth if name in breadth else ())
        for name in ("postgresql", "mariadb", "mysql", "sqlite")
    ]
    metafunc.parametrize("kmq_target", kinds, indirect=True)


@pytest.fixture
def kmq_target(request: pytest.FixtureRequest) -> Target:
    name = request.param
    if name == "sqlite":
        folder: Path = request.getfixturevalue("tmp_path")
        return _target(f"sqlite:///{folder}/queues.db")
    servers: Databases = request.getfixturevalue("start")(name)
    url = servers.urls[name]

    def kill() -> None:
        servers.server(name).kill()
        servers.server(name).start()

    return _target(
        url,
        kill_server=kill,
        cut_connections=lambda: _connections(name, url, cut=True),
        connections=lambda: _connections(name, url),
    )


def _target(url: str, **hooks: Callable[[], object]) -> Target:
    def open_with_clock(clock: Clock) -> StoredStorage:
        # The clock is that of a machine which uses the storage, not of the one that has SQLite's file.
        storage = storage_for(url)
        storage._clock = clock
        return storage

    return Target(open=lambda: storage_for(url), url=url, open_with_clock=open_with_clock, **hooks)


def _connections(name: str, url: str, *, cut: bool = False) -> int:
    engine = sqlalchemy.create_engine(_DRIVERS[name] + url.removeprefix(name), poolclass=sqlalchemy.NullPool)
    with closing(engine.raw_connection()) as connection:
        cursor = connection.cursor()
        cursor.execute(_LIST[name])
        found = [one for (one,) in cursor.fetchall()]
        for one in found if cut else ():
            try:
                cursor.execute(_CUT[name], (one,))
            except Exception as error:
                if "Unknown thread" not in str(error):  # it has just left
                    raise
    return len(found)
