"""Kills servers as soon as their owner, the process that started them, has ended for any reason.

The watchdog is a process of its own: `python watchdog.py <pid of the owner> <folder to remove, or "">`. It
leads the process group that the servers join. It looks every 0.2 s whether the owner is still its parent. A
pipe would not do: a forked child of the owner would keep it open. Nor would PR_SET_PDEATHSIG, which only
Linux has, and which watches one thread of the owner. This module imports only what the watchdog needs.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator

SECONDS_BETWEEN_LOOKS = 0.2


def start(folder: str) -> subprocess.Popen[bytes]:
    """Start a watchdog over this process. The servers that it kills are those in its own process group."""
    return subprocess.Popen(
        [sys.executable, "-IS", __file__, str(os.getpid()), folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


def processes() -> Iterator[tuple[int, int, int]]:
    """Yield process id, parent and process group of all processes except zombies."""
    if not os.path.exists("/proc/self/stat"):  # noqa: PTH110 - nothing more to import
        command = ["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="]
        listed = subprocess.run(command, check=False, capture_output=True, text=True).stdout
        for line in listed.splitlines():
            pid, parent, group, state = line.split()[:4]
            if state[0] != "Z":
                yield int(pid), int(parent), int(group)
        return
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()  # state, parent, group, …
            if fields[0] not in (b"Z", b"X"):
                yield int(name), int(fields[1]), int(fields[2])


def running(pids: Collection[int]) -> bool:
    """Tell whether one of these processes still runs."""
    return bool(pids) and any(pid in pids for pid, _, _ in processes())


def main(owner: int, folder: str) -> None:
    """Wait until `owner` is no longer the parent, then kill the servers and remove the folder."""
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    while os.getppid() == owner:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    group = os.getpgrp()
    if os.fork():
        signal.pause()  # killed with the group
    os.setpgid(0, 0)  # outside of the group, so as to outlive it
    os.killpg(group, signal.SIGSTOP)  # the servers start no more children
    found = list(processes())
    members = {pid for pid, _, of in found if of == group}
    os.killpg(group, signal.SIGKILL)
    for pid, parent, _ in found:  # PostgreSQL's children leave the group, and outlive it if they are halted
        if parent in members and pid not in members and pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for _ in range(50):  # a server that is still dying may write once more
        if not folder or not os.path.exists(folder):  # noqa: PTH110 - nothing more to import
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
