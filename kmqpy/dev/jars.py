"""Fetches sets of jars from Maven Central, each jar once; jars.json pins the jars and their SHA-256.

The SHA-256 of a jar is checked before the jar gets into the cache. Servers whose jars are all in the cache
start without the network, and without jgo (the package that fetches jars). Jars are checked again only after
a server did not start (`remove_damaged`): the disk may have damaged them.

To change a set or add one, edit its "coordinates" and "exclude" in jars.json (`*:*` excludes everything that
the coordinates depend on). Then pin the jars of the set again:

    python -m kmqpy.dev --relock zookeeper

`python -m kmqpy.dev zookeeper` fetches a set and prints the paths of its jars.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from kmqpy.errors import ClusterError, MissingExtra

LOCK = Path(__file__).with_name("jars.json")
ALL_DEPENDENCIES = "*:*"
"""With this entry in "exclude", a set has only the jars of its coordinates."""
PARALLEL_DOWNLOADS = 8
TIMEOUT_S = 60


def cache_folder() -> Path:
    """Return the folder that keeps fetched files: $KMQ_CACHE, else `kmqpy` in the user's cache folder."""
    if chosen := os.environ.get("KMQ_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kmqpy"


def jar_set(name: str, lock: Path = LOCK, *, extra: str = "dev") -> list[Path]:
    """Return the jars of a set, in class path order; fetch those that are not in the cache.

    Safe to call from several processes at once. Raises KeyError if there is no such set, and ClusterError if
    a jar can't be fetched or its SHA-256 is not the pinned one. Raises MissingExtra if a jar has to be
    fetched and jgo, which the extra `extra` installs, is missing.
    """
    pins, paths = _pinned(name, lock)
    if not all(path.exists() for path in paths.values()):
        with cache_locked():
            missing = [coordinate for coordinate, path in paths.items() if not path.exists()]
            with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="fetch-") as scratch:
                for coordinate, fetched in _fetch(name, missing, Path(scratch), extra):
                    _check(coordinate, fetched, pins[coordinate])
                    paths[coordinate].parent.mkdir(parents=True, exist_ok=True)
                    fetched.replace(paths[coordinate])
    return list(paths.values())


def remove_damaged(name: str, lock: Path = LOCK) -> list[Path]:
    """Remove the jars of a set whose SHA-256 is not the pinned one; return these and the missing jars."""
    pins, paths = _pinned(name, lock)
    damaged = [path for one, path in paths.items() if not path.exists() or _sha256(path) != pins[one]]
    for path in damaged:
        path.unlink(missing_ok=True)
    return damaged


def relock(names: Sequence[str], lock: Path = LOCK) -> None:
    """Resolve the coordinates of these sets again, and pin the jars found, with their SHA-256, in `lock`."""
    sets: dict[str, Any] = json.loads(lock.read_text())
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            coordinates = sets[name]["coordinates"]
            if ALL_DEPENDENCIES not in sets[name]["exclude"]:
                coordinates = _resolve(name, coordinates, sets[name]["exclude"], Path(scratch))
            digests = {c: _sha256(path) for c, path in _fetch(name, coordinates, Path(scratch))}
        sets[name]["jars"] = {coordinate: digests[coordinate] for coordinate in coordinates}
    lock.write_text(json.dumps(sets, indent=2) + "\n")


def _pinned(name: str, lock: Path) -> tuple[Mapping[str, str], dict[str, Path]]:
    """Return by coordinate the SHA-256 of each jar of a set, and its path in the cache."""
    pins: Mapping[str, str] = json.loads(lock.read_text())[name]["jars"]
    jars = cache_folder() / "jars"
    names = {coordinate: "-".join(coordinate.split(":")[1:]) for coordinate in pins}
    return pins, {one: jars / pins[one][:16] / f"{name}.jar" for one, name in names.items()}


def _check(coordinate: str, jar: Path, pin: str) -> None:
    if (found := _sha256(jar)) != pin:
        raise ClusterError(
            f"{coordinate}: the fetched jar has SHA-256 {found}, but {pin} is pinned. "
            "It was not kept. Something between here and Maven Central changes files; try another "
            "network, or see kmqpy/dev/jars.py if the pin is wrong."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def cache_locked() -> Iterator[None]:
    """Let one process fetch at a time; on Windows, which has no such lock, two may fetch the same jar."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "lock").open("w") as file:
        with suppress(ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        yield


def _context(scratch: Path, name: str, extra: str = "dev") -> Any:
    try:
        maven = import_module("jgo.maven")
    except ImportError:
        raise MissingExtra(extra, f"Fetching the jars of {name}") from None
    return maven.MavenContext(repo_cache=scratch, local_repos=[], timeout=TIMEOUT_S)


def _resolve(name: str, coordinates: Sequence[str], exclude: Sequence[str], scratch: Path) -> list[str]:
    context = _context(scratch, name)
    left_out = [context.project(*project.split(":")) for project in exclude]
    wanted = [context.create_dependency(c, left_out) for c in coordinates]
    for dependency in wanted:
        dependency.scope = "compile"
    direct, transitive = context.resolver.resolve(wanted)
    # All of them go on the class path: jgo would put some on the module path.
    found = [*direct, *(d for d in transitive if d.scope in ("compile", "runtime"))]
    parts = ((d.groupId, d.artifactId, d.version, d.classifier) for d in found)
    return [":".join(filter(None, part)) for part in parts]


def _fetch(
    name: str, coordinates: Sequence[str], scratch: Path, extra: str = "dev"
) -> Iterator[tuple[str, Path]]:
    """Download jars to `scratch` and yield each, in any order; stderr shows the progress."""
    if not coordinates:
        return
    context = _context(scratch, name, extra)

    def fetch(coordinate: str) -> tuple[str, Path]:
        group, artifact, version, *classifier = coordinate.split(":")
        component = context.project(group, artifact).at_version(version)
        return coordinate, component.artifact(*classifier).resolve()

    with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
        futures = [pool.submit(fetch, coordinate) for coordinate in coordinates]
        try:
            sys.stderr.write(f"Fetching {name} (once): {len(futures)} jars from Maven Central\n")
            for count, done in enumerate(as_completed(futures), 1):
                yield done.result()
                if count % 10 == 0 or count == len(futures):
                    sys.stderr.write(f"Fetching {name} (once): {count} of {len(futures)}\n")
        except (OSError, RuntimeError) as error:  # the errors of requests and jgo
            raise ClusterError(
                f"Can't fetch the jars of {name} from Maven Central: {error}. "
                "Check the network (HTTPS_PROXY is honoured) and start again; "
                "jars that were already fetched are kept."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
