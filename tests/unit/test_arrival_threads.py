"""Threads that tell of arrivals, in a process that may not start one for a moment."""

import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from kmqpy.storages.redis.arrival_subscriber import ArrivalSubscriber
from kmqpy.storages.sql.arrivals import ArrivalCounts, ArrivalListener, Notifier


class Reached(Exception):
    pass


def subscriber(connect):
    subscriber = ArrivalSubscriber(connect)
    return lambda: subscriber.wait(b"q", 0, 0, 0.0), subscriber.close


def listener(connect):
    listener = ArrivalListener(SimpleNamespace(own=connect, moves=0), "c", ArrivalCounts())
    return listener.start, listener.stop


def notifier(connect):
    notifier = Notifier(SimpleNamespace(own=connect), "", "c")
    return lambda: notifier.tell("q"), notifier.stop


@pytest.mark.parametrize("made", [subscriber, listener, notifier])
def test_a_thread_that_could_not_be_started_is_started_by_the_next_call(monkeypatch, made):
    has_connected = threading.Event()

    def connect():
        has_connected.set()
        raise Reached

    call, close = made(connect)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot_start)
        with suppress(RuntimeError):
            call()
    call()
    assert has_connected.wait(10)
    close()


@pytest.mark.parametrize("made", [subscriber, listener, notifier])
def test_what_has_no_thread_can_be_closed(monkeypatch, made):
    call, close = made(None)
    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    with suppress(RuntimeError):
        call()
    close()


def cannot_start(_thread):
    raise RuntimeError("can't start new thread")
