"""Opens a client at its first use and closes it when it is idle, or when nobody can use it any more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from kmqpy.core.clock import Clock
from kmqpy.core.forks import ForkGuard
from kmqpy.errors import Closed
from kmqpy.message import MessagesLike

if TYPE_CHECKING:
    from kmqpy.kafka.client.consumer import QueueConsumer
    from kmqpy.kafka.client.lanes import LanesConsumer
    from kmqpy.kafka.settings import QueueSettings

    _Consumer: TypeAlias = QueueConsumer | LanesConsumer

_log = logging.getLogger(__name__)


class LazyConsumer:
    """Opens a client at its first use, and closes it when it is idle.

    use() opens the client when there is none. When the client was idle and has been closed, the next use()
    opens a new one. So does the next taker when it is outdated and only takers use it, who go on with the new
    one: were it kept until nobody used it, two threads that receive all the time would keep it for ever.

    Safe to use from any thread. `what` names the client in errors; `make` gets this object. `refresh` reads
    the queue's settings anew, for the next `make`, and returns them.
    """

    def __init__(
        self,
        make: Callable[[LazyConsumer], _Consumer],
        what: str,
        clock: Clock,
        refresh: Callable[[], QueueSettings],
    ) -> None:
        self.current_settings = refresh
        self._make = make
        self._what = what
        self._clock = clock
        self._guard = ForkGuard(what)
        # Reentrant: the garbage collector may end an iteration, and with it use(), in the middle of any call.
        self._lock = threading.RLock()
        self._client: _Consumer | None = None
        self._users = 0
        self._takers = 0
        """Those of the users that receive or iterate; a client that is closed ends their call."""
        self._used_at = 0.0
        self._closed = False
        self._abandoned = False
        self._told = False

    @property
    def current(self) -> _Consumer | None:
        """The open client, or None. Reading this opens none, and does not count as use."""
        return self._client

    @property
    def is_open(self) -> bool:
        """True before close(), in the process that made this object."""
        return not self._closed and not self._guard.inherited

    def check_open(self) -> None:
        """Raise Closed after close(), and Forked in a process that fork() made after this object."""
        self._guard.raise_if_inherited()
        if self._closed:
            raise Closed(f"{self._what} is closed")

    @contextmanager
    def use(self, *, takes: bool = False) -> Iterator[_Consumer]:
        """Yield the client, opened if there is none. A client that is in use does not count as idle.

        takes  the caller receives or iterates, and goes on with another use() when the client is closed

        Raises Closed, Forked, and the errors of opening the client.
        """
        self.check_open()  # before the lock, which nobody may ever release in a forked process
        with self._lock:
            self.check_open()
            others = self._users - (self._takers if takes else 0)
            if self._client is not None and self._client.outdated and not others:
                self.close_current()
            if self._client is None:
                self._client = client = self._make(self)
                if self._closed:  # by another thread, which perhaps saw no client yet
                    client.close()
                    self.check_open()
            client = self._client
            self._users += 1
            self._takers += takes
        try:
            yield client
        finally:
            with self._lock:
                self._users -= 1
                self._takers -= takes
                self._used_at = self._clock.monotonic()

    def ack(self, *messages: MessagesLike, confirmed: bool = False) -> None:
        """See KmqClient.ack. Messages call this object, not the KmqClient, which they must not keep alive."""
        with self.use() as client:
            client.ack(*messages, confirmed=confirmed)

    def abandon(self) -> None:
        """Have the client closed soon, in its own thread; called when the KmqClient is collected.

        The collector may run in any thread and in the middle of any call, so this takes no lock and waits for
        nothing. Messages that are still there can be acknowledged all the same.
        """
        self._abandoned = True

    def close_if_abandoned(self) -> None:
        """Close the client after abandon() if nobody uses it; the thread of the client calls this."""
        if not self._abandoned or not self._lock.acquire(blocking=False):
            return
        try:
            if self._users:
                return
            if not self._told:
                self._told = True
                _log.warning("%s was collected and never closed; it leaves its group", self._what)
            self.close_current()
        finally:
            self._lock.release()

    def close_if_idle(self, idle_s: float) -> None:
        """Close the client if nobody has used it for `idle_s` seconds and it has no messages in flight."""
        with self._lock:
            unused_for = self._clock.monotonic() - self._used_at
            if (
                self._client is not None
                and not self._users
                and unused_for >= idle_s
                and not self._client.leased
            ):
                self.close_current()

    def close_current(self) -> None:
        """Close the client that is open; the next user opens another one."""
        with self._lock:  # until the client has left the group, which the next client joins
            client, self._client = self._client, None
            if client is not None:
                client.close()

    def close(self) -> None:
        """Close the client for good: calls of its users raise Closed. Does nothing in a forked process."""
        if self._guard.inherited:
            return
        self._closed = True
        client = self._client
        if client is not None:
            client.close()  # not under the lock, which another thread may have while it opens a client
