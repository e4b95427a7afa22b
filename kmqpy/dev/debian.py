"""Fetches programs from Debian's newest packages (sid), with all that they need, into a folder of their own.

For servers that Maven Central does not have. The machine's own apt fetches and verifies them, from the mirror
of its settings; nothing is installed, and no file of the system changes. Which version that is, Debian says.
"""

import platform
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kmqpy.dev.jars import cache_locked
from kmqpy.dev.programs import made_once
from kmqpy.errors import ClusterError

_KEYS = "/usr/share/keyrings"


def from_debian(package: str, wanted: Callable[[str], bool], advice: str) -> Path:
    """Return the folder with the `wanted` files of a package and of what it depends on; fetch it once.

    Raises ClusterError, which gives the `advice`, if this machine's apt can't fetch it. Safe to call from
    several processes.
    """

    def make(target: Path) -> None:
        try:
            _fetch(package, wanted, target)
        except (OSError, LookupError, tarfile.TarError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or error
            raise ClusterError(
                f"{package} can't be fetched from Debian's packages: {said}; {advice}."
            ) from error

    with cache_locked():
        return made_once(f"debian-{package}", make)


def loaded(folder: Path, program: str) -> list[str]:
    """The command that runs a program of such a folder, with the libraries that were fetched beside it."""
    (loader,) = folder.glob("usr/lib/*/ld-linux*")
    return [str(loader), "--library-path", str(loader.parent), str(folder / program)]


def _fetch(package: str, wanted: Callable[[str], bool], target: Path) -> None:
    codename = platform.freedesktop_os_release()["VERSION_CODENAME"]
    sources = _output("apt-get", "update", "--print-uris")
    mirror = re.search(rf"'(\S+)/dists/{codename}/", sources)
    if mirror is None:
        raise LookupError("apt's settings name no mirror of this system")
    keys = next(Path(_KEYS).glob("debian-archive-keyring.*"), Path(_KEYS, "debian-archive-keyring.gpg"))
    with tempfile.TemporaryDirectory(prefix="kmqpy-") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)  # apt downloads as a user of its own
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        (folder / "installed").touch()  # nothing is: what the system has may be too old
        (folder / "sid.list").write_text(f"deb [signed-by={keys}] {mirror[1]} sid main\n")
        settings = {
            "Dir::Etc::sourcelist": folder / "sid.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "installed",
            "Dir::Cache": folder / "cache",
            "Debug::NoLocking": "true",
            "APT::Install-Recommends": "false",
            "APT::Update::Post-Invoke-Success": "",
        }
        apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
        _output(*apt, "update")
        _output(*apt, "--download-only", "--assume-yes", "install", package)
        for archive in (folder / "cache/archives").glob("*.deb"):
            _unpack(archive, wanted, target)


def _unpack(archive: Path, wanted: Callable[[str], bool], target: Path) -> None:
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE) as files,
        tarfile.open(fileobj=files.stdout, mode="r|") as tar,
    ):
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        for member in tar:
            if not member.isdir() and wanted(member.name.removeprefix("./")):
                tar.extract(member, target)


def _output(*command: str) -> str:
    """What a program prints; raises OSError if it is missing, CalledProcessError if it fails."""
    done: Sequence[str] = command
    return subprocess.run(
        done, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    ).stdout
