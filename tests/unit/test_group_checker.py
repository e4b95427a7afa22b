"""The judge of groups says what must not be, and nothing else."""

import pytest

from kmqpy.testing.contract.group_checker import CapChecker, GroupChecker


@pytest.fixture
def checker() -> GroupChecker:
    return GroupChecker()


def test_batches_in_order_and_redeliveries_are_right(checker):
    checker.handed_out([("a", 0), ("b", 0), ("a", 1)])
    checker.ended([("a", 0)])
    checker.back([("a", 1)])
    checker.handed_out([("a", 1), ("a", 2)])
    checker.back([("a", 1)])
    checker.ended([("a", 2), ("b", 0)])
    checker.handed_out([("a", 1)])
    checker.ended([("a", 1)])
    checker.handed_out([("a", 3), ("b", 1)])
    assert checker.problems == []
    assert checker.unfinished({"a": 4, "b": 1, "c": 2}) == {"a": 1, "c": 2}


def test_a_message_beside_another_of_its_group_is_an_overlap(checker):
    checker.handed_out([("a", 0), ("b", 0)])
    checker.handed_out([("a", 1)])
    assert [one.split(":")[0] for one in checker.problems] == ["overlap", "inversion"]


@pytest.mark.parametrize("batch", [[("a", 1)], [("a", 1), ("a", 0)], [("a", 0), ("a", 2)]])
def test_a_message_before_an_earlier_one_is_an_inversion(checker, batch):
    checker.handed_out(batch)
    assert checker.problems
    assert all(one.startswith("inversion") for one in checker.problems)


def test_what_was_finished_and_comes_again_is_an_inversion(checker):
    checker.handed_out([("a", 0)])
    checker.ended([("a", 0)])
    checker.handed_out([("a", 0)])
    assert checker.problems == ["inversion: a 0 before 1"]


def test_one_message_too_many_of_a_group_is_told():
    checker = CapChecker(2)
    checker.handed_out(["a", "b", "a"])
    checker.ended(["a"])
    checker.handed_out(["a", "b"])
    assert checker.problems == []
    checker.handed_out(["a"])
    assert checker.problems == ["more than 2 in flight: {'a': 3}"]
