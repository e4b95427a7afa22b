"""Numbers of messages in logs that were cut back."""

import pytest

from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.log_cuts import NO_CUTS, Cut, LogCuts, cuts_behind, offset_of

ONCE = NO_CUTS.with_cut(Cut(3, 450, 2))
TWICE = ONCE.with_cut(Cut(7, 900, 6))


def test_r39_without_a_cut_a_number_is_the_offset() -> None:
    assert NO_CUTS.numbers_of(range(5, 9)) == range(5, 9)
    assert NO_CUTS.number_of(2**43) == offset_of(2**43) == 2**43
    assert not NO_CUTS


def test_r39_no_number_names_two_messages() -> None:
    logs = [NO_CUTS, ONCE, TWICE, TWICE.with_cut(Cut(9, 300, 8))]
    seen: dict[int, tuple[int, int]] = {}
    epochs = [lambda o: 0, lambda o: 3 * (o >= 450), lambda o: 7 if o >= 900 else 3 * (o >= 450)]
    epochs.append(lambda o: 9 * (o >= 300))
    for cuts, epoch_at in zip(logs, epochs, strict=True):
        for offset in range(1_200):
            message = epoch_at(offset), offset
            assert seen.setdefault(cuts.number_of(offset), message) == message
            assert offset_of(cuts.number_of(offset)) == offset


def test_r39_cuts_can_be_told_from_a_number() -> None:
    for number in (0, 7, TWICE.number_of(460), TWICE.number_of(900)):
        assert cuts_behind(number).number_of(offset_of(number)) == number


def test_r39_what_lies_below_a_cut_keeps_its_number() -> None:
    assert [TWICE.number_of(offset) for offset in (0, 449)] == [0, 449]
    assert TWICE.number_of(899) == ONCE.number_of(899) != TWICE.number_of(900)
    assert TWICE.is_current(TWICE.number_of(899))
    assert not TWICE.is_current(ONCE.number_of(900))
    assert not TWICE.is_current(450)


def test_r39_a_later_cut_that_lies_lower_supersedes_the_former() -> None:
    assert TWICE.with_cut(Cut(9, 500, 8)).cuts == (Cut(3, 450, 2), Cut(9, 500, 8))
    assert TWICE.with_cut(Cut(9, 450, 8)).cuts == (Cut(9, 450, 8),)


def test_r39_an_earlier_cut_that_is_found_later_lies_below_the_known_one() -> None:
    found = LogCuts((Cut(7, 900, 6),)).with_cut(Cut(3, 450, 2))
    assert found == TWICE
    assert LogCuts((Cut(7, 900, 6),)).new_in(TWICE) == (Cut(3, 450, 2),)


@pytest.mark.parametrize(
    "cut", [Cut(7, 1, 6), Cut(6, 2_000, 5), Cut(0, 0, 0), Cut(2**19, 0, 8), Cut(8, 2**44, 7), Cut(8, -1, 7)]
)
def test_r39_older_cuts_and_those_that_have_no_numbers_are_left_out(cut: Cut) -> None:
    assert TWICE.knows(cut)
    assert TWICE.with_cut(cut) is TWICE


def test_r39_a_cut_that_is_found_again_after_an_election_is_the_same() -> None:
    assert ONCE.knows(Cut(4, 450, 2))
    assert ONCE.with_cut(Cut(4, 450, 3)).cuts == (Cut(4, 450, 3),)  # what stood behind the first is gone
    assert ONCE.with_cut(Cut(4, 300, 2)).cuts == (Cut(4, 300, 2),)


def test_numbers_of_ascending_offsets() -> None:
    for offsets in (range(440, 460), [449, 450], range(500, 510), [500, 502]):
        assert list(TWICE.numbers_of(offsets)) == [TWICE.number_of(offset) for offset in offsets]


def test_merged() -> None:
    assert NO_CUTS.merged(TWICE) == TWICE.merged(ONCE) == ONCE.merged(TWICE) == TWICE
    assert ONCE.new_in(TWICE) == (Cut(7, 900, 6),)
    assert LogCuts((Cut(2, 5, 1),)).merged(TWICE).cuts == (Cut(2, 5, 1), Cut(3, 450, 2), Cut(7, 900, 6))


def test_text() -> None:
    assert str(TWICE) == "2<3@450,6<7@900"
    for cuts in (NO_CUTS, ONCE, TWICE):
        assert LogCuts.parse(str(cuts)) == cuts
    for text in (
        "x",
        "2<3@450,",
        "6<7@900,2<3@450",
        "2<3@900,6<7@450",
        "0<0@4",
        "3<600000@4",
        "2<3@99999999999999",
    ):
        with pytest.raises(ValueError, match="cuts"):
            LogCuts.parse(text)


@pytest.mark.parametrize(
    "marker", [codec.tick(3, TWICE), codec.assignment_tick(3, 17, again=True, cuts=ONCE)]
)
def test_ticks_name_cuts(marker: codec.Marker) -> None:
    assert codec.decode(*codec.encode(marker)) == marker


def test_cuts_that_can_not_be_read_count_as_absent() -> None:
    key, value, _ = codec.encode(codec.tick(3))
    assert codec.decode(key, value, [("kmq-cuts", b"\xff"), ("kmq-takes-from", b"5")]).takes_from == 5
    assert codec.decode(key, value, [("kmq-cuts", b"3@")]).cuts == NO_CUTS


def test_r39_of_more_cuts_than_a_text_can_have_the_first_are_forgotten() -> None:
    found = NO_CUTS
    for epoch in range(1, 150):
        found = found.with_cut(Cut(epoch, 10 * epoch, epoch - 1))
    assert len(found.cuts) == 100
    assert LogCuts.parse(str(found)) == found
    assert found.cuts[-1].epoch == 149


def test_r39_a_log_has_no_cut_of_an_epoch_that_it_never_had() -> None:
    assert [TWICE.up_to(epoch) for epoch in (2, 3, 6, 7)] == [NO_CUTS, ONCE, ONCE, TWICE]
