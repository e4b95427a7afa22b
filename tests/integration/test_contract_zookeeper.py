"""The contract of all storages, on ZooKeeper."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from kazoo.client import KazooClient
from zk_support import ZOOKEEPERS

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.dev import Cluster
from kmqpy.queue import Storage
from kmqpy.storages.stored_storage import StoredStorage
from kmqpy.storages.zookeeper.engine import ZooKeeperEngine
from kmqpy.storages.zookeeper.znodes import Znodes
from kmqpy.testing.contract import *  # noqa: F403
from kmqpy.testing.contract import Target
from kmqpy.zookeeper.multi_read import MultiReadProbe
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection


@pytest.fixture(scope="module")
def own_zookeeper() -> Iterator[Cluster]:
    """A server that the tests kill; or several, of which they kill the first."""
    with Cluster(brokers=0, zookeepers=ZOOKEEPERS) as servers:
        yield servers


@pytest.fixture
def kmq_target(own_zookeeper: Cluster) -> Target:
    opened: list[KazooClient] = []

    def open_with_clock(clock: Clock) -> Storage:
        with ExitStack() as closing:
            probe = MultiReadProbe()
            servers = ZooKeeperConnection(hosts=own_zookeeper.zookeeper)
            zk = closing.enter_context(connect(servers, greeting=probe))
            engine = ZooKeeperEngine(Znodes(zk, "/kmqpy", probe=probe))
            engine.on_close(closing.pop_all().close)
        opened.append(zk)
        return StoredStorage(engine, clock=clock)

    def kill_server() -> None:
        own_zookeeper.zookeeper_server().kill()
        own_zookeeper.zookeeper_server().start()

    def cut_connections() -> None:
        for zk in opened:
            if zk._connection._socket is not None:
                with suppress(OSError):
                    zk._connection._socket.shutdown(socket.SHUT_RDWR)

    url = f"zookeeper://{own_zookeeper.zookeeper}/kmqpy"
    return Target(
        open=lambda: open_with_clock(SYSTEM_CLOCK),
        url=url,
        open_with_clock=open_with_clock,
        kill_server=kill_server,
        cut_connections=cut_connections,
        connections=lambda: sum(zk.connected for zk in opened),
    )
