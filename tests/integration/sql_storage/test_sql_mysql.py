"""MySQL beside MariaDB: which is told from which, logins, sessions of applications, limits of the server."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pymysql
import pytest
from sql_support import Place

from kmqpy.errors import AccessDenied, ConfigError, MessageError
from kmqpy.queue import Queue, queue_for, storage_for
from kmqpy.storages.sql.mysql import MySql

BOTH = ("mariadb", pytest.param("mysql", marks=pytest.mark.breadth))
ODD = b"\0'\"\\%s\xff"


@pytest.mark.parametrize("place", BOTH, indirect=True)
def test_a_server_of_the_other_scheme_is_told(place: Place) -> None:
    (other,) = {"mariadb", "mysql"} - {place.name}
    with pytest.raises(ConfigError, match=rf"{place.name}:// for {other}://"):
        storage_for(place.url.replace(place.name, other, 1))


@pytest.mark.parametrize("version", ["5.7.44-log", "8.0.16", "8.0.11-TiDB-v7.5.1", "what"])
def test_a_mysql_that_is_too_old_is_told(version: str) -> None:
    with pytest.raises(ConfigError, match=r"8\.0\.17 or newer"):
        MySql.check_server(SimpleNamespace(), version)  # type: ignore[arg-type]
    MySql.check_server(SimpleNamespace(), "8.0.17-debug")  # type: ignore[arg-type]


@pytest.mark.parametrize("place", BOTH, indirect=True)
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_sessions_of_applications_may_be_set_as_they_like(place: Place, queue: Queue, isolation: str) -> None:
    queue.send("taken")
    messages = queue.receive(lease=60)
    with place.application.connect() as connection:
        for setting in (
            "sql_mode = 'ANSI,NO_BACKSLASH_ESCAPES,HIGH_NOT_PRECEDENCE,TRADITIONAL'",
            "time_zone = '+05:45'",
            "auto_increment_increment = 3, auto_increment_offset = 2",
            f"TRANSACTION ISOLATION LEVEL {isolation}",
        ):
            connection.exec_driver_sql(f"SET SESSION {setting}")
        connection.exec_driver_sql("SELECT 1")
        queue.send("later than the snapshot")
        ids = queue.send_many([ODD, "b", "c"], key=ODD, headers={"h": ODD}, transaction=connection)
        queue.ack(messages, transaction=connection)
        assert (queue.size(), queue.in_flight()) == (1, 1)
        connection.commit()
    _, *found = queue.receive(10)
    assert [one.id for one in found] == ids
    assert (found[0].body, found[0].key, found[0].headers) == (ODD, ODD, (("h", ODD),))


@pytest.fixture
def small_packets(place: Place) -> Iterator[None]:
    ((usual,),) = place.execute("SELECT @@GLOBAL.max_allowed_packet")
    place.execute("SET GLOBAL max_allowed_packet = 1048576")
    yield
    place.execute(f"SET GLOBAL max_allowed_packet = {usual}")


@pytest.mark.parametrize("place", BOTH, indirect=True)
@pytest.mark.usefixtures("small_packets")
def test_no_statement_is_larger_than_the_server_takes(place: Place) -> None:
    with queue_for(f"{place.url}&queue=q&create=true") as queue:
        assert len(queue.send_many([b"x" * 900] * 1_200)) == 1_200
        queue.send(b"\xff" * 490_000)
        with pytest.raises(
            MessageError, match=r"500000 bytes .* more than .* max_allowed_packet may be rais"
        ):
            queue.send(b"x" * 500_000)
        assert queue.size() == 1_201


@pytest.fixture
def by_password(place: Place) -> Iterator[Callable[[], str]]:
    """The URL of a user with a password, of whom the server's cache knows nothing."""
    name = f"u{place.prefix[1:13]}"
    place.execute(f"CREATE USER {name}@'%%' IDENTIFIED BY 'pw'", f"GRANT ALL ON kmq.* TO {name}@'%%'")

    def url() -> str:
        place.execute("FLUSH PRIVILEGES")
        return place.url.replace("//", f"//{name}:pw@", 1).replace("@kmq@", "@", 1).replace("@root@", "@", 1)

    yield url
    place.execute(f"DROP USER {name}@'%%'")


@pytest.mark.breadth
@pytest.mark.parametrize("place", ["mysql"], indirect=True)
def test_who_logs_in_by_a_password_needs_tls_or_a_package(
    by_password: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """caching_sha2_password: the password goes to the server encrypted, by TLS or by the server's RSA key."""
    auth: Any = pymysql.connections._auth  # type: ignore[attr-defined]
    storage_for(by_password()).close()
    monkeypatch.setattr(auth, "_have_cryptography", False)
    with pytest.raises(AccessDenied, match=r"'cryptography' package is required"):
        storage_for(by_password())
    storage_for(f"{by_password()}&ssl_verify=false").close()
    with pytest.raises(AccessDenied, match="Access denied for user"):
        storage_for(by_password().replace(":pw@", ":wrong@") + "&ssl_verify=false")
