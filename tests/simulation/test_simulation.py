"""Clients, trackers and faults in a simulated world: a slice of seeds, and controls that must be caught.

A seed that fails is printed and replays: python -m tests.simulation --seed N --trace
"""

import inspect
import re
from dataclasses import fields
from itertools import chain
from pathlib import Path
from types import FunctionType

import pytest

from spec.runs import INVARIANTS as INVARIANTS_OF_THE_MODEL

from . import clients
from .catching import INVARIANT_OF, REFUSED_ACTIONS_OF, Catcher, seed_that_catches
from .controls import CONTROLS
from .cut_logs import CutLogs
from .invariants import INVARIANTS
from .protocol import NOT_IN_KMQPY, Protocol
from .simulate import Controls, simulate

ROOT = Path(__file__).parents[2]

SEEDS = 200
"""More than the hardest control needs; `python -m tests.simulation --seeds 10000` runs more."""

FOUND = {
    1712: "R10: after a start marker failed, a commit told its reader to begin behind the starts of "
    "messages that it does not cover",
    1214: "R10: a start marker arrived after its producer had a fatal error, and the message was taken again",
    213556: "R10: a start marker arrived after its client had closed, behind what its successor had read",
    1627: "R24: a record came from behind a commit of the topic before, and what lay before it was left out",
    7968: "R24: a partition was begun at a commit of the topic before, which was deleted meanwhile",
    1140: "TrackerDecides: a message that was taken after the plan, and given back at once, was not dropped",
    8052: "OneFate: a message that was ended before the tick of its client's assignment was taken late (R30)",
    7210: "Looks: a take of a client that had lost the partition was thought to be known",
    1984: "R10: the take of a client that a pause had halted was thought to be known",
    2861: "TrackerDecides: a message that was rejected before the plan, and taken late, was not dropped",
    525: "R24: a tracker waited for a tick that it had written to the topic before",
    28081: "R39: the end marker of an aborted transaction, which came late, was evidence of a cut",
    26515: "lost: librdkafka had passed the end of a transaction that was cut away, and so a new message",
    80932: "stuck: a tracker told a cut by what was stored before clients had told another",
    82544: "R39: a take of messages behind a cut was thought a lie, since an older epoch had been asked for",
    55457: "count: the checker went by an acknowledgement that the plan had known, of an earlier take",
    90914: "R24: the checker forgave nothing when topics were recreated while brokers told older ones",
}
"""Seeds that failed once, and why; a seed is the same run only while simulation and kmqpy stay the same."""

FOUND_WITH_CUT_LOGS = {
    107: "stuck: after two cuts, a tracker went by messages that nobody had taken",
    614: "stuck: what was given back without a start marker was evidence to trackers, and not to clients",
    867: "R39: a cut was not found, since a transaction ended where the last known record had stood",
    12616: "R39: the first of two cuts was found when the second was known, and was thought to be known, too",
    13766: "R10: markers were compared with a commit that was cut back, and looked cut back themselves",
    30328: "lost: a partition was begun where the first record had stood that came before a cut",
    30569: "stuck: a tracker took the end that Kafka had told before its last tick for one of later",
    32712: "R39: a client told a cut that was none, by takes of an epoch that it did not know yet",
    30660: "stuck: a tracker told a second cut by what it knew since the first, which clients were to tell",
    500051: "lost: copies were committed, and aborted when the record that had committed them was cut away",
    501576: "lost: the same, when nothing else was cut away, so that nobody told a cut",
    500889: "lost: the same, when a tracker took over after the election",
    502737: "R39: takes of a log that was cut back before hid those of the log that was cut back now",
    601871: "F5: what was cut away was in flight again for who read from before the tick that told the cut",
    606777: "stuck: a nack of what was cut away counted as a take, since markers had been missed",
    301971: "R39: the checker knew nothing of assignment ticks that retention had deleted",
    307571: "lost: end markers of an aborted transaction, whose copies were cut away, named others' offsets",
    706623: "stuck: a copy that was cut away was evidence again when its end marker was read again",
    708965: "lost: whom a pause had halted ended a message for one of the former log, a gap of R39",
    752618: "R39: the take of a client that was expelled came late, and named what was cut away",
    803541: "R14: gone was what an abort had undone, whose record a second cut took away",
    830239: "F5: a tracker had what was cut away redelivered, since it did not know a second cut yet",
    710183: "lost: a copy was aborted, and a cut that nobody told took away all of the next transaction",
    902657: "F5: a number was given again, since retention had deleted start marker and claim, a gap of R39",
    910577: "stuck: a take by a former number counted as evidence of an epoch that its message had not",
    1070757: "lost: a tracker was killed before it had looked for lost copies; its successor had not begun",
    1042537: "stuck: what was not there any more by a cut that was told meanwhile proved another cut",
    1021435: "lost: the last message taken was there, so nobody looked at the copy before it, which was not",
    1001225: "lost: a client that had stood still took the former message at its offset, a gap of R39",
    1000536: "lost: nobody waited until it was written that a message whose copy is gone is redelivered",
    981344: "R32: the copy of another message, made for one that was cut away, was none of its original",
    970256: "lost: a tracker claimed a log to be whole before it knew whether its last copy was aborted",
    932554: "lost: who looked for a cut looked at what he learned meanwhile only when new markers came",
    876854: "R39: clients looked only at the highest take behind the end, which a told cut had taken away",
    3100043: "R39: a copy stood where whom a pause had halted took what was cut away, a gap of R39",
}
"""The same, of seeds in which logs are cut back."""

