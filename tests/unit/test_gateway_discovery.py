"""What a gateway registers in ZooKeeper for EmoDB's clients."""

import contextlib
import json
import socket
import threading
import time

import pytest

from kmqpy.gateway.discovery import registration as discovery
from kmqpy.gateway.discovery.ostrich import end_points
from kmqpy.gateway.discovery.registration import Entry, Registration
from kmqpy.zookeeper.settings import ZooKeeperConnection


@pytest.mark.parametrize(
    ("host", "in_url"),
    [("h.example", "h.example"), ("10.0.0.1", "10.0.0.1"), ("2001:db8::1", "[2001:db8::1]")],
)
def test_urls_of_a_gateway(host, in_url):
    queue, dedup = end_points("prod", host, 8080, 8081, "https")
    assert (queue.folder, dedup.folder) == ("/ostrich/prod-emodb-queue-1", "/ostrich/prod-emodb-dedupq-1")
    data = json.loads(queue.data)
    assert (data["name"], data["id"]) == ("prod-emodb-queue-1", f"{host}:8080")
    assert json.loads(data["payload"]) == {
        "serviceUrl": f"https://{in_url}:8080/queue/1",
        "adminUrl": f"http://{in_url}:8081",
        "extensions": {"proxy": False},
    }


def test_a_zookeeper_that_does_not_answer_does_not_hold_up_the_end():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]}"
        registration = Registration(ZooKeeperConnection(hosts=hosts), [Entry("/x", "y", b"")])
        with silent.accept()[0]:
            begun_s = time.monotonic()
            registration.close()
            assert time.monotonic() - begun_s < 4
    registration._thread.join()


def test_a_registration_survives_any_error(monkeypatch, caplog):
    has_registered = threading.Event()
    results = iter([RuntimeError("can't start new thread"), contextlib.nullcontext(FakeClient())])

    def connect(_settings):
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(discovery, "connect", connect)
    monkeypatch.setattr(discovery, "CHECK_EVERY_S", 0.01)
    with Registration(ZooKeeperConnection(), [Entry("/x", "y", b"")], lambda _: has_registered.set()):
        assert has_registered.wait(10)
    (record,) = (one for one in caplog.records if one.levelname == "WARNING")
    assert "can't start new thread" in record.exc_text


class FakeClient:
    """A ZooKeeper that takes everything."""

    def __getattr__(self, _):
        return lambda *args, **keywords: True
