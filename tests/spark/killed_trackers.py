"""Trackers on Spark that are killed at given steps of a redelivery, and started again."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from support import SESSION_MS, until

from kmqpy.dev.ports import free_ports
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from tests.spark.sessions import CHEAP_QUERIES, SMALL
from tests.spark.tracking import LONG_S, stored, take

ROOT = Path(__file__).parents[2]
CONNECT_SERVER = Path(__file__).with_name("connect_server.py")
DYING_WORKERS = {"spark.python.daemon.module": "tests.spark.worker_daemon"}
CONF = {**SMALL, **CHEAP_QUERIES, **DYING_WORKERS}


class Deaths:
    """The deaths to be died, and the environment that tells the processes of them."""

    def __init__(self, folder: Path, deaths: list[str], sabotage: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.wanted = len(deaths)
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "KMQ_TEST_DEATHS": ",".join(deaths),
            "KMQ_TEST_FOLDER": str(folder),
            "KMQ_TEST_SABOTAGE": sabotage,
        }

    @property
    def died(self) -> int:
        return len(list(self.folder.glob("death.*")))


class SparkTrackerProcess:
    """`kmq spark-tracker`, started again whenever it has died."""

    def __init__(self, queue, deaths: Deaths, **where: str) -> None:
        options = {
            "trackers": "2",
            "tracker-id": "spark",
            "bootstrap": queue.connection.bootstrap,
            "zookeeper": queue.zookeeper.hosts,
            "root": queue.connection.root,
            "queue": queue.name,
            "session-timeout": f"{SESSION_MS}ms",
            "offset-interval": "200ms",
            "max-batch-messages": "20",
            "http-port": "-1",
            "log-level": "WARNING",
            "output": "json",
            **where,
        }
        conf = {} if "remote" in where else CONF
        self._command = [str(Path(sys.executable).with_name("kmq")), "spark-tracker"]
        self._command += [f"--{name}={value}" for name, value in options.items()]
        self._command += [f"--conf={name}={value}" for name, value in conf.items()]
        self._queue = queue
        self._deaths = deaths
        self.codes: list[int] = []
        """With which it has ended before."""
        self._start()

    def _start(self) -> None:
        self._jobs_before = _jobs(self._queue)
        self._process = subprocess.Popen(self._command, env=self._deaths.environment, stdout=subprocess.PIPE)
        (self._deaths.folder / "driver").write_text(str(self._process.pid))

    def all_run(self) -> bool:
        """True if both trackers of this driver are there, and no other driver's znode.

        The trackers of a driver that was killed run until ZooKeeper ends its session: they do not count.
        """
        jobs = _jobs(self._queue)
        if len(jobs) != 1 or jobs & self._jobs_before:
            return False
        (job,) = jobs
        with self._queue.registry() as registry:
            ids = [one.id for one in registry.trackers()]
        return all(any(one.startswith(f"{job}-{n}-") for one in ids) for n in (0, 1))

    def keep_running(self) -> None:
        code = self._process.poll()
        if code is not None:
            # 2: its JVM was killed, which it says.
            assert code in (-signal.SIGKILL, 2), f"it ended by itself: {code}"
            self.codes.append(code)
            self._process.stdout.close()
            self._start()

    def wait(self) -> int:
        return self._process.wait(60)

    def stop(self) -> list[dict]:
        """What it says of its trackers."""
        self._process.send_signal(signal.SIGTERM)
        told, _ = self._process.communicate(timeout=60)
        assert self._process.returncode == 0
        return json.loads(told)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def connect_server(deaths: Deaths):
    """Its address; `deaths` are those of its workers."""
    (port,) = free_ports(1)
    command = [
        sys.executable,
        str(CONNECT_SERVER),
        str(port),
        json.dumps({**CONF, "spark.master": "local[4,99]"}),
    ]
    with subprocess.Popen(command, env=deaths.environment, stdin=subprocess.PIPE) as server:
        until(lambda: _listens(port) or server.poll() is not None, LONG_S, every=0.1)
        yield f"sc://127.0.0.1:{port}"
        server.stdin.close()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _jobs(queue) -> set[str]:
    """The znodes of drivers."""
    with queue.registry() as registry:
        return set(registry._requests.children(ZnodePaths(queue.connection.root).jobs))


def die(queue, deaths: Deaths, trackers: SparkTrackerProcess, each: int) -> list[str]:
    """Returns when all these deaths have been died; the messages that were to come again meanwhile."""
    # Something is due all the time, so that there is a transaction to die in.
    bodies = take(queue, each, "one", lambda number: 20 * number)
    rounds, deadline = 0, time.monotonic() + LONG_S + 90 * deaths.wanted
    while deaths.died < deaths.wanted:
        assert time.monotonic() < deadline, f"{deaths.died} of {deaths.wanted}, ended: {trackers.codes}"
        trackers.keep_running()
        time.sleep(0.2)
        copies = stored(queue)
        if all(copies[body] >= 2 for body in bodies):
            rounds += 1
            bodies += take(queue, each, f"more{rounds}", lambda number: 20 * number)
    return bodies


def killed(queue, deaths: Deaths, each=60, **where: str) -> Counter[str]:
    """How often each message stands in the topic when all these deaths have been died and it is quiet."""
    with SparkTrackerProcess(queue, deaths, **where) as trackers:
        bodies = die(queue, deaths, trackers, each)
        until(lambda: trackers.keep_running() or trackers.all_run(), LONG_S, every=0.1)
        until(lambda: min(map(stored(queue).__getitem__, bodies)) >= 2, LONG_S, every=0.2)
        told = trackers.stop()
        assert [report["number"] for report in told] == [0, 1]
    copies = stored(queue)
    assert copies.keys() == {*bodies}
    return copies
