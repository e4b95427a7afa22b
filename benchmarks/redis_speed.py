"""Queues on Redis: put and take + ack per second, beside bare commands and other queues on the same server.

    python -m benchmarks.redis_speed [--quick] [--server valkey] [--systems bare,kmqpy] [--depths 0,10000]

Rates are by the clock, and by CPU time of clients and server together, which other load on the machine does
not change. The append-only file is on and synced each second, for all. rq and taskiq-redis are installed once
into a cache folder.
"""

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from redis import Redis

from kmqpy.dev import Databases
from kmqpy.storages.engine import NewRow
from kmqpy.storages.redis.engine import RedisEngine
from kmqpy.storages.redis.server import Server, ServerSettings

PEERS = ("rq", "taskiq")
PACKAGES = ("rq==3.0.0", "taskiq-redis==1.2.4")
FOLDER = Path.home() / ".cache" / "kmqpy" / "redis-peers"
SCRIPT = Path(__file__).parent / "peers" / "redis_queues.py"
FILL = 5000
COUNTS = {(False, 1): 8000, (False, 100): 64_000, (True, 1): 1600, (True, 100): 6400}


@dataclass(frozen=True)
class Rate:
    """Messages per second: by the clock, and by CPU time."""

    system: str
    work: str
    takers: int
    batch: int
    depth: int
    per_s: float
    per_cpu_s: float


def measure(system: str, work: str, url: str, *, takers: int, batch: int, depth: int, count: int) -> Rate:
    """Let `takers` processes put or take `count` messages together."""
    with Redis.from_url(url) as admin:
        command = [_python(system), str(SCRIPT), system, work, url, str(batch), str(count // takers)]
        workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(takers)
        ]
        try:
            for worker in workers:
                assert worker.stdout is not None
                if worker.stdout.readline() != "ready\n":
                    raise SystemExit(f"{system} {work}: a worker did not start")
            before = _server_cpu_s(admin)
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
            results = [json.loads(worker.communicate(timeout=600)[0]) for worker in workers]
            cpu_s = sum(one["cpu_s"] for one in results) + _server_cpu_s(admin) - before
        finally:
            for worker in workers:
                worker.kill()
    return Rate(system, work, takers, batch, depth, count / max(one["s"] for one in results), count / cpu_s)


def fill(system: str, url: str, depth: int) -> None:
    """Put messages that stay in the queue."""
    if system == "bare":
        measure(system, "put", url, takers=1, batch=min(FILL, depth), depth=0, count=depth)
        return
    host, _, port = url.partition("://")[2].partition("/")[0].partition(":")
    engine = RedisEngine(Server(ServerSettings(host=host, port=int(port), timeout_s=60)))
    queue = engine.find_queue("speed")
    assert queue is not None
    for _ in range(depth // FILL):
        engine.put(queue, [NewRow(bytes(100))] * FILL)
    engine.close()


def run(server: str, systems: Sequence[str], depths: Sequence[int], *, quick: bool) -> list[Rate]:
    """All rates; prints each as it is known."""
    rates = []
    scale = 4 if quick else 1
    with Databases(server) as databases:
        url = databases.urls[server]
        for depth in depths:
            for system in systems:
                if depth and system in PEERS:
                    continue
                with Redis.from_url(url) as admin:
                    admin.flushall()
                measure(
                    system, "put", url, takers=1, batch=100, depth=0, count=200
                )  # warm, and make the queue
                measure(system, "take", url, takers=1, batch=100, depth=0, count=200)
                if depth:
                    fill(system, url, depth)
                for batch in (1, 100):
                    if system == "rq" and batch > 1:
                        continue  # its worker takes one at a time
                    for takers in (1, 8):
                        count = COUNTS[system in PEERS, batch] // scale
                        for work in ("put", "take"):
                            rate = measure(
                                system, work, url, takers=takers, batch=batch, depth=depth, count=count
                            )
                            rates.append(rate)
                            print(json.dumps(asdict(rate)), flush=True)
    return rates


def _server_cpu_s(admin: Redis) -> float:
    found = admin.info("cpu")
    assert isinstance(found, dict)
    return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


def _python(system: str) -> str:
    if system not in PEERS:
        return sys.executable
    python = FOLDER / "bin" / "python"
    if not python.exists():
        venv.create(FOLDER, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--server", choices=["redis", "valkey"], default="redis")
    parser.add_argument("--systems", default="bare,kmqpy,rq,taskiq")
    parser.add_argument("--depths", default="0,10000,1000000")
    given = parser.parse_args()
    systems, depths = given.systems.split(","), [int(one) for one in given.depths.split(",")]
    rates = run(given.server, systems, depths, quick=given.quick)
    print(f"{'':8}{'work':6}{'takers':>7}{'batch':>6}{'depth':>9}{'/s':>9}{'/CPU s':>9}")
    for one in sorted(rates, key=lambda one: (one.work, one.batch, one.takers, one.depth, one.system)):
        print(
            f"{one.system:8}{one.work:6}{one.takers:7}{one.batch:6}{one.depth:9}"
            f"{one.per_s:9.0f}{one.per_cpu_s:9.0f}"
        )


if __name__ == "__main__":
    main()
