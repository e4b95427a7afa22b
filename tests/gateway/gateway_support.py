"""A gateway in a thread of the tests, and requests to it whose every byte is under control."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import uvloop

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.gateway.keys.stores import KeyStore
from kmqpy.gateway.server import Gateway, GatewaySettings
from kmqpy.gateway.tracker_process import TrackerProcess
from kmqpy.queue import Storage
from kmqpy.testing import memory_storage

JSON = {"Content-Type": "application/json"}
_TRIES = 5
QUEUE, DEDUP = "/queue/1", "/dedupq/1"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json", self
        return json.loads(self.body)

    @property
    def exception(self) -> str | None:
        return self.headers.get("x-bv-exception")


class Served:
    """A gateway that runs, and its storage."""

    def __init__(self, gateway: Gateway, storage: Storage, loop: asyncio.AbstractEventLoop) -> None:
        self.gateway = gateway
        self.storage = storage
        self.loop = loop

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        raw: bytes | None = None,
        port: int | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> Answer:
        """Send a request; `body` becomes JSON, `raw` is sent as it is, and chunked if it is an iterator."""
        given = dict(headers or {})
        content = raw
        if body is not None:
            content = json.dumps(body).encode()
            given = {**JSON, **given}
        used = connection or http.client.HTTPConnection("127.0.0.1", port or self.gateway.port, timeout=30)
        try:
            used.request(method, path, content, given)
            response = used.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            if connection is None:
                used.close()

    def admin(self, path: str, method: str = "GET") -> Answer:
        return self.ask(method, path, port=self.gateway.admin_port)


class Calls:
    """The calls of one queue; each must answer 200."""

    def __init__(self, served: Served, name: str, base: str = QUEUE, key: str | None = None) -> None:
        self.served = served
        self.name = name
        self.path = f"{base}/{quote(name, safe=':@')}"
        self.headers = {} if key is None else {"X-BV-API-Key": key}

    def _good(self, method: str, call: str, body: Any = None, raw: bytes | None = None) -> Any:
        headers = {**self.headers, **(JSON if raw is not None else {})}
        for _ in range(_TRIES):
            answer = self.served.ask(method, f"{self.path}{call}", body, headers, raw=raw)
            if answer.status != 503 or self.served.storage.capabilities.immediate:
                break
            time.sleep(0.2)  # as EmoDB's clients: a busy Kafka may take seconds to make a queue
        assert answer.status == 200, answer
        return answer.json

    def send(self, *bodies: Any) -> None:
        assert self._good("POST", "/sendbatch", list(bodies)) == {"success": True}

    def poll(self, limit: int = 10, ttl: int = 30) -> list[dict[str, Any]]:
        return self._good("GET", f"/poll?limit={limit}&ttl={ttl}")

    def peek(self, limit: int = 10) -> list[dict[str, Any]]:
        return self._good("GET", f"/peek?limit={limit}")

    def size(self, limit: int | None = None) -> int:
        return self._good("GET", "/size" if limit is None else f"/size?limit={limit}")

    def claims(self) -> int:
        return self._good("GET", "/claimcount")

    def ack(self, *ids: str) -> None:
        assert self._good("POST", "/ack", list(ids)) == {"success": True}

    def renew(self, *ids: str, ttl: int = 30) -> None:
        assert self._good("POST", f"/renew?ttl={ttl}", list(ids)) == {"success": True}

    def unclaim(self) -> None:
        assert self._good("POST", "/unclaimall") == {"success": True}

    def purge(self) -> None:
        assert self._good("DELETE", "") == {"success": True}


def fresh_memory() -> Storage:
    """A storage in memory with no queues; all `memory:` of a process are one."""
    return memory_storage(SYSTEM_CLOCK)


def payloads(messages: list[dict[str, Any]]) -> list[Any]:
    return [message["payload"] for message in messages]


def ids(messages: list[dict[str, Any]]) -> list[str]:
    return [message["id"] for message in messages]


def threads_of_clients() -> int:
    """How many threads this process has, without the gateway's, whose number is up to all its clients."""
    return sum(not thread.name.startswith("kmq-gateway") for thread in threading.enumerate())


@contextmanager
def running(
    storage: Storage,
    keys: KeyStore | None = None,
    trackers: Mapping[str, TrackerProcess] | None = None,
    name: str = "",
    **settings: Any,
) -> Iterator[Served]:
    """Run a gateway; the storage is closed with it. Its queues may have the storage's name before them."""
    ready = threading.Event()
    found: list[Served] = []
    failure: list[BaseException] = []

    async def main() -> None:
        options = {"port": 0, "admin_port": 0, "drain_s": 0.0, "quick_s": 5.0, **settings}
        gateway = Gateway(GatewaySettings(**options), {name: storage, "": storage}, keys, trackers)
        found.append(Served(gateway, storage, asyncio.get_running_loop()))
        await gateway.run(on_ready=ready.set)

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as `kmq gateway` has it
                runner.run(main())
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    if failure:
        thread.join()
        raise failure[0]
    try:
        yield found[0]
    finally:
        found[0].loop.call_soon_threadsafe(found[0].gateway.request_stop)
        thread.join(60)
    assert not thread.is_alive()
    assert not failure, failure
