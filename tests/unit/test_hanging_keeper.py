"""How a tracker shows the hanging transactions of its partitions."""

from collections.abc import Iterable

import pytest
from tracked import Tracked, with_two_queues

from kmqpy.kafka.hanging import HangingTransaction
from kmqpy.kafka.log_ends import TopicPlace


class Keeping:
    """A tracker of two queues, and the search of its HangingKeeper."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tracked = with_two_queues(Tracked())
        self.keeper = self.tracked.loop._hanging
        monkeypatch.setattr(self.keeper, "_search", self)
        self.hanging: set[TopicPlace] = set()

    def look(self, places: Iterable[TopicPlace]) -> list[HangingTransaction]:
        return [HangingTransaction(*place, 5, 4, 0, ()) for place in self.hanging.intersection(places)]

    def stands_still_at(self, _place: TopicPlace) -> None:
        """Nothing of a tracker does."""

    def look_again(self) -> None:
        self.keeper._next_look = 0.0
        self.keeper.look(1.0)
        self.tracked.take_one_result()

    def shown(self) -> set[str]:
        """The topics of which the metric is shown."""
        (metric,) = self.tracked.tracker.metrics._hanging.collect()
        return {sample.labels["topic"] for sample in metric.samples}


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Keeping:
    return Keeping(monkeypatch)


def test_a_transaction_is_shown_only_while_it_hangs(keeping: Keeping) -> None:
    keeping.look_again()
    assert keeping.shown() == set()
    keeping.hanging = {("a", 0), ("a__markers", 0)}
    keeping.look_again()
    assert keeping.shown() == {"a", "a__markers"}
    assert len(keeping.tracked.problems()) == 2
    keeping.hanging = {("a", 0)}
    keeping.look_again()
    assert keeping.shown() == {"a"}
    assert len(keeping.tracked.problems()) == 1


def test_a_partition_that_is_given_up_shows_nothing(keeping: Keeping) -> None:
    keeping.hanging = {("a", 0), ("b", 0)}
    keeping.look_again()
    keeping.keeper._next_look = 0.0
    keeping.keeper.look(1.0)  # this job begins before, and ends after
    keeping.tracked.lifecycle.drop(keeping.tracked.parts["a", 0], "a test")
    assert keeping.shown() == {"b"}
    keeping.tracked.take_one_result()
    assert keeping.shown() == {"b"}
    keeping.look_again()
    assert keeping.shown() == {"b"}
    assert len(keeping.tracked.problems()) == 1
