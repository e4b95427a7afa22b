"""Keeps files in the cache that can be made again; the checksum in a name shows whether a file is damaged."""

import hashlib
import shutil
import uuid
from pathlib import Path

_CHECKSUM_DIGITS = 16


def find(folder: Path, name: str) -> Path | None:
    """Return the file in `folder` that was kept as `name` (`kafka-1.jsa`, say), None if there is none."""
    wanted = folder / name
    found = sorted(folder.glob(f"{wanted.stem}.{'?' * _CHECKSUM_DIGITS}{wanted.suffix}"))
    return found[0] if found else None


def keep(file: Path, folder: Path, name: str) -> Path:
    """Copy a complete file to `folder` as `name`, in one step: other processes may look for it meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch, wanted = folder / f"{uuid.uuid4()}.new", folder / name
    shutil.copyfile(file, scratch)
    return scratch.rename(folder / f"{wanted.stem}.{_digest(scratch)}{wanted.suffix}")


def remove_if_damaged(file: Path) -> bool:
    """Remove the file if its checksum is not the one in its name; return True if the file is gone."""
    try:
        damaged = _digest(file) != Path(file.stem).suffix[1:]
    except FileNotFoundError:  # another process has removed it
        return True
    if damaged:
        file.unlink(missing_ok=True)
    return damaged


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_CHECKSUM_DIGITS]
