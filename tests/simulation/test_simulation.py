"""Clients, trackers and faults in a simulated world: a slice of seeds, and controls that must be caught.

A seed that fails is printed and replays: python -m tests.simulation --seed N --trace
"""

import re
from itertools import chain
from pathlib import Path

import pytest

from spec.runs import INVARIANTS as INVARIANTS_OF_THE_MODEL

from . import clients
from .catching import INVARIANT_OF, REFUSED_ACTIONS_OF, Catcher, seed_that_catches
from .controls import CONTROLS
from .invariants import INVARIANTS
from .protocol import NOT_IN_KMQPY, Protocol
from .simulate import Controls, simulate

ROOT = Path(__file__).parents[2]

SEEDS = 300
"""More than the hardest control needs; `python -m tests.simulation --seeds 10000` runs more."""

FOUND = {
    1712: "R10: after a start marker failed, a commit told its reader to begin behind the starts of "
    "messages that it does not cover",
    1214: "R10: a start marker arrived after its producer had a fatal error, and the message was taken again",
    213556: "R10: a start marker arrived after its client had closed, behind what its successor had read",
    1627: "R24: a record came from behind a commit of the topic before, and what lay before it was left out",
    7968: "R24: a partition was begun at a commit of the topic before, which was deleted meanwhile",
    8052: "OneFate: a message that was ended before the tick of its client's assignment was taken late (R30)",
    7210: "Looks: a take of a client that had lost the partition was thought to be known",
    525: "R24: a tracker waited for a tick that it had written to the topic before",
}
"""Seeds that failed once, and why; a seed is the same run only while simulation and kmqpy stay the same."""


def test_same_seed_same_run():
    runs = []
    for _ in range(2):
        lines: list[str] = []
        result = simulate(7, trace=lines.append)
        runs.append((lines, result.steps, result.stats))
    assert runs[0] == runs[1]
    assert len(runs[0][0]) > 100


def test_nothing_is_lost_and_nothing_made_twice():
    assert {seed: problems for seed in range(SEEDS) if (problems := simulate(seed).problems)} == {}


@pytest.mark.parametrize("seed", FOUND)
def test_what_failed_once(seed):
    assert simulate(seed).problems == []


@pytest.mark.parametrize("control", CONTROLS)
def test_the_checker_catches(control):
    assert seed_that_catches(Catcher.CHECKER, control) is not None


@pytest.mark.parametrize("control", INVARIANT_OF)
def test_the_invariant_of_the_model_catches(control):
    assert seed_that_catches(Catcher.INVARIANT, control) is not None


@pytest.mark.parametrize("control", REFUSED_ACTIONS_OF)
def test_the_model_refuses_the_steps_of(control):
    assert seed_that_catches(Catcher.REFUSAL, control) is not None


def test_the_actions_are_those_of_the_model():
    model = (ROOT / "spec" / "Delivery.tla").read_text()
    following = re.findall(r"^Next ==\n((?:    .*\n)+)", model, re.MULTILINE)[0]
    actions = set(re.findall(r"\b[A-Z]\w+", following)) - {"Partitions", "Clients"}
    methods = {name.title().replace("_", "") for name in vars(Protocol) if not name.startswith("_")}
    assert methods == actions - NOT_IN_KMQPY | {"StoredOffset", "IsGivenReceipt"}
    assert actions >= NOT_IN_KMQPY
    assert {*chain(*REFUSED_ACTIONS_OF.values())} <= methods


def test_all_invariants_of_the_model_are_judged():
    of_clients_transactions = {"ProcessedOnce"}
    assert {*INVARIANTS_OF_THE_MODEL} - of_clients_transactions == INVARIANTS.keys()
    assert INVARIANTS.keys() == {*INVARIANT_OF.values()}


def test_copies_are_examined_whatever_was_forgotten_of_the_markers(monkeypatch):
    monkeypatch.setattr(clients._copy_check, "_SPAN", 12)
    monkeypatch.setattr(clients._copy_check, "_SKIPPED", 4)
    late_acks = Controls(late_acks=True)
    assert {seed: problems for seed in range(40) if (problems := simulate(seed, late_acks).problems)} == {}
