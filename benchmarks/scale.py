"""100,000 partitions on 1,000 trackers: what ZooKeeper has to do, what moves, and how long it takes.

The trackers' own code (`tracker.leadership`) runs against a ZooKeeper in
memory that counts its operations, on a clock of its own. The same steps with a few trackers on a real
ZooKeeper check the counts. Speeds of ZooKeeper, and what one partition costs a tracker process, are measured
on the embedded cluster; times for the whole are computed from them. docs/scale.md says what came out.
"""

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from kazoo.client import KazooClient

from benchmarks import trackers
from benchmarks.children import Failed, usage
from benchmarks.fake_zookeeper import Server
from benchmarks.lab import Lab
from benchmarks.results import progress
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.admin.registry_entries import StoredOffset, decode_queue, decode_tracker, partitions_of
from kmqpy.kafka.settings import QueueSettings
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.leadership import leadership as leadership_module
from tracker.leadership import planner
from tracker.leadership import registry_view as tree_module
from tracker.leadership.assignment import STAND_INS, LazyRanking, Member, Partition, assign
from tracker.leadership.leadership import RECHECK_ZNODES_PER_S, Leadership
from tracker.leadership.offset_znodes import OffsetWriteSchedule
from tracker.leadership.znode_cache import ZnodeCache
from tracker.settings import TrackerSettings

SESSION_S = TrackerSettings.session_timeout_ms / 1000
SERVER_TICK_S = 2.0  # ZooKeeper's default tickTime: sessions end that much late
KINDS = ("syncs", "reads", "writes", "multis", "writes in multis", "watch events")
_REQUESTS = ("syncs", "reads", "writes", "multis")
_STEADY_S = 6.0
_ROLLED = 1
_ROOT = "/kmq-scale"

Counts = dict[str, float]


_decode_queue = functools.lru_cache(maxsize=10_000)(decode_queue)
_decode_tracker = functools.lru_cache(maxsize=10_000)(decode_tracker)


_numbers_of: dict[int, tuple[list[str], tuple[int, list[int]]]] = {}


def _partitions_of(children: list[str]) -> tuple[int, list[int]]:
    """The same, counted once for each list; the server in memory gives one list to all."""
    known = _numbers_of.get(id(children))
    if known is None or known[0] is not children:
        known = _numbers_of[id(children)] = (children, partitions_of(children))
    return known[1]


