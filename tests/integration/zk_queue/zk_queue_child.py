"""A process that moves items from one queue to another, and kills itself at a request.

    python tests/integration/zk_queue_child.py HOSTS ROOT commit|rollback|forever REQUEST before|after

It takes two items from `in` and puts three to `out`. REQUEST counts the requests to ZooKeeper since the
transaction began, from 1; 0 is never. The process prints `ready`, and begins when its standard input has a
line or ends.
"""

import os
import signal
import sys
import time

from kmqpy.zookeeper.queue import ZkQueue, ZkQueueSettings
from kmqpy.zookeeper.settings import ZooKeeperConnection


def main(hosts, root, end, request, when):
    queue = ZkQueue(ZooKeeperConnection(hosts=hosts), ZkQueueSettings(root=root, session_timeout_ms=1_000))
    zk = queue.session.zk
    call, count = zk._call, 0

    def counted(*args):
        nonlocal count
        count += 1
        if count == int(request) and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args)
        if count == int(request):
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    zk._call = counted
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        with queue.transaction() as tx:
            taken = [tx.try_take("in"), tx.try_take("in")]
            if None in taken:
                tx.rollback()
                print("empty", flush=True)
                time.sleep(0.01)
                continue
            for _ in range(3):
                tx.put("out", b"out")
            tx.commit() if end != "rollback" else tx.rollback()
        if end != "forever":
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
