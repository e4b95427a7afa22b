"""The life of a message, from records and markers as they were read."""

from dataclasses import replace

from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.life import LifeEventKind, LifeState, RecordFacts, SeenMarker, build_life
from kmqpy.kafka.markers.lineage import RecordPlace
from kmqpy.kafka.markers.log_cuts import LogCuts

ORIGINAL, COPY = RecordPlace("jobs", 0, 5), RecordPlace("jobs", 0, 9)
LETTER = RecordPlace("jobs__undelivered", 0, 2)


def markers(*some, copy=None, first_ms=1_000):
    """Markers a second apart; the last of them names `copy`."""
    seen = [SeenMarker(at, first_ms + 1_000 * at, marker, None) for at, marker in enumerate(some)]
    return seen if copy is None else [*seen[:-1], seen[-1]._replace(copy=copy)]


def marker(op, after_ms=0, **fields):
    return Marker(0, 5, op, after_ms, **fields)


END = marker(Op.END)
MOVED = replace(END, by_tracker=True)
TAKE = marker(Op.TAKE, 30_000, holder="w1")


def life(chain, by_place, lost=(), **facts):
    known = {place: RecordFacts(500, b"k") for place in chain if place not in lost}
    return build_life("jobs", chain, known | facts.get("facts", {}), by_place, lost)


def told(found):
    return [(event.what.value, event.record, event.by, event.reason, event.late) for event in found.events]


def test_sent_and_not_taken():
    found = life([ORIGINAL], {})
    assert told(found) == [("sent", "0:5", None, None, False)]
    assert (found.state, found.records, found.key) == (LifeState.WAITING, ("0:5",), "k")


def test_taken_extended_acknowledged():
    found = life([ORIGINAL], {ORIGINAL: markers(TAKE, marker(Op.EXTEND, 60_000), END)})
    assert told(found)[1:] == [
        ("taken", "0:5", "w1", None, False),
        ("extended", "0:5", "w1", None, False),
        ("acknowledged", "0:5", "w1", None, False),
    ]
    assert [event.for_ms for event in found.events] == [None, 30_000, 60_000, None]
    assert found.state is LifeState.ACKNOWLEDGED


def test_r44_held_back_before_it_is_redelivered():
    held = marker(Op.NACK, 10_000, reason="expired", by_tracker=True)
    found = life([ORIGINAL, COPY], {ORIGINAL: markers(TAKE, held, MOVED, copy=COPY)})
    assert told(found)[1:] == [
        ("taken", "0:5", "w1", None, False),
        ("held back", "0:5", None, "expired", False),
        ("redelivered", "0:5", None, "expired", False),
    ]
    assert life([ORIGINAL], {ORIGINAL: markers(TAKE, held)}).state is LifeState.RELEASED


def test_what_comes_after_the_end_is_late():
    late = [marker(Op.EXTEND, 1), marker(Op.NACK), marker(Op.DEAD_LETTER), END]
    found = life([ORIGINAL], {ORIGINAL: markers(TAKE, END, *late)})
    assert [event.late for event in found.events] == [False] * 3 + [True] * 4
    assert found.state is LifeState.ACKNOWLEDGED


def test_a_take_after_the_end_opens_it_again():
    found = life([ORIGINAL], {ORIGINAL: markers(TAKE, END, replace(TAKE, holder="w2"))})
    assert told(found)[-1] == ("taken", "0:5", "w2", None, False)
    assert found.state is LifeState.IN_FLIGHT


def test_given_back_redelivered_and_acknowledged_late_and_in_time():
    given_back = marker(Op.NACK, 2_000, reason="busy", counts=False)
    of_original = [*markers(TAKE, given_back, MOVED, copy=COPY), SeenMarker(9, 8_000, END, None)]
    of_copy = markers(replace(TAKE, holder="w2"), END, first_ms=5_000)
    found = life([ORIGINAL, COPY], {ORIGINAL: of_original, COPY: of_copy})
    assert told(found)[1:] == [
        ("taken", "0:5", "w1", None, False),
        ("given back", "0:5", "w1", "busy", False),
        ("redelivered", "0:5", None, "nack: busy", False),
        ("taken", "0:9", "w2", None, False),
        ("acknowledged", "0:9", "w2", None, False),
        ("acknowledged", "0:5", "w1", None, True),
    ]
    assert [event.copy for event in found.events if event.copy] == ["0:9"]
    assert [event.counts for event in found.events].count(False) == 1
    assert found.state is LifeState.ACKNOWLEDGED


