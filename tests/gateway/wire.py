"""A connection whose every byte a test decides."""

import contextlib
import http.client
import socket
import zlib
from typing import Self

from gateway_support import Answer


class Wire:
    """One connection to a gateway, reused until it is closed."""

    def __init__(self, port: int, timeout_s: float = 30.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *pieces: bytes) -> None:
        """Send pieces, each by itself."""
        for piece in pieces:
            self.socket.sendall(piece)

    def end(self) -> None:
        """Tell the other side that nothing more comes."""
        with contextlib.suppress(OSError):  # it has closed the connection already
            self.socket.shutdown(socket.SHUT_WR)

    def answer(self, method: str = "GET") -> Answer:
        """Read an answer to a request that has this method."""
        response = http.client.HTTPResponse(self.socket, method=method)
        try:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())
        finally:
            response.close()

    def ask(self, head: str, *pieces: bytes) -> Answer:
        """Send a head, without its empty line, and the pieces of a body as they are."""
        self.send(head.encode("latin-1") + b"\r\nHost: localhost\r\n\r\n", *pieces)
        return self.answer(head.partition(" ")[0])

    def is_closed(self) -> bool:
        """Wait for the other side; True if it closes the connection."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


def chunks(*pieces: bytes) -> list[bytes]:
    """The pieces as chunks of a body, and its end."""
    return [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]


def gzipped(content: bytes) -> bytes:
    """One member of gzip."""
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()
