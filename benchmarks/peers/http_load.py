"""A load of HTTP requests, from an event loop that does nothing else: most of them are made beforehand.

Sends for `seconds`, then polls and acknowledges what was sent, for as long at most. Each connection has one
request under way. With a `rate`, it only sends, so many requests a second, however soon they are answered.
`dialect` is emodb, native or sqs (JSON protocol; batches of at most 10); `key` the id and the secret of an
access key, with which it signs.
"""

import asyncio
import hashlib
import hmac
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import uvloop

from benchmarks.results import percentile

_BODY = "x" * 100
_LEASE_S = 300
_TRIES = 20
"""Tries of the first send, half a second apart."""


class _Emodb:
    """The requests of EmoDB's dialect."""

    def __init__(self, options: dict[str, Any]) -> None:
        queue, batch = f"/queue/1/{options['queue']}", options["batch"]
        self.create: bytes | None = None
        self._queue = queue
        self.send = (
            _post(f"{queue}/send", _BODY) if batch == 1 else _post(f"{queue}/sendbatch", [_BODY] * batch)
        )
        poll = f"{queue}/poll?ttl={_LEASE_S}&limit={batch}"
        self.poll = f"GET {poll} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()

    def ack(self, answer: bytes) -> tuple[int, bytes]:
        ids = [message["id"] for message in json.loads(answer)]
        return len(ids), _post(f"{self._queue}/ack", ids)


class _Native:
    """The gateway's own requests."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._path, batch = f"/v1/queues/{options['queue']}", options["batch"]
        self.create = f"PUT {self._path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        if batch == 1:
            self.send = _post(f"{self._path}/messages", _BODY)
        else:
            self.send = _post(f"{self._path}/batch", {"messages": [{"body": _BODY}] * batch})
        query = f"lease={_LEASE_S}&max_messages={batch}"
        self.poll = f"POST {self._path}/receive?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()

    def ack(self, answer: bytes) -> tuple[int, bytes]:
        receipts = [message["receipt"] for message in json.loads(answer)["messages"]]
        return len(receipts), _post(f"{self._path}/ack", {"receipts": receipts})


class _Signer:
    """Signs requests of one day, as AWS's SDKs do."""

    def __init__(self, key_id: str, secret: str) -> None:
        self._time = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._scope = f"{self._time[:8]}/us-east-1/sqs/aws4_request"
        self._key_id = key_id
        self._key = f"AWS4{secret}".encode()
        for part in self._scope.split("/"):
            self._key = hmac.digest(self._key, part.encode(), "sha256")

    def headers(self, target: str, body: bytes) -> str:
        signed = "host;x-amz-date;x-amz-target"
        given = f"host:localhost\nx-amz-date:{self._time}\nx-amz-target:{target}\n"
        request = f"POST\n/\n\n{given}\n{signed}\n{hashlib.sha256(body).hexdigest()}"
        digest = hashlib.sha256(request.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{self._time}\n{self._scope}\n{digest}"
        signature = hmac.digest(self._key, text.encode(), "sha256").hex()
        return (
            f"X-Amz-Date: {self._time}\r\nAuthorization: AWS4-HMAC-SHA256 "
            f"Credential={self._key_id}/{self._scope}, SignedHeaders={signed}, Signature={signature}\r\n"
        )


class _Sqs:
    """The requests of SQS's JSON protocol."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._signer = _Signer(*options["key"]) if options.get("key") else None
        self._url = f"http://localhost:{options['port']}/000000000000/{options['queue']}"
        batch = options["batch"]
        self._single = batch == 1
        self.create = self._post("CreateQueue", QueueName=options["queue"])
        if self._single:
            self.send = self._post("SendMessage", QueueUrl=self._url, MessageBody=_BODY)
        else:
            entries = [{"Id": str(number), "MessageBody": _BODY} for number in range(batch)]
            self.send = self._post("SendMessageBatch", QueueUrl=self._url, Entries=entries)
        self.poll = self._post(
            "ReceiveMessage", QueueUrl=self._url, MaxNumberOfMessages=batch, VisibilityTimeout=_LEASE_S
        )

    def ack(self, answer: bytes) -> tuple[int, bytes]:
        handles = [message["ReceiptHandle"] for message in json.loads(answer).get("Messages", [])]
        if self._single:
            return len(handles), self._post(
                "DeleteMessage", QueueUrl=self._url, ReceiptHandle=handles[0] if handles else ""
            )
        entries = [{"Id": str(number), "ReceiptHandle": one} for number, one in enumerate(handles)]
        return len(handles), self._post("DeleteMessageBatch", QueueUrl=self._url, Entries=entries)

    def _post(self, action: str, **values: Any) -> bytes:
        target = f"AmazonSQS.{action}"
        more = f"X-Amz-Target: {target}\r\n"
        if self._signer is not None:
            more += self._signer.headers(target, json.dumps(values).encode())
        return _post("/", values, "application/x-amz-json-1.0", more)


def _post(path: str, value: Any, content_type: str = "application/json", more: str = "") -> bytes:
    body = json.dumps(value).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Connection:
    """One connection, with one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, request: bytes) -> bytes:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if b" 204 " in head[:16]:
            return b""
        lower = head.lower()
        start = lower.index(b"content-length:") + 15
        answer = await self._reader.readexactly(int(lower[start : lower.index(b"\r\n", start)]))
        if b" 200 " not in head[:16]:
            raise RuntimeError((head + answer).decode(errors="replace"))
        return answer


