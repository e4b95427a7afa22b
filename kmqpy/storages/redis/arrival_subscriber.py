"""Tells threads of messages that arrive, by Redis' channels: one connection and one thread for all queues.

The functions publish on the channel of a queue, which is named like its key: `a <number>` for the first row
that is ready in an empty queue, where the number grows with each, and `d <ms>` when a row becomes ready by
itself sooner than the waiting threads were told. The thread subscribes to a channel while somebody waits,
and for a while after, since takers wait again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from redis.connection import Connection

_LINGER_S = 60.0
_SILENCE_S = 10.0
"""After that long without a message the server is asked whether it is still there."""
_BACKOFF = Backoff(first=0.05, maximum=2.0)


@dataclass(eq=False, slots=True)
class _Channel:
    """The state of a queue that this process knows.

    latest   number of the last arrival
    due      when a row becomes ready sooner than its takers knew (monotonic, in s)
    resumed  counts the subscriptions: what came between two of them was not heard
    """

    heard: threading.Condition
    waiting: int = 0
    latest: int = 0
    due: float | None = None
    resumed: int = 0
    used: float = 0.0


class ArrivalSubscriber:
    """Lets threads wait for arrivals; `connect` returns a new connection, which only this object uses."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._channels: dict[bytes, _Channel] = {}
        self._wakes = 0
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @property
    def wakes(self) -> int:
        """How often wake() was called; a thread notes it before its take, for wait()."""
        return self._wakes

    def wait(self, name: bytes, seen: int, wakes: int, seconds: float) -> bool:
        """Wait for an arrival after number `seen` or a call of wake() after `wakes` of them.

        Also returns True when an arrival may have been missed; False after `seconds`.
        """
        until = SYSTEM_CLOCK.monotonic() + seconds
        with self._lock:
            channel = self._channel(name)
            resumed = channel.resumed
            channel.waiting += 1
            try:
                while not (
                    channel.latest > seen
                    or self._wakes != wakes
                    or channel.resumed != resumed
                    or self._stopped.is_set()
                ):
                    now = SYSTEM_CLOCK.monotonic()
                    if channel.due is not None and channel.due <= now:
                        channel.due = None
                        channel.resumed += 1  # all threads take, in case that one of them dies
                        channel.heard.notify_all()
                        return True
                    if until <= now:
                        return False
                    channel.heard.wait((until if channel.due is None else min(until, channel.due)) - now)
                return True
            finally:
                channel.waiting -= 1
                channel.used = SYSTEM_CLOCK.monotonic()

    def wake(self, name: bytes) -> None:
        """Let those who wait for this channel return."""
        with self._lock:
            self._wakes += 1
            if name in self._channels:
                self._channels[name].heard.notify_all()

    def close(self) -> None:
        """End the thread, and let all return who wait."""
        with self._lock:
            self._stopped.set()
            for channel in self._channels.values():
                channel.heard.notify_all()
            if self._connection is not None:
                self._connection.disconnect()  # the thread's read fails
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _channel(self, name: bytes) -> _Channel:
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = _Channel(threading.Condition(self._lock))
            if self._connection is not None:
                try:
                    self._connection.send_command("SUBSCRIBE", name)
                except Exception:  # the thread meets the same error, and subscribes anew
                    self._connection = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._listen, name="kmqpy-redis-arrivals", daemon=True)
            self._thread.start()
        return channel

    # --- the thread -------------------------------------------------------------------------------

    def _listen(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            connection = None
            try:
                connection = self._connect()
                self._subscribe(connection)
                while not self._stopped.is_set():
                    self._read(connection)
                    failures = 0
            except Exception:  # threads that wait take, and that raises what is wrong
                failures += 1
            with self._lock:
                self._connection = None
                self._resume_all()
            if connection is not None:
                connection.disconnect()
            if failures:
                self._stopped.wait(_BACKOFF.delay(failures))

    def _subscribe(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            if self._channels:
                connection.send_command("SUBSCRIBE", *self._channels)

    def _read(self, connection: Connection) -> None:
        from redis.exceptions import TimeoutError as ReadTimeout

        try:
            kind, *rest = connection.read_response(timeout=_SILENCE_S, disconnect_on_error=False)
        except ReadTimeout:
            with self._lock:
                self._unsubscribe_idle(connection)
                connection.send_command("PING")
            kind, *rest = connection.read_response(timeout=_SILENCE_S, disconnect_on_error=False)
        if kind not in (b"message", b"subscribe"):
            return
        with self._lock:
            channel = self._channels.get(rest[0])
            if channel is None:
                return
            if kind == b"subscribe":
                channel.resumed += 1
            elif rest[1].startswith(b"a "):
                channel.latest = int(rest[1][2:])
            elif rest[1].startswith(b"d "):
                due = SYSTEM_CLOCK.monotonic() + int(rest[1][2:]) / 1000 + 0.001
                channel.due = due if channel.due is None else min(channel.due, due)
            channel.heard.notify_all()

    def _resume_all(self) -> None:
        for channel in self._channels.values():
            channel.resumed += 1
            channel.latest = 0  # a server that took over may have an older number
            channel.heard.notify_all()

    def _unsubscribe_idle(self, connection: Connection) -> None:
        long_ago = SYSTEM_CLOCK.monotonic() - _LINGER_S
        idle = [name for name, one in self._channels.items() if not one.waiting and one.used < long_ago]
        if idle:
            connection.send_command("UNSUBSCRIBE", *idle)
        for name in idle:
            del self._channels[name]