FOUND_WITH_LANES = {
    287: "R10: a client started what it had polled of a lane before another lane's poll lost the partition",
    419: "R11: leases ran down while the start markers of another lane were waited for",
    145: "stuck: a message with a long back-off was due only when the retry lane was to be tried again",
}
"""The same, of seeds in which the queue has a retry lane."""
MISJUDGED_WITH_LANES = {200282: "R32: of two late nacks the second came while the taker read the other lane"}
MISJUDGED_WITH_LANES_CUT_BACK = {
    30176: "stuck: a client took what was cut away when it had fetched the new message at that offset, too",
    70231: "count: before and behind the cut stood copies of the same message, with other counts",
}


@pytest.mark.breadth
@pytest.mark.parametrize("seed", MISJUDGED_WITH_LANES)
def test_what_was_misjudged_with_lanes(seed):
    assert simulate(seed, Controls(lanes=True)).problems == []


@pytest.mark.breadth
@pytest.mark.parametrize("seed", MISJUDGED_WITH_LANES_CUT_BACK)
def test_what_was_misjudged_with_lanes_cut_back(seed):
    assert simulate(seed, Controls(lanes=True, cut_logs=True)).problems == []


@pytest.mark.parametrize("lanes", [False, True])
def test_same_seed_same_run(lanes):
    runs = []
    for _ in range(2):
        lines: list[str] = []
        result = simulate(7, Controls(lanes=lanes), trace=lines.append)
        runs.append((lines, result.steps, result.stats))
    assert runs[0] == runs[1]
    assert len(runs[0][0]) > 100


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, SEEDS), marks=pytest.mark.breadth)], ids=str
)
def test_nothing_is_lost_and_nothing_made_twice(seeds):
    assert {seed: problems for seed in seeds if (problems := simulate(seed).problems)} == {}


@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 60), marks=pytest.mark.breadth)], ids=str
)
def test_r41_what_is_sent_when_its_twin_was_taken_is_handed_out(seeds):
    collapse = Controls(collapse=True)
    assert {seed: problems for seed in seeds if (problems := simulate(seed, collapse).problems)} == {}


@pytest.mark.breadth
def test_r41_also_where_logs_were_cut_back():
    collapse = Controls(collapse=True, cut_logs=True)
    seeds = (*range(30), 166)
    assert {seed: problems for seed in seeds if (problems := simulate(seed, collapse).problems)} == {}


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 100), marks=pytest.mark.breadth)], ids=str
)
def test_r46_r47_r48_the_same_with_a_retry_lane(seeds):
    lanes = Controls(lanes=True)
    assert {seed: problems for seed in seeds if (problems := simulate(seed, lanes).problems)} == {}


@pytest.mark.breadth
def test_an_election_alone_changes_nothing(monkeypatch):
    monkeypatch.setattr(CutLogs, "cut", lambda cut_logs: cut_logs.due.clear())
    cut_logs = Controls(cut_logs=True)
    seeds = (*range(40), 1237, 1325)  # the last two: commits after elections of markers
    assert {seed: problems for seed in seeds if (problems := simulate(seed, cut_logs).problems)} == {}


@pytest.mark.breadth
@pytest.mark.parametrize("seed", FOUND)
def test_what_failed_once(seed):
    assert simulate(seed, Controls(lanes=False)).problems == []


