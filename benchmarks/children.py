"""Runs child processes (peers that report as JSON, trackers), and measures their CPU time and memory."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kmqpy.core.clock import wait_until
from kmqpy.dev.ports import free_ports
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 600.0


class Failed(Exception):
    """Raised when a child process did not do what it should."""


class Child:
    """A child process that is killed at the end of the block."""

    def __init__(self, command: list[str]) -> None:
        self.started = time.time()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads would fill up
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._errors.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self._process.communicate()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Send SIGTERM, and wait until the process has ended."""
        self._process.terminate()
        self._process.communicate(timeout=timeout_s)

    def line(self) -> dict[str, Any]:
        """Return the JSON in the next line of its stdout; raises Failed when stdout has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(self._last_words())
        return dict(json.loads(line))

    def result(self, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
        """Wait until the process ends by itself, and return the JSON in the last line of its stdout."""
        try:
            output, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"not done after {timeout_s:.0f} s") from None
        if self._process.returncode or not output.strip():
            raise Failed(self._last_words())
        return dict(json.loads(output.splitlines()[-1]))

    def check(self) -> None:
        """Raise Failed if the process has ended."""
        if self._process.poll() is not None:
            raise Failed(self._last_words())

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        # librdkafka and the JVM log to stderr, too. The last line of Python says why the process ended.
        ours = [line for line in lines if not line.startswith(("%", "[", "WARNING"))]
        return (ours or lines or ["ended without a word"])[-1]


def peer(name: str, work: str, **options: Any) -> Child:
    """Start one of benchmarks/peers in a process of its own."""
    return Child([sys.executable, "-m", "benchmarks.peers", name, work, json.dumps(options)])


class TrackerProcess(Child):
    """`python -m tracker`, as a user runs it."""

    def __init__(self, connection: KafkaConnection, zookeeper: ZooKeeperConnection, **flags: str) -> None:
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}/metrics"
        settings = {
            "bootstrap": connection.bootstrap,
            "zookeeper": zookeeper.hosts,
            "root": connection.root,
            "http-port": str(port),
            "log-level": "ERROR",
            **{name.replace("_", "-"): value for name, value in flags.items()},
        }
        options = [text for name, value in settings.items() for text in (f"--{name}", value)]
        super().__init__([sys.executable, "-m", "tracker", *options])

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 while the tracker does not answer."""
        try:
            with urllib.request.urlopen(self._url, timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0.0
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    def wait_until_it_owns(self, partitions: int) -> None:
        """Return when the tracker owns `partitions` partitions and has taken them over."""
        until(
            lambda: self.metric("kmq_owned_partitions") == partitions <= self.metric("kmq_takeovers_total"),
            "the tracker owns its partitions",
            30.0,
            child=self,
        )


class SparkTrackerProcess(Child):
    """`kmq spark-tracker` on a local master, as a user runs it."""

    def __init__(
        self, connection: KafkaConnection, zookeeper: ZooKeeperConnection, trackers: int, queue: str
    ) -> None:
        settings = {
            "bootstrap": connection.bootstrap,
            "zookeeper": zookeeper.hosts,
            "root": connection.root,
            "trackers": str(trackers),
            "queue": queue,
            "http-port": "-1",
            "log-level": "ERROR",
            "conf": "spark.ui.enabled=false",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        super().__init__([str(Path(sys.executable).with_name("kmq")), "spark-tracker", *options])


def until(
    is_so: Callable[[], bool],
    what: str,
    timeout_s: float,
    *,
    child: Child | None = None,
    every_s: float = 0.1,
) -> None:
    """Wait until `is_so()` is true; raises Failed when that takes too long, or when `child` has ended."""

    def holds() -> bool:
        if is_so():
            return True
        if child is not None:
            child.check()
        return False

    if not wait_until(holds, timeout_s, every_s=every_s):
        raise Failed(f"not after {timeout_s:.0f} s: {what}")


def usage(pid: int) -> Mapping[str, float]:
    """The CPU seconds of a process so far, and its resident memory in bytes."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        fields = stat.read_text().rpartition(")")[2].split()
        tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        return {"cpu_s": (int(fields[11]) + int(fields[12])) / tick, "rss": float(int(fields[21]) * page)}
    row = subprocess.run(
        ["ps", "-o", "rss=,time=", "-p", str(pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    cpu_s = 0.0
    for part in re.split("[:-]", row[1]):
        cpu_s = cpu_s * 60 + float(part)
    return {"cpu_s": cpu_s, "rss": float(row[0]) * 1024}
