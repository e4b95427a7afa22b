"""The TCP proxy of the fault tests."""

import gc
import socket
import threading

import pytest

from tests.chaos.proxy import Proxy


@pytest.mark.filterwarnings("error")
def test_a_proxy_that_closes_while_clients_connect_leaves_no_socket_open() -> None:
    """A leaked socket raises a ResourceWarning in whichever test happens to collect it."""
    with socket.create_server(("127.0.0.1", 0), backlog=500) as target:
        accepting = threading.Thread(target=_close_whatever_connects, args=(target,), daemon=True)
        accepting.start()
        address = target.getsockname()[1]
        for _ in range(20):
            with Proxy() as proxy:
                port = proxy.listen(proxy.gate(), lambda: address)
                clients = [_begin_to_connect(port) for _ in range(12)]
            for client in clients:
                client.close()
        gc.collect()  # raises for each socket that nothing closed
        target.shutdown(socket.SHUT_RDWR)
        accepting.join(10)


def _begin_to_connect(port: int) -> socket.socket:
    client = socket.socket()
    client.settimeout(0)
    client.connect_ex(("127.0.0.1", port))
    return client


def _close_whatever_connects(target: socket.socket) -> None:
    while True:
        try:
            connection, _ = target.accept()
        except OSError:
            return
        connection.close()
