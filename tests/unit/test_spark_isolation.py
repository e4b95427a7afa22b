"""The message that makes a query fail is found by halves, and pays only while others get through."""

import random

import pytest

from kmqpy.spark import isolation
from kmqpy.spark.isolation import LAST_FAILURE, counts_as_attempt, failed_before, remember, split


class Queue:
    """Micro-batches of what is there; `poison` makes one fail, and so does a sink that is away."""

    def __init__(self, messages, poison=(), max_redeliveries=2):
        self.waiting = list(messages)
        self.poison = set(poison)
        self.limit = max_redeliveries
        self.rerun = []
        self.attempts = dict.fromkeys(messages, 1)
        self.remembered = {}
        self.progress = 0
        self.away = False
        self.chance = random.Random(5)
        self.done, self.dead = [], []

    def run(self):
        """One micro-batch: that which failed again, or the next one; and the restart if it fails."""
        batch, self.rerun = self.rerun, []
        if not batch:
            batch, self.waiting = self.waiting, []
        if not batch:
            return
        if not self.away and not self.poison & set(batch):
            self.done += batch
            self.progress += 1
            return
        before, self.remembered = self.remembered, remember(batch, self.progress, self.remembered)
        if not failed_before(self.progress, before):
            self.rerun = batch
            return
        if len(batch) > 1:
            kept, given_back = split(
                [(0, at) for at in range(len(batch))], keeps_lower=self.chance.random() < 0.5
            )
            self.rerun = [batch[at] for _, at in kept]
            self.waiting += [batch[at] for _, at in given_back]
            return
        (message,) = batch
        self.attempts[message] += counts_as_attempt(message, self.progress, self.remembered)
        if self.attempts[message] > self.limit + 1:
            self.dead.append(message)
        else:
            self.waiting.append(message)


def messages(count):
    return [(number % 3, number) for number in range(count)]


@pytest.mark.parametrize("count", [2, 3, 10, 100, 1_000])
@pytest.mark.parametrize("where", [0, 1, -1])
def test_only_the_message_that_is_the_cause_becomes_a_dead_letter(count, where):
    everything = messages(count)
    queue = Queue(everything, poison=[everything[where]])
    runs = 0
    while not queue.dead:
        queue.run()
        runs += 1
    while queue.waiting or queue.rerun:
        queue.run()
    assert queue.dead == [everything[where]]
    assert sorted(queue.done) == sorted(set(everything) - set(queue.dead))
    assert runs < 200
    assert [one for one in everything if queue.attempts[one] > 1] == queue.dead


def test_several_of_them():
    everything = messages(200)
    poison = everything[::40]
    queue = Queue(everything, poison)
    for _ in range(1_000):
        queue.run()
    assert sorted(queue.dead) == sorted(poison)
    assert sorted(queue.done) == sorted(set(everything) - set(poison))


def test_a_sink_that_is_away_costs_nobody_an_attempt():
    queue = Queue(messages(50), max_redeliveries=0)
    queue.run()
    queue.away = True
    queue.waiting = messages(50)
    for _ in range(1_000):
        queue.run()
    assert set(queue.attempts.values()) == {1}
    queue.away = False
    for _ in range(200):
        queue.run()
    assert set(queue.done) == set(messages(50))
    assert queue.dead == []


def test_a_message_alone_in_its_queue_is_tried_without_end():
    queue = Queue([(0, 0)], poison=[(0, 0)], max_redeliveries=0)
    for _ in range(100):
        queue.run()
    assert queue.dead == []
    queue.waiting.append((0, 1))
    queue.attempts[0, 1] = 1
    for _ in range(50):
        queue.run()
    assert (queue.dead, queue.done) == ([(0, 0)], [(0, 1)])


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(isolation, "MAX_REMEMBERED", 3)
    remembered = {}
    for number in range(10):
        remembered = remember([(0, number), (0, number + 1)], number, remembered)
    assert remembered == {(0, 8): 7, (0, 9): 8, (0, 10): 9, LAST_FAILURE: 9}
    assert counts_as_attempt((0, 9), 9, remembered)
    assert not counts_as_attempt((0, 10), 9, remembered)
    assert not counts_as_attempt((0, 1), 9, remembered)
