"""Which partitions this tracker owns: membership, assignment and leader znodes in ZooKeeper.

The assignment proposes, the leader znode decides: a partition is ours while the `ephemeralOwner` of
its leader znode is our session, whatever its data say. ZooKeeper can't stop a tracker that does not
know yet that its session is gone, so `may_redeliver` ends with a local deadline that is shorter
than the session; Kafka's fencing covers the rest.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any

from kazoo.exceptions import (
    BadVersionError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
)
from kazoo.protocol.states import Callback, KazooState, KeeperState

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import AccessDenied, ConfigError, Unavailable
from kmqpy.kafka.admin.registry import RegisteredQueue, StoredOffset, TrackerInfo, ZnodePaths
from kmqpy.zookeeper.session import (
    address,
    check_access,
    failure,
    gather,
    last_failure,
    new_client,
    session_of,
    stop,
    unavailable,
)
from kmqpy.zookeeper.settings import ZooKeeperSecurity
from tracker.leadership.assignment import STAND_INS, Member, Partition, Plan, assign, next_actions
from tracker.leadership.offset_znodes import OffsetStore
from tracker.leadership.registry_view import RegistrySnapshot, TreeReader
from tracker.leadership.znode_cache import ZnodeCache

log = logging.getLogger(__name__)

RECHECK_S = 1.0  # everything is read anew this often, watches or not …
RECHECK_ZNODES_PER_S = 50  # … or less often, so that all trackers together read about as many
MAX_BACKOFF_S = 2.0
_POLL_S = 0.05
_FIX = "clear it up with: kmq doctor --fix"


@dataclass(frozen=True)
class Grant:
    """Ownership of a partition; a later acquisition has a larger `epoch`."""

    epoch: int


@dataclass(frozen=True)
class LeadershipView:
    """What stands at the moment.

    owned      partitions whose leader znode is ours
    releasing  those of them to finish and then give up with release()
    queues     the registered queues that this tracker serves
    connected  whether there is a session; says nothing about its age, see may_redeliver()
    problems   znodes, by path, that keep something from being tracked, and why
    """

    owned: Mapping[Partition, Grant] = field(default_factory=lambda: MappingProxyType({}))
    releasing: frozenset[Partition] = frozenset()
    queues: Mapping[str, RegisteredQueue] = field(default_factory=lambda: MappingProxyType({}))
    connected: bool = False
    problems: tuple[str, ...] = ()


class Leadership:
    """Membership and ownership of one tracker, kept up by a thread of its own.

    hosts               ZooKeeper, `host:port[,host:port]`
    tracker_id          unique among the living trackers; the data of the leader znodes
    queues              the queues to serve; None: all that are registered
    session_timeout_ms  how long after this tracker's death others take over
    takeover_delay      s after which the next in rank takes what the proposed owner did not
    security            who we are to ZooKeeper, and TLS
    wake                set whenever snapshot() has changed

    snapshot, may_redeliver, release and set_kafka_ok do no I/O and can be called from any thread.
    verify and the offset calls block for at most about twice the session timeout, raise Unavailable
    then, and are for one thread at a time.
    """

    def __init__(
        self,
        hosts: str,
        tracker_id: str,
        *,
        root: str = "/kmq",
        host: str = "",
        queues: frozenset[str] | None = None,
        session_timeout_ms: int = 6_000,
        takeover_delay: float = 3.0,
        security: ZooKeeperSecurity | None = None,
        wake: threading.Event | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not tracker_id or "/" in tracker_id or tracker_id in {".", ".."}:
            raise ConfigError(f"tracker_id: {tracker_id!r} must not be empty or contain /")
        self.wake = wake or threading.Event()
        self._id = tracker_id
        self._info = TrackerInfo(tracker_id, host, clock.wall_ms(), queues, kafka_ok=True)
        self._paths = ZnodePaths(root)
        self._takeover_delay = takeover_delay
        self._clock = clock
        self._timeout = session_timeout_ms / 1000
        self._zk = new_client(hosts, session_timeout_ms, security or ZooKeeperSecurity())
        self._zk.add_listener(self._on_state)

        self._signal = threading.Event()  # something to do for the thread
        self._closing = threading.Event()
        self._registered = threading.Event()
        self._denied: AccessDenied | None = None
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)
        self._lock = threading.Lock()  # of the view and the requested releases
        self._view = LeadershipView()
        self._releases: dict[Partition, int] = {}  # asked for, by epoch
        self._connection = 0  # counts changes of the connection's state
        self._verified = (-1, 0.0)  # of which connection, and until when

        # Of the thread alone.
        self._offsets = OffsetStore(
            self._zk,
            self._paths,
            self._timeout,
            self._is_ours,
            self._seen_as_ours,
            self._paths.tracker(tracker_id),
        )
        self._reader = TreeReader(self._paths, queues)
        self._znodes = ZnodeCache(self._zk, self._signal.set, self._timeout)
        self._session: int | None = None
        self._dead_since: float | None = None
        self._refused = False  # and has said so
        self._verify_at = 0.0
        self._recheck_at = 0.0
        self._eligible: frozenset[Member] = frozenset()
        self._sessions: frozenset[tuple[str, int | None]] = frozenset()  # of all members
        self._unowned_since: dict[Partition, float] = {}
        self._stand_in: frozenset[Partition] = frozenset()
        self._proposed_for: Any = None
        self._ranking: dict[Partition, tuple[str, ...]] = {}  # of those that concern us
        self._claimed: set[Partition] = set()  # whose leader znode is ours, or may be
        self._blocked: dict[Partition, str] = {}  # why their leader znodes can't be made
        self._waiting_for: int | None = None  # session of another tracker with our id

    # ---- for the tracker's main loop ----

    def start(self, timeout: float | None = None) -> Leadership:
        """Begin; with `timeout` s, wait until this tracker is registered or raise Unavailable.

        AccessDenied is raised at once.
        """
        self._zk.start_async()
        self._thread.start()
        if timeout is not None and not self._wait_until_registered(timeout):
            self.close()
            why = "another session is registered so" if self._waiting_for else "no answer"
            raise Unavailable(
                f"ZooKeeper at {address(self._zk)}: could not register as {self._id!r} "
                f"within {timeout:g} s: {why}"
            )
        return self

    def _wait_until_registered(self, timeout: float) -> bool:
        deadline = self._clock.monotonic() + timeout
        try:
            while not self._registered.wait(_POLL_S) and self._clock.monotonic() < deadline:
                if self._denied is not None:
                    raise self._denied
                check_access(self._zk)
        except AccessDenied:
            self.close()
            raise
        return self._registered.is_set()

    def close(self) -> None:
        """End the session: every leader znode vanishes at once and others take over."""
        self._closing.set()
        self._signal.set()
        if self._thread.is_alive():
            self._thread.join(2 * self._timeout)
        stop(self._zk)
        self._publish(LeadershipView())

    def __enter__(self) -> Leadership:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def snapshot(self) -> LeadershipView:
        """What this tracker owns and serves, as last seen."""
        return self._view

    def alive(self) -> bool:
        """Whether its thread runs, connected or not; once it has died, only a restart helps."""
        return self._thread.ident is None or self._thread.is_alive() or self._closing.is_set()

    def may_redeliver(self) -> bool:
        """Whether our session is certainly alive.

        True until two thirds of the session timeout after the start of the last round trip that
        verified it, on a monotonic clock, and only while the connection stands.
        """
        connection, deadline = self._verified
        return connection == self._connection and self._clock.monotonic() < deadline

    def set_kafka_ok(self, ok: bool) -> None:
        """Tell the others whether this tracker reaches Kafka; without it nothing is proposed."""
        info = self._info
        self._info = TrackerInfo(info.id, info.host, info.started_ms, info.queues, kafka_ok=ok)
        self._signal.set()

    def release(self, queue: str, partition: int) -> None:
        """Give up a partition that is owned; it leaves snapshot() at once, its znode soon."""
        key = (queue, partition)
        with self._lock:
            grant = self._view.owned.get(key)
            if grant is None:
                return
            self._releases[key] = grant.epoch
            self._view = self._without_releases(self._view)
        self._signal.set()

    def verify(self, queue: str, partition: int) -> bool:
        """Ask ZooKeeper's leader whether the partition is ours; raises Unavailable."""
        path = self._paths.leader(queue, partition)
        with unavailable(self._zk):
            _, stat = gather([self._zk.sync_async(path), self._zk.exists_async(path)], self._timeout)
            return self._is_ours(stat)

    def read_offset(self, queue: str, partition: int) -> StoredOffset | None:
        """The stored offset; None when there is none or it can't be read. Raises Unavailable."""
        return self._offsets.read((queue, partition))

    def write_offset(self, queue: str, partition: int, stored: StoredOffset) -> bool:
        """write_offsets() of one partition: whether it was stored."""
        return bool(self._offsets.write({(queue, partition): stored}))

    def write_offsets(self, offsets: Mapping[Partition, StoredOffset]) -> frozenset[Partition]:
        """Store offsets, pipelined; returns those stored.

        A partition that is not ours (any more), or whose queue is gone, is left out. Raises
        Unavailable; then some may have been stored, which does no harm.
        """
        return self._offsets.write(offsets)

    def _is_ours(self, stat: Any) -> bool:
        client_id = self._zk.client_id
        return client_id is not None and session_of(stat) == client_id[0]

    def _seen_as_ours(self, partitions: Iterable[Partition]) -> set[Partition]:
        """Those whose leader znode is ours, as its watch tells after a round trip to ZooKeeper."""
        (stat,) = gather([self._zk.exists_async(self._paths.tracker(self._id))], self._timeout)
        if not self._is_ours(stat):
            return set()
        told = threading.Event()  # every event that came before the answer has been taken in
        self._zk.handler.dispatch_callback(Callback("watch", told.set, ()))
        if not told.wait(self._timeout):
            return set()
        return {p for p in partitions if self._is_ours(self._znodes.seen(self._paths.leader(*p)))}

    @property
    def _lease_s(self) -> float:
        """How long a verified session lets us redeliver: two thirds of what the server grants."""
        return float(self._zk.granted_s) * 2 / 3

    # ---- the thread ----

    def _run(self) -> None:
        backoff, complaint = 0.0, ""
        while not self._closing.is_set():
            self._signal.clear()
            try:
                with unavailable(self._zk):
                    delay = self._pass()
                self._denied = None
                if complaint and self._view.connected:
                    log.info("ZooKeeper answers again", extra={"tracker": self._id})
                    backoff, complaint = 0.0, ""
            except Exception as error:
                self._znodes.expire()
                expected = isinstance(error, Unavailable)
                self._denied = error if isinstance(error, AccessDenied) else None
                if (text := str(error) or repr(error)) != complaint:
                    log.warning(
                        "leadership: %s; trying again",
                        text,
                        exc_info=not expected,
                        extra={"tracker": self._id},
                    )
                complaint = text
                delay = backoff = min(MAX_BACKOFF_S, 2 * backoff or 0.1)
                # A signal must not turn the back-off into a busy loop.
                self._closing.wait(delay)
                continue
            self._signal.wait(max(0.0, delay))

    def _pass(self) -> float:
        """One look at ZooKeeper and what follows from it; returns s until the next."""
        session = self._current_session()
        if session is None:
            return RECHECK_S
        now = self._clock.monotonic()
        if now >= self._verify_at or self._verified[0] != self._connection:
            self._verify_session(session)
        if now >= self._recheck_at:
            self._znodes.expire()
            everyone = len(self._znodes) * len(self._sessions) / RECHECK_ZNODES_PER_S
            self._recheck_at = now + max(RECHECK_S, everyone * random.uniform(0.75, 1.25))
        tree = self._reader.read(self._znodes, self._concerns_us)
        changed = self._register(tree, session)
        changed |= self._give_up(tree, session)
        held = {p: stat for p, stat in tree.leaders.items() if session_of(stat) == session}
        self._claimed = set(held)
        todo = self._plan(tree, held, now)
        self._publish(
            LeadershipView(
                MappingProxyType({p: Grant(stat.czxid) for p, stat in held.items()}),
                todo.releasing,
                MappingProxyType(dict(tree.queues)),
                connected=True,
                problems=(*tree.problems, *self._blocked.values()),
            )
        )
        self._claimed.update(todo.acquire)  # even when we never hear whether it worked
        changed |= self._acquire(todo.acquire, tree)
        if changed:
            return 0.0
        due = [self._verify_at, self._recheck_at]
        due += [todo.next_due] if todo.next_due is not None else []
        return min(due) - self._clock.monotonic()

    def _current_session(self) -> int | None:
        """Our session while connected; when it has changed, what the old one owned is dropped."""
        client_id = self._zk.client_id
        if self._zk.state != KazooState.CONNECTED or client_id is None:
            if self._zk.state == KazooState.LOST:
                self._begin_session(None)
            elif self._view.connected:
                view = self._view
                log.warning("ZooKeeper connection lost: no redelivery", extra={"tracker": self._id})
                self._publish(LeadershipView(view.owned, view.releasing, view.queues))
            self._revive()
            return None
        self._dead_since = None
        self._refused = False
        session: int = client_id[0]
        if session != self._session:
            self._begin_session(None)
            for path in (self._paths.queues, self._paths.trackers):
                self._zk.ensure_path_async(path).get(timeout=self._timeout)
            self._begin_session(session)
        return session

    def _revive(self) -> None:
        """Start the client anew when kazoo gave up for good, as it does when refused."""
        now = self._clock.monotonic()
        if self._zk.client_state not in {KeeperState.CLOSED, KeeperState.AUTH_FAILED}:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now
        elif now - self._dead_since > MAX_BACKOFF_S:
            if not self._refused:
                log.error(
                    "ZooKeeper can't be reached or refused us%s; trying again",
                    last_failure(self._zk),
                    extra={"tracker": self._id},
                )
            self._refused = True
            self._dead_since = None
            stop(self._zk)
            self._zk.start_async()

    def _begin_session(self, session: int | None) -> None:
        if session == self._session:
            return
        if self._session is not None:
            log.warning(
                "ZooKeeper session lost, and with it %d partitions",
                len(self._view.owned),
                extra={"tracker": self._id},
            )
        self._session = session
        self._znodes.expire()
        self._unowned_since.clear()
        self._stand_in = frozenset()
        self._claimed.clear()
        with self._lock:
            self._releases.clear()
        self._publish(LeadershipView(queues=self._view.queues))

    def _verify_session(self, session: int) -> None:
        """A round trip through ZooKeeper's leader that proves that our session still stands."""
        connection, started = self._connection, self._clock.monotonic()
        path = self._paths.tracker(self._id)
        _, stat = gather([self._zk.sync_async(path), self._zk.exists_async(path)], self._timeout)
        if session_of(stat) == session:
            self._verified = (connection, started + self._lease_s)
        self._verify_at = started + self._lease_s * 3 / 8  # a quarter of the session timeout

    def _register(self, tree: RegistrySnapshot, session: int) -> bool:
        """Make our member znode what it should be; whether something was done."""
        path, data = self._paths.tracker(self._id), self._info.to_json()
        found = tree.members.get(self._id)
        if found is None:
            call = self._zk.create_async(path, data, ephemeral=True, makepath=True)
        elif session_of(found[1]) is None:
            self._replace_copy(path, found[1], data)
            return True
        elif session_of(found[1]) != session:
            if self._waiting_for != session_of(found[1]):
                self._waiting_for = session_of(found[1])
                log.warning(
                    "another session is registered under this id; waiting for its end",
                    extra={"tracker": self._id},
                )
            return False
        elif found[0] != data:
            call = self._zk.set_async(path, data)
        else:
            self._registered.set()
            return False
        with contextlib.suppress(NodeExistsError):  # then what we saw was old
            call.get(timeout=self._timeout)
        self._znodes.forget(path)
        self._znodes.forget(self._paths.trackers)
        self._verify_at = 0.0
        return True

    def _replace_copy(self, path: str, stat: Any, data: bytes) -> None:
        """Replace our member znode that has no session: a copy from a backup, which would never expire."""
        transaction = self._zk.transaction()
        transaction.delete(path, stat.version)
        transaction.create(path, data, ephemeral=True)
        error = failure(transaction.commit_async().get(timeout=self._timeout))
        self._znodes.forget(path)
        self._verify_at = 0.0
        if isinstance(error, NotEmptyError):
            raise Unavailable(f"{path} belongs to no session, and something is below it; {_FIX}")
        if error is None:
            log.warning("%s belonged to no session; replaced", path, extra={"tracker": self._id})

    def _give_up(self, tree: RegistrySnapshot, session: int) -> bool:
        """Delete the leader znodes of requested releases; whether something was done."""
        with self._lock:
            requested = dict(self._releases)
        ours = {
            key: self._paths.leader(*key)
            for key, epoch in requested.items()
            if (stat := tree.leaders.get(key)) is not None
            and (stat.ephemeralOwner, stat.czxid) == (session, epoch)
        }
        calls = []
        for path in ours.values():
            # Our member znode is gone when the session is: then nothing is deleted, even if this
            # reaches ZooKeeper in a new session while the partition is another's.
            transaction = self._zk.transaction()
            transaction.check(self._paths.tracker(self._id), -1)
            transaction.delete(path)
            calls.append(transaction.commit_async())
        for (key, path), results in zip(ours.items(), gather(calls, self._timeout), strict=True):
            self._znodes.forget(path)
            error = failure(results or ())
            if error is not None and not isinstance(error, NoNodeError):
                raise error
            log.info("partition released", extra=self._about(key))
        with self._lock:
            for key, epoch in requested.items():
                if key not in ours and self._releases.get(key) == epoch:
                    del self._releases[key]
        return bool(ours)

    def _concerns_us(
        self, queues: Mapping[str, RegisteredQueue], eligible: frozenset[Member]
    ) -> set[Partition]:
        """What is ours, proposed to us or ours to stand in for; who leads the others is theirs to watch."""
        there = {name: queue.partitions for name, queue in queues.items()}
        alive = [(name, count) for name, count in there.items() if not queues[name].deleting]
        if (alive, eligible) != self._proposed_for:
            proposal = assign(((name, p) for name, count in alive for p in range(count)), eligible)
            self._ranking = proposal.near(self._id, 1 + STAND_INS)
            for claimed in self._claimed & proposal.keys():
                self._ranking[claimed] = proposal.first(claimed, 1 + STAND_INS)
            self._proposed_for = (alive, eligible)
        return self._ranking.keys() | {p for p in self._claimed if p[1] < there.get(p[0], 0)}

    def _plan(self, tree: RegistrySnapshot, held: Iterable[Partition], now: float) -> Plan:
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
        return todo

    def _acquire(self, partitions: Iterable[Partition], tree: RegistrySnapshot) -> bool:
        """Try to make leader znodes; whether any was made.

        A leader znode without a session is replaced. No tracker makes such a znode, so nobody relies on it.
        If another tracker has just replaced it, we take over from that one as from any predecessor.
        """
        made = False
        self._blocked = {}
        calls = {}
        for key in partitions:
            transaction = self._zk.transaction()
            # The version tells whether the queue was marked as deleting in between.
            transaction.check(self._paths.queue(key[0]), tree.versions[key[0]])
            copy = tree.leaders.get(key)
            if copy is not None:
                transaction.delete(self._paths.leader(*key), copy.version)
            transaction.create(self._paths.leader(*key), self._id.encode(), ephemeral=True)
            calls[key] = transaction.commit_async()
        for key, call in calls.items():
            error = failure(call.get(timeout=self._timeout))
            path = self._paths.leader(*key)
            self._znodes.forget(path)
            if error is None:
                made = True
                if tree.leaders.get(key) is not None:
                    log.warning("%s belonged to no session; replaced", path, extra=self._about(key))
                log.info("partition acquired", extra=self._about(key))
            elif isinstance(error, BadVersionError | NoNodeError):
                self._znodes.forget(self._paths.queues)
                self._znodes.forget(self._paths.queue(key[0]))
                self._znodes.forget(self._paths.partitions(key[0]))
            elif not isinstance(error, NodeExistsError):
                self._blocked[key] = f"{path} can't be taken: {_why_blocked(error)}"
        return made

    def _publish(self, view: LeadershipView) -> None:
        with self._lock:
            view = self._without_releases(view)
            changed = view != self._view
            self._view = view
        if changed:
            self.wake.set()

    def _without_releases(self, view: LeadershipView) -> LeadershipView:
        owned = {p: g for p, g in view.owned.items() if self._releases.get(p) != g.epoch}
        return LeadershipView(
            MappingProxyType(owned),
            frozenset(view.releasing & owned.keys()),
            view.queues,
            view.connected,
            view.problems,
        )

    def _about(self, key: Partition) -> dict[str, Any]:
        return {"queue": key[0], "partition": key[1], "tracker": self._id}

    # ---- on kazoo's threads ----

    def _on_state(self, _state: str) -> None:
        self._connection += 1
        self._signal.set()


def _why_blocked(error: Exception) -> str:
    if isinstance(error, NotEmptyError):
        return f"it belongs to no session, and something is below it; {_FIX}"
    return f"{type(error).__name__}; check the ACLs of the znodes"
