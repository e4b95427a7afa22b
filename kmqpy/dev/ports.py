"""Finds free TCP ports on loopback."""

import random
import socket
from collections import deque

# Operating systems take the ports of outgoing connections from above this range. So no such connection can
# hold the port of a server that is down for a moment.
PORTS = range(10_000, 32_768)
"""Those to choose from. Processes that set it to different ones take none from each other."""

_RANDOM = random.SystemRandom()
"""random.seed() has no effect on it: two processes with tests that seed `random` choose different ports."""


_given: deque[int] = deque(maxlen=500)
"""The last ones that this process was given, whose servers may not listen yet."""


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
    """Return different ports that are free now; another process can take one before it is used."""
    found: set[int] = set()
    while len(found) < count:
        port = _RANDOM.choice(PORTS)
        if port not in _given and is_free(port):
            found.add(port)
    _given.extend(found)
    return list(found)
