"""Clients, trackers and faults in a simulated world: a slice of seeds, and controls that must be caught.

A seed that fails is printed and replays: python -m tests.simulation --seed N --trace
"""

import re
from itertools import chain
from pathlib import Path

import pytest

from spec.runs import INVARIANTS as INVARIANTS_OF_THE_MODEL

from . import clients
from .controls import CONTROLS
from .invariants import INVARIANTS
from .protocol import NOT_IN_KMQPY, Protocol
from .simulate import Controls, simulate
from .surroundings import INTERNAL_ERROR

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

CONTROL_SEEDS = 2_000
BEGIN_AT = {
    "fencing off": 26,
    "unfenced take": 5,
    "finished messages forgotten at takeover": 80,
    "taken again unsaid": 1,
    "what is read again taken again": 33,
    "ticks of assignments not waited for": 8_052,
    "safe offset past the oldest start": 58,
    "start markers not waited for": 3,
    "failed markers count as written": 26,
    "any record for one that is gone": 26,
    "late operations open": 16,
    "no ticks": 2,
    "timestamps believed": 250,
    "retry from memory": 7,
    "claim after reading": 7,
    "failed starts taken again unread": 8,
    "own starts read too early": 202,
    "commits of other topics believed": 34,
    "topics not watched": 34,
    "state kept for other topics": 24,
    "committed without a look": 2_048,
    "late dead letters ignored": 57,
    "late extensions ignored": 36,
    "late nacks ignored": 46,
    "every copy lost": 1,
    "every ancestor of a dead letter believed": 57,
}
"""The seed that caught a control last, to begin the search with; an outdated one costs only time."""

CAUGHT_BY = {
    "no claim": "AckHolds",
    "claim after reading": "AckHolds",
    "two sends instead of a transaction": "OneFate",
    "retry from memory": "OneFate",
    "every original taken for gone": "NothingLost",
    "copies handed out whatever was acknowledged": "NoStaleHandOut",
    "late acks looked for from the own take on only": "NoStaleHandOut",
    "dead letters made whatever was acknowledged": "NoStaleDeadLetter",
}
"""Controls whose rule the model has, too, and the invariant that they must violate."""

REFUSED = {
    "fencing off": ("Takeover", "TrackerPlans"),
    "retry from memory": ("TrackerPlans",),
    "late operations open": ("TrackerPlans",),
    "unfenced take": ("TrackerPlans",),
    "finished messages forgotten at takeover": ("TrackerPlans",),
    "no claim": ("TrackerBegins",),
    "claim after reading": ("TrackerDecides",),
    "every original taken for gone": ("TrackerEndsLate",),
    "two sends instead of a transaction": ("TrackerCommits",),
    "safe offset past the oldest start": ("StoredOffset",),
    "start markers not waited for": ("Looks",),
    "failed start markers ignored": ("Looks",),
    "predecessors forgotten": ("Looks",),
    "copies handed out whatever was acknowledged": ("Looks",),
    "late acks looked for from the own take on only": ("Looks",),
    "dead letters made whatever was acknowledged": ("TrackerDeadLetters",),
    "every ancestor believed": ("Looks",),
}
"""Controls whose rule is a guard of the model, and the actions of which one must be refused."""

REFUSED_AT = {
    "fencing off": 17,
    "claim after reading": 16,
    "unfenced take": 9,
    "finished messages forgotten at takeover": 142,
    "failed start markers ignored": 3,
}
"""The seed that had a step refused last, to begin with."""


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
    for seed in (BEGIN_AT.get(control, 0), *range(CONTROL_SEEDS)):
        problems = simulate(seed, CONTROLS[control]).problems
        if any(not problem.startswith(INTERNAL_ERROR) for problem in problems):
            return
    pytest.fail(f"not caught in {CONTROL_SEEDS} seeds")


@pytest.mark.parametrize("control", CAUGHT_BY)
def test_the_invariant_of_the_model_catches(control):
    wanted = CAUGHT_BY[control]
    for seed in range(CONTROL_SEEDS):
        problems = simulate(seed, CONTROLS[control]).problems
        if any(problem.startswith(f"{wanted}: ") for problem in problems):
            return
    pytest.fail(f"{wanted} was not violated in {CONTROL_SEEDS} seeds")


@pytest.mark.parametrize("control", REFUSED)
def test_the_model_refuses_the_steps_of(control):
    for seed in (REFUSED_AT.get(control, 0), *range(CONTROL_SEEDS)):
        problems = simulate(seed, CONTROLS[control]).problems  # the first refused step ends the replay
        if any(problem.startswith(f"{action}: ") for problem in problems for action in REFUSED[control]):
            return
    pytest.fail(f"no step was refused in {CONTROL_SEEDS} seeds")


def test_the_actions_are_those_of_the_model():
    model = (ROOT / "spec" / "Delivery.tla").read_text()
    following = re.findall(r"^Next ==\n((?:    .*\n)+)", model, re.MULTILINE)[0]
    actions = set(re.findall(r"\b[A-Z]\w+", following)) - {"Partitions", "Clients"}
    methods = {name.title().replace("_", "") for name in vars(Protocol) if not name.startswith("_")}
    assert methods == actions - NOT_IN_KMQPY | {"StoredOffset", "IsGivenReceipt"}
    assert actions >= NOT_IN_KMQPY
    assert {*chain(*REFUSED.values())} <= methods


def test_all_invariants_of_the_model_are_judged():
    of_clients_transactions = {"ProcessedOnce"}
    assert {*INVARIANTS_OF_THE_MODEL} - of_clients_transactions == INVARIANTS.keys()
    assert INVARIANTS.keys() == {*CAUGHT_BY.values()}


def test_copies_are_examined_whatever_was_forgotten_of_the_markers(monkeypatch):
    monkeypatch.setattr(clients._copy_check, "_SPAN", 12)
    monkeypatch.setattr(clients._copy_check, "_SKIPPED", 4)
    late_acks = Controls(late_acks=True)
    assert {seed: problems for seed in range(40) if (problems := simulate(seed, late_acks).problems)} == {}
