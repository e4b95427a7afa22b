"""Messages within transactions of applications, with the connections that frameworks hand out."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

import pymysql
import pytest
import sqlalchemy
from sql_support import Place
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from kmqpy.errors import ConfigError, QueueNotFound, Unavailable
from kmqpy.queue import Queue, storage_for

psycopg = pytest.importorskip("psycopg")

ASYNC_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+psycopg_async",
    "mariadb": "mariadb+asyncmy",
    "mysql": "mysql+asyncmy",
}


def check(queue: Queue, transact: Callable[[Callable[[Any], Any], bool], Any]) -> None:
    """`transact(work, commits)` calls `work` in a transaction, with what the framework gives, and ends it."""
    queue.send_many(["a", "b"])
    messages = queue.receive(2, lease=60)

    def work(given: Any) -> list[str]:
        queue.ack(messages, transaction=given)
        sent = queue.send_many(["new", b"\xff\0'%s"], key="k", headers={"h": "1"}, transaction=given)
        return [*sent, queue.send("third", transaction=given)]

    transact(work, False)  # noqa: FBT003
    assert (queue.size(), queue.in_flight()) == (0, 2)
    sent = transact(work, True)  # noqa: FBT003
    assert (queue.size(), queue.in_flight()) == (3, 0)
    found = queue.receive()
    assert [(one.id, one.body) for one in found] == list(
        zip(sent, [b"new", b"\xff\0'%s", b"third"], strict=True)
    )
    assert (found[0].key, found[0].headers) == (b"k", (("h", b"1"),))


@contextmanager
def session(engine: sqlalchemy.Engine) -> Iterator[Any]:
    with Session(engine) as made:
        yield made


@contextmanager
def scoped(engine: sqlalchemy.Engine) -> Iterator[Any]:
    made = scoped_session(sessionmaker(engine))
    yield made
    made.remove()


@contextmanager
def proxied(engine: sqlalchemy.Engine) -> Iterator[Any]:
    with closing(engine.raw_connection()) as made:
        yield made


@pytest.mark.parametrize("framework", [session, scoped, proxied])
def test_sessions_and_pooled_connections_of_sqlalchemy(place: Place, queue: Queue, framework: Any) -> None:
    def transact(work: Callable[[Any], Any], commits: bool) -> Any:
        with framework(place.application) as given:
            result = work(given)
            given.commit() if commits else given.rollback()
            return result

    check(queue, transact)


@pytest.mark.parametrize("how", ["connection", "session"])
def test_sqlalchemys_asyncio_within_run_sync(place: Place, queue: Queue, how: str) -> None:
    url = place.application.url.set(drivername=ASYNC_DRIVERS[place.name])

    def transact(work: Callable[[Any], Any], commits: bool) -> Any:
        async def main() -> Any:
            engine = create_async_engine(url)
            async with AsyncSession(engine) if how == "session" else engine.connect() as given:
                result = await given.run_sync(work)
                await (given.commit() if commits else given.rollback())
            await engine.dispose()
            return result

        return asyncio.run(main())

    check(queue, transact)


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
@pytest.mark.parametrize("factory", ["ClientCursor", "RawCursor", "dict_row"])
def test_connections_of_psycopg_with_other_cursors(place: Place, queue: Queue, factory: str) -> None:
    options: dict[str, Any] = {"cursor_factory": getattr(psycopg, factory, psycopg.Cursor)}
    if factory == "dict_row":
        options = {"row_factory": psycopg.rows.dict_row}
    url = place.application.url.set(drivername="postgresql").render_as_string(hide_password=False)

    def transact(work: Callable[[Any], Any], commits: bool) -> Any:
        with closing(psycopg.connect(url, **options)) as given:
            result = work(given)
            given.commit() if commits else given.rollback()
            return result

    check(queue, transact)


@pytest.fixture
def django_connection(place: Place) -> Iterator[Any]:
    """django.db.connection, to the database of the place."""
    import django
    import django.conf
    from django.db import connections

    url = place.application.url
    engine = {"mariadb": "mysql"}.get(place.name, place.name.replace("sqlite", "sqlite3"))
    if engine == "mysql":  # as users of Django do who have PyMySQL
        pymysql.version_info = (2, 2, 1, "final", 0)  # type: ignore[assignment]
        pymysql.install_as_MySQLdb()
    if not django.conf.settings.configured:
        django.conf.settings.configure(USE_TZ=True)
        django.setup()
    settings = {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": url.database,
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.host or url.query.get("unix_socket", ""),
        "PORT": str(url.port or ""),
    }
    connections.settings = connections.configure_settings({"default": settings})
    for alias in list(connections):
        connections[alias] = connections.create_connection(alias)
    yield connections["default"]
    connections["default"].close()


@pytest.mark.parametrize("which", ["wrapper", "proxy", "driver"])
def test_djangos_connection_within_atomic(
    place: Place, queue: Queue, django_connection: Any, which: str
) -> None:
    from django.db import connection, transaction

    def transact(work: Callable[[Any], Any], commits: bool) -> Any:
        with transaction.atomic():
            given = {
                "wrapper": lambda: django_connection,
                "proxy": lambda: connection,
                "driver": lambda: connection.connection,
            }[which]()
            if given is None:
                connection.ensure_connection()
                given = connection.connection
            result = work(given)
            transaction.set_rollback(not commits)
        return result

    check(queue, transact)


def test_django_sends_at_once_outside_atomic_and_on_commit(
    place: Place, queue: Queue, django_connection: Any
) -> None:
    from django.db import connection, transaction

    queue.send("at once", transaction=connection)
    assert queue.size() == 1
    with transaction.atomic():
        transaction.on_commit(lambda: queue.send("afterwards"))
        assert queue.size() == 1 or place.name == "sqlite"
    assert queue.size() == 2


def test_what_django_will_roll_back_takes_no_messages(
    place: Place, queue: Queue, django_connection: Any
) -> None:
    from django.db import IntegrityError, connection, transaction

    with transaction.atomic():
        with suppress(IntegrityError), transaction.atomic(savepoint=False):
            raise IntegrityError
        with pytest.raises(transaction.TransactionManagementError):
            queue.send("x", transaction=connection)
    assert queue.size() == 0


@pytest.mark.parametrize("checks", [False, True])
def test_a_request_closes_a_connection_of_djangos_that_has_broken(
    place: Place, queue: Queue, django_connection: Any, *, checks: bool
) -> None:
    from django.db import close_old_connections, connection

    id_of, end = {
        "postgresql": ("pg_backend_pid()", "SELECT pg_terminate_backend({}, 10000)"),
        "sqlite": ("1", "SELECT {}"),  # has no server that ends it
    }.get(place.name, ("CONNECTION_ID()", "KILL {}"))
    connection.settings_dict.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=checks)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {id_of}")
        place.execute(end.format(cursor.fetchone()[0]))
    close_old_connections()
    with nullcontext() if checks or place.name == "sqlite" else pytest.raises(Unavailable):
        queue.send("x", transaction=connection)
    close_old_connections()
    queue.send("y", transaction=connection)


@pytest.mark.parametrize("how", ["sqlalchemy", "asyncio", "django"])
def test_without_a_transaction_all_is_done_or_nothing(
    request: pytest.FixtureRequest, place: Place, queue: Queue, how: str
) -> None:
    def send(given: Any) -> None:
        queue.send("x", dedup_id="x", transaction=given)
        with storage_for(place.url) as storage:
            assert storage.describe("q").ready == 1
            storage.delete("q")
        with pytest.raises(QueueNotFound):
            queue.send("y", dedup_id="y", transaction=given)

    async def main() -> None:
        url = place.application.url.set(drivername=ASYNC_DRIVERS[place.name])
        engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
        async with engine.connect() as given:
            await given.run_sync(send)
        await engine.dispose()

    if how == "asyncio":
        asyncio.run(main())
    elif how == "django":
        send(request.getfixturevalue("django_connection"))
    else:
        with place.application.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            send(connection)
    assert place.execute(f"SELECT dedup_key FROM {place.names.tables['dedup']}") == []


def test_what_is_no_connection_says_what_to_pass_instead(place: Place, queue: Queue) -> None:
    async def of_asyncio() -> None:
        engine = create_async_engine(place.application.url.set(drivername=ASYNC_DRIVERS[place.name]))
        async with engine.connect() as connection, AsyncSession(engine) as session_:
            for given in (connection, session_, engine):
                with pytest.raises(ConfigError, match=r"^transaction: .*Async\w+ is one of asyncio.*sync"):
                    queue.send("x", transaction=given)
            assert isinstance(connection, AsyncConnection)
            with pytest.raises(ConfigError, match=r"^transaction: .*run_sync"):
                queue.send("x", transaction=connection.sync_connection)
        await engine.dispose()

    asyncio.run(of_asyncio())
    for maker in (place.application, sessionmaker(place.application)):
        with pytest.raises(ConfigError, match=r"^transaction: .* makes connections; .*engine\.begin"):
            queue.send("x", transaction=maker)
    with pytest.raises(ConfigError, match=r"^transaction: .* not a connection .*; pass one of "):
        queue.send("x", transaction=place.url)
    if place.name != "sqlite":
        with (
            closing(sqlite3.connect(":memory:")) as other,
            pytest.raises(ConfigError, match=rf"type Connection is not a connection to {place.name} that"),
        ):
            queue.send("x", transaction=other)
    assert queue.size() == 0


@pytest.mark.parametrize(
    ("place", "driver"),
    [("postgresql", "postgresql+asyncpg"), ("mariadb", "mariadb+aiomysql")],
    indirect=["place"],
)
def test_drivers_that_we_can_not_use_say_what_to_pass_instead(
    place: Place, queue: Queue, driver: str
) -> None:
    async def main() -> None:
        engine = create_async_engine(place.application.url.set(drivername=driver))
        async with engine.connect() as given:
            with pytest.raises(ConfigError, match=rf"not a connection to {place.name} that we can use; pass"):
                await given.run_sync(lambda sync: queue.send("x", transaction=sync))
        await engine.dispose()

    asyncio.run(main())
    assert queue.size() == 0


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
async def test_an_asynchronous_connection_of_psycopg_says_what_to_pass_instead(
    place: Place, queue: Queue
) -> None:
    url = place.application.url.set(drivername="postgresql").render_as_string(hide_password=False)
    async with await psycopg.AsyncConnection.connect(url) as connection:
        with pytest.raises(ConfigError, match="AsyncConnection is not a connection to postgresql that we"):
            queue.send("x", transaction=connection)


@pytest.mark.parametrize(
    ("place", "charset"),
    [("postgresql", {"client_encoding": "latin1"}), ("mariadb", {"charset": "latin1"})],
    indirect=["place"],
)
def test_what_the_charset_of_a_connection_can_not_hold_is_refused(
    place: Place, charset: dict[str, str]
) -> None:
    engine = sqlalchemy.create_engine(place.application.url.update_query_dict(charset))
    with place.queue(order="group") as queue:
        with engine.begin() as connection:
            queue.send("日本", headers={"日本": "日本"}, group="ä", transaction=connection)
        (found,) = queue.receive()
        assert (found.body, found.group) == ("日本".encode(), "ä")
        assert found.headers == (("日本", "日本".encode()),)
        with (
            engine.connect() as connection,
            pytest.raises(ConfigError, match=r"^transaction: .*character set, \S+, can't hold"),
        ):
            queue.send("x", group="日本", transaction=connection)
    engine.dispose()
