"""Lets long polls wait, and wakes them: at once by what this gateway sends, soon by what others do."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict

from kmqpy.errors import KmqError
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.gateway.service.served_queue import ServedQueue

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
"""While somebody waits, a queue is looked at so often, in seconds: one look for all who wait."""

Arrival = asyncio.Future[None]


class Polls:
    """The polls that wait for messages, by their queues; used on one event loop."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._waiting: defaultdict[str, dict[Arrival, None]] = defaultdict(dict)
        self._scouts: dict[str, asyncio.Task[None]] = {}
        self.stopped = False
        """True when the gateway ends, so that nobody waits any more."""

    def expect(self, queue: str) -> Arrival:
        """A future that is done when the queue may have messages; end it by forget()."""
        arrival: Arrival = asyncio.get_running_loop().create_future()
        self._waiting[queue][arrival] = None
        return arrival

    async def wait(self, queue: str, arrival: Arrival, seconds: float) -> None:
        """Wait until the queue may have messages, at most so many seconds."""
        if queue not in self._scouts:
            self._scouts[queue] = asyncio.ensure_future(self._scout(queue))
        await asyncio.wait([arrival], timeout=seconds)

    def forget(self, queue: str, arrival: Arrival) -> None:
        """Wait no longer. Who was woken, and did not look since, wakes the next one."""
        waiting = self._waiting[queue]
        if arrival.done():
            self.note(queue)
        waiting.pop(arrival, None)
        if not waiting:
            del self._waiting[queue]

    def note(self, queue: str, count: int | None = 1) -> None:
        """Wake as many as there are new messages; None: all who wait."""
        waiting = self._waiting.get(queue)
        while waiting and (count is None or count > 0):
            arrival = next(iter(waiting))
            del waiting[arrival]
            if not arrival.done():
                arrival.set_result(None)
                count = None if count is None else count - 1

    def stop(self) -> None:
        """Let all polls end now."""
        self.stopped = True
        for queue in list(self._waiting):
            self.note(queue, None)

    async def _scout(self, queue: str) -> None:
        """Look for messages of others, and for those whose delay or lease has ended."""
        try:
            while self._waiting.get(queue):
                await asyncio.sleep(_LOOK_EVERY_S)
                try:
                    if await self._hub.with_queue(
                        QueueName(queue), ServedQueue.is_ready, missing=lambda: True
                    ):
                        self.note(queue, None)
                except KmqError as error:
                    _log.warning("polls wait on", extra={"queue": queue, "error": str(error)})
        finally:
            del self._scouts[queue]
