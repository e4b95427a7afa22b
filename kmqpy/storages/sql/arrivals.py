"""Wakes threads that wait for messages, sent by this process or by others."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import sqlalchemy

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK

_ALL = ""


class ArrivalCounts:
    """Counts the arrivals in each queue, by its generation, as far as this process knows of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: dict[str, int] = {}

    def seen(self, generation: str) -> int:
        """The number of arrivals so far."""
        return self._counts.get(generation, 0) + self._counts.get(_ALL, 0)

    def note(self, generation: str = _ALL) -> None:
        """Count an arrival in this queue; without a generation, in every queue."""
        with self._changed:
            self._counts[generation] = self._counts.get(generation, 0) + 1
            self._changed.notify_all()

    def wait(self, generation: str, seen: int, seconds: float) -> bool:
        """Wait up to `seconds`; True when there was an arrival after the first `seen` ones."""
        with self._changed:
            return self._changed.wait_for(lambda: self.seen(generation) != seen, seconds)


class Listener:
    """Learns of the arrivals of other processes by LISTEN, on one connection beside the pool.

    It begins with the first wait.
    """

    def __init__(self, pool: sqlalchemy.Engine, channel: str, arrivals: ArrivalCounts) -> None:
        self._pool = pool
        self._channel = channel
        self._arrivals = arrivals
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Listen, unless it does so already."""
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="kmqpy-sql-listener", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop listening and close the connection."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        attempts = 0
        while not self._stopped.is_set():
            attempts += 1
            with suppress(Exception):  # the pool's users report that the server is away
                proxy = self._pool.raw_connection()
                proxy.detach()
                try:
                    self._listen(proxy.dbapi_connection)
                finally:
                    proxy.close()
                attempts = 0
            self._stopped.wait(Backoff(0.05, 2, 2).delay(attempts))

    def _listen(self, connection: Any) -> None:
        connection.execute(f'LISTEN "{self._channel}"')
        self._arrivals.note()  # what came before was not heard
        while not self._stopped.is_set():
            for notice in connection.notifies(timeout=0.2):
                self._arrivals.note(notice.payload)


class Notifier:
    """Tells other processes by NOTIFY, on one connection beside the pool, from the first arrival on.

    PostgreSQL commits transactions with a NOTIFY one after the other, each with its sync. So the
    transactions of senders have none. A thread notifies just after them, for many at once, without a sync.
    If it is killed in between, those who wait look again by themselves.
    """

    PAUSE_S = 0.005

    def __init__(self, pool: sqlalchemy.Engine, statement: str, channel: str) -> None:
        self._pool = pool
        self._statement = statement
        self._channel = channel
        self._changed = threading.Condition()
        self._untold: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def tell(self, generation: str) -> None:
        """Tell other processes of an arrival in this queue, which is committed."""
        if generation in self._untold:
            return
        with self._changed:
            self._untold.add(generation)
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="kmqpy-sql-notifier", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self) -> None:
        """Tell the arrivals that are left, and close the connection."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        connection: Any = None
        cursor: Any = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._untold or self._stopped)
                if not self._untold:
                    break
                generations, self._untold = self._untold, set()
            try:
                if connection is None:
                    connection = self._pool.raw_connection()
                    connection.detach()
                    cursor = connection.dbapi_connection.cursor()
                    cursor.execute("SET synchronous_commit = off")
                cursor.execute(self._statement, {"channel": self._channel, "arrived": list(generations)})
            except Exception:  # the pool's users report that the server is away; who waits looks again
                if connection is not None:
                    with suppress(Exception):
                        connection.close()
                    connection = None
            SYSTEM_CLOCK.sleep(self.PAUSE_S)
        if connection is not None:
            connection.close()


class Watcher:
    """Notices that another connection has changed SQLite's file, when a thread that waits looks."""

    PERIOD_S = 0.01

    def __init__(self, pool: sqlalchemy.Engine, statement: str, arrivals: ArrivalCounts) -> None:
        self._pool = pool
        self._statement = statement
        self._arrivals = arrivals
        self._lock = threading.Lock()
        self._connection: Any = None
        self._version = 0
        self._looked_at = 0.0

    def look(self) -> None:
        """Note an arrival in each queue if the file was changed since the last look."""
        with self._lock:
            now = SYSTEM_CLOCK.monotonic()
            if now - self._looked_at < self.PERIOD_S:
                return
            self._looked_at = now
            if self._connection is None:
                self._connection = self._pool.raw_connection()
                self._connection.detach()
            version = self._connection.dbapi_connection.execute(self._statement).fetchone()[0]
            changed, self._version = version != self._version, version
        if changed:
            self._arrivals.note()

    def close(self) -> None:
        """Close its connection."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
