"""Which partitions this tracker owns: membership, assignment and leader znodes in ZooKeeper.

The assignment proposes, the leader znode decides: a partition is ours while the `ephemeralOwner` of
its leader znode is our session, whatever its data say. ZooKeeper can't stop a tracker that does not
know yet that its session is gone, so `may_redeliver` ends with a local deadline that is shorter
than the session; Kafka's fencing covers the rest.
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

RECHECK_S = 1.0  # everything is read anew this often, watches or not …
RECHECK_ZNODES_PER_S = 50  # … or less often, so that all trackers together read about as many
_PAUSE = Backoff(0.1, 2, 2, jitter=0)
_POLL_S = 0.05


class Leadership(Closeable):
    """Membership and ownership of one tracker, kept up by a thread of its own.

    zookeeper           where ZooKeeper is, and who we are to it
    tracker_id          unique among the living trackers; the data of the leader znodes
    queues              the queues to serve; None: all that are registered
    session_timeout_ms  how long after this tracker's death others take over
    takeover_delay      s after which the next in rank takes what the proposed owner did not

    snapshot, may_redeliver, release and set_kafka_ok do no I/O and can be called from any thread.
    verify and the offset calls block for at most about twice the session timeout, raise Unavailable
    then, and are for one thread at a time.
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
        self._signal = threading.Event()  # something to do for the thread
        self._closing = threading.Event()
        self._denied: AccessDenied | None = None
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)
        self._published = PublishedView()
        self._zk = new_client(zookeeper, session_timeout_ms)
        self._session = TrackerSession(
            self._zk, self._paths.tracker(tracker_id), tracker_id, self._timeout, clock, self._signal.set
        )
        self._znodes = ZnodeCache(self._zk, self._signal.set, self._timeout)
        info = TrackerInfo(tracker_id, host, clock.wall_ms(), queues, kafka_ok=True)
        self._member = MemberZnode(self._zk, self._znodes, self._paths, info, self._timeout)
        self._offsets = OffsetStore(
            self._zk,
            self._paths,
            self._timeout,
            self._session.is_ours,
            self._seen_as_ours,
            self._paths.tracker(tracker_id),
        )

        # Of the thread alone.
        self._reader = RegistryReader(self._paths, queues)
        self._leaders = LeaderZnodes(self._zk, self._znodes, self._paths, tracker_id, self._timeout)
        self._planner = Planner(tracker_id, takeover_delay)
        self._session_id: int | None = None
        self._recheck_at = 0.0

    # ---- for the tracker's main loop ----

    def start(self, timeout: float | None = None) -> Leadership:
        """Begin; with `timeout` s, wait until this tracker is registered or raise Unavailable.

        AccessDenied is raised at once.
        """
        self._zk.start_async()
        self._thread.start()
        if timeout is not None and not self._wait_until_registered(timeout):
            self.close()
            why = "another session is registered so" if self._member.other_session else "no answer"
            raise Unavailable(
                f"ZooKeeper at {address(self._zk)}: could not register as {self._id!r} "
                f"within {timeout:g} s: {why}"
            )
        return self

    def _wait_until_registered(self, timeout: float) -> bool:
        deadline = self._clock.monotonic() + timeout
        try:
            while not self._member.registered.wait(_POLL_S) and self._clock.monotonic() < deadline:
                if self._denied is not None:
                    raise self._denied
                check_access(self._zk)
        except AccessDenied:
            self.close()
            raise
        return self._member.registered.is_set()

    def close(self) -> None:
        """End the session: every leader znode vanishes at once and others take over."""
        self._closing.set()
        self._signal.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._timeout)
        stop(self._zk)
        self._published.publish(LeadershipView())

    def snapshot(self) -> LeadershipView:
        """The partitions that this tracker owns and the queues it serves, as last seen."""
        return self._published.view

    def alive(self) -> bool:
        """True while its thread runs, connected or not; once it has died, only a restart helps."""
        return self._thread.ident is None or self._thread.is_alive() or self._closing.is_set()

    def may_redeliver(self) -> bool:
        """True while our session is certainly alive.

        True until two thirds of the session timeout after the start of the last round trip that
        verified it, on a monotonic clock, and only while the connection stands.
        """
        return self._session.is_certain()

    def set_kafka_ok(self, ok: bool) -> None:
        """Tell the others whether this tracker reaches Kafka; without it nothing is proposed."""
        self._member.set_kafka_ok(ok)
        self._signal.set()

    def release(self, queue: str, partition: int) -> None:
        """Give up a partition that is owned; it leaves snapshot() at once, its znode soon."""
        if self._published.release((queue, partition)):
            self._signal.set()

    def verify(self, queue: str, partition: int) -> bool:
        """Ask ZooKeeper's leader whether the partition is ours; raises Unavailable."""
        path = self._paths.leader(queue, partition)
        with unavailable(self._zk):
            _, stat = gather([self._zk.sync_async(path), self._zk.exists_async(path)], self._timeout)
            return self._session.is_ours(stat)

    def read_offset(self, queue: str, partition: int) -> StoredOffset | None:
        """The stored offset; None when there is none or it can't be read. Raises Unavailable."""
        return self._offsets.read((queue, partition))

    def write_offsets(self, offsets: Mapping[Partition, StoredOffset]) -> frozenset[Partition]:
        """Store offsets, pipelined; returns those stored.

        A partition that is not ours (any more), or whose queue is gone, is left out. Raises
        Unavailable; then some may have been stored, which does no harm.
        """
        return self._offsets.write(offsets)

    def _seen_as_ours(self, partitions: Iterable[Partition]) -> set[Partition]:
        """Return the partitions whose leader znode is ours, by its watch after a round trip to ZooKeeper."""
        (stat,) = gather([self._zk.exists_async(self._paths.tracker(self._id))], self._timeout)
        if not self._session.is_ours(stat):
            return set()
        told = threading.Event()  # every event that came before the answer has been taken in
        self._zk.handler.dispatch_callback(Callback("watch", told.set, ()))
        if not told.wait(self._timeout):
            return set()
        return {p for p in partitions if self._session.is_ours(self._znodes.seen(self._paths.leader(*p)))}

    # ---- the thread ----

    def _run(self) -> None:
        failures, logged = 0, ""
        while not self._closing.is_set():
            self._signal.clear()
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
                    log.warning(
                        "leadership: %s; trying again",
                        text,
                        exc_info=not expected,
                        extra={"tracker": self._id},
                    )
                logged = text
                failures += 1
                # A signal must not turn the back-off into a busy loop.
                self._closing.wait(_PAUSE.delay(failures))
                continue
            self._signal.wait(max(0.0, delay))

    def _pass(self) -> float:
        """Look at ZooKeeper once and act on what is there; returns the seconds until the next look."""
        session = self._current_session()
        if session is None:
            return RECHECK_S
        now = self._clock.monotonic()
        self._session.verify_when_due(session)
        if now >= self._recheck_at:
            self._znodes.expire()
            everyone = len(self._znodes) * self._planner.members / RECHECK_ZNODES_PER_S
            self._recheck_at = now + max(RECHECK_S, everyone * random.uniform(0.75, 1.25))
        tree = self._reader.read(self._znodes, self._planner.concerning_us)
        changed = self._register(tree, session)
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
        """Our session while connected; when it has changed, what the old one owned is dropped."""
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
            log.warning(
                "ZooKeeper session lost, and with it %d partitions",
                len(view.owned),
                extra={"tracker": self._id},
            )
        self._session_id = session
        self._znodes.expire()
        self._planner.forget_session()
        self._published.forget_releases()
        self._published.publish(LeadershipView(queues=view.queues))

    def _register(self, tree: RegistrySnapshot, session: int) -> bool:
        """Make our member znode what it should be; returns whether it had to be written."""
        changed = self._member.ensure(tree, session)
        if changed:
            self._session.verify_at = 0.0
        return changed

    def _give_up(self, tree: RegistrySnapshot, session: int) -> bool:
        """Delete the leader znodes of requested releases; returns whether any of them was ours."""
        releases = self._published.releases()
        ours = self._leaders.give_up(releases, tree, session)
        for partition, epoch in releases.items():
            if partition not in ours:
                self._published.released(partition, epoch)
        return bool(ours)
