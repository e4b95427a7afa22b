"""Simulates 100,000 partitions on 1,000 trackers: the work of ZooKeeper, partitions that move, and times.

The trackers' own code (`tracker.leadership`) runs on a simulated clock and against a ZooKeeper in memory,
which counts its operations. The same steps with a few trackers on a real ZooKeeper check the counts. Speeds
of ZooKeeper, and what one partition costs a tracker process, are measured on the embedded cluster; times for
the whole are computed from them. docs/scale.md has the results.
"""

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks import trackers
from benchmarks.children import usage
from benchmarks.lab import Lab
from benchmarks.results import progress
from benchmarks.scale_worlds import KINDS, ROOT, Real, Simulation, World
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.settings import QueueSettings
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.leadership.assignment import STAND_INS, Member, assign
from tracker.leadership.leadership import RECHECK_ZNODES_PER_S
from tracker.leadership.offset_znodes import OffsetWriteSchedule
from tracker.settings import TrackerSettings

SESSION_S = TrackerSettings.session_timeout_ms / 1000
SERVER_TICK_S = 2.0  # ZooKeeper's default tickTime: a session ends up to one tick too late
_REQUESTS = ("syncs", "reads", "writes", "multis")
_STEADY_S = 6.0

Counts = dict[str, float]


def steps(world: World, count: int, *, killed: int) -> dict[str, Counts]:
    """Return for each step the operations that ZooKeeper did, and how many partitions moved.

    killed  how many trackers die at once; 0 in the real world, whose sessions nobody can end early
    """
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
    world.run(2.0)  # after this time, trackers verify their sessions, each at its own time
    measured("steady, without offsets", lambda: world.run(_STEADY_S), _STEADY_S)
    world.store_all()  # not counted: the first time, this creates the znodes
    measured("every offset once", world.store_all)
    measured("one joins", settled(lambda: world.join(1)))
    measured("one stops", settled(lambda: world.stop(next(iter(world.members)))))
    if killed:
        assert isinstance(world, Simulation)
        names = list(world.members)
        dead = names[:: len(names) // killed][:killed]
        measured(f"{killed} die", settled(lambda: world.kill(dead)))
        measured(f"{killed} come back", settled(lambda: world.join(killed)))
    measured("restart 1", settled(lambda: _restart(world)))
    return found


def _restart(world: World) -> None:
    world.stop(next(iter(world.members)))
    world.settle()
    world.join(1)


def simulate(partitions: int, count: int, queues: int) -> dict[str, Any]:
    """Run the steps in their whole size; also measures the CPU time of one assignment."""
    members = [Member(f"tracker-{n}") for n in range(count)]
    names = [(f"queue-{q}", p) for q in range(queues) for p in range(partitions // queues)]
    took = time.process_time()
    ranking = assign(names, members)
    assignment_s = time.process_time() - took
    took = time.process_time()
    ranking.near(members[0].id, 1 + STAND_INS)
    near_s = time.process_time() - took
    load = Counter(ranking.owners.values())
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
    """Run the same steps on a real ZooKeeper and in the simulation: both counts should agree."""
    with connect(ZooKeeperConnection(hosts=zookeeper)) as client, contextlib.ExitStack() as stack:
        registry = Registry(client, ROOT)
        for number in range(4):
            registry.register(QueueSettings(name=f"queue-{number}"), partitions // 4)
        try:
            with contextlib.ExitStack() as inner:
                real = steps(Real(zookeeper, inner, partitions), count, killed=0)
        finally:
            stack.callback(lambda: client.delete(ROOT, recursive=True))
    simulated = steps(Simulation(4, partitions), count, killed=0)
    return {"partitions": partitions, "trackers": count, "real": real, "simulated": simulated}


def zookeeper_speed(zookeeper: str) -> Counts:
    """Measure the operations per second of the embedded ZooKeeper, pipelined from one client."""
    count = 4_000
    with connect(ZooKeeperConnection(hosts=zookeeper), 20_000) as zk:
        zk.ensure_path(ROOT)
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
                transaction.set_data(ROOT, b"x" * 100)
            return transaction.commit_async()

        timed("reads", lambda: [zk.exists_async(ROOT) for _ in range(count)])
        timed("syncs", lambda: [zk.sync_async(ROOT) for _ in range(count)])
        timed("writes", lambda: [zk.set_async(ROOT, b"x" * 100) for _ in range(count)])
        timed("multis", lambda: [multi(2) for _ in range(count)])
        timed("writes in multis", lambda: [multi(100) for _ in range(count // 50)], 100)
        zk.delete(ROOT, recursive=True)
    return speeds


def tracker_costs(lab: Lab, few: int, many: int) -> Counts:
    """Measure what each owned partition costs a tracker process, by the difference of two sizes."""
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
    """Compute the figures for which there are goals."""
    partitions, count, found = simulated["partitions"], simulated["trackers"], simulated["steps"]
    settings = TrackerSettings()
    steady = found["steady, without offsets"]
    interval_s = OffsetWriteSchedule(
        settings.offset_interval_ms / 1000, settings.offset_writes_per_s
    ).interval_s(partitions)
    requests = operations = float(RECHECK_ZNODES_PER_S)  # znodes that all trackers read again anyway
    for step, seconds in ((steady, steady["seconds"]), (found["every offset once"], interval_s)):
        singles = (step["syncs"] + step["reads"] + step["writes"]) / seconds
        requests += singles + step["multis"] / seconds
        operations += singles + step["writes in multis"] / seconds
    killed = max(1, count // 10)
    dying, leave, join = found[f"{killed} die"], found["one stops"], found["one joins"]
    zookeeper_s = sum(dying[kind] / speed[kind] for kind in _REQUESTS)
    # Of the most loaded tracker: it gets half as much again as its share of the dead trackers' partitions.
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
    """The results as text for a terminal."""
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
