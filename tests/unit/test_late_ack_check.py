"""Who reads the markers of copies, without a server: while another thread reads, and when it is closed."""

import threading

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.kafka.client.late_acks import CheckedCopies, LateAckCheck
from kmqpy.kafka.partition_reader import RepeatedReader
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

COPIES = {0: {10: 100}}


@pytest.fixture
def check(monkeypatch):
    def scan(*_):
        raise AssertionError("nothing is to be read")

    monkeypatch.setattr(RepeatedReader, "scan", scan)
    return LateAckCheck(KafkaConnection(bootstrap="localhost:1"), QueueSettings(name="jobs"), SYSTEM_CLOCK)


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
