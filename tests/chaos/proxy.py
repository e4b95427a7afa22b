"""A TCP proxy whose connections can be cut and healed; asyncio, in a thread of its own."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TypeVar

from kmqpy.dev.ports import free_ports

from .requests import Hold, Holder, Request, RequestReader, Way

T = TypeVar("T")
_CHUNK = 65_536


class Cut(StrEnum):
    """How a gate is closed."""

    REFUSE = "refuse"
    """Connections are reset, new ones too."""
    BLACKHOLE = "blackhole"
    """Connections stay, nothing passes. What was on its way arrives when the gate is opened again."""
    FORGET = "forget"
    """On the connections that there are nothing passes any more; new ones are fine. For ever: heal() does not
    mend it. So does a load balancer or firewall that has forgotten idle connections."""
    MUTE = "mute"
    """What is sent arrives; the answers pass when the gate is opened again."""


class Gate:
    """The way from one process to one kind of server; thread-safe.

    rewrite  changes answers as they pass, a chunk at a time
    holder   holds requests back, where these are Kafka's; None: nobody does
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open = asyncio.Event()
        self._open.set()
        self._answers = asyncio.Event()
        self._answers.set()
        self._refusing = False
        self.rewrite: Callable[[bytes], bytes] = lambda answer: answer
        self.holder: Holder | None = None
        self._transports: set[asyncio.WriteTransport] = set()

    def cut(self, how: Cut) -> None:
        self._loop.call_soon_threadsafe(self._cut, how)

    def heal(self) -> None:
        self._loop.call_soon_threadsafe(self._heal)

    def _cut(self, how: Cut) -> None:
        if how is Cut.FORGET:
            self._open.clear()
            self._answers.clear()
            self._open, self._answers = asyncio.Event(), asyncio.Event()
            self._heal()
            return
        if how is not Cut.REFUSE:
            self._answers.clear()
            if how is Cut.BLACKHOLE:
                self._open.clear()
            return
        self._refusing = True
        for transport in self._transports:
            _reset(transport)

    def _heal(self) -> None:
        self._refusing = False
        self._open.set()
        self._answers.set()

    async def serve(
        self, target: Callable[[], int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One connection, to the end of it."""
        if self._refusing:
            _reset(writer.transport)
            return
        mine = {writer.transport}
        self._transports |= mine
        try:
            await self._open.wait()
            there, back = await asyncio.open_connection("127.0.0.1", target())
            mine.add(back.transport)
            self._transports |= mine
            connection = _Connection(self, self._open, self._answers, reader, writer, there, back)
            await asyncio.gather(connection.pass_requests(), connection.pass_answers())
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # the server is down, so is this connection; or the proxy is closed
        finally:
            self._transports -= mine
            for transport in mine:
                transport.abort()


class _Connection:
    """A client's connection to the proxy and the proxy's to the server; passes on what is sent on them."""

    def __init__(
        self,
        gate: Gate,
        requests_pass: asyncio.Event,
        answers_pass: asyncio.Event,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        self._gate = gate
        self._requests_pass, self._answers_pass = requests_pass, answers_pass
        self._client, self._to_client = client, to_client
        self._server, self._to_server = server, to_server
        self._requests = RequestReader()
        self._dropping = False  # answers: the client is to get none any more

    async def pass_requests(self) -> None:
        """Until the client ends the connection, or loses it because a request is held back."""
        while data := await self._client.read(_CHUNK):
            passed = 0
            for request in self._requests.feed(data):
                holder = self._gate.holder
                if (hold := holder.hold(request) if holder else None) is None:
                    continue
                await self._send(data[passed : request.at])
                passed = request.at
                if hold.way is Way.LATE:
                    await asyncio.sleep(hold.delay_s)
                else:
                    await self._hold(data[passed:], request, hold)
                    return
            await self._send(data[passed:])
        await self._requests_pass.wait()  # the end of a connection does not pass either
        if self._to_server.can_write_eof():
            self._to_server.write_eof()

    async def pass_answers(self) -> None:
        """Until the server ends the connection; what it answers a client that has lost it is dropped."""
        while data := await self._server.read(_CHUNK):
            if not self._dropping:
                await self._answers_pass.wait()
            if not self._dropping:
                self._to_client.write(self._gate.rewrite(data))
                try:
                    await self._to_client.drain()
                except ConnectionError:
                    if not self._dropping:
                        raise
        if not self._dropping:
            await self._answers_pass.wait()
        if not self._dropping and self._to_client.can_write_eof():
            self._to_client.write_eof()

    async def _hold(self, data: bytes, request: Request, hold: Hold) -> None:
        """Take the client's connection away, and give the server the rest of its request before or later."""
        if (missing := request.rest - len(data)) > 0:
            data += await self._client.readexactly(missing)
        rest = data[: request.rest]
        self._dropping = True
        if hold.way is Way.AFTER_RESET:
            _reset(self._to_client.transport)
            await asyncio.sleep(hold.delay_s)
            await self._send(rest)
        else:
            await self._send(rest)
            await asyncio.sleep(hold.delay_s)
            _reset(self._to_client.transport)
        self._to_server.write_eof()  # once it has answered, the server ends the connection, too

    async def _send(self, data: bytes) -> None:
        await self._requests_pass.wait()
        self._to_server.write(data)
        await self._to_server.drain()


def _reset(transport: asyncio.WriteTransport) -> None:
    """End a connection with RST rather than in an orderly way."""
    if transport.is_closing():
        return  # its socket may be closed
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class Proxy:
    """Listens on ports of 127.0.0.1 and passes on what comes, as long as the gate is open."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def gate(self) -> Gate:
        return Gate(self._loop)

    def listen(self, gate: Gate, target: Callable[[], int]) -> int:
        """Pass on to the port that `target` says; returns the port to connect to."""
        (port,) = free_ports(1)

        async def listen() -> None:
            server = await asyncio.start_server(
                lambda reader, writer: gate.serve(target, reader, writer), "127.0.0.1", port
            )
            self._servers.append(server)

        self._run(listen())
        return port

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _close(self) -> None:
        for server in self._servers:
            for listening in server.sockets:
                self._loop.remove_reader(listening.fileno())
        # asyncio gives an accepted connection to its task a few iterations later, but not once the server is
        # closed: that connection would have no owner, and its socket would be left open.
        await _settle()
        for server in self._servers:
            server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await _settle()  # transports close their sockets in the next iteration


async def _settle() -> None:
    """Let the loop run what is ready, and what that makes ready, a few times."""
    for _ in range(20):
        await asyncio.sleep(0)
