"""What a take of a queue with order="group" decides about ready rows, on SQL. Pure."""

from kmqpy.storages.sql.groups import _Ready, _Take


def ready(row_id: int, group: int = 1, **more: int) -> _Ready:
    """A ready row whose place is its id, the first one of its group."""
    fields = {**dict.fromkeys(_Ready._fields[4:]), "first_ready": row_id, **more}
    return _Ready(row_id, row_id, group, **fields)


def look(*rows: _Ready) -> _Take:
    take = _Take(limit=9, holds=False, one_per_group=False, follow=lambda *_: ())
    take.look_at(rows, None)
    return take


def test_a_row_that_was_given_back_meanwhile_waits_not_for_itself() -> None:
    take = look(ready(1, taken_id=1), ready(2, group=2))
    assert (take.waiting, take.unclear, take.chosen) == ({}, {1}, [2])


def test_the_others_of_its_group_wait_for_it_no_more_than_it_does() -> None:
    take = look(ready(1, delayed_id=1, first_delayed=0), ready(3))
    assert (take.waiting, take.chosen) == ({}, [])


def test_a_row_waits_for_one_that_is_taken() -> None:
    assert look(ready(2, taken_id=1), ready(3)).waiting == {1: [2, 3]}


def test_a_second_batch_of_a_group_shows_nothing_that_waits_behind_the_first() -> None:
    rows = [ready(1, first_behind=2), ready(3, first_ready=1, first_behind=2)]
    take = _Take(limit=0, holds=False, one_per_group=False, follow=lambda *_: ())
    take.look_at(rows, None)
    assert (take.healed, take.chosen, take.waiting) == (set(), [], {})
