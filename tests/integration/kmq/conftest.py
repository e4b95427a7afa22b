"""The command `kmq` with the servers of the tests, and a queue."""

import logging

import pytest
from kmq_support import Kmq


@pytest.fixture
def environment(cluster, queue_name):
    return {
        "KMQ_BOOTSTRAP": cluster.bootstrap,
        "KMQ_ZOOKEEPER": cluster.zookeeper,
        "KMQ_ROOT": f"/kmq-{queue_name}",
    }


@pytest.fixture
def kmq(environment, capsys, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield Kmq(environment, capsys, monkeypatch)
    logging.getLogger("kmqpy").handlers.clear()


@pytest.fixture
def name(kmq, queue_name):
    """A queue of one partition, made by the command."""
    kmq("queue", "create", queue_name)
    return queue_name
