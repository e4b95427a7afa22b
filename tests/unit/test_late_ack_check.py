"""Who reads the markers of copies, without a server: while another thread reads, and when it is closed."""

import threading
from types import SimpleNamespace

import pytest
from confluent_kafka import Message

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.kafka.copies.late_acks import CheckedCopies, LateAckCheck
from kmqpy.kafka.markers.claim_headers import CLAIM, naming_tick
from kmqpy.kafka.markers.late_operations import CopyHeaders, LateOperations
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.testing import ManualClock

COPIES = {0: {10: CopyHeaders(100)}}


@pytest.fixture
def check(monkeypatch):
    def scan(*_):
        raise AssertionError("nothing is to be read")

    monkeypatch.setattr(RepeatedReader, "scan", scan)
    return LateAckCheck(
        KafkaConnection(bootstrap="localhost:1"), QueueSettings(name="jobs"), SYSTEM_CLOCK, str
    )


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
        known = check._known["jobs", 0]
        known.end = min(end, starts[0] + at_once)
        return {0: SimpleNamespace(done=known.end == end)}

    monkeypatch.setattr(RepeatedReader, "scan", scan)
    old, new = {0: {1: CopyHeaders(0)}}, {0: {end + 1: CopyHeaders(end - 100)}}
    answers = [bool(check.examine(copies, 1).unread) for _ in range(8) for copies in (old, new)]
    assert answers[:4] == [True] * 4, "nobody knows until all is read"
    assert answers[6:] == [False] * 10


def test_forged_claims_that_take_long_to_read_hold_up_nobody_for_long(monkeypatch):
    """What is not read then counts as unread, also where it came at the end of the log."""
    check, read = check_of_slow_claims(monkeypatch, each_s=0.4)
    assert check.examine(COPIES, 1).unread == [(0, 10)]
    assert read == [100, 101, 102]
    for _ in range(3):
        unread = check.examine(COPIES, 1).unread
    assert (unread, read) == ([], list(range(100, 110)))


def test_a_little_is_read_though_the_time_is_over(monkeypatch):
    check, read = check_of_slow_claims(monkeypatch, each_s=0.03)
    assert check.examine(COPIES, 0).unread == [(0, 10)]
    assert read == [100, 101, 102, 103]


def check_of_slow_claims(monkeypatch, each_s):
    """A check of markers 100 to 109, claims that take `each_s` to read, and the offsets of those read."""
    clock, read = ManualClock(), []

    def claim(at):
        key, value, headers = naming_tick(0, CLAIM, [at])
        return Message(key=key, value=value, headers=headers, offset=at, timestamp=(2, at))

    def take_long(_known, record, _headers):
        clock.sleep(each_s)
        read.append(record.offset())

    def scan(_, starts, visit):
        visit(0, [claim(at) for at in range(starts[0], 110)])
        return {0: SimpleNamespace(done=True)}

    monkeypatch.setattr(LateOperations, "_read_other", take_long)
    monkeypatch.setattr(RepeatedReader, "scan", scan)
    settings = QueueSettings(name="jobs")
    return LateAckCheck(KafkaConnection(bootstrap="localhost:1"), settings, clock, str), read
