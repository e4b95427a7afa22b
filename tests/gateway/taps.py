"""A tap on the wire: passes connections on to a port of this machine, and keeps what clients sent."""

import contextlib
import socket
import threading
from typing import Self


class Tap:
    def __init__(self, target: int) -> None:
        self.sent = bytearray()
        self.lose_answers = False
        """True: the connection on which the next answer comes is ended in its place."""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections; the port refuses further ones."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(10)

    def cut(self) -> None:
        """End all connections; new ones work."""
        while len(self._sockets) > 1:
            with self._sockets.pop() as one, contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _start(self, work, *args) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                self._start(self._pass_on, client, server, self.sent)
                self._start(self._pass_on, server, client, bytearray())

    def _pass_on(self, origin: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while piece := origin.recv(65_536):
                if self.lose_answers and kept is not self.sent:
                    self.lose_answers = False
                    origin.shutdown(socket.SHUT_RDWR)
                    break
                kept += piece
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
