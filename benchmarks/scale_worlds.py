"""Runs the leaderships of many trackers as one world, on a simulated ZooKeeper or on a real one.

A Leadership (tracker.leadership) is the part of a tracker that finds out which partitions it owns. Both
worlds count the operations that the trackers ask of ZooKeeper, by the kinds of `KINDS`.
"""

import contextlib
import functools
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from kazoo.client import KazooClient

from benchmarks.children import Failed
from benchmarks.fake_zookeeper import Server
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.kafka.admin.registry_entries import StoredOffset, decode_queue, decode_tracker, partitions_of
from kmqpy.kafka.settings import QueueSettings
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.leadership import leadership as leadership_module
from tracker.leadership import planner
from tracker.leadership import registry_view as view_module
from tracker.leadership.assignment import STAND_INS, LazyRanking, Member, Partition, assign
from tracker.leadership.leadership import Leadership
from tracker.leadership.znode_cache import ZnodeCache

KINDS = ("syncs", "reads", "writes", "multis", "writes in multis", "watch events")
ROOT = "/kmq-scale"
"""The znode below which these worlds write."""

_decode_queue = functools.lru_cache(maxsize=10_000)(decode_queue)
_decode_tracker = functools.lru_cache(maxsize=10_000)(decode_tracker)
_numbers_of: dict[int, tuple[list[str], tuple[int, list[int]]]] = {}


def _partitions_of(children: list[str]) -> tuple[int, list[int]]:
    """`partitions_of`, computed once for each list: the server in memory gives one list to all trackers."""
    known = _numbers_of.get(id(children))
    if known is None or known[0] is not children:
        known = _numbers_of[id(children)] = (children, partitions_of(children))
    return known[1]


