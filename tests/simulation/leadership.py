"""A tracker's leadership in a simulation: what it does at ZooKeeper, in single steps."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType, SimpleNamespace
from typing import Any

from kmqpy.errors import Unavailable
from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from tracker.leadership.assignment import Member, assign, next_actions
from tracker.leadership.published_view import LeadershipView

from .journal import Stored
from .world import Steps
from .zookeeper import SESSION_MS, NoSession

_RECHECK_MS = 1_000
_LEASE_OF_SESSION_MS = SESSION_MS * 2 / 3
_TAKEOVER_DELAY_S = 1.0

_assigned = lru_cache(lambda keys, members: assign(keys, map(Member, members)))
"""The assignment, which every tracker computes anew at each look: computed once for the same members."""


class Leadership:
    """tracker.leadership.leadership over the simulated ZooKeeper: the same decisions, one actor."""

    def __init__(self, zookeeper: SimpleNamespace, **settings: Any) -> None:
        self._zk, self._process, queue, partitions = zookeeper.hosts
        self._world = self._process.world
        self._id: str = settings["tracker_id"]
        self._queue, self._partitions = queue, partitions
        self._look_at_queues()
        self._view = LeadershipView()
        self._session: int | None = None
        self._verified_until = 0.0
        self._verify_at = 0.0
        self._unowned_since: dict[Any, float] = {}
        self._stand_in: frozenset[Any] = frozenset()
        self._membership: Any = None
        self._releases: dict[Any, int] = {}
        self._versions: dict[Any, int] = {}
        self._actor = self._process.spawn(self._run())
        self._closed = False

    def _look_at_queues(self) -> None:
        settings, deleting = self._queue, ()
        if (lanes := self._zk.lanes) is not None:
            settings = lanes.settings
            deleting = lanes.registered_only()
        self._deleting = [lane.name for lane in deleting]
        queues = {
            lane.name: RegisteredQueue(lane, self._partitions, lane in deleting)
            for lane in (*deleting, *reversed(settings.lanes()))
        }
        self._queues = MappingProxyType(queues)
        self._keys = [(name, p) for name in queues for p in range(self._partitions)]

    def start(self, timeout: float) -> "Leadership":
        self._zk.watchers.append(self._changed)
        return self

    def close(self) -> None:
        self.forget()
        if self._session in self._zk.sessions:
            self._zk.end(self._session)
        self._session = None
        self._view = LeadershipView()

    def forget(self) -> None:
        """Follow no more: closed, or dead."""
        if not self._closed:
            self._closed = True
            self._zk.watchers.remove(self._changed)

    def snapshot(self) -> LeadershipView:
        return self._view

    def may_redeliver(self) -> bool:
        return self._world.now < self._verified_until

    def set_kafka_ok(self, ok: bool) -> None:
        pass

    def release(self, queue: str, partition: int) -> None:
        epoch = self._view.owned.get((queue, partition))
        if epoch is not None:
            self._releases[queue, partition] = epoch
            self._publish(self._view)
            self._world.wake(self._actor)

    def verify(self, queue: str, partition: int) -> Steps:
        yield from self._reach()
        ours = self._is_ours((queue, partition))
        yield self._world.latency()
        return ours

    def read_offset(self, queue: str, partition: int) -> Steps:
        yield from self._reach()
        stored, version = self._zk.offsets.get((queue, partition), (None, 0))
        self._versions[queue, partition] = version
        yield self._world.latency()
        return stored

    def write_offsets(self, offsets: Mapping[Any, Any]) -> frozenset[Any]:
        if self._cut or self._session not in self._zk.sessions:
            raise Unavailable("ZooKeeper")
        done = set()
        for key, stored in offsets.items():
            if not self._is_ours(key):
                continue
            version = self._versions[key] = self._zk.offsets.get(key, (None, 0))[1]

            def arrive(key: Any = key, stored: Any = stored, version: int = version) -> None:
                if self._zk.offsets.get(key, (None, 0))[1] == version:
                    self._zk.offsets[key] = (stored, version + 1)
                    self._world.journal.append(Stored(key[1], stored))
                    if self._world.tracing:
                        shown = replace(stored, copy=None)  # which names a claim, by a random text
                        self._world.trace(self._process.name, f"stored {key[1]}: {shown}")

            if self._world.unlucky():  # it arrives when the partition may be another's
                self._world.at(3000 * self._world.random(), arrive)
            else:
                arrive()
                done.add(key)
        return frozenset(done)

    @property
    def _cut(self) -> bool:
        return self._process.zk_cut_until > self._world.now

    def _reach(self) -> Steps:
        yield self._world.latency()
        if self._cut or self._session not in self._zk.sessions:
            raise Unavailable("ZooKeeper")

    def _is_ours(self, key: Any) -> bool:
        return self._zk.leaders.get(key, (None, 0))[0] == self._session

    def _changed(self) -> None:
        self._world.wake(self._actor, self._world.latency())

    def _run(self) -> Steps:
        while not self._closed:
            if self._cut:
                # kazoo tells of a lost session only when it is connected again.
                yield self._world.latency() * 10
                self._verified_until = 0.0
                yield max(0.0, self._process.zk_cut_until - self._world.now)
                self._verify_at = 0.0
                continue
            try:
                yield (yield from self._pass())
            except NoSession:
                self._begin_session()
        if self._session in self._zk.sessions:
            self._zk.end(self._session)

    def _begin_session(self) -> None:
        self._verified_until = 0.0
        self._session = None
        self._releases.clear()
        self._unowned_since.clear()
        self._stand_in = frozenset()
        self._publish(LeadershipView(queues=self._queues))

    def _pass(self) -> Steps:
        zk, world = self._zk, self._world
        if self._session is None:
            yield world.latency()
            if self._closed:
                return 0.0
            self._session = zk.connect(self._process)
        session = self._session
        if world.now >= self._verify_at:
            started = world.now
            yield world.latency()
            zk.check(session)
            self._verified_until = started + _LEASE_OF_SESSION_MS
            self._verify_at = started + _LEASE_OF_SESSION_MS * 3 / 8
            world.wake(self._process.main)
        if zk.members.get(self._id) != session:
            zk.register(session, self._id)
        members = dict(zk.members)
        yield world.latency()
        zk.check(session)
        self._look_at_queues()
        leaders = dict(zk.leaders)
        for key, epoch in list(self._releases.items()):
            if leaders.get(key) == (session, epoch):
                yield world.latency()
                zk.give_up(session, key, epoch)
                world.trace(self._process.name, f"released {key[1]}")
                leaders.pop(key)
            if self._releases.get(key) == epoch:
                del self._releases[key]
        held = {key: epoch for key, (owner, epoch) in leaders.items() if owner == session}
        if members != self._membership:
            self._membership = members
            self._unowned_since.clear()
            self._stand_in = frozenset()
        now = world.now / 1000
        self._unowned_since = {
            key: self._unowned_since.get(key, now) for key in self._keys if key not in leaders
        }
        todo = next_actions(
            self._id,
            _assigned(tuple(self._keys), tuple(members)),
            held=frozenset(held),
            deleting=self._deleting,
            unowned_since=self._unowned_since,
            stand_in=self._stand_in,
            now=now,
            takeover_delay=_TAKEOVER_DELAY_S,
        )
        self._stand_in = todo.stand_in
        owned = MappingProxyType(dict(held))
        self._publish(LeadershipView(owned, todo.releasing, self._queues, connected=True))
        made = False
        for key in todo.acquire:
            yield world.latency()
            if zk.lead(session, key):
                made = True
                world.trace(self._process.name, f"leads {key[1]}")
        due = [self._verify_at, world.now + _RECHECK_MS]
        due += [todo.next_due * 1000] if todo.next_due is not None else []
        return 0.0 if made else max(0.0, min(due) - world.now)

    def _publish(self, view: LeadershipView) -> None:
        owned = {key: epoch for key, epoch in view.owned.items() if self._releases.get(key) != epoch}
        view = LeadershipView(
            MappingProxyType(owned), frozenset(view.releasing & owned.keys()), view.queues, view.connected
        )
        if view != self._view:
            self._view = view
            self._world.wake(self._process.main)
