"""The list of mutants fits the source and the tests; the runner judges and cleans up."""

import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.mutants import __main__ as command
from tests.mutants.catalogue import Mutant, Stale, load, named
from tests.mutants.run import MutantReport, Runner, Tree, Verdict, not_passed

ROOT = Path(__file__).parents[2]
MUTANTS = load()
MUTANT = Mutant("area.name", "1 + 1", "1 + 2", "tests/unit/test_it.py::test_it", "Sums are wrong.")


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_each_mutant_fits_the_source_and_names_a_test(mutant):
    file = mutant.file_in(ROOT)
    before = file.read_text()
    after = mutant.mutated(before)
    compile(after, str(file), "exec")
    lines = zip(before.splitlines(), after.splitlines(), strict=True)
    assert sum(line != changed for line, changed in lines) == 1
    mutant.check_catcher(ROOT)
    assert mutant.felt.endswith(".")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("pytestmark = [pytest.mark.slow, pytest.mark.breadth]\n\n\ndef test_it(): ...\n", "test_it"),
        ("@pytest.mark.parametrize('n', [1])\n@pytest.mark.breadth\ndef test_it(n): ...\n", "test_it"),
        (
            "class TestA:\n    pytestmark = pytest.mark.breadth\n    def test_it(self): ...\n",
            "TestA::test_it",
        ),
    ],
)
def test_what_catches_a_mutant_runs_in_make_test(source, text, name):
    (source / "tests/unit/test_it.py").write_text(text)
    with pytest.raises(Stale, match="make test does not run it"):
        replace(MUTANT, caught_by=f"tests/unit/test_it.py::{name}").check_catcher(source)


def test_there_are_enough_and_in_every_area():
    assert len(MUTANTS) >= 60
    assert len({mutant.name.partition(".")[0] for mutant in MUTANTS}) >= 12


def test_mutants_are_chosen_by_name_and_by_area():
    other = replace(MUTANT, name="area.other")
    assert named([MUTANT, other], []) == named([MUTANT, other], ["area"]) == [MUTANT, other]
    assert named([MUTANT, other], ["area.other"]) == [other]
    with pytest.raises(ValueError, match=r"^are: no mutant and no area has this name"):
        named([MUTANT], ["are"])


@pytest.fixture
def source(tmp_path):
    """A tree with one function and one test of it."""
    for folder in ("kmqpy", "tests/unit"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "kmqpy" / "it.py").write_text("def two() -> int:\n    return 1 + 1\n")
    (tmp_path / "kmqpy" / "other.py").write_text("A = 1 + 3\n")
    (tmp_path / "tests" / "unit" / "test_it.py").write_text("def test_it():\n    assert True\n")
    return tmp_path


def test_text_that_stands_nowhere_or_twice_is_stale(source):
    with pytest.raises(Stale, match="nowhere"):
        replace(MUTANT, text="2 + 2").file_in(source)
    with pytest.raises(Stale, match=r"kmqpy/it.py \(1x\), kmqpy/other.py \(1x\)"):
        replace(MUTANT, text="1 +").file_in(source)
    assert replace(MUTANT, where="kmqpy/it.py", text="1 +").file_in(source).name == "it.py"


@pytest.mark.parametrize("name", ["no.py::test_it", "test_it.py", "test_it.py::no", "test_it.py::test_it::a"])
def test_a_test_that_is_missing_is_stale(source, name):
    MUTANT.check_catcher(source)
    with pytest.raises(Stale, match="there is no such test"):
        replace(MUTANT, caught_by=f"tests/unit/{name}").check_catcher(source)


def test_the_users_files_are_never_changed_and_the_copy_is_mended_and_removed(source):
    file = source / "kmqpy" / "it.py"
    before = file.read_text()
    with Tree(source) as tree:
        copy = tree.path / "kmqpy" / "it.py"
        with contextlib.suppress(KeyboardInterrupt), tree.with_mutant(MUTANT):
            assert "1 + 2" in copy.read_text()
            assert file.read_text() == before
            raise KeyboardInterrupt
        assert copy.read_text() == before
    assert not tree.path.exists()


class FakeRunner(Runner):
    """Runs no tests."""

    def __init__(self, tree: Tree, reports) -> None:
        super().__init__(tree, {})
        self._found = reports

    def _pytest(self, tests, *_):
        return self._found


@pytest.mark.parametrize(
    ("reports", "verdict"),
    [
        ([MutantReport(MUTANT.caught_by, "failed", "wrong")], Verdict.CAUGHT),
        ([MutantReport(MUTANT.caught_by, "passed", "")], Verdict.SURVIVED),
        ([], Verdict.STALE),
    ],
)
def test_what_a_test_tells_of_a_mutant(source, reports, verdict):
    with Tree(source) as tree:
        assert FakeRunner(tree, reports).judge(MUTANT).verdict is verdict
        assert FakeRunner(tree, reports).judge(replace(MUTANT, text="no")).verdict is Verdict.STALE


def test_processes_are_killed_with_their_children_when_their_time_is_over(source):
    with (
        Tree(source) as tree,
        Runner(tree, os.environ)._started(0.2, "timeit", "-n1", "while True: pass") as one,
    ):
        assert one.wait(10) == -signal.SIGKILL


def test_a_test_must_pass_without_the_mutant():
    reports = [
        MutantReport("t.py::test_a[1]", "passed", ""),
        MutantReport("t.py::test_a[2]", "passed", ""),
        MutantReport("t.py::test_a[3]", "skipped", "not there"),
        MutantReport("t.py::T::test_b", "rerun", ""),
        MutantReport("t.py::T::test_b", "passed", ""),
        MutantReport("t.py::test_bad", "failed", "wrong"),
        MutantReport("t.py::test_skipped", "skipped", "no server"),
    ]
    tests = ["t.py::test_a", "t.py::T", "t.py::test_bad", "t.py::test_skipped", "t.py::test_gone"]
    assert not_passed(tests, reports).keys() == {"t.py::test_bad", "t.py::test_skipped", "t.py::test_gone"}


def test_the_command_lists_and_refuses(capsys):
    assert command.main(["--list", "worker"]) == 0
    assert "worker.never-acknowledges\n    Each message is handled again" in capsys.readouterr().out
    assert command.main(["nothing"]) == 2
    assert "nothing: no mutant and no area" in capsys.readouterr().err
