"""A simulated ZooKeeper: sessions, members, leader znodes, offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .world import Process, World

if TYPE_CHECKING:
    from .lanes import Lanes

SESSION_MS = 2_000
"""A session ends when nothing was heard for this long."""


class NoSession(Exception):
    """The session is over."""


class ZooKeeper:
    """Members, leader znodes and offsets; every change wakes the watchers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sessions: dict[int, Process] = {}
        self.members: dict[str, int] = {}
        self.leaders: dict[Any, tuple[int, int]] = {}
        self.offsets: dict[Any, Any] = {}
        self.watchers: list[Callable[[], None]] = []
        self.lanes: Lanes | None = None
        """What the registry says of them, if the queue has some."""
        self._zxid = 0

    def connect(self, process: Process) -> int:
        self._zxid += 1
        self.sessions[self._zxid] = process
        process.zk_session = self._zxid
        return self._zxid

    def silent(self, process: Process) -> None:
        """Nothing is heard of `process` from now on; its session ends when that lasts."""
        session = process.zk_session
        if session is None:
            return

        def look() -> None:
            if session in self.sessions and process.silent_to_zookeeper:
                self.world.trace("zookeeper", f"session of {process.name} expired")
                self.end(session)

        self.world.at(SESSION_MS, look)

    def end(self, session: int) -> None:
        self.sessions.pop(session, None)
        self.members = {name: s for name, s in self.members.items() if s != session}
        self.leaders = {key: owner for key, owner in self.leaders.items() if owner[0] != session}
        self.changed()

    def check(self, session: int) -> None:
        if session not in self.sessions:
            raise NoSession

    def register(self, session: int, member: str) -> None:
        self.check(session)
        self.members[member] = session
        self.changed()

    def lead(self, session: int, key: Any) -> bool:
        """Make the leader znode; False when there is one."""
        self.check(session)
        if key in self.leaders:
            return False
        self._zxid += 1
        self.leaders[key] = (session, self._zxid)
        self.changed()
        return True

    def give_up(self, session: int, key: Any, czxid: int) -> None:
        self.check(session)
        if self.leaders.get(key) == (session, czxid):
            del self.leaders[key]
            self.changed()

    def changed(self) -> None:
        for watcher in self.watchers:
            watcher()
