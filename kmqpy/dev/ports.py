"""Finds free TCP ports on loopback."""

import os
import random
import socket

# Operating systems take the ports of outgoing connections from above this range. So no such connection can
# hold the port of a server that is down for a moment.
_LOWEST_PORT, _HIGHEST_PORT = 10_000, 32_767

_RANDOM = random.SystemRandom()
"""random.seed() has no effect on it: two processes with tests that seed `random` choose different ports."""


def is_free(port: int) -> bool:
    """Tell whether a server could listen on this port now."""
    with socket.socket() as probe:
        # The servers set this option, too: closed connections of an earlier server are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now; another process can take one before it is used.

    Processes whose environment names a part of the ports each, KMQ_DEV_PORTS=2/4 (the second of four), take
    none from each other, also while a server is down for a moment.
    """
    part, parts = map(int, os.environ.get("KMQ_DEV_PORTS", "1/1").split("/"))
    each = (_HIGHEST_PORT - _LOWEST_PORT + 1) // parts
    lowest = _LOWEST_PORT + (part - 1) * each
    found: set[int] = set()
    while len(found) < count:
        port = _RANDOM.randint(lowest, lowest + each - 1)
        if is_free(port):
            found.add(port)
    return list(found)
