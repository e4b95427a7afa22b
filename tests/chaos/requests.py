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
    Api.PRODUCE: 0.15,
    Api.INIT_PRODUCER_ID: 0.5,
    Api.ADD_PARTITIONS_TO_TXN: 0.25,
    Api.END_TXN: 0.5,
}
_DELAY_S = (0.15, 3.0)
_PAUSE_S = (0.1, 0.5)
"""From one that is held back to the next."""


class Holder:
    """Chooses the requests of one tracker that are held back, one now and then, by dice of a seed."""

    def __init__(self, way: Way, seed: str, now: Callable[[], float] = time.monotonic) -> None:
        self.way = way
        self.held: Counter[Api] = Counter()
        self._dice = random.Random(seed)
        self._now = now
        self._free_at = now()

    def delay_s(self, request: Request) -> float | None:
        """How long this one is held back; None: it is not."""
        if request.api not in _CHANCES or request.rest > _HOLDABLE or self._now() < self._free_at:
            return None
        api = Api(request.api)
        if self._dice.random() >= _CHANCES[api]:
            return None
        self.held[api] += 1
        self._free_at = self._now() + self._dice.uniform(*_PAUSE_S)
        return self._dice.uniform(*_DELAY_S)
