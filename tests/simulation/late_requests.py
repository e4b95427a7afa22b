"""Requests that come twice: the first one late, after the producer has repeated it and got its answer.

So does librdkafka when a connection breaks before the answer: it waits about `retry.backoff.ms`, sends the
request again, and tells nobody. The first request may still be on its way.
"""

from collections.abc import Callable
from random import Random

LATE_BY_MS = 3_000
"""By how much the first request comes later than it was sent, at most."""
_HELD = 0.4
_ANY_TIME = 0.4
"""In so many of the cases the first request comes while its producer writes something, or at any time."""
_UNNOTICED = 0.4
"""In so many of the seeds with late requests no producer can notice that it has repeated one."""
END, ADD, PRODUCE, INIT = "EndTxn", "AddPartitionsToTxn", "Produce", "InitProducerId"


class LateRequests:
    """Of one seed: how often connections of transactional producers break, by request."""

    def __init__(self, seed: int, at: Callable[[float, Callable[[], None]], None]) -> None:
        self._rng = Random(f"late requests of {seed}")
        self._at = at
        self._rates: dict[str, float] = {}
        self._unnoticed = False

    def begin(self) -> None:
        """From now on connections break, most of all at the end of transactions."""
        rng = self._rng
        self._rates = {request: rng.choice((0.0, 0.02, 0.1)) for request in (ADD, PRODUCE, INIT)}
        self._rates[END] = rng.choice((0.1, 0.3, 0.6))
        self._unnoticed = rng.random() < _UNNOTICED

    def breaks(self, request: str) -> bool:
        """Whether a connection breaks now, after this request was sent."""
        rate = self._rates.get(request, 0.0)
        return rate > 0 and self._rng.random() < rate

    def repeated_after_ms(self, backoff_ms: float) -> float:
        """How long a producer waits before it sends a request again."""
        return 0.0 if self._unnoticed else backoff_ms * (0.8 + 0.4 * self._rng.random())

    def loses(self, request: str, *, commit: bool = True) -> bool:
        """Whether the first of two requests never comes.

        Where nobody notices a repetition, one late request to abort a claim and one to commit the copies
        written after it would leave copies that no claim tells of. And behind a late EndTxn that commits, a
        late AddPartitionsToTxn opens a transaction, and to abort that one is no failure.
        """
        return self._unnoticed and (request == ADD or not commit)

    def delay(self, arrive: Callable[[], None], held: list[Callable[[], None]]) -> None:
        """Let the first request arrive at any time, or when its producer writes something, or never."""
        luck = self._rng.random()
        if luck < _HELD:
            held.append(arrive)
        elif luck < _HELD + _ANY_TIME:
            self._at(LATE_BY_MS * self._rng.random(), arrive)

    def deliver(self, held: list[Callable[[], None]]) -> None:
        """Let some of the requests arrive that were held until their producer writes something."""
        while held and self._rng.random() < 0.3:
            held.pop(0)()
