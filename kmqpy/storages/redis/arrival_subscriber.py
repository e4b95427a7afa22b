"""Wakes threads that wait for messages in Redis: one thread subscribes for all queues, by one connection.

functions.lua publishes on the channel of a queue, which is named like the queue's key:

    a <number>  a row has become ready in a queue without ready rows; the number grows with each such arrival
    d <ms>      a row becomes ready by itself in this many ms, sooner than waiting threads were told

The thread subscribes to a channel when another thread waits for the queue. It keeps the subscription for a
minute or more afterwards, because takers wait again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

_UNUSED_CHANNEL_S = 60.0
"""A channel is unused when no thread has waited for its queue for this many seconds. When the server is
silent, the thread unsubscribes unused channels."""
_PING_AFTER_S = 10.0
"""The thread pings the server after this many seconds of silence."""
_ANSWER_WITHIN_S = 2.0
"""Without an answer to its ping for this many seconds the thread connects anew."""
_BACKOFF = Backoff(first=0.05, maximum=2.0)


@dataclass(eq=False, slots=True)
class _Channel:
    """What this process has heard on the channel of a queue, and the threads that wait for the queue.

    heard     wakes the waiting threads
    waiting   the number of threads that wait
    latest    number of the last arrival
    due       when a row becomes ready sooner than its takers knew (monotonic, in s); None: no such row
    rechecks  counts the times at which all waiting threads had to try a take: when a row was due, when the
              subscriber lost its connection, and when it subscribed: it may have missed an arrival before
    used      when a thread last stopped waiting (monotonic, in s)
    """

    heard: threading.Condition
    waiting: int = 0
    latest: int = 0
    due: float | None = None
    rechecks: int = 0
    used: float = 0.0


class ArrivalSubscriber:
    """Lets threads wait for arrivals; `connect` makes a connection, which nothing else uses. Thread-safe."""

    def __init__(self, connect: Callable[[], AbstractConnection]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._channels: dict[bytes, _Channel] = {}
        self._wakes = 0
        self._connection: AbstractConnection | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @property
    def wakes(self) -> int:
        """How often wake() was called, for any channel; a thread reads this before its take, for wait()."""
        return self._wakes

    def wait(self, name: bytes, seen: int, wakes: int, seconds: float) -> bool:
        """Wait for an arrival with a number above `seen`, or until wake() was called more than `wakes` times.

        Also returns True when a row is due, when an arrival may have been missed, and after close(). Returns
        False after `seconds`.
        """
        until = SYSTEM_CLOCK.monotonic() + seconds
        with self._lock:
            channel = self._channel(name)
            rechecks = channel.rechecks
            channel.waiting += 1
            try:
                while not (
                    channel.latest > seen
                    or self._wakes != wakes
                    or channel.rechecks != rechecks
                    or self._stopped.is_set()
                ):
                    now = SYSTEM_CLOCK.monotonic()
                    if channel.due is not None and channel.due <= now:
                        channel.due = None
                        channel.rechecks += 1  # all threads look again, in case the one that takes dies
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
        """Let the threads that wait for this channel return."""
        with self._lock:
            self._wakes += 1
            if name in self._channels:
                self._channels[name].heard.notify_all()

    def close(self) -> None:
        """End the thread, and let all waiting threads return."""
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
                except Exception:  # the thread meets the same error, connects and subscribes anew
                    self._connection = None
        if self._thread is None:
            thread = threading.Thread(target=self._listen, name="kmqpy-redis-arrivals", daemon=True)
            thread.start()  # may fail; then the next call tries again
            self._thread = thread
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
            except Exception:  # waiting threads look again; their takes raise the error
                failures += 1
            with self._lock:
                self._connection = None
                self._recheck_all()
            if connection is not None:
                connection.disconnect()
            if failures:
                self._stopped.wait(_BACKOFF.delay(failures))

    def _subscribe(self, connection: AbstractConnection) -> None:
        with self._lock:
            self._connection = connection
            if self._channels:
                connection.send_command("SUBSCRIBE", *self._channels)

    def _read(self, connection: AbstractConnection) -> None:
        from redis.exceptions import TimeoutError as ReadTimeout

        try:
            kind, *rest = connection.read_response(timeout=_PING_AFTER_S, disconnect_on_error=False)
        except ReadTimeout:
            with self._lock:
                self._unsubscribe_idle(connection)
                connection.send_command("PING")
            kind, *rest = connection.read_response(timeout=_ANSWER_WITHIN_S, disconnect_on_error=False)
        if kind not in (b"message", b"subscribe"):
            return
        with self._lock:
            channel = self._channels.get(rest[0])
            if channel is None:
                return
            if kind == b"subscribe":
                channel.rechecks += 1
            elif rest[1].startswith(b"a "):
                channel.latest = int(rest[1][2:])
            elif rest[1].startswith(b"d "):
                due = SYSTEM_CLOCK.monotonic() + int(rest[1][2:]) / 1000 + 0.001
                channel.due = due if channel.due is None else min(channel.due, due)
            channel.heard.notify_all()

    def _recheck_all(self) -> None:
        for channel in self._channels.values():
            channel.rechecks += 1
            channel.latest = 0  # a server that took over may have an older number
            channel.heard.notify_all()

    def _unsubscribe_idle(self, connection: AbstractConnection) -> None:
        long_ago = SYSTEM_CLOCK.monotonic() - _UNUSED_CHANNEL_S
        idle = [name for name, one in self._channels.items() if not one.waiting and one.used < long_ago]
        if idle:
            connection.send_command("UNSUBSCRIBE", *idle)
        for name in idle:
            del self._channels[name]
