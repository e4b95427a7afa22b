"""Consumes a queue of Curator's with kmqpy, in a process of its own that a test can kill.

It is told, and says, what curator_jvm.py is told and says when that consumes; it serves one session.
"""

import json
import sys
import time
from typing import Any

from kmqpy.zookeeper.curator import QueueBuilder
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps({"session": 0, **what}) + "\n")
    sys.stdout.flush()


def consume(options: dict[str, Any]) -> None:
    def consumer(item: bytes) -> None:
        say(item=item.decode())
        time.sleep(options["pause_ms"] / 1000)

    with connect(ZooKeeperConnection(hosts=options["zookeeper"]), 4_000) as zk:
        builder = QueueBuilder(zk=zk, path=options["path"], consumer=consumer, lock_path=options["locks"])
        with builder.build_queue():
            say(started=True)
            sys.stdin.read()


if __name__ == "__main__":
    consume(json.loads(sys.stdin.readline()))
