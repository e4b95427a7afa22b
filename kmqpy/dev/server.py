"""Runs server processes, each with its children: starts, stops, kills, pauses and resumes them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kmqpy.core.clock import wait_until
from kmqpy.dev import watchdog
from kmqpy.errors import ClusterError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
LINES_IN_ERROR = 15


def check_platform() -> None:
    """Raise ClusterError on Windows, which has neither process groups nor the signals used here."""
    if sys.platform == "win32":
        raise ClusterError(
            "The embedded servers need Linux or macOS; on Windows, run this in WSL, "
            "or use servers that run elsewhere (KMQ_BOOTSTRAP, KMQ_ZOOKEEPER)."
        )


class Servers:
    """Servers that run together as child processes, under one watchdog, in one folder."""

    def __init__(self, keep: Path | None) -> None:
        self.folder: Path | None = None
        self._keep = keep
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start all servers, and return when all of them answer."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop all servers, and remove their data unless it is kept. May be called twice."""
        raise NotImplementedError

    def _make_folder(self) -> Path:
        self.folder = Path(self._keep or tempfile.mkdtemp(prefix="kmqpy-")).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def _watched_group(self) -> int:
        if self._watchdog is None:
            self._watchdog = watchdog.start("" if self._keep else str(self.folder))
        return self._watchdog.pid

    def _clear_up(self) -> None:
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog = None
        if self.folder and not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def stop_all(servers: Iterable["Server"]) -> list["Server"]:
    """Stop servers, all of them at a time; return those that ended by themselves in time."""
    servers = list(servers)
    for server in servers:
        server.terminate()
    return [server for server in servers if server.stop()]


@dataclass(frozen=True)
class ServerKind:
    """Describes a kind of server to Cluster.

    name          the name of the kind, and of its jar set
    ports_each    how many ports each server has
    write_config  called with (folder, number, ports, settings): writes the configuration of server `number`
                  (from 1) and returns its path; `ports` has the ports of all servers
    answers       called with (log, config, port): tells whether the server that wrote this text to its log
                  and has this configuration serves clients on this port
    """

    name: str
    main_class: str
    ports_each: int
    write_config: Callable[[Path, int, Sequence[Sequence[int]], Mapping[str, str]], Path]
    answers: Callable[[str, Path, int], bool]


class Server:
    """A server process, made by Cluster or Databases. All durations are in seconds.

    Attributes:
        name: What logs call it.
        command: The program and its arguments.
        environment: May be changed; the next start uses it.
        log: The file of its output.
        answers: Called with the text that the server has logged since its last start: tells whether the
            server serves clients.
        group: The process group that the server joins; the watchdog kills the group as soon as the process
            that started the servers has ended.
        owner: Arguments of subprocess that choose the user as whom the server runs, see
            programs.process_owner(); None: this user.
        stop_signal: The signal that stops the server in an orderly way.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        answers: Callable[[str], bool],
        group: int,
        owner: Mapping[str, Any] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name
        self.log = log
        self._command = command
        self.environment = environment
        self._answers = answers
        self._group = group
        self._owner = owner or {}
        self._stop_signal = stop_signal
        self._process: subprocess.Popen[bytes] | None = None
        self._log_offset = 0

    @property
    def pid(self) -> int | None:
        """The process id; None while the server does not run."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process and running else None

    def start(self, wait: float = START_TIMEOUT_S) -> None:
        """Start the server unless it runs, with the port and data it had before, and wait until it answers.

        Args:
            wait: Seconds to wait for its answer; 0: return at once, for a server that answers only when
                others are up.

        Raises:
            ClusterError: The server ends, or does not answer in time; the text has the last lines of the log.
        """
        if self.pid is None:
            with self.log.open("ab") as log:
                self._log_offset = log.tell()
                self._process = subprocess.Popen(
                    self._command,
                    env=self.environment,
                    cwd=self.log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=self._group,
                    **self._owner,
                )
        if wait:
            self.wait_until_it_answers(wait)

    def wait_until_it_answers(self, timeout: float = START_TIMEOUT_S) -> None:
        """Wait until the server answers.

        Args:
            timeout: Seconds.

        Raises:
            ClusterError: As for start().
        """

        def answers() -> bool:
            if self._answers(self.log_since_start()):
                return True
            if self.pid is None:
                code = self._process.returncode if self._process else None
                raise self._failure(f"ended with exit code {code} while it was starting")
            return False

        if not wait_until(answers, timeout):
            raise self._failure(f"did not answer within {timeout:g} s")

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> bool:
        """Stop the server in an orderly way; kill it if it runs longer than `timeout`.

        Args:
            timeout: Seconds.

        Returns:
            False if the server ran longer and was killed.
        """
        self.terminate()
        if self._process is not None:
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                return False
        return True

    def terminate(self) -> None:
        """Ask the server to stop, and return at once."""
        self.resume()
        self._signal(self._stop_signal)

    def kill(self) -> None:
        """Kill the server and its children (SIGKILL), even while they are paused."""
        children = self._halt()
        self._signal(signal.SIGKILL, children)
        if self._process is not None:
            self._process.wait()
        # PostgreSQL does not start again while one of its children is left.
        wait_until(lambda: not watchdog.running(children), STOP_TIMEOUT_S, every_s=0.01)

    def pause(self) -> None:
        """Halt the server and its children (SIGSTOP): connections stay open, and no request is answered."""
        self._signal(signal.SIGSTOP, self._halt())

    def resume(self) -> None:
        """Let the server and its children go on after pause() (SIGCONT)."""
        self._signal(signal.SIGCONT, self._children())

    def log_since_start(self) -> str:
        """Return the text that the server has logged since its last start."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(self._log_offset)
            return log.read().decode(errors="replace")

    def _signal(self, number: signal.Signals, children: Sequence[int] = ()) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        if self._process is not None:
            self._process.send_signal(number)  # does nothing once the process has ended

    def _halt(self) -> list[int]:
        """Halt the process, so that it starts no more children, and return those it has."""
        self._signal(signal.SIGSTOP)
        if self.pid and hasattr(os, "waitid"):  # macOS: since Python 3.13
            # On a busy machine its threads go on for a moment. WNOWAIT: subprocess reaps an ended process.
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return self._children()

    def _children(self) -> list[int]:
        own = self.pid
        return [pid for pid, parent, _ in watchdog.processes() if parent == own] if own else []

    def _failure(self, what: str) -> ClusterError:
        lines = self.log_since_start().splitlines()[-LINES_IN_ERROR:]
        return ClusterError(
            f"{self.name} {what}. The last lines of its log {self.log}:\n  "
            + "\n  ".join(lines or ["(it is empty)"])
            + "\nIf they name a setting, correct that; if memory or disk is short, free some. "
            "With keep=<folder> the logs are kept."
        )
