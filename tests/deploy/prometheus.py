"""Prometheus and promtool: those on the PATH, else those of a Debian package, unpacked into the cache."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from kmqpy.dev.jars import cache_folder

_PACKAGE = "prometheus"


def program(name: str) -> Path:
    """The path of `prometheus` or `promtool`."""
    if found := shutil.which(name):
        return Path(found)
    folder = cache_folder() / "prometheus-debian"
    if not folder.exists():
        _unpack(folder)
    return folder / "usr" / "bin" / name


def _unpack(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        work = Path(made)
        work.chmod(0o755)  # apt downloads as a user of its own
        if not _download(work):
            # The machine has no lists of packages, or old ones: fetch lists of our own.
            for name in ("lists/partial", "archives/partial"):
                (work / name).mkdir(parents=True)
            options = [f"-oDir::State::Lists={work}/lists", f"-oDir::Cache::Archives={work}/archives"]
            _run(work, "apt-get", *options, "update")
            assert _download(work, *options), "apt-get found no package `prometheus`"
        (package,) = work.glob("*.deb")
        _run(work, "dpkg", "--extract", package.name, "unpacked")
        if not folder.exists():  # another worker may have been faster
            (work / "unpacked").rename(folder)


def _download(work: Path, *options: str) -> bool:
    command = ["apt-get", *options, "download", _PACKAGE]
    return subprocess.run(command, cwd=work, capture_output=True, check=False, timeout=120).returncode == 0


def _run(work: Path, *command: str) -> None:
    subprocess.run(command, cwd=work, capture_output=True, check=True, timeout=120)
