"""What tests of queues in ZooKeeper share."""

import os
import threading

from kazoo.client import KazooClient
from kazoo.security import make_acl

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.zookeeper.settings import ZooKeeperConnection

ZOOKEEPERS = int(os.environ.get("KMQ_TEST_ZOOKEEPERS", "1"))
"""For clusters that tests start for themselves."""


def until(true):
    end = SYSTEM_CLOCK.monotonic() + 60
    while not true():
        assert SYSTEM_CLOCK.monotonic() < end
        SYSTEM_CLOCK.sleep(0.02)


def put(queue, *bodies, target="in", **options):
    with queue.transaction() as tx:
        for body in bodies:
            tx.put(target, body, **options)
        tx.commit()


def drained(queue, source="in"):
    """All bodies, in the order in which they are handed out; they are rolled back."""
    with queue.transaction() as tx:
        return [item.body for item in iter(lambda: tx.try_take(source), None)]


def put_below(zk, path):
    """Put a znode of others below one of a queue, which can't be deleted then."""
    zk.create(f"{path}/of-others", b"")


def forbid(zk, path):
    """Let nobody read a znode."""
    zk.set_acls(path, [make_acl("world", "anyone", write=True, create=True, delete=True, admin=True)])


def expire(zk):
    """End a client's session at the server, as if its time-out had passed; wait until it has another one."""

    def ended():
        thief = KazooClient(hosts=",".join(f"{host}:{port}" for host, port in zk.hosts), client_id=session)
        thief.start()
        thief.stop()
        thief.close()
        SYSTEM_CLOCK.sleep(0.1)
        return zk.client_id != session and zk.connected  # else it was quick enough to take it back

    session = zk.client_id
    until(ended)


class Cable:
    """A way to ZooKeeper that can be cut, by a Proxy of tests.chaos."""

    def __init__(self, proxy, zookeeper):
        self._proxy, self._gate = proxy, proxy.gate()
        port = int(zookeeper.hosts.rpartition(":")[2])
        self.connection = ZooKeeperConnection(hosts=f"127.0.0.1:{proxy.listen(self._gate, lambda: port)}")

    def cut(self, how):
        self._gate.cut(how)
        self._settle()

    def heal(self):
        self._gate.heal()
        self._settle()

    def _settle(self):
        """Wait until the proxy's thread has done what it was told."""
        done = threading.Event()
        self._proxy._loop.call_soon_threadsafe(done.set)
        assert done.wait(60)
