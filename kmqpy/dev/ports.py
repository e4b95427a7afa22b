"""Free TCP ports on loopback."""

import random
import socket

# Below the range from which systems take the ports of outgoing connections: one of those must not
# sit on the port of a server that is down for a moment.
LOWEST, HIGHEST = 10_000, 32_767

_CHOICE = random.SystemRandom()
"""Random numbers of its own: a test that seeds `random` must not make two processes choose the same ports."""


def is_free(port: int) -> bool:
    """Tell whether a server could listen on this port now."""
    with socket.socket() as probe:
        # As the servers do: closed connections of an earlier server are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now; one can still be taken before it is used."""
    found: set[int] = set()
    while len(found) < count:
        port = _CHOICE.randint(LOWEST, HIGHEST)
        if is_free(port):
            found.add(port)
    return list(found)
