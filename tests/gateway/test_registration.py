"""Registration at a ZooKeeper where the gateway has a user."""

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from taps import Tap

from kmqpy.cli.gateway import _zookeeper
from kmqpy.core.clock import wait_until
from kmqpy.gateway.discovery.ostrich import end_points
from kmqpy.gateway.discovery.registration import Registration
from kmqpy.zookeeper.settings import ZooKeeperConnection


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


def test_without_a_zookeeper_it_does_not_count_as_registered(zookeeper, queue_name):
    entries = end_points(queue_name, "h", 1, 2, "http")
    with Tap(int(zookeeper.hosts.rpartition(":")[2])) as tap:
        hosts = ZooKeeperConnection(hosts=f"127.0.0.1:{tap.port}")
        with Registration(hosts, entries) as registration:
            assert wait_until(lambda: registration.registered, 20)
            tap.close()
            assert wait_until(lambda: not registration.registered, 20)
