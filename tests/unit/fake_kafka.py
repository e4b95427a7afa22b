"""A broker of Kafka's protocol that answers ApiVersions and Metadata only; a producer without a broker."""

import socket
import struct
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from kmqpy.dev.ports import free_ports
from kmqpy.kafka.settings import KafkaConnection

_PRODUCE, _METADATA, _API_VERSIONS, _INIT_PRODUCER_ID = 0, 3, 18, 22
_UNKNOWN_TOPIC, _LEADER_NOT_AVAILABLE, _UNSUPPORTED_VERSION = 3, 5, 35
_NODE = 1
_TOPICS = "t", "t__markers"


class FakeKafka:
    """One broker with the topics `t` and `t__markers`, of one partition each.

    names_broker  False: answers name no broker, as Kafka's do for a moment after all were fenced
    named_port    the port at which answers say that the broker is
    may_create    topics that clients have allowed the broker to create
    """

    def __init__(self) -> None:
        self.names_broker = True
        self.may_create: set[str] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.named_port = self.port
        self._connections: set[socket.socket] = set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connection(self, **kafka: object) -> KafkaConnection:
        return KafkaConnection(bootstrap=f"127.0.0.1:{self.port}", kafka=kafka)

    def lead_astray(self) -> None:
        """Tell clients of a port at which nobody listens.

        One with `metadata.recovery.strategy=none` that believes it is cut off for good.
        """
        (self.named_port,) = free_ports(1)

    def close(self) -> None:
        """Be away."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept() in the other thread
        self._listener.close()
        for one in list(self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream, suppress(OSError, struct.error):
            while True:
                (size,) = struct.unpack(">i", stream.read(4))
                request = stream.read(size)
                key, version, correlation, id_size = struct.unpack_from(">hhih", request)
                if key not in (_METADATA, _API_VERSIONS):
                    continue  # never answered
                body = self._metadata(request[10 + id_size :]) if key == _METADATA else _api_versions(version)
                connection.sendall(struct.pack(">ii", len(body) + 4, correlation) + body)

    def _metadata(self, request: bytes) -> bytes:
        """The answer to a request of version 4.

        It has only topics that were asked for: others make librdkafka 2.16 crash.
        """
        asked = _texts(request) or list(_TOPICS)
        if request[-1]:
            self.may_create.update(asked)
        node = struct.pack(">i", _NODE)
        brokers = []
        if self.names_broker:
            brokers = [node + _text("127.0.0.1") + struct.pack(">ih", self.named_port, -1)]
        error, leader = (0, _NODE) if self.names_broker else (_LEADER_NOT_AVAILABLE, -1)
        partition = struct.pack(">hii", error, 0, leader) + _array([node]) + _array([node])
        topics = [
            struct.pack(">h", 0) + _text(name) + b"\0" + _array([partition])
            if name in _TOPICS
            else struct.pack(">h", _UNKNOWN_TOPIC) + _text(name) + b"\0" + _array([])
            for name in asked
        ]
        controller = struct.pack(">i", leader)
        return struct.pack(">i", 0) + _array(brokers) + _text("cluster") + controller + _array(topics)


def _api_versions(version: int) -> bytes:
    """An answer of version 0, for which clients ask then."""
    highest = {_PRODUCE: 7, _METADATA: 4, _API_VERSIONS: 0, _INIT_PRODUCER_ID: 1}
    apis = [struct.pack(">hhh", key, 0, version) for key, version in highest.items()]
    return struct.pack(">h", _UNSUPPORTED_VERSION if version else 0) + _array(apis)


def _texts(data: bytes) -> list[str]:
    """The array of texts at the beginning; none where it is null or empty."""
    (count,), at, found = struct.unpack_from(">i", data), 4, []
    for _ in range(count):
        (size,) = struct.unpack_from(">h", data, at)
        found.append(data[at + 2 : at + 2 + size].decode())
        at += 2 + size
    return found


def _array(items: list[bytes]) -> bytes:
    return struct.pack(">i", len(items)) + b"".join(items)


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


class Transactions:
    """A producer that keeps in `committed` what its produce() has put in `open`."""

    may_end_again = False

    def __init__(self):
        self.open, self.committed = [], []

    def begin_transaction(self):
        self.open = []

    def flush(self, _timeout_s):
        return 0

    def commit_transaction(self, _timeout_s):
        self.committed += self.open

    def abort_transaction(self, _timeout_s):
        self.open = []

    def purge(self):
        pass
