"""Applies mutants to a copy of the tree, one at a time, and runs the test that must catch each."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from .catalogue import Mutant, Stale
from .reports import FILE_VARIABLE

ROOT = Path(__file__).parents[2]
_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "results")
_RUN_TIMEOUT_S = 240.0
"""Of a simulation or a test, which pytest itself ends a minute before."""
_POLL_S = 0.05


class Verdict(StrEnum):
    """What came of a mutant."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    STALE = "STALE"


@dataclass(frozen=True)
class Result:
    """The verdict on one mutant; `why` is the failure of the test, or what is stale."""

    mutant: Mutant
    verdict: Verdict
    why: str
    took_s: float = 0.0


@dataclass(frozen=True)
class MutantReport:
    """How one test ended, as tests.mutants.reports wrote it."""

    test: str
    outcome: str
    why: str

    def belongs_to(self, named: str) -> bool:
        """True for the test of this name, or one of its parameters or methods."""
        return self.test == named or self.test.startswith((f"{named}[", f"{named}::"))


class Tree:
    """A copy of the working tree, in a temporary folder; use it with `with`."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._folder = tempfile.TemporaryDirectory(prefix="kmqpy-mutants-")
        self.path = Path(self._folder.name) / "kmqpy"

    def __enter__(self) -> "Tree":
        shutil.copytree(self._root, self.path, ignore=_NOT_COPIED)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @contextlib.contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        """Apply a mutant; take it back at the end. Raises Stale."""
        file = mutant.file_in(self.path)
        before = file.read_text()
        file.write_text(mutant.mutated(before))
        try:
            yield
        finally:
            file.write_text(before)


class Runner:
    """Runs tests in a tree.

    environment  of the tests; the variable KMQ_TEST_CLUSTER names the servers that they share
    """

    def __init__(self, tree: Tree, environment: Mapping[str, str]) -> None:
        self._tree = tree
        self._reports = tree.path.with_name("reports.jsonl")
        self._environment = {
            **environment,
            "PYTHONPATH": str(tree.path),  # before the working tree, where the environment finds kmqpy
            "PYTHONDONTWRITEBYTECODE": "1",  # Python may take that of one mutant for that of the next
            FILE_VARIABLE: str(self._reports),
        }

    def unmutated_failures(
        self, mutants: Sequence[Mutant], progress: Callable[[int, int], None]
    ) -> dict[str, str]:
        """Run the tests that catch these mutants, without mutants: those that do not pass, and why."""
        failures: dict[str, str] = {}
        for mutant in mutants:
            try:
                mutant.check_catcher(self._tree.path)
            except Stale as stale:
                failures[mutant.caught_by] = str(stale)
        found = {mutant.caught_by: mutant.simulated for mutant in mutants if mutant.caught_by not in failures}
        tests = [one for one, simulated in found.items() if not simulated]
        simulations = [one for one, simulated in found.items() if simulated]
        for done, arguments in enumerate(simulations):
            progress(done, len(found))
            if problem := self._simulation_problem(arguments):
                failures[arguments] = problem
        if tests:

            def ended(reports: Sequence[MutantReport]) -> None:
                done = sum(any(report.belongs_to(test) for report in reports) for test in tests)
                progress(len(simulations) + done, len(found))

            reports = self._pytest(tests, ended)
            failures |= not_passed(tests, reports)
        return failures

    def judge(self, mutant: Mutant) -> Result:
        """Apply a mutant and run its test."""
        began = time.monotonic()
        try:
            with self._tree.with_mutant(mutant):
                verdict, why = self._simulated(mutant) if mutant.simulated else self._tested(mutant)
        except Stale as stale:
            verdict, why = Verdict.STALE, str(stale)
        return Result(mutant, verdict, why, time.monotonic() - began)

    def _simulated(self, mutant: Mutant) -> tuple[Verdict, str]:
        if problem := self._simulation_problem(mutant.caught_by):
            return Verdict.CAUGHT, problem
        return Verdict.SURVIVED, f"{mutant.caught_by} finds no problems"

    def _tested(self, mutant: Mutant) -> tuple[Verdict, str]:
        reports = self._pytest([mutant.caught_by])
        if not reports:
            return Verdict.STALE, "with the mutant no test runs at all: it fails before"
        for report in reports:
            if report.outcome == "failed":
                return Verdict.CAUGHT, report.why
        return Verdict.SURVIVED, f"{mutant.caught_by} passes"

    def _pytest(
        self, tests: Sequence[str], ended: Callable[[Sequence[MutantReport]], None] = lambda _: None
    ) -> list[MutantReport]:
        self._reports.write_text("")
        options = ["-p", "tests.mutants.reports", "-p", "no:cacheprovider", "--hypothesis-seed", "0", "-q"]
        # Of several, those that can't be collected must not keep the others from being run.
        options.append("--exitfirst" if len(tests) == 1 else "--continue-on-collection-errors")
        with self._started(_RUN_TIMEOUT_S * len(tests), "pytest", *options, *tests) as process:
            while process.poll() is None:
                ended(self._read_reports())
                time.sleep(_POLL_S)
        reports = self._read_reports()
        if process.returncode < 0:
            why = f"ended by signal {-process.returncode}, after {_RUN_TIMEOUT_S:.0f} s at the latest"
            missing = [one for one in tests if not any(report.belongs_to(one) for report in reports)]
            reports += [MutantReport(one, "failed", why) for one in missing]
        return reports

    def _read_reports(self) -> list[MutantReport]:
        lines = self._reports.read_text().splitlines(keepends=True)
        return [MutantReport(**json.loads(line)) for line in lines if line.endswith("\n")]

    def _simulation_problem(self, arguments: str) -> str:
        """The first problem that the simulation finds; empty if it finds none."""
        last = "no output"
        with self._started(_RUN_TIMEOUT_S, *arguments.split()) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last = line.strip() or last
                if line.startswith("seed "):
                    return last
            return last if process.wait() else ""

    @contextlib.contextmanager
    def _started(self, timeout_s: float, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """`python -m` with these arguments; killed, with its children, at the end and after `timeout_s`."""
        with subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=self._tree.path,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if arguments[0] == "pytest" else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            timer = threading.Timer(timeout_s, _kill_group, [process.pid])
            timer.start()
            try:
                yield process
            finally:
                timer.cancel()
                _kill_group(process.pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def not_passed(tests: Sequence[str], reports: Sequence[MutantReport]) -> dict[str, str]:
    """Those of `tests` that do not pass by these reports, and why."""
    found = {}
    for test in tests:
        own = [report for report in reports if report.belongs_to(test)]
        harmless = {"passed", "rerun"}
        if any(report.outcome == "passed" for report in own):
            harmless.add("skipped")  # with one of its parameters
        bad = [report for report in own if report.outcome not in harmless]
        if not own:
            found[test] = f"{test} does not exist"
        elif bad:
            found[test] = f"{test} is {bad[0].outcome} without the mutant: {bad[0].why}"
    return found
