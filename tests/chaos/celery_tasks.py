"""Kills gateways, a worker of Celery and PostgreSQL's connections while tasks with an ETA are sent and run.

The workers are Celery's own, with processes. Each task has an ETA later than the visibility timeout, and is
sent once. None that was accepted may be lost, or run before its ETA; one may run twice only if something was
killed within the lease of its first run: its delete may have been lost.
"""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kmqpy.core.clock import wait_until
from kmqpy.dev.jars import cache_folder
from kmqpy.dev.ports import free_ports

from .gateways import LARGE, Gateway, Span, backend, break_things
from .sqs import client
from .stage import Failed

PACKAGES = ("celery[sqs]==5.7.0", "aioboto3==15.5.0")
_LEASE_S = 10
_SLACK_S = 5.0
_END_S = 900.0


def packages() -> Path:
    """Celery, which needs another boto3 than the tests: pip fetches it once, and the cache keeps it.

    Raises subprocess.SubprocessError.
    """
    folder = cache_folder() / "-".join(one.replace("==", "-") for one in PACKAGES)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", f"{made}/all"]
            subprocess.run([*install, *PACKAGES], check=True, capture_output=True, timeout=400)
            if not folder.exists():  # another process may have been faster
                Path(made, "all").rename(folder)
    return folder


class _Program:
    """A process with Celery: a sender, or a worker.

    kept  it is started again whenever it ends, as by a supervisor: when a receive has no answer, kombu 5.7
          raises an AttributeError of its own, which ends its worker
    """

    def __init__(self, arguments: list[str], port: int, out: Path, name: str, *, kept: bool) -> None:
        self.printed = out / f"{name}.out"
        self._command = [sys.executable, *arguments]
        self._log = out / f"{name}.log"
        self._env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(packages()), str(out)]),
            "AWS_MAX_ATTEMPTS": "1",  # a send that is repeated may be two
            "PORT": str(port),
            "LEASE_S": str(_LEASE_S),
            "RUNS": str(out / "runs"),
        }
        self.printed.write_text("")
        self.starts = 0
        self._kept = kept
        self._start()
        if kept:
            threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        while self._kept:
            self._process.wait()
            if self._kept:
                self.kill(signal.SIGKILL)  # its processes
                self._start()

    def _start(self) -> None:
        self.starts += 1
        with self._log.open("a") as log, self.printed.open("a") as printed:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=printed, stderr=log, start_new_session=True
            )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self, number: int) -> None:
        """Send a signal to it and its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """End it."""
        self._kept = False
        self.kill(signal.SIGTERM)
        self._process.wait(60)


def run(count: int, seed: int, out: Path, tell: Callable[[str], None]) -> list[str]:
    """Let `count` tasks be accepted; returns what was wrong."""
    try:
        packages()
    except subprocess.SubprocessError as error:
        raise Failed(f"the package registry does not give {PACKAGES}: {error}") from None
    tell(f"seed {seed}")
    (out / "runs").write_text("")
    app = shutil.copy(Path(__file__).with_name("celery_app.py"), out)  # other files here hide libraries
    with backend("postgresql") as (url, cut):
        ports = free_ports(LARGE.gateways)
        gateways = [Gateway(url, port, out / f"gateway-{port}.log") for port in ports]
        programs: list[_Program] = []
        try:
            for gateway in gateways:
                gateway.start()
            attributes = {"VisibilityTimeout": str(_LEASE_S)}
            client(ports[0]).create_queue(QueueName="celery", Attributes=attributes)
            worker = ["-m", "celery", "-A", "celery_app", "worker", "-c", "2", "--without-mingle"]
            for number, port in enumerate(ports):
                command = [*worker, "-n", f"w{number}"]
                programs.append(_Program(command, port, out, f"worker-{number}", kept=True))
            workers = [*programs]
            each = str(-(-count // len(ports)))
            for number, port in enumerate(ports):
                command = [str(app), str(number), each]
                programs.append(_Program(command, port, out, f"sender-{number}", kept=False))
            senders = programs[len(workers) :]

            def break_something() -> None:
                cut()
                workers[0].kill(signal.SIGKILL)

            def accepted() -> list[str]:
                return [name for one in senders for name in one.printed.read_text().split()]

            dice = random.Random(seed)
            faults = break_things(
                gateways, break_something, lambda: len(accepted()), count, dice, LARGE, tell
            )
            if not wait_until(lambda: not any(one.is_running() for one in senders), _END_S):
                raise Failed("the senders did not end")
            wait_until(lambda: {*accepted()} <= _runs(out).keys(), _END_S, every_s=0.5)
            time.sleep(_LEASE_S + _SLACK_S)  # what runs again without a reason may do so now
            names, runs = accepted(), _runs(out)
        finally:
            for one in programs:
                one.end()
            for gateway in gateways:
                gateway.stop()
    again = sum(len(found) > 1 for found in runs.values())
    started = sum(one.starts for one in workers)
    tell(f"{len(names)} tasks accepted, {len(runs)} ran, {again} of them again, by {started} workers")
    found = {
        "accepted and lost": [name for name in names if name not in runs],
        "run before the ETA": [name for name, each in runs.items() if any(early > 0 for _, early in each)],
        "run twice for no reason": [name for name, each in runs.items() if _is_doubled(each, faults)],
    }
    return [f"{len(wrong)} {what}: {wrong[:10]}" for what, wrong in found.items() if wrong]


def _runs(out: Path) -> dict[str, list[tuple[float, float]]]:
    """When each task ran, and how much too early (s)."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in (out / "runs").read_text().splitlines():
        name, at_s, early_s = line.split()
        found[name].append((float(at_s), float(early_s)))
    return found


def _is_doubled(runs: list[tuple[float, float]], faults: list[Span]) -> bool:
    for (first_s, _), (second_s, _) in itertools.pairwise(sorted(runs)):
        if not any(
            fault.asked_s < second_s and first_s < fault.answered_s + _LEASE_S + _SLACK_S for fault in faults
        ):
            return True
    return False
