"""Databases that demand TLS and a client's certificate."""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from kmqpy.dev import Databases
from kmqpy.dev.ports import free_ports
from kmqpy.dev.programs import hand_over
from kmqpy.errors import AccessDenied, ClusterError, ConfigError
from kmqpy.queue import queue_for, storage_for

CANARY = "canary-of-tls"


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    """A folder of PEM files, which servers can enter."""
    folder = Path(tempfile.mkdtemp(prefix="kmqpy-tls-"))  # others can enter it, unlike those of pytest
    folder.chmod(0o755)
    hand_over(folder)
    for authority in ("ca", "other"):
        ca = trustme.CA()
        ca.cert_pem.write_to_path(folder / f"{authority}.pem")
        for name in ("server", "client"):
            cert = ca.issue_cert("127.0.0.1", common_name=name)
            prefix = "" if authority == "ca" else "other-"
            (folder / f"{prefix}{name}.pem").write_bytes(
                b"".join(one.bytes() for one in cert.cert_chain_pems)
            )
            key = folder / f"{prefix}{name}.key"
            cert.private_key_pem.write_to_path(key)
            key.chmod(0o600)
    hand_over(folder / "server.key")
    yield folder
    shutil.rmtree(folder)


def servers(kind: str, files: Path) -> dict[str, str]:
    """Settings with which a server takes nothing but TLS with a client's certificate."""
    ca, cert, key = (str(files / name) for name in ("ca.pem", "server.pem", "server.key"))
    if kind == "postgresql":
        access = files / "access.conf"
        access.write_text("hostssl all all 127.0.0.1/32 trust clientcert=verify-ca\n")
        return {
            "ssl": "on",
            "ssl_ca_file": ca,
            "ssl_cert_file": cert,
            "ssl_key_file": key,
            "hba_file": str(access),
        }
    if kind in ("mariadb", "mysql"):
        first = files / "first.sql"
        first.write_text("ALTER USER kmq@'127.0.0.1' REQUIRE X509;\n")
        return {
            **({"ssl": "1"} if kind == "mariadb" else {}),
            "ssl-ca": ca,
            "ssl-cert": cert,
            "ssl-key": key,
            "require-secure-transport": "1",
            "init-file": str(first),
        }
    return {
        "port": "0",
        "tls-port": str(free_ports(1)[0]),
        "tls-ca-cert-file": ca,
        "tls-cert-file": cert,
        "tls-key-file": key,
        "tls-auth-clients": "yes",
    }


@pytest.fixture(
    scope="module",
    params=[
        "postgresql",
        "mariadb",
        "redis",
        *(pytest.param(one, marks=pytest.mark.breadth) for one in ("mysql", "valkey")),
    ],
)
def url(request: pytest.FixtureRequest, files: Path) -> Iterator[str]:
    kind = request.param
    settings = servers(kind, files)
    try:
        started = Databases(kind, settings={kind: settings}).start()
    except ClusterError as error:
        if "Failed finding TLS support" not in str(error):
            raise
        pytest.skip(f"this {kind} was built without TLS")
    by_tls = f"{kind}s://127.0.0.1:{settings.get('tls-port')}/0"
    try:
        yield by_tls if "tls-port" in settings else started.urls[kind]
    finally:
        started.stop()


def with_files(url: str, **settings: object) -> str:
    return f"{url}?timeout_ms=20000" + "".join(f"&{name}={value}" for name, value in settings.items())


def test_a_queue_works_by_tls_and_is_refused_without_what_is_demanded(
    url: str, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ours = {"ssl_certfile": files / "client.pem", "ssl_keyfile": files / "client.key"}
    for trust in ({"ssl_ca_certs": files / "ca.pem"}, {"ssl_verify": "false"}):
        with queue_for(with_files(url, queue="q", create="true", **ours, **trust)) as queue:
            queue.send("x")
            (message,) = queue.receive()
            message.ack()
    for wrong in (
        {**ours, "ssl_ca_certs": files / "other.pem"},  # we don't trust the server
        {"ssl_ca_certs": files / "ca.pem"},  # it does not trust us
        ours,  # the system trusts no such authority
        {},
    ):
        secret = url.replace("//", f"//me:{CANARY}@") if "@" not in url else url.replace("@", f":{CANARY}@")
        with pytest.raises(AccessDenied) as caught:
            storage_for(with_files(secret, **wrong))
        assert CANARY not in str(caught.value) + caplog.text


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("sslmode=require", "did you mean ssl_verify"),
        ("sslrootcert=ca.pem", "did you mean ssl_ca_certs"),
        ("ssl_ca=ca.pem", "did you mean ssl_ca_certs"),
        ("sslkey=k.pem", "did you mean ssl_keyfile"),
        ("program_name=shop", "did you mean application_name"),
        ("ssl_ca_certs=no.pem", "ssl_ca_certs: the file 'no.pem' can't be read"),
        ("ssl_verify=perhaps", "ssl_verify"),
        ("ssl_keyfile=/dev/null", "give it as ssl_certfile"),
        ("ssl_verify=false&ssl_ca_certs=/dev/null", "trusts every certificate"),
    ],
)
def test_settings_of_others_and_bad_ones_are_told(kind: str, setting: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        storage_for(f"{kind}://h/db?{setting}")


def test_sqlite_has_no_server() -> None:
    with pytest.raises(ConfigError, match="SQLite has no server"):
        storage_for("sqlite:///x.db?ssl_verify=true")


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_server_without_tls_is_refused_when_the_url_demands_it(database_url, kind) -> None:
    with pytest.raises(AccessDenied, match="SSL"):
        storage_for(f"{database_url(kind)}?ssl_verify=false")


@pytest.mark.parametrize("kind", ["postgresql", "mariadb", "redis"])
def test_servers_show_the_name_of_the_application(queue_name, kind) -> None:
    name = queue_name[-8:]
    with (
        Databases(kind, settings={"mariadb": {"performance-schema": "1"}}) as started,
        storage_for(f"{started.urls[kind]}?application_name={name}") as storage,
    ):
        engine = storage._engine
        if kind == "redis":
            listed = engine._server.call("CLIENT", "LIST")
            assert f"name={name}".encode() in listed
            return
        text = {
            "postgresql": "SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()",
            "mariadb": "SELECT ATTR_VALUE FROM performance_schema.session_account_connect_attrs"
            " WHERE ATTR_NAME = 'program_name'",
        }[kind]

        def read(cursor):
            cursor.execute(text)
            return cursor.fetchall()

        found = engine._run(read)
        assert {one for (one,) in found} == {name}
