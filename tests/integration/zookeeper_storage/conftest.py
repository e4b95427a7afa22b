"""A storage of its own for each test."""

from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient

from kmqpy.queue import Storage, storage_for
from kmqpy.zookeeper.session import connect


@pytest.fixture
def root(queue_name) -> str:
    return f"/{queue_name}"


@pytest.fixture
def url(zookeeper, root) -> str:
    return f"zookeeper://{zookeeper.hosts}{root}"


@pytest.fixture
def storage(url) -> Iterator[Storage]:
    with storage_for(url) as storage:
        yield storage


@pytest.fixture
def zk(zookeeper) -> Iterator[KazooClient]:
    with connect(zookeeper) as zk:
        yield zk
