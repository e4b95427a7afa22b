"""The demo ends, even when a part of it does not work."""

import contextlib
from types import SimpleNamespace

import pytest

from kmqpy.dev import demo
from kmqpy.errors import ClusterError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.settings import KafkaConnection


@pytest.fixture
def shared_servers(cluster, zookeeper, tmp_path, monkeypatch):
    """The demo runs on the servers that all tests share; its queue is deleted when the test is over."""
    servers = SimpleNamespace(bootstrap=cluster.bootstrap, zookeeper=cluster.zookeeper, folder=tmp_path)
    monkeypatch.setattr(demo, "Cluster", lambda **_: contextlib.nullcontext(servers))
    yield
    with Admin(KafkaConnection(bootstrap=cluster.bootstrap), zookeeper, timeout=60) as admin:
        for registered in admin.list_queues():
            if registered.settings.name.startswith("demo-"):
                admin.delete_queue(registered.settings.name)


@pytest.mark.usefixtures("shared_servers")
def test_a_consumer_that_dies_ends_the_demo_with_its_last_words(monkeypatch):
    start = demo._Demo._process

    def dies(self, name, *arguments):
        if name == "consumer-2":
            arguments = ("-c", "import sys; sys.exit('too bad')")
        return start(self, name, *arguments)

    monkeypatch.setattr(demo._Demo, "_process", dies)
    with pytest.raises(ClusterError, match="the demo's consumer-2 ended: too bad"):
        demo.run(200, lambda _: None)
