"""Follows the ZooKeeper session of a tracker, and computes until when the session is certainly alive."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kazoo.protocol.states import KazooState, KeeperState

from kmqpy.core.clock import Clock
from kmqpy.zookeeper.session import gather, last_failure, session_of, stop

log = logging.getLogger(__name__)

RESTART_AFTER_S = 2.0
"""kazoo's client is started again when it has been closed, or refused by ZooKeeper, for this long."""


class TrackerSession:
    """Follows the session of a kazoo client. For the leadership's thread.

    `is_certain` and `is_ours` do no I/O, and any thread may call them.

    member_path  the path of the tracker's member znode, which lives as long as the session
    changed      called by a thread of kazoo when the state of the connection has changed
    """

    def __init__(
        self,
        zk: Any,
        member_path: str,
        tracker_id: str,
        timeout_s: float,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self._zk = zk
        self._member_path = member_path
        self._tracker_id = tracker_id
        self._timeout = timeout_s
        self._clock = clock
        self._changed = changed
        self._connection = 0
        """How often the connection's state has changed so far. Each state has this number as its name."""
        self._verified = (-1, 0.0)
        """The connection that was verified last, and the monotonic time until which that counts."""
        self.verify_at = 0.0
        """The monotonic time at which the session is verified next; 0: at once."""
        self._gave_up_at: float | None = None
        self._logged = False
        zk.add_listener(self._on_state)

    @property
    def certain_s(self) -> float:
        """For how many seconds a verified session is certainly alive: two thirds of its granted timeout."""
        return float(self._zk.granted_s) * 2 / 3

    def is_certain(self) -> bool:
        """True while the session is certainly alive.

        The round trip that verified the session last counts for two thirds of the session timeout from its
        start, on a monotonic clock, and only while the state of the connection has not changed.
        """
        connection, deadline = self._verified
        return connection == self._connection and self._clock.monotonic() < deadline

    def is_ours(self, stat: Any) -> bool:
        client_id = self._zk.client_id
        return client_id is not None and session_of(stat) == client_id[0]

    def current(self) -> int | None:
        client_id = self._zk.client_id
        if self._zk.state != KazooState.CONNECTED or client_id is None:
            return None
        self._gave_up_at = None
        self._logged = False
        session: int = client_id[0]
        return session

    def is_lost(self) -> bool:
        """True once the session has ended; a lost connection alone does not end it."""
        return bool(self._zk.state == KazooState.LOST)

    def verify_when_due(self, session: int) -> None:
        """If due, verify by a round trip through ZooKeeper's leader that the session still exists."""
        if self._clock.monotonic() < self.verify_at and self._verified[0] == self._connection:
            return
        connection, started = self._connection, self._clock.monotonic()
        calls = [self._zk.sync_async(self._member_path), self._zk.exists_async(self._member_path)]
        _, stat = gather(calls, self._timeout)
        if session_of(stat) == session:
            self._verified = (connection, started + self.certain_s)
        self.verify_at = started + self.certain_s * 3 / 8  # a quarter of the session timeout

    def revive(self) -> None:
        """Start the client again if kazoo has given up for good, as it does when ZooKeeper refuses it."""
        now = self._clock.monotonic()
        if self._zk.client_state not in {KeeperState.CLOSED, KeeperState.AUTH_FAILED}:
            self._gave_up_at = None
        elif self._gave_up_at is None:
            self._gave_up_at = now
        elif now - self._gave_up_at > RESTART_AFTER_S:
            if not self._logged:
                text, about = "ZooKeeper can't be reached or refused us%s; trying again", self._tracker_id
                log.error(text, last_failure(self._zk), extra={"tracker": about})
            self._logged = True
            self._gave_up_at = None
            stop(self._zk)
            self._zk.start_async()

    def _on_state(self, _state: str) -> None:
        self._connection += 1
        self._changed()
