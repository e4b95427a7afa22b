"""Which problem of a simulated run shows that a control is caught, and which seed is tried first for that.

The seeds are in first_seeds.json. An outdated one costs only time, up to half a minute; bring them up to date
after changes of the simulation or of what it simulates: python -m tests.simulation --first-seeds, which keeps
a seed that still catches its control.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from .controls import CONTROLS
from .simulate import simulate
from .surroundings import INTERNAL_ERROR

_SEARCHED_SEEDS = 20_000
_FIRST_SEEDS = Path(__file__).with_name("first_seeds.json")


class Catcher(StrEnum):
    """What catches a control."""

    CHECKER = "checker"
    """Any check of the run."""
    INVARIANT = "invariant"
    """The invariant of the model that INVARIANT_OF names."""
    REFUSAL = "refusal"
    """The model refuses a step of one of the actions that REFUSED_ACTIONS_OF names."""


INVARIANT_OF = {
    "no claim": "AckHolds",
    "claim after reading": "AckHolds",
    "two sends instead of a transaction": "OneFate",
    "torn transactions not looked for": "OneFate",
    "every original taken for gone": "NothingLost",
    "copies handed out whatever was acknowledged": "NoStaleHandOut",
    "late acks looked for from the own take on only": "NoStaleHandOut",
    "dead letters made whatever was acknowledged": "NoStaleDeadLetter",
}
"""Controls whose rule the model has, too, and the invariant that they must violate."""

REFUSED_ACTIONS_OF = {
    "fencing off": ("Takeover", "TrackerPlans"),
    "retry from memory": ("TrackerPlans",),
    "late operations open": ("TrackerPlans",),
    "unfenced take": ("TrackerPlans",),
    "finished messages forgotten at takeover": ("TrackerPlans",),
    "no claim": ("TrackerBegins",),
    "claim after reading": ("TrackerDecides",),
    "every original taken for gone": ("TrackerEndsLate",),
    "two sends instead of a transaction": ("TrackerCommits",),
    "a producer used on after an end that was repeated": ("TrackerPlans",),
    "torn transactions not looked for": ("TrackerPlans", "StoredOffset"),
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


def controls_of(catcher: Catcher) -> Sequence[str]:
    """Return the controls that must be caught so."""
    every: Mapping[Catcher, Mapping[str, object]] = {
        Catcher.CHECKER: CONTROLS,
        Catcher.INVARIANT: INVARIANT_OF,
        Catcher.REFUSAL: REFUSED_ACTIONS_OF,
    }
    return list(every[catcher])


def seed_that_catches(catcher: Catcher, control: str, most_seeds: int = 2_000) -> int | None:
    """Return a seed with which the control is caught so; None if none of the first `most_seeds` is one."""
    first = json.loads(_FIRST_SEEDS.read_text()).get(catcher, {}).get(control, 0)
    for seed in (first, *range(most_seeds)):
        # The first refused step ends the replay.
        problems = simulate(seed, CONTROLS[control]).problems
        if any(problem.startswith(INTERNAL_ERROR) for problem in problems):
            continue  # what else is wrong comes of the error, perhaps one of the control
        if any(_is_caught(catcher, control, problem) for problem in problems):
            return seed
    return None


def write_first_seeds() -> None:
    """Bring first_seeds.json up to date."""
    seeds = {
        catcher: {
            control: seed_that_catches(catcher, control, _SEARCHED_SEEDS) or 0
            for control in controls_of(catcher)
        }
        for catcher in Catcher
    }
    _FIRST_SEEDS.write_text(json.dumps(seeds, indent=2) + "\n")


def _is_caught(catcher: Catcher, control: str, problem: str) -> bool:
    if catcher is Catcher.INVARIANT:
        return problem.startswith(f"{INVARIANT_OF[control]}: ")
    if catcher is Catcher.REFUSAL:
        return any(problem.startswith(f"{action}: ") for action in REFUSED_ACTIONS_OF[control])
    return True
