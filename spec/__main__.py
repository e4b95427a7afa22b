"""Runs the model checker: `python -m spec`, `--full` for large bounds, or parts of the names of runs.

Exits with 1 unless every run completes, good runs violate nothing, and each negative control violates the
invariant that is named for it.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from kmqpy.dev.jars import jar_set
from kmqpy.dev.java import find_java
from spec.runs import RUNS, Run

_HERE = Path(__file__).parent
_TIMEOUT_S = 3_600


def main() -> int:
    """Run the chosen runs; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make model ARGS=…", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of runs; default: all")
    parser.add_argument("--full", action="store_true", help="with large bounds, too: an hour")
    options = parser.parse_args()
    chosen = [
        run
        for run in RUNS
        if any(name in run.name for name in options.names)
        or (not options.names and (options.full or not run.full))
    ]
    if not chosen:
        parser.error(f"no run is named so; there are: {', '.join(run.name for run in RUNS)}")
    jar = jar_set("tlc", _HERE / "jars.json")[0]
    wrong = [run.name for run in chosen if not _passes(run, jar)]
    print(f"not as expected: {'; '.join(wrong)}" if wrong else f"all {len(chosen)} runs as expected")
    return 1 if wrong else 0


def _passes(run: Run, jar: Path) -> bool:
    cpu_before_s = _cpu_of_children_s()
    output = _check(run, jar)
    violated = re.findall(r"Invariant (\w+) is violated", output)
    complete = "Model checking completed. No error has been found" in output
    good = complete if run.violates is None else violated == [run.violates]
    found = f"violates {violated[0]}" if violated else "holds" if complete else "did not complete"
    states = re.findall(r"([\d,]+) distinct states found", output)
    print(
        f"{'ok' if good else 'WRONG':5}  {run.name:58} {found:24} {states[-1] if states else '?':>12} states "
        f"{_cpu_of_children_s() - cpu_before_s:5.1f} s CPU",
        flush=True,
    )
    if not good:
        print(output, file=sys.stderr)
    return good


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _check(run: Run, jar: Path) -> str:
    constants = run.all_constants
    with tempfile.TemporaryDirectory(prefix="kmq-model-") as folder:
        definitions = "".join(f"c_{name} == {value}\n" for name, value in constants.items())
        Path(folder, "Run.tla").write_text(
            f"---- MODULE Run ----\nEXTENDS {run.module}, TLC\nCONSTANTS a, b\n"
            f"{definitions}AnyClient == Permutations(c_Clients)\n====\n"
        )
        Path(folder, "Run.cfg").write_text(
            "SPECIFICATION Spec\nCHECK_DEADLOCK FALSE\nCONSTANTS\n  a = a\n  b = b\n"
            + "".join(f"  {name} <- c_{name}\n" for name in constants)
            + ("SYMMETRY AnyClient\n" if run.clients_are_alike else "")
            + f"INVARIANTS {' '.join(run.invariants)}\n"
        )
        name = f"{run.module}.tla"
        Path(folder, name).write_text((_HERE / name).read_text())
        java = [find_java("The model checker"), "-XX:+UseParallelGC", f"-Xmx{8 if run.full else 4}g"]
        done = subprocess.run(
            [*java, "-cp", jar, "tlc2.TLC", "-workers", "2", "-metadir", folder, "Run"],
            check=False,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            cwd=folder,
        )
        return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
