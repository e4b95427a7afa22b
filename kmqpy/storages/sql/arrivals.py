"""Wakes threads that wait for messages, sent by this process or by others.

An *arrival* is an event after which a take may find more in a queue: a message was sent, given back or
redriven. ArrivalCounts counts arrivals and wakes threads. ArrivalListener and Notifier (PostgreSQL) and
Watcher (SQLite) let processes learn of each other's arrivals. Queues are named by their generations
(QueueRow.generation).
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.storages.sql.connections import Connections

_EVERY_QUEUE = ""
"""The key, in place of a generation, under which arrivals are counted that may be in any queue."""

_CHECK_SILENCE_S = 10.0
"""A connection that was silent for so many seconds is checked: the network may have forgotten it."""


class ArrivalCounts:
    """Counts the arrivals in each queue that this process knows of. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: dict[str, int] = {}

    def seen(self, generation: str) -> int:
        """The number of arrivals that this process has counted in this queue so far."""
        return self._counts.get(generation, 0) + self._counts.get(_EVERY_QUEUE, 0)

    def note(self, generation: str = _EVERY_QUEUE) -> None:
        """Count an arrival in this queue, or, without a generation, in every queue; wake waiting threads."""
        with self._changed:
            self._counts[generation] = self._counts.get(generation, 0) + 1
            self._changed.notify_all()

    def wait(self, generation: str, seen: int, seconds: float) -> bool:
        """Wait until the number of arrivals is no longer `seen`; returns False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self.seen(generation) != seen, seconds)


class ArrivalListener:
    """Hears of arrivals in other processes by PostgreSQL's LISTEN, in a thread with a connection of its own.

    SqlEngine starts the thread when a caller first waits.
    """

    def __init__(self, connections: Connections, channel: str, arrivals: ArrivalCounts) -> None:
        self._connections = connections
        self._channel = channel
        self._arrivals = arrivals
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                thread = threading.Thread(target=self._run, name="kmqpy-sql-listener", daemon=True)
                thread.start()  # may fail; then the next call tries again
                self._thread = thread

    def stop(self) -> None:
        """End the thread, which closes its connection; waits for the thread for 10 s at most."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        attempts = 0
        while not self._stopped.is_set():
            attempts += 1
            with suppress(Exception):  # methods of the engine report that the server is away
                moves = self._connections.moves
                proxy = self._connections.own()
                try:
                    self._listen(proxy, moves)
                finally:
                    proxy.close()
                attempts = 0
            self._stopped.wait(Backoff(0.05, 2, 2).delay(attempts))

    def _listen(self, proxy: Any, moves: int) -> None:
        """Listen until stop(), or until another server has taken over: this one hears of nothing then."""
        connection = proxy.dbapi_connection
        connection.execute(f'LISTEN "{self._channel}"')
        self._arrivals.note()  # earlier arrivals were not heard
        heard_at = SYSTEM_CLOCK.monotonic()
        while not self._stopped.is_set() and self._connections.moves == moves:
            for notice in connection.notifies(timeout=0.2):
                self._arrivals.note(notice.payload)
                heard_at = SYSTEM_CLOCK.monotonic()
            if SYSTEM_CLOCK.monotonic() - heard_at > _CHECK_SILENCE_S:
                if not self._connections.is_alive(proxy):
                    return
                self._arrivals.note()  # the check may have read some
                heard_at = SYSTEM_CLOCK.monotonic()


class Notifier:
    """Tells other processes of arrivals by PostgreSQL's NOTIFY, in a thread with a connection of its own.

    PostgreSQL commits transactions with a NOTIFY one after the other, and syncs its log for each. So the
    engine's own transactions have no NOTIFY; only a put() in the application's transaction has one. The
    thread notifies just after the transactions, for many of them at once and without a sync. If the process
    is killed in between, waiting takers look again after Dialect.waits_ms.
    """

    PAUSE_S = 0.005
    """The shortest pause between two NOTIFYs, in seconds."""

    def __init__(self, connections: Connections, statement: str, channel: str) -> None:
        self._connections = connections
        self._statement = statement
        self._channel = channel
        self._changed = threading.Condition()
        self._untold_queues: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def tell(self, generation: str) -> None:
        """Let the thread tell other processes of a committed arrival in this queue."""
        if generation in self._untold_queues:
            return
        with self._changed:
            if self._thread is None and not self._stopped:
                thread = threading.Thread(target=self._run, name="kmqpy-sql-notifier", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # of a system without threads to give; takers look by themselves, too
                    return
                self._thread = thread
            self._untold_queues.add(generation)
            self._changed.notify()

    def stop(self) -> None:
        """Let the thread tell of the arrivals that are left, and end; waits for it for 10 s at most."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        connection: Any = None
        cursor: Any = None
        told_at = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._untold_queues or self._stopped)
                if not self._untold_queues:
                    break
                generations, self._untold_queues = self._untold_queues, set()
            try:
                now = SYSTEM_CLOCK.monotonic()
                if (
                    connection
                    and now - told_at > _CHECK_SILENCE_S
                    and not self._connections.is_alive(connection)
                ):
                    connection.close()
                    connection = None
                told_at = now
                if connection is None:
                    connection = self._connections.own()
                    cursor = connection.dbapi_connection.cursor()
                    cursor.execute("SET synchronous_commit = off")
                cursor.execute(self._statement, {"channel": self._channel, "arrived": list(generations)})
            except Exception:  # methods of the engine report it; waiting takers look again
                if connection is not None:
                    with suppress(Exception):
                        connection.close()
                    connection = None
            SYSTEM_CLOCK.sleep(self.PAUSE_S)
        if connection is not None:
            connection.close()


class Watcher:
    """Notices that another connection has changed SQLite's file; waiting threads call look() for that."""

    PERIOD_S = 0.01
    """look() asks SQLite at most once in this many seconds; otherwise it returns at once."""

    def __init__(self, connections: Connections, statement: str, arrivals: ArrivalCounts) -> None:
        self._connections = connections
        self._statement = statement
        self._arrivals = arrivals
        self._lock = threading.Lock()
        self._connection: Any = None
        self._is_closed = False
        self._version = 0
        self._looked_at = 0.0

    def look(self) -> None:
        """Note an arrival in every queue at the first look, and if the file was changed since the last."""
        with self._lock:
            now = SYSTEM_CLOCK.monotonic()
            if self._is_closed or now - self._looked_at < self.PERIOD_S:
                return
            self._looked_at = now
            if self._connection is None:
                self._connection = self._connections.own()
            version = self._connection.dbapi_connection.execute(self._statement).fetchone()[0]
            changed, self._version = version != self._version, version
        if changed:
            self._arrivals.note()

    def close(self) -> None:
        """Close its connection."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None
