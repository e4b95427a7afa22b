"""A client that is opened when it is used, and closed when nobody does."""

import threading

import pytest

from kmqpy.errors import Closed
from kmqpy.kafka.client.lazy_consumer import LazyConsumer
from kmqpy.testing import ManualClock


class Client:
    def __init__(self):
        self.leased = 0
        self.closed = False
        self.outdated = False
        self.acknowledged = []

    def ack(self, *messages, confirmed):
        self.acknowledged.append((messages, confirmed))

    def close(self):
        self.closed = True


class Lazy(LazyConsumer):
    def __init__(self):
        self.made = []
        self.clock = ManualClock()
        super().__init__(self.new, "queue 'q'", self.clock, lambda: None)

    def new(self, _owner):
        self.made.append(Client())
        return self.made[-1]

    def opened(self):
        with self.use() as client:
            return client


def test_it_is_opened_once_by_its_first_user():
    lazy = Lazy()
    assert (lazy.current, lazy.made) == (None, [])
    assert lazy.opened() is lazy.opened()
    assert [lazy.current] == lazy.made


def test_it_is_closed_when_nobody_has_used_it_for_long_enough_and_nothing_is_in_flight():
    lazy = Lazy()
    first = lazy.opened()
    lazy.clock.advance(9)
    lazy.close_if_idle(10)
    assert not first.closed
    first.leased = 1
    lazy.clock.advance(1)
    lazy.close_if_idle(10)
    assert not first.closed
    first.leased = 0
    with lazy.use():
        lazy.clock.advance(20)
        lazy.close_if_idle(10)
        assert not first.closed
    lazy.clock.advance(10)
    lazy.close_if_idle(10)
    assert first.closed
    lazy.close_if_idle(10)
    assert lazy.opened() is not first
    assert len(lazy.made) == 2


def test_one_whose_queue_has_other_lanes_by_now_is_opened_anew_when_nobody_uses_it():
    lazy = Lazy()
    with lazy.use() as first:
        first.outdated = True
        assert lazy.opened() is first
    assert lazy.opened() is not first
    assert first.closed


def test_one_whose_queue_has_other_lanes_by_now_is_opened_anew_though_two_take_all_the_time():
    lazy = Lazy()
    with lazy.use(takes=True) as first:
        first.outdated = True
        with lazy.use(), lazy.use(takes=True) as second:
            assert second is first, "somebody acknowledges by it"
        with lazy.use(takes=True) as second:
            assert second is not first
    assert first.closed
    with lazy.use() as third:
        assert third is second


def test_of_the_issue_an_abandoned_one_is_closed_as_soon_as_nobody_uses_it(caplog):
    lazy = Lazy()
    with lazy.use() as client:
        lazy.close_if_abandoned()
        lazy.abandon()
        lazy.close_if_abandoned()
        assert not client.closed
    lazy.close_if_abandoned()
    assert client.closed
    lazy.ack("a message that is left", confirmed=True)
    _, late = lazy.made
    assert late.acknowledged == [(("a message that is left",), True)]
    lazy.close_if_abandoned()
    assert late.closed
    assert [one.getMessage() for one in caplog.records] == [
        "queue 'q' was collected and never closed; it leaves its group"
    ]


def slow_to_open():
    """One whose opening waits; an event that says that it does, and the event for which it waits."""
    lazy = Lazy()
    opening, may_open = threading.Event(), threading.Event()

    def new(owner):
        opening.set()
        may_open.wait(60)
        return Lazy.new(lazy, owner)

    lazy._make = new
    return lazy, opening, may_open


def test_one_is_abandoned_while_another_thread_opens_it():
    """The garbage collector must not wait, and the client's thread must not wait for close_current()."""
    lazy, opening, may_open = slow_to_open()
    user = threading.Thread(target=lazy.opened)
    user.start()
    opening.wait(60)
    lazy.abandon()
    lazy.close_if_abandoned()
    may_open.set()
    user.join(60)
    lazy.close_if_abandoned()
    assert [client.closed for client in lazy.made] == [True]


def test_a_closed_one_opens_no_more():
    lazy = Lazy()
    client = lazy.opened()
    lazy.close()
    assert client.closed
    for call in (lazy.opened, lazy.check_open):
        with pytest.raises(Closed, match="queue 'q' is closed"):
            call()
    assert len(lazy.made) == 1


def test_one_that_is_closed_just_when_it_was_opened_is_left_to_nobody():
    class ClosedMeanwhile(Lazy):
        """Another thread calls close() just after the thread that opens has looked whether it is closed."""

        _is_closed = False

        @property
        def _closed(self):
            found = self._is_closed
            if self.made and not found:
                self.close()
            return found

        @_closed.setter
        def _closed(self, value):
            self._is_closed = value

    lazy = ClosedMeanwhile()
    lazy.opened()
    assert [client.closed for client in lazy.made] == [True]


def test_one_that_is_closed_while_it_is_opened_is_left_to_nobody():
    lazy, opening, may_open = slow_to_open()
    raised = []

    def use():
        try:
            lazy.opened()
        except Closed as error:
            raised.append(error)

    user = threading.Thread(target=use)
    user.start()
    opening.wait(60)
    lazy.close()
    may_open.set()
    user.join(60)
    assert [client.closed for client in lazy.made] == [True]
    assert len(raised) == 1
