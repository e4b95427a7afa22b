"""Runs `kmq tracker` beside the gateway, in a process of its own: queues on Kafka need one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.closeable import Closeable

_log = logging.getLogger(__name__)

_STEADY_S = 60.0
"""One that ran longer, in seconds, before it ended is started again after the shortest pause."""
_END_S = 20.0
"""The tracker gets so many seconds to end by itself."""
_PROGRAM = """
import ctypes, os, signal, sys
parent = int(sys.argv.pop(1))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end when the gateway is killed
if os.getppid() == parent:
    from kmqpy.cli import main
    main()
"""


class TrackerProcess(Closeable):
    """Keeps a tracker running for the storage of a kafka: url, until close().

    deaths     how often it has ended by itself
    last_exit  the exit code of the last time, negative for a signal; None: it never has
    """

    def __init__(self, url: str, log_format: str = "text") -> None:
        self._environment = {**os.environ, "KMQ_QUEUE_URL": url}
        self._log_format = log_format
        self._backoff = Backoff(first=0.5, maximum=30)
        self._closing = threading.Event()
        self.deaths = 0
        self.last_exit: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, name="kmq-tracker", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """True while its process runs."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Stop the tracker, and return when it has ended."""
        self._closing.set()
        if self._process is not None:
            self._process.terminate()
        self._thread.join(_END_S)
        self.kill()
        self._thread.join()

    def kill(self) -> None:
        """End the tracker at once."""
        self._closing.set()
        if self._process is not None:
            self._process.kill()

    def _keep_running(self) -> None:
        failures = 0
        while not self._closing.is_set():
            started_s = SYSTEM_CLOCK.monotonic()
            options = ["--http-port", "-1", "--log-format", self._log_format]
            command = [sys.executable, "-c", _PROGRAM, str(os.getpid()), "tracker", *options]
            try:
                self._process = subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL)
            except OSError as error:  # no room for one more process, for example
                failures += 1
                what, details = "the tracker can't be started", {"error": str(error)}
            else:
                if self._closing.is_set():
                    self._process.terminate()  # close() may have come too early for this process
                code = self._process.wait()
                if self._closing.is_set():
                    return
                failures = 1 if SYSTEM_CLOCK.monotonic() - started_s > _STEADY_S else failures + 1
                self.last_exit = code
                self.deaths += 1
                what, details = "the tracker ended", {"code": str(code)}
            pause_s = self._backoff.delay(failures)
            _log.error(what, extra={**details, "again_in_s": round(pause_s, 1)})
            self._closing.wait(pause_s)
