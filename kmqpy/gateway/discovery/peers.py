"""Other gateways of the same queues on Kafka: each has some partitions, and asks others when it has nothing.

Gateways find each other in ZooKeeper. A znode there holds the address of the gateway's admin port, and a
token: who can read it may ask the gateway for messages.
"""

from __future__ import annotations

import asyncio
import hmac
import http.client
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import Annotated, Concatenate, ParamSpec, TypeVar

import msgspec
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from msgspec import Meta, Struct

from kmqpy.core.clock import SYSTEM_CLOCK
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
_Address = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:%-]{1,300}:[0-9]{1,5}\Z")]
_Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,300}\Z")]
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


class Peer(Struct, frozen=True):
    """Another gateway, as its znode describes it."""

    address: _Address
    token: _Token


class Request(Struct):
    """What ask() asks for."""

    unique_id: str
    limit: Annotated[int, Meta(ge=1, le=_MAX_LIMIT)]
    lease_s: Annotated[float, Meta(ge=MIN_LEASE_MS / 1000, lt=DAY_MS)]


class _Message(Struct):
    """A message that another gateway has taken."""

    id: str
    body: bytes
    key: bytes | None
    headers: list[tuple[str, bytes | None]]


class _Hearsay(Struct):
    """What tell() tells."""

    unique_id: str
    ids: list[str]
    lease_s: Annotated[float, Meta(ge=0, lt=DAY_MS)] | None


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
    ) -> None:
        self._zookeeper = zookeeper
        self._address = address
        self._threads = threads
        self._on_asked = on_asked
        self._empty_until_s: dict[tuple[Peer, str], float] = {}
        self._silent_until_s: dict[Peer, float] = {}
        self._folder = f"{root}/{_FOLDER}"
        self._token = secrets.token_urlsafe(32)
        self._others: tuple[Peer, ...] = ()
        self._registration: Registration | None = None

    def register(self) -> None:
        """Look for the others, and let them find us."""
        data = msgspec.json.encode(Peer(self._address, self._token))
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
        begun_s = SYSTEM_CLOCK.monotonic()
        if len(self._empty_until_s) > _MAX_REMEMBERED:
            self._empty_until_s.clear()
        for peer in self._others:
            now_s = SYSTEM_CLOCK.monotonic()
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
            except (OSError, ValueError) as error:
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
        except (OSError, ValueError) as error:
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
            self._silent_until_s = {**others, peer: SYSTEM_CLOCK.monotonic() + _SILENT_S}
            raise

    def _is_silent(self, peer: Peer) -> bool:
        return self._silent_until_s.get(peer, 0.0) > SYSTEM_CLOCK.monotonic()

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


def _parsed(data: bytes, kind: type[T]) -> T:
    """What JSON says; raises ValueError for what no gateway writes."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def parse_peer(data: bytes) -> Peer:
    """The gateway of a znode; raises ValueError for what no gateway writes."""
    return _parsed(data, Peer)


def ask(peer: Peer, unique_id: str, limit: int, lease_s: float, timeout_s: float) -> list[Taken]:
    """Let another gateway take messages for us; blocks.

    Raises OSError if it does not answer, and ValueError for a wrong answer.
    """
    body = Request(unique_id, limit, lease_s)
    return [
        Taken(one.id, one.body, key=one.key, headers=tuple(one.headers))
        for one in _parsed(_post(peer, TAKE_PATH, body, timeout_s), list[_Message])
    ]


def tell(peer: Peer, unique_id: str, said: Said, timeout_s: float) -> list[str]:
    """Tell another gateway what was said of messages, see Hub.hear(); blocks.

    Returns those that it has handed out. Raises as ask() does.
    """
    body = _Hearsay(unique_id, [*said.ids], said.lease_s)
    return _parsed(_post(peer, SAID_PATH, body, timeout_s), list[str])


def _post(peer: Peer, path: str, body: Struct, timeout_s: float) -> bytes:
    host, _, port = peer.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        headers = {TOKEN_HEADER: peer.token, "Connection": "close"}
        connection.request("POST", path, msgspec.json.encode(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _WrongAnswer(f"status {response.status}")
        return response.read()
    except http.client.HTTPException as error:
        raise OSError(type(error).__name__) from error
    finally:
        connection.close()


def parse_request(body: bytes) -> Request:
    """The request in a body; raises ValueError."""
    return _parsed(body, Request)


def parse_hearsay(body: bytes) -> tuple[str, Said]:
    """The queue's unique id, and what was said, in a body; raises ValueError."""
    found = _parsed(body, _Hearsay)
    return found.unique_id, Said(found.ids, found.lease_s)


def answer(messages: Sequence[Taken]) -> bytes:
    """The body of the answer to ask()."""
    return msgspec.json.encode([_Message(one.id, one.body, one.key, [*one.headers]) for one in messages])