def speed(options: dict[str, Any]) -> dict[str, float]:
    """Messages per second, and the latency of sends in ms."""
    return uvloop.run(_speed(options))


async def _speed(options: dict[str, Any]) -> dict[str, float]:
    dialect = {"emodb": _Emodb, "native": _Native, "sqs": _Sqs}[options["dialect"]](options)
    connections = [
        _Connection(*await asyncio.open_connection("127.0.0.1", options["port"], limit=1 << 24))
        for _ in range(options["connections"])
    ]
    if dialect.create is not None:
        await connections[0].ask(dialect.create)
    await _patiently(connections[0], dialect.send)
    times: list[float] = []
    batch = options["batch"]

    async def send(connection: _Connection) -> int:
        began = time.perf_counter()
        await connection.ask(dialect.send)
        times.append(time.perf_counter() - began)
        return batch

    async def take(connection: _Connection) -> int:
        count, ack = dialect.ack(await connection.ask(dialect.poll))
        if count:
            await connection.ask(ack)
        return count

    if rate := options.get("rate"):
        times = await _paced(connections, dialect.send, rate, options["seconds"])
        return {"p50_ms": percentile(times, 50) * 1000, "p99_ms": percentile(times, 99) * 1000}
    cpu = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    sent, send_s = await _until(connections, send, options["seconds"], None)
    # On Kafka, the gateway joins the group at a queue's first poll. This takes as much as _patiently() sent.
    while not await take(connections[0]):
        await asyncio.sleep(0.05)
    taken, take_s = await _until(connections, take, options["seconds"], sent)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu
    return {
        "send": sent / send_s,
        "take": taken / take_s,
        "p50_ms": percentile(times, 50) * 1000,
        "p99_ms": percentile(times, 99) * 1000,
        "load_cores": used / (send_s + take_s),
    }


async def _patiently(connection: _Connection, request: bytes) -> None:
    """Ask again while the queue is being made: a gateway answers 503 soon, and clients ask again."""
    for left in reversed(range(_TRIES)):
        try:
            await connection.ask(request)
        except RuntimeError:
            if not left:
                raise
            await asyncio.sleep(0.5)
        else:
            return


async def _paced(connections: list[_Connection], request: bytes, rate: float, seconds: float) -> list[float]:
    """Ask at a rate; returns the seconds from the time at which each request was due to its answer."""
    free: asyncio.Queue[_Connection] = asyncio.Queue()
    for one in connections:
        free.put_nowait(one)
    times: list[float] = []

    async def ask(due: float) -> None:
        connection = await free.get()
        await connection.ask(request)
        times.append(time.perf_counter() - due)
        free.put_nowait(connection)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as asking:
        for number in range(int(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(due - time.perf_counter())
            asking.create_task(ask(due))
    return times


async def _until(
    connections: list[_Connection], do: Callable[[_Connection], Any], seconds: float, most: int | None
) -> tuple[int, float]:
    """Let each connection do it again and again; returns how many messages in how many seconds."""
    done = 0
    began = time.perf_counter()

    async def work(connection: _Connection) -> None:
        nonlocal done
        while time.perf_counter() < began + seconds and (most is None or done < most):
            count = await do(connection)
            done += count  # after the await, in which others count too

    await asyncio.gather(*map(work, connections))
    return done, time.perf_counter() - began
