"""Plans which leader znodes a tracker acquires and releases, from snapshots of the registry. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from kmqpy.zookeeper.session import session_of
from tracker.leadership.assignment import STAND_INS, Member, Partition, Plan, assign, next_actions
from tracker.leadership.registry_view import RegistrySnapshot


class Planner:
    """Calls assign() and next_actions(), and remembers between the calls the input of these pure functions.

    takeover_delay_s  the next member in rank takes a partition after this time, if the one before has not
    """

    def __init__(self, tracker_id: str, takeover_delay_s: float) -> None:
        self._id = tracker_id
        self._takeover_delay = takeover_delay_s
        self._eligible: frozenset[Member] = frozenset()
        self._sessions: frozenset[tuple[str, int | None]] = frozenset()
        self._unowned_since: dict[Partition, float] = {}
        self._stand_in: frozenset[Partition] = frozenset()
        self._ranked_for: Any = None
        self._ranking: dict[Partition, tuple[str, ...]] = {}
        """By partition: the ids of the first members in order of rank. Only for partitions to watch."""
        self.claimed: set[Partition] = set()
        """Partitions whose leader znode is ours, or may be, because we have asked ZooKeeper to create it."""

    @property
    def members(self) -> int:
        return len(self._sessions)

    def forget_session(self) -> None:
        """Forget everything about leader znodes, because our session has ended."""
        self._unowned_since.clear()
        self._stand_in = frozenset()
        self.claimed.clear()

    def concerning_us(
        self, queues: Mapping[str, RegisteredQueue], eligible: frozenset[Member]
    ) -> set[Partition]:
        """The partitions to watch: this tracker leads them, is their proposed owner, or is a stand-in."""
        there = {name: queue.partitions for name, queue in queues.items()}
        alive = [(name, count) for name, count in there.items() if not queues[name].deleting]
        if (alive, eligible) != self._ranked_for:
            ranking = assign(((name, p) for name, count in alive for p in range(count)), eligible)
            self._ranking = ranking.near(self._id, 1 + STAND_INS)
            for claimed in self.claimed & ranking.keys():
                self._ranking[claimed] = ranking.first(claimed, 1 + STAND_INS)
            self._ranked_for = (alive, eligible)
        return self._ranking.keys() | {p for p in self.claimed if p[1] < there.get(p[0], 0)}

    def plan(self, tree: RegistrySnapshot, held: Iterable[Partition], now: float) -> Plan:
        """The next actions at the monotonic time `now`, if our session has the leader znodes of `held`."""
        sessions = frozenset((i, session_of(stat)) for i, (_, stat) in tree.members.items())
        if (tree.eligible, sessions) != (self._eligible, self._sessions):
            self._eligible, self._sessions = tree.eligible, sessions
            self._unowned_since.clear()
            self._stand_in = frozenset()
        deleting = {name for name, queue in tree.queues.items() if queue.deleting}
        self._unowned_since = {
            p: self._unowned_since.get(p, now) for p, stat in tree.leaders.items() if session_of(stat) is None
        }
        todo = next_actions(
            self._id,
            self._ranking,
            held=frozenset(held),
            deleting=deleting,
            unowned_since=self._unowned_since,
            stand_in=self._stand_in,
            now=now,
            takeover_delay=self._takeover_delay,
        )
        self._stand_in = todo.stand_in
        # A partition counts as claimed before we ask for its leader znode: the answer may be lost.
        self.claimed = {*held, *todo.acquire}
        return todo
