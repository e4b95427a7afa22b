"""The runs of the model: bounds, rules that are switched off, and what must come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

INVARIANTS = ("ProcessedOnce", "OneFate", "AckHolds", "NothingLost", "NoStaleHandOut", "NoStaleDeadLetter")
OF_CUT_LOGS = ("OneName", "CopiesAreTheirs", "EndsAreTheirs", "NothingLost")
OF_LANES = ("NoStaleHandOut", "NothingLost", "NothingHeldUp")
"""The invariants of Delivery.tla, CutLog.tla and Lanes.tla."""

_BASE = {
    "Originals": "1",
    "PartitionOf": "<<1>>",
    "MaxMessages": "3",
    "MaxTransactions": "3",
    "MaxAcks": "1",
    "MaxTakeovers": "0",
    "MaxDeletions": "0",
    "MaxDeadLetters": "0",
    "MaxLate": "0",
    "Clients": "{a, b}",
    "Owner": "b",
    "FetchedEarlier": "{}",
    "TransactionsAbort": "TRUE",
    "TrackerClaims": "TRUE",
    "TrackerWaits": "TRUE",
    "TrackerNamesDropped": "TRUE",
    "CopiesFirst": "TRUE",
    "Fencing": "TRUE",
    "TornAreMended": "TRUE",
    "ClientReads": '"tail"',
    "ClientChecksRetention": "TRUE",
    "ClientHeedsAncestors": "TRUE",
    "LateTakesEnd": "TRUE",
    "EndsAreStored": "TRUE",
    "TakerLooks": "TRUE",
    "TakerLooksFrom": '"plan"',
    "TrackerLooks": "TRUE",
    "AncestorsFrom": '"log"',
    "Forwarded": "{}",
}
_BASE_OF_CUT_LOGS = {
    "Clients": "{a, b}",
    "MaxMessages": "3",
    "MaxCuts": "1",
    "MaxElections": "0",
    "MaxAssignments": "2",
    "MaxTrackerTicks": "1",
    "MaxEnds": "2",
    "NumbersHaveEpochs": "TRUE",
    "ClientsLook": "TRUE",
    "PositionGoesBack": "TRUE",
    "TicksComeFirst": "TRUE",
    "TrackersLook": "TRUE",
    "LateTakes": "FALSE",
}
_BASE_OF_LANES = {
    "Clients": "{a, b}",
    "Originals": "1",
    "MaxMessages": "3",
    "MaxAcks": "1",
    "MaxRefusals": "1",
    "ReadsToItsEnd": "TRUE",
    "AsksAfterTake": "TRUE",
    "FallsBack": "TRUE",
    "RemovedWhenEmpty": "TRUE",
    "RemovedWhenQuiet": "TRUE",
}
_MODULES: Mapping[str, tuple[Mapping[str, str], Sequence[str]]] = {
    "Delivery": (_BASE, INVARIANTS),
    "CutLog": (_BASE_OF_CUT_LOGS, OF_CUT_LOGS),
    "Lanes": (_BASE_OF_LANES, OF_LANES),
}
_TWO_MESSAGES = {"Originals": "2", "PartitionOf": "<<1, 1>>", "MaxMessages": "3", "MaxAcks": "0"}
_TWO_PARTITIONS = {"Originals": "2", "PartitionOf": "<<1, 2>>", "MaxMessages": "3", "MaxAcks": "0"}
_PAUSED_CLIENT = {"FetchedEarlier": "{1}"}
_TAKEOVER = {"MaxTakeovers": "1", "MaxTransactions": "2"}
_RETENTION = {"MaxDeletions": "1"}
_DEAD_LETTER = {"MaxDeadLetters": "1", "MaxTransactions": "2"}
_FORWARDED = {"Originals": "2", "PartitionOf": "<<1, 1>>", "Forwarded": "{2}"}
_LATE_END = {"MaxLate": "1"}
_UNNOTICED = {**_LATE_END, "Fencing": "FALSE", "Clients": "{b}"}
_TORN = {**_UNNOTICED, "CopiesFirst": "FALSE", "MaxMessages": "4", "MaxAcks": "0"}
_NO_CLAIM = {"TrackerClaims": "FALSE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of TLC.

    constants  those that differ from the base
    violates   the invariant that a negative control must violate; None: nothing may be violated
    full       too large for a run within a minute
    module     the model: a file of this folder
    """

    name: str
    constants: Mapping[str, str] = field(default_factory=dict)
    violates: str | None = None
    full: bool = False
    module: str = "Delivery"

    @property
    def all_constants(self) -> dict[str, str]:
        """The value of every constant of the model."""
        return {**_MODULES[self.module][0], **self.constants}

    @property
    def invariants(self) -> Sequence[str]:
        """What must hold, or what a control must violate."""
        return _MODULES[self.module][1] if self.violates is None else (self.violates,)

    @property
    def clients_are_alike(self) -> bool:
        """The model tells its clients apart only where one fetched a message before it lost the partition."""
        constants = self.all_constants
        return all(constants.get(name, "{}") == "{}" for name in ("FetchedEarlier", "Forwarded"))


