"""Other gateways of the same queues on Kafka: each has some partitions, and asks others when it has nothing.

Gateways find each other in ZooKeeper. A znode there holds the address of the gateway's admin port, and a
token: who can read it may ask the gateway for messages.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import http.client
import json
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.durations import DAY_MS, MIN_LEASE_MS
from kmqpy.gateway.discovery.registration import Entry, Registration
from kmqpy.gateway.service.claims import Said
from kmqpy.gateway.service.served_queue import Taken
from kmqpy.zookeeper.settings import ZooKeeperConnection

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TAKE_PATH = "/internal/take"
SAID_PATH = "/internal/said"
TOKEN_HEADER = "x-kmq-peer"  # noqa: S105 - a name
_ADDRESS = re.compile(r"[A-Za-z0-9._:%-]{1,300}:[0-9]{1,5}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,300}")
_FOLDER = "gateways"
_EMPTY_S = 0.25
"""A gateway that has no messages of a queue is not asked for so many seconds."""
_SILENT_S = 2.0
"""One that does not answer is asked and told nothing for so many seconds: it would hold up all threads."""
_MAX_REMEMBERED = 10_000
_MAX_LIMIT = 1_000
_TIMEOUT_S = 0.3
"""Within so many seconds take() begins to ask others: EmoDB's clients give up after 500 ms, and we have
waited for messages of our own before. An answer in pieces may take longer, and so may a wait for a thread."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another gateway."""

    address: str
    token: str


class _Silent(OSError):
    """The gateway did not answer a moment ago."""


class _WrongAnswer(OSError):
    """The gateway answers, but not what it should."""


