"""A kind of database server, as Databases needs to know it."""

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kmqpy.dev.programs import process_owner
from kmqpy.errors import ClusterError


@dataclass(frozen=True)
class DatabaseKind:
    """A kind of database server.

    `find()` returns its programs; it fetches them if need be. `create(programs, folder, group)` makes an
    empty database in `folder`, with its helpers in the process group `group`. `command(programs, folder,
    port, settings)` is that of the server; the settings win. It logs the text `ready` as soon as it serves
    clients, which it does not on a port that another process has.
    `url` is what clients open, with a place for the port. SIGKILL apart, `stop_signal` stops it soonest.
    """

    name: str
    url: str
    find: Callable[[], Sequence[Path]]
    create: Callable[[Sequence[Path], Path, int], None]
    command: Callable[[Sequence[Path], Path, int, Mapping[str, str]], list[str]]
    ready: str
    stop_signal: signal.Signals = signal.SIGTERM


def run(command: Sequence[str], folder: Path, group: int) -> None:
    """Run a program that creates a database; raise ClusterError with what it printed if it fails."""
    result = subprocess.run(
        command,
        check=False,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=group,
        **process_owner(),
    )
    if result.returncode:
        raise ClusterError(
            f"{Path(command[0]).name} failed with exit code {result.returncode}:\n{result.stdout.strip()}\n"
            "If it names a missing library, install that; if memory or disk is short, free some."
        )