class SimulatedClock:
    """Stands until it is moved."""

    now = 1_000.0

    def wall_ms(self) -> int:
        return int(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Shared:
    """A proposal that all trackers of one process share; they ask it for the same things."""

    def __init__(self, proposal: LazyRanking) -> None:
        self.owners = proposal.owners
        self.first = proposal.first
        self.keys = proposal.keys
        self._near: defaultdict[str, dict[Partition, tuple[str, ...]]] = defaultdict(dict)
        for partition in proposal:
            for member in (first := proposal.first(partition, 1 + STAND_INS)):
                self._near[member][partition] = first

    def near(self, member: str, count: int) -> dict[Partition, tuple[str, ...]]:
        assert count == 1 + STAND_INS
        return dict(self._near[member])


class World:
    """Trackers' leaderships and what a tracker asks of them, on a ZooKeeper in memory or a real one."""

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
        """As a tracker that is asked to stop: offsets are stored, the session is closed."""
        leadership = self.members.pop(tracker)
        self._store(leadership, self._served.pop(tracker))
        leadership.close()

    def owners(self) -> dict[Partition, str]:
        return {
            partition: tracker for tracker, leadership in self.members.items()
            for partition in leadership.snapshot().owned
        }  # fmt: skip

    def store_all(self) -> None:
        """Every offset once."""
        for tracker, leadership in self.members.items():
            self._store(leadership, self._served[tracker])

    def _store(self, leadership: Leadership, partitions: dict[Partition, int]) -> None:
        stored = leadership.write_offsets(
            dict.fromkeys(partitions, StoredOffset(next(self._numbers), "t", 0))
        )
        assert stored == partitions.keys()

    def _serve(self, tracker: str) -> bool:
        """Ask leadership what a tracker asks at a takeover and a release; True if there was something."""
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
    """All in this thread, on a simulated clock."""

    def __init__(self, queues: int, partitions: int) -> None:
        super().__init__()
        self.clock = SimulatedClock()
        self.server = Server()
        self._due: dict[str, float] = {}
        self._proposals: dict[frozenset[Member], Any] = {}
        client = self.server.client()
        client.ensure_path_async(f"{_ROOT}/queues")
        client.ensure_path_async(f"{_ROOT}/trackers")
        for number in range(queues):
            name = f"queue-{number}"
            self.server.create(f"{_ROOT}/queues/{name}", QueueSettings(name=name).to_json())
            self.server.create(f"{_ROOT}/queues/{name}/partitions", b"")
            share = partitions // queues + (number < partitions % queues)
            for partition in range(share):
                self.server.create(f"{_ROOT}/queues/{name}/partitions/{partition}", b"")

    def counts(self) -> Counter[str]:
        return self.server.counts.copy()

    def join(self, count: int) -> list[str]:
        names = [f"tracker-{next(self._numbers)}" for _ in range(count)]
        for name in names:
            with patch.object(leadership_module, "new_client", lambda *_: self.server.client()):
                leadership = Leadership(ZooKeeperConnection(hosts=""), name, root=_ROOT, clock=self.clock)
            self.members[name] = leadership
            leadership._session.verify_at = 0.0
            self._served[name] = {}
            # Its first look: it registers. What it would propose before it knows all others is left out.
            with self._shared(lambda *_: LazyRanking({}, (), {})):
                leadership._pass()
            leadership._planner.forget_ranking()
            self._due[name] = self.clock.now
        return names

    def stop(self, tracker: str) -> None:
        self._due.pop(tracker)
        super().stop(tracker)

    def kill(self, names: list[str]) -> None:
        """Their sessions end."""
        for name in names:
            leadership = self.members.pop(name)
            self._due.pop(name)
            self._served.pop(name)
            self.server.expire(leadership._zk.client_id[0])

    def settle(self) -> None:
        """Until nobody has anything to do at this moment, nor in the time of a stand-in."""
        with self._shared(self._propose):
            while self._turn():
                pass

    def run(self, seconds: float) -> None:
        """Let time pass; first so much that the trackers verify their sessions at different times."""
        end = self.clock.now + seconds
        with self._shared(self._propose):
            while (following := min(self._due.values())) < end:
                self.clock.now = max(self.clock.now, following)
                self._turn()
        self.clock.now = end

    def _turn(self) -> bool:
        did = False
        for name, leadership in self.members.items():
            if leadership._signal.is_set() or self._due[name] <= self.clock.now:
                leadership._signal.clear()
                self._due[name] = self.clock.now + max(0.0, leadership._pass())
                did = True
                if self._serve(name):
                    leadership._signal.set()
        return did

    @contextlib.contextmanager
    def _shared(self, proposed: Callable[..., Any]) -> Iterator[None]:
        """Work that every tracker does for itself and that gives the same is done once."""
        with (
            patch.object(planner, "assign", proposed),
            patch.object(tree_module, "decode_queue", _decode_queue),
            patch.object(tree_module, "decode_tracker", _decode_tracker),
            patch.object(tree_module, "partitions_of", _partitions_of),
        ):
            yield

    def _propose(self, partitions: Iterator[Partition], eligible: frozenset[Member]) -> Any:
        if eligible not in self._proposals:
            self._proposals.clear()
            self._proposals[eligible] = _Shared(assign(partitions, eligible))
        return self._proposals[eligible]


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
            self.members[name] = Leadership(ZooKeeperConnection(hosts=self._hosts), name, root=_ROOT)
            self._served[name] = {}
        for name in names:
            self.members[name].start(10)
        return names

    def settle(self) -> None:
        """Until everything is owned and nobody has done anything for a while."""
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


def steps(world: World, count: int, *, killed: int) -> dict[str, Counts]:
    """Counts of each step, and of partitions that moved; `killed` only where sessions can be ended."""
    found: dict[str, Counts] = {}

    def measured(name: str, step: Callable[[], object], seconds: float = 0.0) -> None:
        before, owners = world.counts(), world.owners()
        began, cpu = SYSTEM_CLOCK.monotonic(), time.process_time()
        step()
        after = world.owners()
        moved = [p for p, owner in owners.items() if after.get(p) != owner]
        must = [p for p in moved if owners[p] not in world.members or after[p] not in set(owners.values())]
        found[name] = {kind: float(world.counts()[kind] - before[kind]) for kind in KINDS}
        found[name] |= {"moved": len(moved), "must move": len(must)}
        if seconds:
            found[name]["seconds"] = seconds
        took, cpu = SYSTEM_CLOCK.monotonic() - began, time.process_time() - cpu
        progress(f"{name}: {took:.1f} s, {cpu:.1f} s of CPU")

    def settled(step: Callable[[], object]) -> Callable[[], None]:
        return lambda: (step(), world.settle())[1]

    measured("all start", settled(lambda: world.join(count)))
    world.run(2.0)
    measured("steady, without offsets", lambda: world.run(_STEADY_S), _STEADY_S)
    world.store_all()  # the first time each is created
    measured("every offset once", world.store_all)
    measured("one joins", settled(lambda: world.join(1)))
    measured("one stops", settled(lambda: world.stop(next(iter(world.members)))))
    if killed:
        assert isinstance(world, Simulation)
        names = list(world.members)
        dead = names[:: len(names) // killed][:killed]
        measured(f"{killed} die", settled(lambda: world.kill(dead)))
        measured(f"{killed} come back", settled(lambda: world.join(killed)))
    for number in range(_ROLLED if killed else 1):
        measured(f"restart {number + 1}", settled(lambda: _restart(world)))
    return found


def _restart(world: World) -> None:
    world.stop(next(iter(world.members)))
    world.settle()
    world.join(1)


def simulate(partitions: int, count: int, queues: int) -> dict[str, Any]:
    """The whole size; CPU of the assignment besides."""
    members = [Member(f"tracker-{n}") for n in range(count)]
    names = [(f"queue-{q}", p) for q in range(queues) for p in range(partitions // queues)]
    took = time.process_time()
    proposal = assign(names, members)
    assignment_s = time.process_time() - took
    took = time.process_time()
    proposal.near(members[0].id, 1 + STAND_INS)
    near_s = time.process_time() - took
    load = Counter(proposal.owners.values())
    simulation = Simulation(queues, partitions)
    found = steps(simulation, count, killed=max(1, count // 10))
    return {
        "partitions": partitions,
        "trackers": count,
        "queues": queues,
        "assignment_cpu_s": assignment_s + near_s,
        "load": {"mean": partitions / count, "min": min(load.values()), "max": max(load.values())},
        "watches": simulation.server.watch_count(),
        "steps": found,
    }


def check(zookeeper: str, partitions: int, count: int) -> dict[str, Any]:
    """The same steps, counted on a real ZooKeeper and in the simulation."""
    with connect(ZooKeeperConnection(hosts=zookeeper)) as client, contextlib.ExitStack() as stack:
        registry = Registry(client, _ROOT)
        for number in range(4):
            registry.register(QueueSettings(name=f"queue-{number}"), partitions // 4)
        try:
            with contextlib.ExitStack() as inner:
                real = steps(Real(zookeeper, inner, partitions), count, killed=0)
        finally:
            stack.callback(lambda: client.delete(_ROOT, recursive=True))
    simulated = steps(Simulation(4, partitions), count, killed=0)
    return {"partitions": partitions, "trackers": count, "real": real, "simulated": simulated}


def zookeeper_speed(zookeeper: str) -> Counts:
    """What the embedded ZooKeeper does per second, pipelined from one client."""
    count = 4_000
    with connect(ZooKeeperConnection(hosts=zookeeper), 20_000) as zk:
        zk.ensure_path(_ROOT)
        speeds: Counts = {}

        def timed(name: str, calls: Callable[[], list[Any]], each: int = 1) -> None:
            values = []
            for _ in range(3):
                began = SYSTEM_CLOCK.monotonic()
                done = calls()
                for call in done:
                    call.get(timeout=30)
                values.append(len(done) * each / (SYSTEM_CLOCK.monotonic() - began))
            speeds[name] = statistics.median(values)

        def multi(size: int) -> Any:
            transaction = zk.transaction()
            for _ in range(size):
                transaction.set_data(_ROOT, b"x" * 100)
            return transaction.commit_async()

        timed("reads", lambda: [zk.exists_async(_ROOT) for _ in range(count)])
        timed("syncs", lambda: [zk.sync_async(_ROOT) for _ in range(count)])
        timed("writes", lambda: [zk.set_async(_ROOT, b"x" * 100) for _ in range(count)])
        timed("multis", lambda: [multi(2) for _ in range(count)])
        timed("writes in multis", lambda: [multi(100) for _ in range(count // 50)], 100)
        zk.delete(_ROOT, recursive=True)
    return speeds


def tracker_costs(lab: Lab, few: int, many: int) -> Counts:
    """What a partition that is owned costs a tracker process, from two sizes of it."""
    found = []
    for partitions in (few, many):
        with lab.queue(partitions, register=True) as queue:
            began = SYSTEM_CLOCK.monotonic()
            with trackers.kmqpy(lab, queue, partitions) as tracker:
                took = SYSTEM_CLOCK.monotonic() - began
                time.sleep(3)
                before = usage(tracker.pid)
                time.sleep(5)
                after = usage(tracker.pid)
                found.append((partitions, took, after["rss"], (after["cpu_s"] - before["cpu_s"]) / 5))
                progress(f"{partitions} partitions: {took:.1f} s, {after['rss'] / 1e6:.0f} MB")
    (n1, took1, rss1, cpu1), (n2, took2, rss2, cpu2) = found
    return {
        "bytes_per_partition": (rss2 - rss1) / (n2 - n1),
        "base_bytes": rss1 - n1 * (rss2 - rss1) / (n2 - n1),
        "takeover_s_per_partition": (took2 - took1) / (n2 - n1),
        "idle_cpu": cpu2,
        "idle_cpu_per_partition": (cpu2 - cpu1) / (n2 - n1),
        "measured_with": n2,
    }


def conclude(simulated: dict[str, Any], speed: Counts, costs: Counts) -> dict[str, float]:
    """The figures that the goals are about."""
    partitions, count, found = simulated["partitions"], simulated["trackers"], simulated["steps"]
    settings = TrackerSettings()
    steady = found["steady, without offsets"]
    interval_s = OffsetWriteSchedule(
        settings.offset_interval_ms / 1000, settings.offset_writes_per_s
    ).interval_s(partitions)
    requests = operations = float(RECHECK_ZNODES_PER_S)  # by all trackers, beside what watches tell
    for step, seconds in ((steady, steady["seconds"]), (found["every offset once"], interval_s)):
        singles = (step["syncs"] + step["reads"] + step["writes"]) / seconds
        requests += singles + step["multis"] / seconds
        operations += singles + step["writes in multis"] / seconds
    killed = max(1, count // 10)
    dying, leave, join = found[f"{killed} die"], found["one stops"], found["one joins"]
    zookeeper_s = sum(dying[kind] / speed[kind] for kind in _REQUESTS)
    # As the most loaded one fares that gets half as much again as its share of the dead ones' partitions.
    takeovers = math.ceil(partitions / count * killed / (count - killed) * 1.5)
    takeover_s = takeovers * costs["takeover_s_per_partition"]
    assignment_s = simulated["assignment_cpu_s"]
    memory = costs["base_bytes"] + partitions / count * costs["bytes_per_partition"]
    return {
        "offset_interval_s": interval_s,
        "steady_requests_per_s": requests,
        "steady_operations_per_s": operations,
        "moved_at_leave": leave["moved"] / leave["must move"],
        "moved_at_join": join["moved"] / join["must move"],
        "moved_when_10_percent_die": dying["moved"] / dying["must move"],
        "requests_when_10_percent_die": sum(dying[kind] for kind in _REQUESTS),
        "session_end_s": SESSION_S + SERVER_TICK_S,
        "assignment_s": assignment_s,
        "zookeeper_s": zookeeper_s,
        "takeovers_of_one_tracker": takeovers,
        "takeover_s": takeover_s,
        "all_redelivering_after_s": SESSION_S + SERVER_TICK_S + assignment_s + zookeeper_s + takeover_s,
        "memory_mb_per_tracker": memory / 1e6,
    }


def table(results: dict[str, Any]) -> str:
    """For a terminal."""
    lines = []
    sections = [("simulated", results["simulation"]["steps"])]
    if "check" in results:
        sections += [(f"check, {name}", results["check"][name]) for name in ("real", "simulated")]
    for title, found in sections:
        columns = (*KINDS, "moved", "must move")
        lines += ["", f"{title:26}" + "".join(f"{name:>18}" for name in columns)]
        for name, step in found.items():
            lines.append(f"{name:26}" + "".join(f"{step.get(column, 0):18,.0f}" for column in columns))
    for title in ("zookeeper", "tracker", "conclusions"):
        lines += [
            "",
            *(f"{title}: {name:34}{value:14,.3f}" for name, value in results.get(title, {}).items()),
        ]
    return "\n".join(lines).lstrip("\n")
