"""Runs a `kmq` command, and measures what it costs."""

import contextlib
import os
import re
import resource
from pathlib import Path
from typing import Any

from benchmarks.children import usage
from kmqpy.cli import app


def run(options: dict[str, Any]) -> dict[str, float]:
    """Run the command without its output; returns the CPU seconds of the process, and its peak memory."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        if code := app.run(options["arguments"]):
            raise RuntimeError(f"kmq ended with {code}")
    return {"cpu_s": usage(os.getpid())["cpu_s"], "peak_mb": _peak_kb() / 1024}


def _peak_kb() -> int:
    # Linux counts what the parent had at the fork into ru_maxrss.
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