def test_a_lease_that_ran_out_and_a_delay_that_is_over():
    for op, reason in ((TAKE, "expired"), (marker(Op.DELAY, 9), "delay over")):
        found = life([ORIGINAL, COPY], {ORIGINAL: markers(op, MOVED, copy=COPY)})
        assert found.events[-1].reason == reason
        assert found.state is LifeState.WAITING


def test_rejected_dead_and_redriven():
    rejected = markers(TAKE, marker(Op.DEAD_LETTER, reason="bad"), MOVED, copy=LETTER)
    facts = {LETTER: RecordFacts(900, None, "rejected: bad")}
    found = life([ORIGINAL, LETTER], {ORIGINAL: rejected}, facts=facts)
    assert told(found)[-1] == ("dead-lettered", "0:5", None, "rejected: bad", False)
    assert found.state is LifeState.DEAD_LETTER
    assert found.records == ("0:5", "jobs__undelivered:0:2")

    redriven = {ORIGINAL: rejected, LETTER: markers(MOVED, copy=COPY, first_ms=9_000)}
    found = life([ORIGINAL, LETTER, COPY], redriven, facts=facts)
    assert told(found)[-1] == ("redriven", "jobs__undelivered:0:2", None, None, False)
    assert found.state is LifeState.WAITING


def test_what_a_cut_log_has_lost_is_lost_unless_it_was_finished():
    now_there = RecordPlace("jobs", 0, LogCuts.parse("2<3@5").number_of(9))
    redelivered = {ORIGINAL: markers(TAKE, MOVED, copy=COPY)}
    found = life([ORIGINAL, COPY], redelivered, lost={COPY})
    assert (found.state, found.records, found.lost) == (
        LifeState.LOST,
        ("0:5", "0:9 (lost)"),
        ("0:9 (lost)",),
    )
    assert [event.copy for event in found.events if event.copy] == ["0:9 (lost)"]
    found = life([ORIGINAL, COPY], {**redelivered, COPY: markers(TAKE, END, first_ms=5_000)}, lost={COPY})
    assert (found.state, found.lost) == (LifeState.ACKNOWLEDGED, ("0:9 (lost)",))
    assert (found.deleted, life([now_there], {}).records) == ((), ("0:9",))


def test_an_end_that_names_no_copy_or_one_that_is_not_believed():
    for copy in (None, COPY):
        found = life([ORIGINAL], {ORIGINAL: markers(TAKE, MOVED, copy=copy)})
        assert found.events[-1].what is LifeEventKind.ENDED
        assert found.events[-1].copy is None
        assert found.state is LifeState.ENDED


def test_a_message_that_was_taken_after_its_end_says_why_it_was_ended_again():
    late = replace(MOVED, reason="taken late")
    found = life([ORIGINAL], {ORIGINAL: markers(TAKE, END, TAKE, late)})
    assert told(found)[-1] == ("ended", "0:5", None, "taken late", False)


def test_a_copy_that_a_tracker_found_to_be_acknowledged():
    found_acknowledged = replace(MOVED, reason="acknowledged")
    found = life([ORIGINAL], {ORIGINAL: markers(TAKE, found_acknowledged)})
    assert told(found)[-1] == ("acknowledged", "0:5", None, "by an earlier taker", False)
    assert found.state is LifeState.ACKNOWLEDGED
    # A copy that it names says more than its reason, believed or not.
    found = life([ORIGINAL], {ORIGINAL: markers(TAKE, found_acknowledged, copy=COPY)})
    assert found.state is LifeState.ENDED
    found = life([ORIGINAL, COPY], {ORIGINAL: markers(TAKE, found_acknowledged, copy=COPY)})
    assert found.events[-1].what is LifeEventKind.REDELIVERED


def test_a_message_that_is_gone_itself():
    found = build_life("jobs", [ORIGINAL], {}, {ORIGINAL: markers(TAKE)})
    assert [event.what for event in found.events] == [LifeEventKind.TAKEN]
    assert (found.deleted, found.key) == (("0:5",), None)
