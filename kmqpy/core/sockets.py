"""What connections to databases set and ask of their sockets."""

import selectors
import socket

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3
"""TCP asks whether the other end is there after so many seconds of silence, this often, then gives up."""
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


def keepalive_options() -> dict[int, int]:
    """The options of a TCP socket for this, of those that the system has."""
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # so called on macOS
    wanted = {idle: KEEPALIVE_IDLE_S, "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_S, "TCP_KEEPCNT": KEEPALIVE_COUNT}
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


def keep_alive(connected: socket.socket) -> None:
    """Set them on a socket, if it is one of TCP."""
    if connected.family in (socket.AF_INET, socket.AF_INET6):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in keepalive_options().items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def is_readable(fileno: int, seconds: float) -> bool:
    """True as soon as the socket has something to read, its end too; False after `seconds` without."""
    with _Selector() as selector:
        selector.register(fileno, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def wait_for_either(fileno: int) -> None:
    """Return as soon as the socket can be read or written."""
    with _Selector() as selector:
        selector.register(fileno, selectors.EVENT_READ | selectors.EVENT_WRITE)
        selector.select()
