"""Keeps a tracker a member in ZooKeeper, and has it own the partitions that the assignment proposes to it.

The assignment only proposes an owner; the partition's leader znode decides. This tracker owns a partition
while the `ephemeralOwner` of the leader znode is the tracker's session, whatever the znode's data say.
ZooKeeper can't stop a tracker that does not know yet that its session has ended. Therefore `may_redeliver`
turns False at a local deadline, before the session can end. Kafka's fencing covers the remaining risk: Kafka
refuses writes of a former owner's producer once a new owner has opened its own.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kazoo.protocol.states import Callback

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.errors import AccessDenied, ConfigError, Unavailable
from kmqpy.kafka.admin.registry_entries import StoredOffset, TrackerInfo
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.zookeeper.session import address, check_access, gather, new_client, session_of, stop, unavailable
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.leadership.assignment import Partition
from tracker.leadership.offset_znodes import OffsetStore
from tracker.leadership.ownership import LeaderZnodes, MemberZnode
from tracker.leadership.planner import Planner
from tracker.leadership.published_view import LeadershipView, PublishedView
from tracker.leadership.registry_view import RegistryReader, RegistrySnapshot
from tracker.leadership.tracker_session import TrackerSession
from tracker.leadership.znode_cache import ZnodeCache

log = logging.getLogger(__name__)

RECHECK_S = 1.0
"""The tracker reads all znodes again after this time, whether or not watches have reported changes."""
RECHECK_ZNODES_PER_S = 50
"""It waits for longer if all trackers together would read more znodes per second than this."""
_FAILURE_PAUSE = Backoff(0.1, 2, 2, jitter=0)
"""The pause of the thread after a failure: 0.1 s, doubled by each failure in a row, up to 2 s."""
_POLL_S = 0.05
"""While `start` waits for the registration, it checks at intervals of this many seconds for denied access."""


class Leadership(Closeable):
    """The membership of one tracker and the partitions it owns; a thread of its own keeps both up to date.

    zookeeper           the address of ZooKeeper, and the credentials
    tracker_id          unique among the living trackers; the data of the leader znodes
    queues              the queues to serve; None: all that are registered
    session_timeout_ms  how long after this tracker's death other trackers take over
    takeover_delay      seconds after which the next member in rank takes a partition that the proposed owner
                        has not taken

    snapshot, may_redeliver, release and set_kafka_ok do no I/O; any thread may call them. verify, read_offset
    and write_offsets wait for ZooKeeper, each request for one session timeout at most, and raise Unavailable.
    Only one thread at a time may call read_offset and write_offsets.
    """

    def __init__(
        self,
        zookeeper: ZooKeeperConnection,
        tracker_id: str,
        *,
        root: str = "/kmq",
        host: str = "",
        queues: frozenset[str] | None = None,
        session_timeout_ms: int = 6_000,
        takeover_delay: float = 3.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not tracker_id or "/" in tracker_id or tracker_id in {".", ".."}:
            raise ConfigError(f"tracker_id: {tracker_id!r} must not be empty or contain /")
        self._id = tracker_id
        self._paths = ZnodePaths(root)
        self._clock = clock
        self._timeout = session_timeout_ms / 1000
        self._wake_up = threading.Event()  # set when the thread has something to do
        self._closing = threading.Event()
        self._denied: AccessDenied | None = None
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)
        self._published = PublishedView()
        self._zk = new_client(zookeeper, session_timeout_ms)
        self._session = TrackerSession(
            self._zk, self._paths.tracker(tracker_id), tracker_id, self._timeout, clock, self._wake_up.set
        )
        self._znodes = ZnodeCache(self._zk, self._wake_up.set, self._timeout)
        info = TrackerInfo(tracker_id, host, clock.wall_ms(), queues, kafka_ok=True)
        self._member = MemberZnode(self._zk, self._znodes, self._paths, info, self._timeout)
        ours = self._session.is_ours, self._seen_as_ours, self._paths.tracker(tracker_id)
        self._offsets = OffsetStore(self._zk, self._paths, self._timeout, *ours)

        # Only the thread uses the following.
        self._reader = RegistryReader(self._paths, queues)
        self._leaders = LeaderZnodes(self._zk, self._znodes, self._paths, tracker_id, self._timeout)
        self._planner = Planner(tracker_id, takeover_delay)
        self._session_id: int | None = None
        self._recheck_at = 0.0

    def start(self, timeout: float | None = None) -> Leadership:
        """Connect and start the thread; with `timeout`, wait that many seconds for the registration.

        Raises Unavailable if the tracker is not registered by then, and AccessDenied as soon as ZooKeeper
        denies access.
        """
        self._zk.start_async()
        self._thread.start()
        try:
            if timeout is not None:
                self._wait_until_registered(timeout)
        except Unavailable:
            self.close()
            raise
        return self

    def _wait_until_registered(self, timeout: float) -> None:
        deadline = self._clock.monotonic() + timeout
        while not self._member.registered.wait(_POLL_S):
            if self._denied is not None:
                raise self._denied
            check_access(self._zk)
            if self._clock.monotonic() >= deadline:
                why = "another session is registered so" if self._member.other_session else "no answer"
                raise Unavailable(
                    f"ZooKeeper at {address(self._zk)}: could not register as {self._id!r} "
                    f"within {timeout:g} s: {why}"
                )

    def close(self) -> None:
        """End the session: ZooKeeper deletes every leader znode at once, and other trackers take over."""
        self._closing.set()
        self._wake_up.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._timeout)
        stop(self._zk)
        self._published.publish(LeadershipView())

    def snapshot(self) -> LeadershipView:
        return self._published.view

    def alive(self) -> bool:
        """False once the thread has died: then only a restart helps. A lost connection does not count."""
        return self._thread.ident is None or self._thread.is_alive() or self._closing.is_set()

    def may_redeliver(self) -> bool:
        return self._session.is_certain()

    def set_kafka_ok(self, ok: bool) -> None:
        """Tell the other trackers whether this one reaches Kafka; if not, no partition is proposed to it."""
        self._member.set_kafka_ok(ok)
        self._wake_up.set()

    def release(self, queue: str, partition: int) -> None:
        """Give up an owned partition: snapshot() omits it at once, the thread deletes its znode soon."""
        if self._published.release((queue, partition)):
            self._wake_up.set()

    def verify(self, queue: str, partition: int) -> bool:
        """Ask ZooKeeper's leader whether this tracker owns the partition. Raises Unavailable."""
        path = self._paths.leader(queue, partition)
        with unavailable(self._zk):
            _, stat = gather([self._zk.sync_async(path), self._zk.exists_async(path)], self._timeout)
            return self._session.is_ours(stat)

    def read_offset(self, queue: str, partition: int) -> StoredOffset | None:
        """The stored offset; None if there is no offset or it can't be decoded. Raises Unavailable."""
        return self._offsets.read((queue, partition))

    def write_offsets(self, offsets: Mapping[Partition, StoredOffset]) -> frozenset[Partition]:
        """Store offsets, see OffsetStore.write(). Raises Unavailable when some may have been stored."""
        return self._offsets.write(offsets)

    def _seen_as_ours(self, partitions: Iterable[Partition]) -> set[Partition]:
        """Return those whose leader znode is ours by the cache, after one round trip to ZooKeeper."""
        (stat,) = gather([self._zk.exists_async(self._paths.tracker(self._id))], self._timeout)
        if not self._session.is_ours(stat):
            return set()
        events_applied = threading.Event()  # set once the events that came before the answer are applied
        self._zk.handler.dispatch_callback(Callback("watch", events_applied.set, ()))
        if not events_applied.wait(self._timeout):
            return set()
        return {p for p in partitions if self._session.is_ours(self._znodes.seen(self._paths.leader(*p)))}

    def _run(self) -> None:
        failures, logged = 0, ""
        while not self._closing.is_set():
            self._wake_up.clear()
            try:
                with unavailable(self._zk):
                    delay = self._pass()
                self._denied = None
                if logged and self._published.view.connected:
                    log.info("ZooKeeper answers again", extra={"tracker": self._id})
                    failures, logged = 0, ""
            except Exception as error:
                self._znodes.expire()
                expected = isinstance(error, Unavailable)
                self._denied = error if isinstance(error, AccessDenied) else None
                if (text := str(error) or repr(error)) != logged:
                    about = {"tracker": self._id}
                    log.warning("leadership: %s; trying again", text, exc_info=not expected, extra=about)
                logged = text
                failures += 1
                # Waits for `_closing`: a wake-up must not turn the back-off into a busy loop.
                self._closing.wait(_FAILURE_PAUSE.delay(failures))
                continue
            self._wake_up.wait(max(0.0, delay))

    def _pass(self) -> float:
        """Read the registry once and act on it; returns the seconds until the next pass."""
        session = self._current_session()
        if session is None:
            return RECHECK_S
        now = self._clock.monotonic()
        self._session.verify_when_due(session)
        if now >= self._recheck_at:
            self._znodes.expire()
            read_by_all = len(self._znodes) * self._planner.members / RECHECK_ZNODES_PER_S
            self._recheck_at = now + max(RECHECK_S, read_by_all * random.uniform(0.75, 1.25))
        tree = self._reader.read(self._znodes, self._planner.concerning_us)
        if changed := self._member.ensure(tree, session):
            self._session.verify_at = 0.0
        changed |= self._give_up(tree, session)
        held = {p: stat for p, stat in tree.leaders.items() if session_of(stat) == session}
        todo = self._planner.plan(tree, held, now)
        self._published.publish(
            LeadershipView(
                MappingProxyType({p: stat.czxid for p, stat in held.items()}),
                todo.releasing,
                MappingProxyType(dict(tree.queues)),
                connected=True,
                problems=(*tree.problems, *self._leaders.blocked.values()),
            )
        )
        changed |= self._leaders.acquire(todo.acquire, tree)
        if changed:
            return 0.0
        due = [self._session.verify_at, self._recheck_at]
        due += [todo.next_due] if todo.next_due is not None else []
        return min(due) - self._clock.monotonic()

    def _current_session(self) -> int | None:
        """The id of our session, None while not connected; a new session begins without partitions."""
        session = self._session.current()
        if session is None:
            view = self._published.view
            if self._session.is_lost():
                self._begin_session(None)
            elif view.connected:
                log.warning("ZooKeeper connection lost: no redelivery", extra={"tracker": self._id})
                self._published.publish(LeadershipView(view.owned, view.releasing, view.queues))
            self._session.revive()
        elif session != self._session_id:
            self._begin_session(None)
            for path in (self._paths.queues, self._paths.trackers):
                self._zk.ensure_path_async(path).get(timeout=self._timeout)
            self._begin_session(session)
        return session

    def _begin_session(self, session: int | None) -> None:
        if session == self._session_id:
            return
        view = self._published.view
        if self._session_id is not None:
            lost, about = len(view.owned), {"tracker": self._id}
            log.warning("ZooKeeper session lost, and with it %d partitions", lost, extra=about)
        self._session_id = session
        self._znodes.expire()
        self._planner.forget_session()
        self._published.forget_releases()
        self._published.publish(LeadershipView(queues=view.queues))

    def _give_up(self, tree: RegistrySnapshot, session: int) -> bool:
        releases = self._published.releases()
        ours = self._leaders.give_up(releases, tree, session)
        for partition, epoch in releases.items():
            if partition not in ours:
                self._published.released(partition, epoch)
        return bool(ours)
