"""Registration at a ZooKeeper where the gateway has a user."""

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError

from kmqpy.cli.gateway import _zookeeper
from kmqpy.core.clock import wait_until
from kmqpy.gateway.discovery.ostrich import end_points
from kmqpy.gateway.discovery.registration import Registration


def test_everybody_may_read_what_only_the_gateway_may_change(zookeeper, queue_name, monkeypatch):
    monkeypatch.delenv("KMQ_CONFIG", raising=False)
    for name, value in (("USERNAME", "gateway"), ("PASSWORD", "secret"), ("SCHEME", "digest")):
        monkeypatch.setenv(f"KMQ_ZOOKEEPER_SECURITY_{name}", value)
    (entry, _) = end_points(queue_name, "h", 1, 2, "http")
    stranger = KazooClient(zookeeper.hosts)
    stranger.start()
    try:
        with Registration(_zookeeper(zookeeper.hosts), [entry]) as registration:
            assert wait_until(lambda: registration.registered, 20)
            (child,) = stranger.get_children(entry.folder)
            assert stranger.get(f"{entry.folder}/{child}")[0] == entry.data
            with pytest.raises(NoAuthError):
                stranger.delete(f"{entry.folder}/{child}")
            with pytest.raises(NoAuthError):
                stranger.create(f"{entry.folder}/forged", b"")
            stranger.create(f"/ostrich/{queue_name}-other", b"")
        assert stranger.get_children(entry.folder) == []
    finally:
        stranger.stop()
        stranger.close()
