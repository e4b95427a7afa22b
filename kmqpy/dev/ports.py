"""Finds free TCP ports on loopback."""

import random
import socket

# Operating systems take the ports of outgoing connections from above this range. So no such connection can
# hold the port of a server that is down for a moment.
_LOWEST_PORT, _HIGHEST_PORT = 10_000, 32_767

_ports = range(_LOWEST_PORT, _HIGHEST_PORT + 1)
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


def take_every(step: int, offset: int) -> None:
    """Choose only from every `step`-th port, from the one with this offset on.

    Processes with different offsets take no ports from each other, also while a server is down for a moment.
    """
    global _ports
    _ports = range(_LOWEST_PORT + offset, _HIGHEST_PORT + 1, step)


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now; another process can take one before it is used."""
    found: set[int] = set()
    while len(found) < count:
        port = _RANDOM.choice(_ports)
        if is_free(port):
            found.add(port)
    return list(found)
