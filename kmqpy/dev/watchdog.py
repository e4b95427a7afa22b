"""Kills the servers of an embedded cluster as soon as their owner is gone, however it went.

Runs as a process of its own: `python watchdog.py <pid of the owner> <folder to remove, or "">`. It leads
the process group that the servers join. It watches its parent rather than a pipe (a forked child of the
owner would keep that open) or PR_SET_PDEATHSIG (Linux only, and bound to the thread that spawned).
"""

import os
import shutil
import signal
import sys
import time

SECONDS_BETWEEN_LOOKS = 0.2


def main(owner: int, folder: str) -> None:
    """Wait until `owner` is no longer the parent, then kill the group and remove the folder."""
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    while os.getppid() == owner:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    group = os.getpgrp()
    if os.fork():
        signal.pause()  # killed with the group
    os.setpgid(0, 0)  # outside of the group, so as to outlive it
    os.killpg(group, signal.SIGKILL)
    for _ in range(50):  # a server that is still dying may write once more
        if not folder or not os.path.exists(folder):  # noqa: PTH110 - nothing more to import
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
