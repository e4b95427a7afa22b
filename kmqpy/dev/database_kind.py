"""Describes a kind of database server to Databases: how to find, create, start and stop a server."""

import os
import shutil
import signal
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kmqpy.dev.programs import process_owner, programs_folder
from kmqpy.errors import ClusterError

_KEPT = 3
"""Of each kind so many empty databases are kept, the latest: of other versions, programs or users."""


@dataclass(frozen=True)
class DatabaseKind:
    """A kind of database server.

    name         the name for Databases, of the data folder and of the log
    url          the URL that clients open, with `{port}` in the place of the port
    find         returns the programs of the server; fetches them if they are missing
    create       called with (programs, folder, group): makes an empty database in `folder`; its helper
                 programs join the process group `group`
    command      called with (programs, folder, port, settings): returns the command that starts the server;
                 `settings` override its own options
    ready        a text that the server logs as soon as it serves clients; a server whose port another process
                 has never logs it
    stop_signal  the signal that stops the server soonest, SIGKILL apart
    """

    name: str
    url: str
    find: Callable[[], Sequence[Path]]
    create: Callable[[Sequence[Path], Path, int], None]
    command: Callable[[Sequence[Path], Path, int, Mapping[str, str]], list[str]]
    ready: str
    stop_signal: signal.Signals = signal.SIGTERM


def arguments(options: Mapping[str, object]) -> list[str]:
    """Return `--name=value` for each option, and `--name` where the value is None."""
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]


def copy_of_first(name: str, server: Path, options: object, folder: Path, make: Callable[[], None]) -> None:
    """Copy the empty database of an earlier start to `folder`/data; without one, `make` makes it there.

    MySQL takes 10 s to make one. `name`, `server` and the `options` of its creation tell which one it is. In
    a cache folder that can't be written none is kept.
    """
    data, status = folder / "data", server.resolve().stat()
    made_by = (str(server), status.st_size, status.st_mtime_ns, os.geteuid(), options)
    kept = programs_folder() / f"{name}-empty-{zlib.crc32(repr(made_by).encode()):08x}"
    try:
        shutil.copytree(kept, data)
    except OSError:
        shutil.rmtree(data, ignore_errors=True)
        make()
        with suppress(OSError):
            _keep(data, kept)
        return
    if owner := process_owner():
        for path in [data, *data.rglob("*")]:
            os.chown(path, owner["user"], owner["group"])


def _keep(data: Path, kept: Path) -> None:
    """Keep a copy of an empty database, with its modes: only its owner may read its keys."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix="new-") as scratch:
        new = Path(scratch, "all")
        shutil.copytree(data, new)
        os.sync()  # a crash of the machine must not leave a damaged one to all later servers
        new.rename(kept)
        of_kind = kept.parent.glob(f"{kept.name.rpartition('-')[0]}-*")
        for old in sorted(of_kind, key=lambda one: one.stat().st_mtime)[:-_KEPT]:
            old.rename(Path(scratch, old.name))  # at once: another process may be copying it


def run(command: Sequence[str], folder: Path, group: int) -> None:
    """Run a program that creates a database; raise ClusterError, with its output, if it fails."""
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