def _control(name: str, violates: str, **constants: str) -> Run:
    return Run(name=f"control: {name}", constants=constants, violates=violates)


def _of_module(
    module: str, name: str, violates: str | None = None, *, full: bool = False, **constants: str
) -> Run:
    name = name if violates is None else f"control: {name}"
    return Run(name=name, constants=constants, violates=violates, full=full, module=module)


_cut_logs = partial(_of_module, "CutLog")
_lanes = partial(_of_module, "Lanes")


RUNS = (
    Run(name="one message, its copies and an ack"),
    Run(name="a client was paused between fetch and take", constants={**_PAUSED_CLIENT, "MaxAcks": "0"}),
    Run(name="a paused client and a takeover", constants={**_PAUSED_CLIENT, **_TAKEOVER}),
    Run(name="headers of a copy, forwarded", constants={**_FORWARDED, "MaxTransactions": "2"}),
    Run(name="two messages", constants={**_TWO_MESSAGES, "MaxTransactions": "2"}),
    Run(name="two partitions", constants={**_TWO_PARTITIONS, "MaxTransactions": "2"}),
    Run(name="takeover", constants=_TAKEOVER),
    Run(name="retention", constants={**_RETENTION, "MaxTransactions": "2"}),
    Run(name="dead letters", constants=_DEAD_LETTER),
    Run(name="a late end", constants={**_LATE_END, **_TAKEOVER}),
    Run(name="a late end that no tracker has noticed", constants=_TORN),
    Run(name="four transactions", constants={"MaxTransactions": "4"}, full=True),
    Run(name="two messages and an ack", constants={**_TWO_MESSAGES, "MaxAcks": "1"}, full=True),
    Run(name="two messages, two copies", constants={**_TWO_MESSAGES, "MaxMessages": "4"}, full=True),
    Run(name="two partitions and an ack", constants={**_TWO_PARTITIONS, "MaxAcks": "1"}, full=True),
    Run(
        name="a paused client, four transactions",
        constants={**_PAUSED_CLIENT, "MaxTransactions": "4"},
        full=True,
    ),
    Run(
        name="dead letters and a takeover",
        constants={**_DEAD_LETTER, **_TAKEOVER, "MaxTransactions": "3"},
        full=True,
    ),
    Run(name="two takeovers", constants={"MaxTakeovers": "2"}, full=True),
    Run(
        name="takeover and retention",
        constants={**_TAKEOVER, **_RETENTION, "MaxTransactions": "3"},
        full=True,
    ),
    Run(name="two late ends and an ack", constants={"MaxLate": "2"}, full=True),
    Run(
        name="two late ends, a dead letter and a takeover",
        constants={**_DEAD_LETTER, **_TAKEOVER, "MaxLate": "2", "MaxTransactions": "3"},
        full=True,
    ),
    Run(
        name="two late ends that no tracker has noticed, and a takeover",
        constants={**_TORN, **_DEAD_LETTER, **_TAKEOVER, "MaxLate": "2", "MaxTransactions": "3"},
        full=True,
    ),
    Run(
        name="a late end that no tracker has noticed, four transactions",
        constants={**_TORN, "MaxTransactions": "4"},
        full=True,
    ),
    Run(
        name="a late end that no tracker has noticed, two messages",
        constants={**_TORN, **_TWO_MESSAGES, "MaxMessages": "4", "MaxTransactions": "2"},
        full=True,
    ),
    _control("the tracker makes no claim: two fates", "OneFate", **_NO_CLAIM),
    _control("the tracker makes no claim: an ack is lost", "AckHolds", **_NO_CLAIM),
    _control("the tracker does not wait before it decides", "OneFate", TrackerWaits="FALSE"),
    _control("a client ignores claims", "OneFate", ClientReads='"ends"'),
    _control("a client does not look", "ProcessedOnce", ClientReads='"nothing"'),
    _control("a client does not look for acks of ancestors", "AckHolds", ClientHeedsAncestors="FALSE"),
    _control("a late take is redelivered", "OneFate", **_PAUSED_CLIENT, LateTakesEnd="FALSE", MaxAcks="0"),
    _control(
        "an acked message is taken late and redelivered", "AckHolds", **_PAUSED_CLIENT, LateTakesEnd="FALSE"
    ),
    _control(
        "a successor does not know what was ended",
        "AckHolds",
        **_PAUSED_CLIENT,
        **_TAKEOVER,
        EndsAreStored="FALSE",
    ),
    _control("who takes a copy does not look", "NoStaleHandOut", TakerLooks="FALSE"),
    _control("who takes a copy looks from the take on", "NoStaleHandOut", TakerLooksFrom='"take"'),
    _control("who takes a copy looks from its last plan on", "NoStaleHandOut", TakerLooksFrom='"last plan"'),
    _control(
        "a tracker makes dead letters without a look",
        "NoStaleDeadLetter",
        **_DEAD_LETTER,
        TrackerLooks="FALSE",
    ),
    _control(
        "who takes a message believes its headers", "NothingLost", **_FORWARDED, AncestorsFrom='"headers"'
    ),
    _control("a late end is not fenced: an ack is lost", "AckHolds", **_UNNOTICED),
    _control(
        "a late end is not fenced: nothing says what is a copy",
        "NoStaleHandOut",
        **_UNNOTICED,
        CopiesFirst="FALSE",
    ),
    _control("torn transactions are not mended", "OneFate", **_TORN, TornAreMended="FALSE"),
    _control("deleted markers are not noticed", "ProcessedOnce", **_RETENTION, ClientChecksRetention="FALSE"),
    _cut_logs("cut logs: a cut"),
    _cut_logs("cut logs: a cut and an election", MaxElections="1", MaxEnds="1"),
    _cut_logs("cut logs: two cuts", MaxCuts="2", MaxEnds="1"),
    _cut_logs(
        "cut logs: two cuts and an election", full=True, MaxCuts="2", MaxElections="1", MaxTrackerTicks="2"
    ),
    _cut_logs("cut logs: three owners", full=True, MaxAssignments="3", MaxElections="1"),
    _cut_logs("cut logs: numbers are offsets", "EndsAreTheirs", NumbersHaveEpochs="FALSE"),
    _cut_logs("cut logs: clients do not look", "NothingLost", ClientsLook="FALSE"),
    _cut_logs("cut logs: a client goes on where it was", "NothingLost", PositionGoesBack="FALSE"),
    _cut_logs("cut logs: messages are taken before the tick", "NothingLost", TicksComeFirst="FALSE"),
    _cut_logs("cut logs: originals of another epoch are copied", "CopiesAreTheirs", TrackersLook="FALSE"),
    _cut_logs("cut logs: a late take of what was cut away", "CopiesAreTheirs", LateTakes="TRUE"),
    _lanes("lanes: one message"),
    _lanes("lanes: two messages", Originals="2", MaxMessages="3", MaxRefusals="0"),
    _lanes("lanes: three copies and two refusals", full=True, MaxMessages="4", MaxRefusals="2"),
    _lanes(
        "lanes: two messages, two copies",
        full=True,
        Clients="{a}",
        Originals="2",
        MaxMessages="4",
        MaxRefusals="0",
    ),
    _lanes("lanes: positions of two lanes are compared", "NoStaleHandOut", ReadsToItsEnd="FALSE"),
    _lanes("lanes: the end is asked for before the take", "NoStaleHandOut", AsksAfterTake="FALSE"),
    _lanes("lanes: no fallback", "NothingHeldUp", FallsBack="FALSE"),
    _lanes("lanes: one is removed with messages in it", "NothingLost", RemovedWhenEmpty="FALSE"),
    _lanes("lanes: one is removed while copies are on their way", "NothingLost", RemovedWhenQuiet="FALSE"),
)