class SimulatedClock:
    """A clock that moves on only when `now`, in seconds, is set, and in sleep()."""

    now = 1_000.0

    def wall_ms(self) -> int:
        return int(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _SharedRanking:
    """The ranking of `assign`, computed once for all trackers: each would compute the same."""

    def __init__(self, ranking: LazyRanking) -> None:
        self.owners = ranking.owners
        self.first = ranking.first
        self.keys = ranking.keys
        self._near: defaultdict[str, dict[Partition, tuple[str, ...]]] = defaultdict(dict)
        for partition in ranking:
            for member in (first := ranking.first(partition, 1 + STAND_INS)):
                self._near[member][partition] = first

    def near(self, member: str, count: int) -> dict[Partition, tuple[str, ...]]:
        assert count == 1 + STAND_INS
        return dict(self._near[member])


class World:
    """Trackers' leaderships, and what a tracker asks of them: on a ZooKeeper in memory or a real one."""

    def __init__(self) -> None:
        self.members: dict[str, Leadership] = {}
        self._served: dict[str, dict[Partition, int]] = {}
        self._numbers = itertools.count()

    def counts(self) -> Counter[str]:
        raise NotImplementedError

    def join(self, count: int) -> list[str]:
        raise NotImplementedError

    def settle(self) -> None:
        raise NotImplementedError

    def stop(self, tracker: str) -> None:
        """Do what a tracker does when it is asked to stop: store its offsets, and close its session."""
        leadership = self.members.pop(tracker)
        self._store(leadership, self._served.pop(tracker))
        leadership.close()

    def owners(self) -> dict[Partition, str]:
        return {
            partition: tracker for tracker, leadership in self.members.items()
            for partition in leadership.snapshot().owned
        }  # fmt: skip

    def store_all(self) -> None:
        """Store the offset of every partition once."""
        for tracker, leadership in self.members.items():
            self._store(leadership, self._served[tracker])

    def _store(self, leadership: Leadership, partitions: dict[Partition, int]) -> None:
        stored = leadership.write_offsets(
            dict.fromkeys(partitions, StoredOffset(next(self._numbers), "t", 0))
        )
        assert stored == partitions.keys()

    def _serve(self, tracker: str) -> bool:
        """Do what a tracker does at takeovers and releases; returns True if there were any."""
        leadership, served = self.members[tracker], self._served.setdefault(tracker, {})
        view = leadership.snapshot()
        for partition in served.keys() - view.owned.keys():
            del served[partition]
        news = [p for p, epoch in view.owned.items() if served.get(p) != epoch]
        for partition in news:
            assert leadership.verify(*partition)
            leadership.read_offset(*partition)
            served[partition] = view.owned[partition]
        for partition in view.releasing:
            leadership.write_offsets({partition: StoredOffset(next(self._numbers), "t", 0)})
            leadership.release(*partition)
        return bool(news or view.releasing)


class Simulation(World):
    """All trackers in the calling thread, on a simulated clock and a ZooKeeper in memory."""

    def __init__(self, queues: int, partitions: int) -> None:
        super().__init__()
        self.clock = SimulatedClock()
        self.server = Server()
        self._due: dict[str, float] = {}
        self._rankings: dict[frozenset[Member], Any] = {}
        client = self.server.client()
        client.ensure_path_async(f"{ROOT}/queues")
        client.ensure_path_async(f"{ROOT}/trackers")
        for number in range(queues):
            name = f"queue-{number}"
            self.server.create(f"{ROOT}/queues/{name}", QueueSettings(name=name).to_json())
            self.server.create(f"{ROOT}/queues/{name}/partitions", b"")
            share = partitions // queues + (number < partitions % queues)
            for partition in range(share):
                self.server.create(f"{ROOT}/queues/{name}/partitions/{partition}", b"")

    def counts(self) -> Counter[str]:
        return self.server.counts.copy()

    def join(self, count: int) -> list[str]:
        names = [f"tracker-{next(self._numbers)}" for _ in range(count)]
        for name in names:
            with patch.object(leadership_module, "new_client", lambda *_: self.server.client()):
                leadership = Leadership(ZooKeeperConnection(hosts=""), name, root=ROOT, clock=self.clock)
            self.members[name] = leadership
            leadership._session.verify_at = 0.0
            self._served[name] = {}
            # Its first pass registers it. It takes no partition yet: it does not know all the others.
            with self._computing_once(lambda *_: LazyRanking({}, (), {})):
                leadership._pass()
            leadership._planner._ranked_for = None
            self._due[name] = self.clock.now
        return names

    def stop(self, tracker: str) -> None:
        self._due.pop(tracker)
        super().stop(tracker)

    def kill(self, names: list[str]) -> None:
        """End their sessions, as ZooKeeper does with those of killed trackers."""
        for name in names:
            leadership = self.members.pop(name)
            self._due.pop(name)
            self._served.pop(name)
            self.server.expire(leadership._zk.client_id[0])

    def settle(self) -> None:
        """Run the trackers until none has anything left to do at this moment of the simulated clock."""
        with self._computing_once(self._assign_once):
            while self._run_due():
                pass

    def run(self, seconds: float) -> None:
        """Let `seconds` of simulated time pass; trackers run whenever they are due."""
        end = self.clock.now + seconds
        with self._computing_once(self._assign_once):
            while (following := min(self._due.values())) < end:
                self.clock.now = max(self.clock.now, following)
                self._run_due()
        self.clock.now = end

    def _run_due(self) -> bool:
        did = False
        for name, leadership in self.members.items():
            if leadership._wake_up.is_set() or self._due[name] <= self.clock.now:
                leadership._wake_up.clear()
                self._due[name] = self.clock.now + max(0.0, leadership._pass())
                did = True
                if self._serve(name):
                    leadership._wake_up.set()
        return did

    @contextlib.contextmanager
    def _computing_once(self, assign_function: Callable[..., Any]) -> Iterator[None]:
        """Compute once what every tracker would compute for itself with the same result."""
        with (
            patch.object(planner, "assign", assign_function),
            patch.object(view_module, "decode_queue", _decode_queue),
            patch.object(view_module, "decode_tracker", _decode_tracker),
            patch.object(view_module, "partitions_of", _partitions_of),
        ):
            yield

    def _assign_once(self, partitions: Iterator[Partition], eligible: frozenset[Member]) -> Any:
        if eligible not in self._rankings:
            self._rankings.clear()
            self._rankings[eligible] = _SharedRanking(assign(partitions, eligible))
        return self._rankings[eligible]


class Real(World):
    """Real leaderships with their threads, on a real ZooKeeper."""

    def __init__(self, hosts: str, stack: contextlib.ExitStack, partitions: int) -> None:
        super().__init__()
        self._hosts = hosts
        self._partitions = partitions
        self._counts: Counter[str] = Counter()
        stack.callback(lambda: [leadership.close() for leadership in self.members.values()])
        stack.enter_context(patch.object(KazooClient, "_call", self._counting(KazooClient._call)))
        stack.enter_context(patch.object(ZnodeCache, "_watch", self._counting_events(ZnodeCache._watch)))

    def counts(self) -> Counter[str]:
        return self._counts.copy()

    def join(self, count: int) -> list[str]:
        names = [f"tracker-{next(self._numbers)}" for _ in range(count)]
        for name in names:
            self.members[name] = Leadership(ZooKeeperConnection(hosts=self._hosts), name, root=ROOT)
            self._served[name] = {}
        for name in names:
            self.members[name].start(10)
        return names

    def settle(self) -> None:
        """Wait until every partition has an owner and no tracker has done anything for 0.4 s."""
        quiet_since = began = SYSTEM_CLOCK.monotonic()
        while SYSTEM_CLOCK.monotonic() - quiet_since < 0.4:
            busy = [self._serve(name) for name in list(self.members)]
            if any(busy) or len(self.owners()) < self._partitions:
                quiet_since = SYSTEM_CLOCK.monotonic()
            if SYSTEM_CLOCK.monotonic() - began > 60:
                raise Failed("the trackers do not come to rest")
            time.sleep(0.02)

    def run(self, seconds: float) -> None:
        time.sleep(seconds)

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(client: KazooClient, request: Any, result: Any) -> Any:
            kind = type(request).__name__
            if kind == "Transaction":
                self._counts.update({"multis": 1, "writes in multis": len(request.operations)})
            elif kind in {"Create", "SetData", "Delete"}:
                self._counts["writes"] += 1
            elif kind not in {"Close", "CloseInstance"}:
                self._counts["syncs" if kind == "Sync" else "reads"] += 1
            return call(client, request, result)

        return counted

    def _counting_events(self, watch: Callable[..., None]) -> Callable[..., None]:
        def counted(znodes: ZnodeCache, event: Any) -> None:
            self._counts["watch events"] += event.path is not None
            watch(znodes, event)

        return counted
