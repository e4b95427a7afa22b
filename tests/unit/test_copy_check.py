"""Who reads the markers of copies, without a server: while another thread reads, and when it is closed."""

import threading
from types import SimpleNamespace

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.kafka.copies.copy_check import CheckedCopies, CopyCheck
from kmqpy.kafka.markers.late_operations import LateOperations
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.testing import ManualClock

COPIES = {0: {10: 100}}


@pytest.fixture
def check(monkeypatch):
    def scan(*_):
        raise AssertionError("nothing is to be read")

    monkeypatch.setattr(RepeatedReader, "scan", scan)
    return CopyCheck(KafkaConnection(bootstrap="localhost:1"), QueueSettings(name="jobs"), SYSTEM_CLOCK)


def test_while_another_thread_reads_nobody_knows(check):
    reading, done = threading.Event(), threading.Event()

    def read():
        with check._lock:
            reading.set()
            done.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(60)
    try:
        assert check.examine(COPIES, 0.01) == CheckedCopies(unread=[(0, 10)])
        assert check.find_acknowledged(COPIES, 0.01) == []
    finally:
        done.set()
        thread.join()


def test_when_it_is_closed_nobody_knows(check):
    check.close()
    assert check.examine(COPIES, 1) == CheckedCopies(unread=[(0, 10)])
    assert check.find_acknowledged(COPIES, 1) == []
    check.close()


def test_old_copies_are_known_some_time_though_newer_ones_come_between(check, monkeypatch):
    end, at_once = 6_000_000, 1_000_000

    def scan(_, starts, visit):
        known = check._known[0]
        known.end = min(end, starts[0] + at_once)
        return {0: SimpleNamespace(done=known.end == end)}

    monkeypatch.setattr(RepeatedReader, "scan", scan)
    old, new = {0: {1: 0}}, {0: {end + 1: end - 100}}
    answers = [bool(check.examine(copies, 1).unread) for _ in range(8) for copies in (old, new)]
    assert answers[:4] == [True] * 4, "nobody knows until all is read"
    assert answers[6:] == [False] * 10


def test_forged_claims_that_take_long_to_read_hold_up_nobody_for_long(monkeypatch):
    """What is not read then counts as unread, also where it came at the end of the log."""
    clock, read = ManualClock(), []

    def take_long(known, records):
        clock.sleep(0.1 * len(records))
        read.extend(records)
        known.end += len(records)

    def scan(_, starts, visit):
        records = list(range(starts[0], 300))
        visit(0, records)
        return {0: SimpleNamespace(done=True)}

    monkeypatch.setattr(LateOperations, "read", take_long)
    monkeypatch.setattr(RepeatedReader, "scan", scan)
    check = CopyCheck(KafkaConnection(bootstrap="localhost:1"), QueueSettings(name="jobs"), clock)
    assert check.examine(COPIES, 1).unread == [(0, 10)]
    assert len(read) == 20
    for _ in range(9):
        unread = check.examine(COPIES, 1).unread
    assert (unread, read) == ([], list(range(100, 300)))
