"""Where a gateway listens, and who may do what there."""

import contextlib
import http.client
import resource
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest
from gateway_support import Served, running
from wire import Wire

from kmqpy.errors import AccessDenied, ConfigError
from kmqpy.gateway import server
from kmqpy.gateway.keys.keyring import new_key, rotated
from kmqpy.gateway.keys.stores import StorageKeys
from kmqpy.gateway.run import _allow_connections
from kmqpy.gateway.server import Gateway, GatewaySettings
from kmqpy.queue import storage_for
from kmqpy.testing import memory_storage


def made(host: str, port: int = 0) -> Gateway:
    return Gateway(GatewaySettings(host=host, port=port), {"": memory_storage()})


@pytest.mark.parametrize("name", ["localhost.of.somebody", "127.of.somebody", "::1.of.somebody"])
def test_without_keys_a_name_that_only_looks_local_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **kwargs: resolve("0.0.0.0", *args, **kwargs)
    )
    with pytest.raises(ConfigError, match="can be reached from elsewhere"):
        made(name)


def test_a_port_is_taken_at_once_so_no_second_gateway_begins_there() -> None:
    first = made("127.0.0.1")
    try:
        with pytest.raises(ConfigError, match="in use; give another: --port"):
            made("127.0.0.1", first.port)
    finally:
        for listener in first._sockets:
            listener.close()


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A certificate and key, another key, and the key with a password."""
    folder = tmp_path_factory.mktemp("tls")
    made = {name: folder / name for name in ("cert", "key", "other", "locked", "no-pem")}

    def openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    new = (
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
    )
    openssl("req", "-x509", *new, "-keyout", made["key"], "-out", made["cert"])
    openssl("genrsa", "-out", made["other"])
    openssl("pkey", "-in", made["key"], "-aes256", "-passout", "pass:x", "-out", made["locked"])
    made["no-pem"].write_text("-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\n")
    return made | {"missing": folder / "missing"}


@pytest.mark.parametrize(
    ("cert", "key", "text"),
    [
        ("missing", "key", "tls_cert: .*missing can't be read: No such file"),
        ("cert", "missing", "tls_key: .*missing can't be read: No such file"),
        ("key", "key", "tls_cert: .*key holds no certificate"),
        ("cert", "cert", "tls_key: .*cert holds no private key"),
        ("cert", "other", "tls_key: .*other is not the key of the certificate in .*cert"),
        ("cert", "locked", "tls_key: .*locked has a password"),
        ("no-pem", "key", "no-pem or .*key is damaged"),
    ],
)
def test_errors_of_tls_name_the_file(pem: dict[str, Path], cert: str, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Gateway(GatewaySettings(port=0, tls_cert=pem[cert], tls_key=pem[key]), {"": memory_storage()})


def test_clients_talk_tls_and_operators_do_not(pem: dict[str, Path]) -> None:
    with running(memory_storage(), tls_cert=pem["cert"], tls_key=pem["key"]) as served:
        trust = ssl.create_default_context(cafile=pem["cert"])
        address = ("localhost", served.gateway.port)
        connection = http.client.HTTPSConnection(*address, context=trust, timeout=10)
        assert served.ask("GET", "/queue/1/a/size", connection=connection).body == b"0"
        connection.close()
        stranger = http.client.HTTPSConnection(*address, context=ssl.create_default_context(), timeout=10)
        with pytest.raises(ssl.SSLCertVerificationError):  # before it sends a key
            stranger.connect()
        assert served.admin("/readyz").status == 200
        url = f"https://localhost:{served.gateway.port}?timeout_ms=2s"
        with storage_for(f"{url}&ssl_ca_certs={pem['cert']}") as storage:
            assert storage.list() == []
        with pytest.raises(AccessDenied, match="CERTIFICATE_VERIFY_FAILED"):
            storage_for(url)


@pytest.mark.parametrize(("setting", "value"), [("cluster", "a/b"), ("cluster", "ä"), ("drain_s", 86_400.0)])
def test_settings_that_are_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=repr(value) if setting == "cluster" else "drain: 86400 s"):
        GatewaySettings(**{setting: value})


def test_a_gateway_that_asks_for_keys_may_listen_everywhere() -> None:
    storage = memory_storage()
    key, secret = new_key("", ["queue_standard"], [])
    StorageKeys(storage).put(key)
    with running(storage, StorageKeys(storage), host="::", advertise="localhost") as served:
        assert served.ask("GET", "/queue/1/a/size").status == 403
        assert served.ask("GET", "/queue/1/a/size", headers={"X-BV-API-Key": secret}).status == 200


def test_a_gateway_may_have_as_many_files_as_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, before[1]))
        _allow_connections(1_500)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(2_500, before[1]), before[1])
        _allow_connections(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(2_500, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_request_that_comes_as_the_gateway_ends_is_answered() -> None:
    with running(memory_storage()) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.gateway.port, timeout=10)
        assert served.ask("GET", "/queue/1/a/size", connection=connection).status == 200
        served.loop.call_soon_threadsafe(served.gateway.request_stop)
        while _listens(served.gateway.port):
            time.sleep(0.01)
        answer = served.ask("GET", "/queue/1/a/size", connection=connection)
        connection.close()
    assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_connections_that_wait_in_the_kernel_as_the_gateway_ends_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopping, connected = threading.Event(), threading.Event()
    shutdown = server._Server.shutdown

    async def busy(self: server._Server, sockets: list[socket.socket] | None = None) -> None:
        stopping.set()
        connected.wait(10)  # the loop accepts nothing
        await shutdown(self, sockets)

    monkeypatch.setattr(server._Server, "shutdown", busy)
    with running(memory_storage()) as served, contextlib.ExitStack() as opened:
        served.loop.call_soon_threadsafe(served.gateway.request_stop)
        assert stopping.wait(10)
        wires = [opened.enter_context(Wire(served.gateway.port, timeout_s=10)) for _ in range(5)]
        for wire in wires[:4]:
            wire.send(b"GET /queue/1/a/size HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connected.set()
        answers = [wire.answer() for wire in wires[:4]]
        assert wires[4].is_closed()
    assert [(one.status, one.headers["connection"]) for one in answers] == [(200, "close")] * 4


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {}),
        (200, {"Host": "LOCALHOST.:8080"}),
        (200, {"Host": "[::1]:8080"}),
        (200, {"Host": "127.0.0.2"}),
        (200, {"Host": "queues.example:1"}),
        (200, {"Sec-Fetch-Site": "none"}),
        (200, {"Host": "localhost:8080", "Origin": "http://localhost:8080", "Sec-Fetch-Site": "same-origin"}),
        (403, {"Origin": "https://evil.example"}),
        (403, {"Origin": "null"}),
        (403, {"Host": "localhost:8080", "Origin": "http://localhost:3000"}),
        (403, {"Sec-Fetch-Site": "cross-site"}),
        (403, {"Sec-Fetch-Site": "same-site"}),
        (403, {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}),
        (403, {"Host": "evil.example"}),
        (403, {"Host": "localhost.evil.example"}),
        (403, {"Host": "127.0.0.1.evil.example"}),
    ],
)
def test_a_web_page_reaches_no_queue_of_a_gateway_without_keys(status: int, headers: dict[str, str]) -> None:
    with running(memory_storage(), advertise="queues.example") as served:
        for method, call in (("POST", "q/unclaimall"), ("POST", "_move?from=q&to=r"), ("GET", "q/poll")):
            answer = served.ask(method, f"/queue/1/{call}", headers=headers)
            assert answer.status == status, answer
            if status == 403:
                assert answer.exception is None
                assert "without keys" in answer.json["message"]


def test_keys_keep_web_pages_out_so_that_any_name_may_be_used() -> None:
    storage = memory_storage()
    key, secret = new_key("", ["queue_standard"], [])
    StorageKeys(storage).put(key)
    headers = {"X-BV-API-Key": secret, "Host": "queues.example", "Origin": "http://somewhere.example"}
    with running(storage, StorageKeys(storage)) as served:
        assert served.ask("GET", "/queue/1/a/size", headers=headers).status == 200


@pytest.mark.breadth
def test_a_key_that_is_rotated_under_load_is_refused_to_nobody_who_has_a_valid_secret() -> None:
    storage = memory_storage()
    keys = StorageKeys(storage)
    key, secret = new_key("", ["queue_standard"], [])
    keys.put(key)
    changed, new_secret = rotated(key, keep_old=True)
    refused: list[tuple[str, int]] = []
    is_valid = threading.Event()
    done = threading.Event()

    def load(served: Served, name: str, secret: str) -> None:
        headers = {"X-BV-API-Key": secret}
        while not done.is_set():
            status = served.ask("POST", "/queue/1/a/send", 1, headers).status
            if status == 200 and name == "new":
                is_valid.set()
            elif status != 200 and (name == "old" or is_valid.is_set()):
                refused.append((name, status))

    with running(storage, keys) as served:
        threads = [
            threading.Thread(target=load, args=(served, name, one))
            for name, one in (("old", secret), ("new", new_secret)) * 2
        ]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.2)
            keys.put(changed)
            assert is_valid.wait(6), "within 5 s"
            time.sleep(0.2)
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert refused == []
