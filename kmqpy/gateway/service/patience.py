"""Limits how long requests wait for a storage."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

from kmqpy.core.clock import Clock
from kmqpy.errors import Unavailable
from kmqpy.gateway.service.pulse import PATIENCE_S, Pulse

_HELD_UP_S = 0.02
"""A look that comes so many seconds late tells that this process was held up, not the storage."""


class Patience:
    """A request waits in this block for its storage; if it is given up, the block raises Unavailable.

    most_s  the most seconds that it waits. More than PATIENCE_S: what is known to take long is no sign of a
            storage that is away
    """

    def __init__(self, pulse: Pulse, most_s: float, clock: Clock) -> None:
        self._is_sign = most_s <= PATIENCE_S
        self._is_long = not self._is_sign
        self._pulse = pulse
        self._most_s = most_s
        self._clock = clock
        self._begun_s = clock.monotonic()
        # Nobody is given up sooner, whatever the pulse says.
        self._look_s = self._begun_s + min(most_s, pulse.least_s)
        self._was_held_up = False
        self._timeout = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._token: Token[Patience | None]

    async def __aenter__(self) -> Self:
        if self._is_sign:
            self._pulse.begin(self, self._begun_s)
        self._token = current_patience.set(self)
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._look_s - self._begun_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        current_patience.reset(self._token)
        if isinstance(error, Unavailable):
            self._pulse.fail(self._clock.monotonic())
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._is_sign:
                self._pulse.give_up(self, self._clock.monotonic())
            raise Unavailable("the storage does not answer in time") from None
        finally:
            self._pulse.end(self)

    @property
    def is_away(self) -> bool:
        """True if the storage does not answer."""
        return self._pulse.is_away(self._clock.monotonic())

    def be_long(self) -> None:
        """What is done now is known to take long, or waits for others; if the storage has ever answered."""
        self._is_long = self._pulse.has_answered

    def _look(self) -> None:
        """Give up, or look again when that may be due."""
        now_s = self._clock.monotonic()
        until_s = self._begun_s + self._most_s
        if not self._is_long:
            until_s = min(until_s, self._pulse.give_up_at(self._begun_s, now_s))
        late_s = now_s - self._look_s
        if late_s > _HELD_UP_S and until_s <= now_s and not self._was_held_up:
            self._was_held_up = True  # what the storage has answered may wait for us, too: once
            until_s = now_s + late_s
        if until_s <= now_s:
            self._timeout.reschedule(self._loop.time())
        else:
            self._look_s = until_s
            self._timer = self._loop.call_later(until_s - now_s, self._look)


current_patience: ContextVar[Patience | None] = ContextVar("patience", default=None)
"""That of the request that runs."""


def be_patient() -> None:
    """What the request that runs does now does not wait for its storage."""
    if (patience := current_patience.get()) is not None:
        patience.be_long()


def is_away() -> bool:
    """True if the storage of the request that runs does not answer."""
    patience = current_patience.get()
    return patience is not None and patience.is_away
