"""Who polls, of the threads that wait for reports of one client."""

import threading
import time

import pytest

from kmqpy.core import poll_turns
from kmqpy.core.poll_turns import PollTurns, Waiter


def waiter():
    made = Waiter()
    made.left.append(None)
    return made


def report(to):
    to.left.pop()
    to.wake()


class Client:
    """Reports to `reports` one after the other, when it is polled and `may` is set."""

    def __init__(self, reports):
        self.reports = list(reports)
        self.may = threading.Event()
        self.polling = 0

    def poll(self, seconds):
        self.polling += 1
        try:
            assert self.polling == 1
            if self.may.wait(seconds) and self.reports:
                report(self.reports.pop(0))
        finally:
            self.polling -= 1


def start(turns, client, waiters, timeout_s=5):
    threads = [
        threading.Thread(target=turns.wait, args=(client.poll, one, timeout_s), daemon=True)
        for one in waiters
    ]
    for thread in threads:
        thread.start()
    return threads


def test_one_polls_for_all_and_each_returns_with_its_own_report(monkeypatch):
    monkeypatch.setattr(poll_turns, "_SLEEP_S", 60)  # nobody looks for himself
    turns, waiters = PollTurns(), [waiter() for _ in range(8)]
    for order in (waiters, waiters[::-1]):
        client = Client(order)
        for one in order:
            one.left[:] = [None]
        threads = start(turns, client, waiters)
        client.may.set()
        for thread in threads:
            thread.join()
        assert not any(one.left for one in waiters)
        assert not turns._turn


def test_the_turn_of_a_thread_that_raises_goes_to_another(monkeypatch):
    monkeypatch.setattr(poll_turns, "_SLEEP_S", 60)
    turns, sleeper = PollTurns(), waiter()
    client = Client([sleeper])
    threads = []

    def poll(_):
        if not threads:
            threads.extend(start(turns, client, [sleeper]))
            while not turns._waiters[1:]:
                time.sleep(0.001)
            return
        client.may.set()
        raise InterruptedError

    with pytest.raises(InterruptedError):
        turns.wait(poll, waiter(), 30)
    threads[0].join()
    assert not sleeper.left


def test_who_sleeps_polls_while_the_one_whose_turn_it_is_stands_still():
    turns, sleeper, stands = PollTurns(), waiter(), threading.Event()
    slow = threading.Thread(target=turns.wait, args=(lambda _: stands.wait(30), waiter(), 1), daemon=True)
    slow.start()
    while not turns._turn:
        time.sleep(0.001)
    turns.wait(lambda _: report(sleeper), sleeper, 30)
    stands.set()
    slow.join()
    assert not sleeper.left


def test_a_handler_of_a_signal_that_waits_in_the_thread_whose_turn_it_is_polls():
    turns, outer, inner = PollTurns(), waiter(), waiter()

    def poll(_):
        if inner.left:
            turns.wait(lambda _: report(inner), inner, 30)
        else:
            report(outer)

    turns.wait(poll, outer, 30)
    assert not outer.left
    assert not turns._turn


def test_after_the_time_out_reports_are_left():
    left = waiter()
    PollTurns().wait(lambda _: None, left, 0.02)
    assert left.left