@pytest.mark.breadth
@pytest.mark.parametrize("seed", FOUND_WITH_CUT_LOGS)
def test_what_failed_once_where_logs_were_cut_back(seed):
    assert simulate(seed, Controls(cut_logs=True)).problems == []


@pytest.mark.breadth
@pytest.mark.parametrize("seed", FOUND_WITH_LANES)
def test_what_failed_once_with_a_retry_lane(seed):
    assert simulate(seed, Controls(lanes=True, priorities=False)).problems == []


def misfits(control):
    """Methods of a control that can't be called as those of kmqpy which they replace, or replace none."""
    found = []
    for part in fields(Controls):
        usual, given = part.default, getattr(control, part.name)
        if not isinstance(given, type):
            continue
        own = [kind for kind in given.__mro__ if not issubclass(usual, kind)]
        methods = {
            name: method
            for kind in own
            for name, method in vars(kind).items()
            if isinstance(method, FunctionType) and name != "__annotate_func__"  # of Python 3.14
        }
        called = {name for method in methods.values() for name in method.__code__.co_names}
        for name, method in methods.items():
            replaced = getattr(usual, name, None)
            if replaced is None and name not in called:
                found.append(f"{part.name}.{name}: it replaces nothing")
            if replaced is None:
                continue
            wanted = inspect.signature(replaced).parameters.values()
            if any(one.kind is one.VAR_POSITIONAL for one in wanted):
                continue
            every = [one.name for one in wanted if one.kind is one.POSITIONAL_OR_KEYWORD]
            needed = [one.name for one in wanted if one.name in every and one.default is one.empty]
            named = {one.name: None for one in wanted if one.kind is one.KEYWORD_ONLY}
            try:
                inspect.signature(method).bind(*every, **named)
                inspect.signature(method).bind(*needed)
            except TypeError as error:
                found.append(f"{part.name}.{name}: {error}")
    return found


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_can_be_called_as_what_it_replaces(control):
    """Else each of its seeds ends with internal errors, and that it is not caught is known minutes later."""
    assert misfits(CONTROLS[control]) == []


def test_a_control_with_another_signature_is_found():
    class NoClaim(Controls.redeliverer):
        def _claim(self):
            return None

        def _no_such_method(self):
            return None

    assert misfits(Controls(redeliverer=NoClaim)) == [
        "redeliverer._claim: too many positional arguments",
        "redeliverer._no_such_method: it replaces nothing",
    ]


@pytest.mark.breadth
@pytest.mark.parametrize("control", CONTROLS)
def test_the_checker_catches(control):
    assert seed_that_catches(Catcher.CHECKER, control) is not None


@pytest.mark.breadth
@pytest.mark.parametrize("control", INVARIANT_OF)
def test_the_invariant_of_the_model_catches(control):
    assert seed_that_catches(Catcher.INVARIANT, control) is not None


@pytest.mark.breadth
@pytest.mark.parametrize("control", REFUSED_ACTIONS_OF)
def test_the_model_refuses_the_steps_of(control):
    assert seed_that_catches(Catcher.REFUSAL, control) is not None


def test_the_actions_are_those_of_the_model():
    model = (ROOT / "spec" / "Delivery.tla").read_text()
    following = re.findall(r"^Next ==\n((?:    .*\n)+)", model, re.MULTILINE)[0]
    actions = set(re.findall(r"\b[A-Z]\w+", following)) - {"Partitions", "Clients"}
    methods = {name.title().replace("_", "") for name in vars(Protocol) if not name.startswith("_")}
    assert methods == actions - NOT_IN_KMQPY | {"StoredOffset", "IsGivenReceipt", "EndMayComeOnceMore"}
    assert actions >= NOT_IN_KMQPY
    assert {*chain(*REFUSED_ACTIONS_OF.values())} <= methods


def test_all_invariants_of_the_model_are_judged():
    of_clients_transactions = {"ProcessedOnce"}
    assert {*INVARIANTS_OF_THE_MODEL} - of_clients_transactions == INVARIANTS.keys()
    assert INVARIANTS.keys() == {*INVARIANT_OF.values()}


def test_copies_are_examined_whatever_was_forgotten_of_the_markers(monkeypatch):
    monkeypatch.setattr(clients._late_acks, "_MAX_KNOWN_MARKERS", 12)
    monkeypatch.setattr(clients._late_acks, "_MAX_GAP_MARKERS", 4)
    late_acks = Controls(late_acks=True)
    assert {seed: problems for seed in range(40) if (problems := simulate(seed, late_acks).problems)} == {}
