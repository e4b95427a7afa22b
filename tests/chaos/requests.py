"""Kafka's requests in a stream of bytes, and which of them are held back. Pure."""

import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

_HEAD = struct.Struct(">ihh")
"""What a request begins with: size of the rest, API key, API version; then a correlation id of 4 bytes."""
_LEAST = _HEAD.size
_LARGEST = 100 << 20
"""What a broker takes at most (`socket.request.max.bytes`). TLS and HTTP read as sizes beyond it."""
_HIGHEST_API, _HIGHEST_VERSION = 1_000, 100
"""Far more than Kafka has."""
_HOLDABLE = 4 << 20


class Api(IntEnum):
    """Requests of a transaction, by their API key."""

    PRODUCE = 0
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    END_TXN = 26


class Way(StrEnum):
    """What is done to a request that is held back."""

    AFTER_RESET = "late after a reset"
    """Its connection is reset, so that the client sends it again; later the broker gets it all the same."""
    LATE = "late"
    """It comes late, and so does what the client sends behind it."""
    UNANSWERED = "answer lost"
    """The broker gets it at once; its answer is dropped, and the connection reset."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request whose head is complete.

    at    where the head ends, in the bytes that completed it
    rest  how many bytes of the request follow from there on; some of them may come only later
    """

    api: int
    at: int
    rest: int


class RequestReader:
    """Finds the requests in what a client sends on one connection.

    What does not begin like a request is none, nor is anything behind it: nothing more is found then.
    """

    def __init__(self) -> None:
        self._head = bytearray()
        self._rest = 0
        self._readable = True

    def feed(self, data: bytes) -> list[Request]:
        """The requests whose heads end in these bytes, the next of the connection."""
        found = []
        at = 0
        while self._readable and at < len(data):
            if self._rest:
                step = min(self._rest, len(data) - at)
                self._rest -= step
                at += step
                continue
            part = data[at : at + _HEAD.size - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) == _HEAD.size:
                size, api, version = _HEAD.unpack(self._head)
                self._head.clear()
                self._rest = size - 4
                self._readable = (
                    _LEAST <= size <= _LARGEST
                    and 0 <= api <= _HIGHEST_API
                    and 0 <= version <= _HIGHEST_VERSION
                )
                if self._readable:
                    found.append(Request(api, at, self._rest))
        return found


_CHANCES = {  # the fewer there are, the greater
    Api.PRODUCE: 0.1,
    Api.INIT_PRODUCER_ID: 0.3,
    Api.ADD_PARTITIONS_TO_TXN: 0.2,
    Api.END_TXN: 0.6,
}
_DELAY_S = (0.15, 3.0)
_PAUSE_S = (0.1, 0.5)
"""From one that is held back to the next of its kind."""
_SLOW_CHANCE, _SLOW_S = 0.5, (0.1, 0.8)
"""Which Produce requests are slow meanwhile, and how slow: where a transaction takes but milliseconds, a late
request of an earlier one seldom meets it between two of its own."""


@dataclass(frozen=True, slots=True)
class Hold:
    """What is done to a request, and for how many seconds it is held back."""

    way: Way
    delay_s: float


class Holder:
    """Chooses the requests of one tracker that are held back, one now and then, by dice of a seed.

    seen, held  how many requests there were, and how many of them were held back, by their kind
    log         when (ms since 1970) what was done to which, and for how many seconds it was held back
    """

    def __init__(self, way: Way, seed: str, now: Callable[[], float] = time.monotonic) -> None:
        self.way = way
        self.seen: Counter[Api] = Counter()
        self.held: Counter[Api] = Counter()
        self.log: list[tuple[int, str, Way, float]] = []
        self._dice = random.Random(seed)
        self._now = now
        self._free_at: dict[Api, float] = {}

    def hold(self, request: Request) -> Hold | None:
        """What is done to this one; None: it passes as it comes."""
        if request.api not in _CHANCES:
            return None
        api = Api(request.api)
        self.seen[api] += 1
        hold = self._choose(api) if request.rest <= _HOLDABLE else None
        if hold is not None:
            self.log.append((int(time.time() * 1000), api.name, hold.way, round(hold.delay_s, 2)))
        return hold

    def _choose(self, api: Api) -> Hold | None:
        dice = self._dice
        if self._now() >= self._free_at.get(api, 0.0) and dice.random() < _CHANCES[api]:
            self.held[api] += 1
            self._free_at[api] = self._now() + dice.uniform(*_PAUSE_S)
            return Hold(self.way, dice.uniform(*_DELAY_S))
        if self.way is Way.AFTER_RESET and api is Api.PRODUCE and dice.random() < _SLOW_CHANCE:
            return Hold(Way.LATE, dice.uniform(*_SLOW_S))
        return None