class Peers(Closeable):
    """Registers this gateway, knows the others, and talks to them.

    address   of this gateway's admin port
    on_asked  called with "messages", "nothing" or "silent" when another one was asked
    """

    def __init__(
        self,
        zookeeper: ZooKeeperConnection,
        root: str,
        address: str,
        threads: Executor,
        *,
        on_asked: Callable[[str], None] = lambda _: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._zookeeper = zookeeper
        self._address = address
        self._threads = threads
        self._on_asked = on_asked
        self._clock = clock
        self._empty_until_s: dict[tuple[Peer, str], float] = {}
        self._silent_until_s: dict[Peer, float] = {}
        self._folder = f"{root}/{_FOLDER}"
        self._token = secrets.token_urlsafe(32)
        self._others: tuple[Peer, ...] = ()
        self._registration: Registration | None = None

    def register(self) -> None:
        """Look for the others, and let them find us."""
        data = json.dumps({"address": self._address, "token": self._token}).encode()
        self._registration = Registration(
            self._zookeeper, [Entry(self._folder, self._address, data)], self._look
        )

    @property
    def others(self) -> tuple[Peer, ...]:
        """The other gateways, as they were a moment ago."""
        return self._others

    @property
    def registered(self) -> bool:
        """True while others can find this gateway."""
        return self._registration is not None and self._registration.registered

    async def take(self, unique_id: str, limit: int, lease_s: float) -> tuple[list[Taken], str]:
        """Ask the others, one after the other, until one has messages; see Elsewhere."""
        silent: list[str] = []
        begun_s = self._clock.monotonic()
        if len(self._empty_until_s) > _MAX_REMEMBERED:
            self._empty_until_s.clear()
        for peer in self._others:
            now_s = self._clock.monotonic()
            if self._empty_until_s.get((peer, unique_id), 0.0) > now_s:
                continue
            if self._is_silent(peer):
                silent.append(peer.address)
                continue
            left_s = begun_s + _TIMEOUT_S - now_s
            if left_s <= 0:  # the next poll asks them: who was silent is left out for a while
                break
            try:
                found = await asyncio.wrap_future(
                    self._threads.submit(self._heard, ask, peer, unique_id, limit, lease_s, left_s)
                )
            except _Silent:
                silent.append(peer.address)
                continue
            except (OSError, ValueError, OverflowError, RecursionError) as error:
                _log.warning(
                    "a gateway does not answer", extra={"gateway": peer.address, "error": str(error)}
                )
                self._on_asked("silent")
                silent.append(peer.address)
                self._empty_until_s[peer, unique_id] = now_s + _SILENT_S
                continue
            self._on_asked("messages" if found else "nothing")
            if found:
                return found, ""
            self._empty_until_s[peer, unique_id] = now_s + _EMPTY_S
        why = f"messages may be at gateways that do not answer: {', '.join(silent)}" if silent else ""
        return [], why

    async def tell(self, unique_id: str, said: Said) -> set[str]:
        """Tell all others, at once; those that do not answer in time do not hear of it; see Elsewhere."""
        answers = await asyncio.gather(
            *(
                asyncio.wrap_future(self._threads.submit(self._told, peer, unique_id, said))
                for peer in self._others
            )
        )
        return set(chain.from_iterable(answers))

    def _told(self, peer: Peer, unique_id: str, said: Said) -> list[str]:
        try:
            return self._heard(tell, peer, unique_id, said, _TIMEOUT_S)
        except (OSError, ValueError, OverflowError, RecursionError) as error:
            _log.warning("a gateway was not told", extra={"gateway": peer.address, "error": str(error)})
            return []

    def _heard(
        self, call: Callable[Concatenate[Peer, P], T], peer: Peer, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call another gateway, unless it has just been silent; raises _Silent, and what `call` raises."""
        if self._is_silent(peer):  # since this call waits for a thread
            raise _Silent("it was silent a moment ago")
        try:
            return call(peer, *args, **kwargs)
        except _WrongAnswer:
            raise
        except OSError:
            others = {one: self._silent_until_s.get(one, 0.0) for one in self._others}
            self._silent_until_s = {**others, peer: self._clock.monotonic() + _SILENT_S}
            raise

    def _is_silent(self, peer: Peer) -> bool:
        return self._silent_until_s.get(peer, 0.0) > self._clock.monotonic()

    def is_token(self, text: str) -> bool:
        """True for this gateway's token, which only other gateways know."""
        return hmac.compare_digest(text.encode(), self._token.encode())

    def close(self) -> None:
        """Withdraw."""
        if self._registration is not None:
            self._registration.close()

    def _look(self, client: KazooClient) -> None:
        found = []
        for name in client.get_children(self._folder):
            try:
                peer = parse_peer(client.get(f"{self._folder}/{name}")[0])
            except NoNodeError:
                continue
            except ValueError:
                _log.warning("a znode of gateways can't be read", extra={"znode": name})
                continue
            if peer.token != self._token:
                found.append(peer)
        self._others = tuple(found)


def parse_peer(data: bytes) -> Peer:
    """The gateway of a znode; raises ValueError for what no gateway writes."""
    try:
        entry = json.loads(data)
        found = Peer(entry["address"], entry["token"])
        if _ADDRESS.fullmatch(found.address) and _TOKEN.fullmatch(found.token):
            return found
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    raise ValueError("address or token can't be one")


def ask(peer: Peer, unique_id: str, limit: int, lease_s: float, timeout_s: float) -> list[Taken]:
    """Let another gateway take messages for us; blocks.

    Raises OSError if it does not answer, and ValueError for a wrong answer.
    """
    try:
        body = {"unique_id": unique_id, "limit": limit, "lease_s": lease_s}
        return [_taken(one) for one in json.loads(_post(peer, TAKE_PATH, body, timeout_s))]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def tell(peer: Peer, unique_id: str, said: Said, timeout_s: float) -> list[str]:
    """Tell another gateway what was said of messages, see Hub.hear(); blocks.

    Returns those that it has handed out. Raises as ask() does.
    """
    body = {"unique_id": unique_id, "ids": list(said.ids), "lease_s": said.lease_s}
    try:
        return [str(one) for one in json.loads(_post(peer, SAID_PATH, body, timeout_s))]
    except TypeError as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _post(peer: Peer, path: str, body: object, timeout_s: float) -> bytes:
    host, _, port = peer.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        headers = {TOKEN_HEADER: peer.token, "Connection": "close"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _WrongAnswer(f"status {response.status}")
        return response.read()
    except http.client.HTTPException as error:
        raise OSError(type(error).__name__) from error
    finally:
        connection.close()


class Request(NamedTuple):
    """What ask() asks for."""

    unique_id: str
    limit: int
    lease_s: float


def parse_request(body: bytes) -> Request:
    """The request in a body; raises ValueError."""
    try:
        given = json.loads(body)
        request = Request(str(given["unique_id"]), int(given["limit"]), float(given["lease_s"]))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not 1 <= request.limit <= _MAX_LIMIT or not MIN_LEASE_MS / 1000 <= request.lease_s < DAY_MS:
        raise ValueError("limit or lease_s is out of range")
    return request


class Hearsay(NamedTuple):
    """What tell() tells."""

    unique_id: str
    said: Said


def parse_hearsay(body: bytes) -> Hearsay:
    """What was said, in a body; raises ValueError."""
    try:
        given = json.loads(body)
        lease_s = None if given["lease_s"] is None else float(given["lease_s"])
        said = Said([str(one) for one in given["ids"]], lease_s)
        found = Hearsay(str(given["unique_id"]), said)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if lease_s is not None and not 0 <= lease_s < DAY_MS:
        raise ValueError("lease_s is out of range")
    return found


def answer(messages: Sequence[Taken]) -> bytes:
    """The body of the answer to ask()."""
    return json.dumps(
        [
            {
                "id": one.id,
                "body": _encoded(one.body),
                "key": _encoded(one.key),
                "headers": [[name, _encoded(value)] for name, value in one.headers],
            }
            for one in messages
        ]
    ).encode()


def _taken(given: dict[str, Any]) -> Taken:
    headers = tuple((str(name), _decoded(value)) for name, value in given["headers"])
    body, key = _decoded(given["body"]) or b"", _decoded(given["key"])
    return Taken(str(given["id"]), body, key=key, headers=headers)


def _encoded(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _decoded(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
