"""Redrives that are killed, overtaken or stopped, or beside which others finish dead letters."""

import dataclasses
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from letters_support import PARTITIONS, assert_each_once, bury, delivered, transactional, write
from support import committed_records, delete_topic

from kmqpy.errors import Unfinished
from kmqpy.kafka import librdkafka
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.copies.copy_transaction import CopyTransaction
from kmqpy.kafka.dead_letters import KafkaDeadLetters, RedriveResult
from kmqpy.kafka.markers import codec
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_names import dead_letter_queue
from kmqpy.kafka.topics import Topics
from tests.torn import tear

# A redrive in a process of its own, which kills itself: `between` after a commit, `inside` after all
# records of a transaction are on the broker and before its commit, `after` just after the commit.
REDRIVE = """
import os, signal, sys
from kmqpy.kafka import librdkafka
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.errors import Unfinished
from kmqpy.kafka import librdkafka

bootstrap, queue, rate, how, when = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Dying(librdkafka.Producer):
    commits = 0

    def commit_transaction(self, *args):
        Dying.commits += 1
        now = Dying.commits == int(when)
        if now and how == "inside":
            self.flush()
            die()
        super().commit_transaction(*args)
        if now and how == "after":
            die()

librdkafka.Producer = Dying

def progress(done, total):
    print(done, flush=True)
    if how == "between" and Dying.commits == int(when):
        die()

with KafkaDeadLetters(QueueSettings(name=queue), KafkaConnection(bootstrap=bootstrap)) as letters:
    try:
        letters.run_redrive(rate=float(rate) or None, progress=progress)
    except Unfinished as error:
        print("unfinished", error.done, error, flush=True)
"""


def redrive_process(
    connection: KafkaConnection, queue: QueueSettings, how: str, when: int, rate: float = 0
) -> "subprocess.Popen[str]":
    arguments = [connection.bootstrap, queue.name, str(rate), how, str(when)]
    return subprocess.Popen(
        [sys.executable, "-c", REDRIVE, *arguments], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("between", 2),
        ("inside", 1),
        pytest.param("inside", 3, marks=pytest.mark.breadth),
        pytest.param("after", 2, marks=pytest.mark.breadth),
    ],
)
def test_a_killed_redrive_loses_and_repeats_nothing(letters, connection, queue, how, when):
    count = 4_200
    bury(connection, queue, count)
    with redrive_process(connection, queue, how, when) as killed:
        assert killed.wait(60) == -signal.SIGKILL
    transactions = [1_000, 400] * PARTITIONS
    committed = sum(transactions[: when if how != "inside" else when - 1])

    assert letters.run_redrive() == RedriveResult(count - committed)

    assert_each_once(connection, queue, count)
    assert letters.list() == []


@pytest.mark.breadth
def test_killed_again_and_again_it_redrives_each_once(letters, connection, queue):
    bury(connection, queue, 4_200)
    for how in ("inside", "after", "inside", "between"):
        with redrive_process(connection, queue, how, 1) as killed:
            assert killed.wait(60) == -signal.SIGKILL
    assert letters.run_redrive() == RedriveResult(2_800)
    assert_each_once(connection, queue, 4_200)


@pytest.mark.parametrize("second", [KafkaDeadLetters.run_redrive, KafkaDeadLetters.purge])
def test_a_second_run_stops_the_first(
    letters, connection, queue, second: Callable[[KafkaDeadLetters], RedriveResult | int]
):
    count = 3_000
    bury(connection, queue, count)
    with redrive_process(connection, queue, "never", 0, rate=400) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "100\n"
        assert first.stdout.readline() == "200\n"
        result = second(letters)
        rest = first.stdout.read().splitlines()
        assert first.wait(60) == 0

    word, done, text = rest[-1].split(" ", 2)
    assert word == "unfinished"
    assert "another redrive or purge of this queue has taken over" in text
    assert f"after {done} dead letters" in text
    assert letters.list() == []
    if isinstance(result, RedriveResult):
        assert result.redriven + int(done) == count
        assert_each_once(connection, queue, count)
    else:
        assert result + int(done) == count
        assert len(delivered(connection, queue)) == int(done)


@pytest.mark.parametrize("copies", [300, *(pytest.param(one, marks=pytest.mark.breadth) for one in (0, 834))])
def test_r37_what_a_torn_redrive_has_sent_back_is_not_sent_again(
    letters, connection, queue, monkeypatch, copies
):
    count = 2_500  # 834, 833, 833: a transaction for each partition
    bury(connection, queue, count)
    torn = tear(monkeypatch, copies)
    with pytest.raises(Unfinished, match="after 0 dead letters"):
        letters.run_redrive()
    assert torn
    assert len(delivered(connection, queue)) == copies
    assert letters.run_redrive() == RedriveResult(count - copies)
    assert_each_once(connection, queue, count)
    assert letters.list() == []
    assert letters.run_redrive() == RedriveResult(0)


def test_r37_a_purge_ends_what_a_torn_redrive_has_sent_back(letters, connection, queue, monkeypatch):
    bury(connection, queue, 1_000)
    tear(monkeypatch, 100, after=1)  # two partitions have 333, the first has 334
    with pytest.raises(Unfinished, match="after 334 dead letters"):
        letters.run_redrive()
    assert letters.purge() == 1_000 - 334 - 100
    assert len(delivered(connection, queue)) == 334 + 100
    assert letters.list() == []


def test_r37_a_torn_purge_is_done_again_also_without_the_queue(letters, connection, queue, monkeypatch):
    bury(connection, queue, 100)
    tear(monkeypatch, 0)
    with pytest.raises(Unfinished, match="after 0 dead letters"):
        letters.purge()
    delete_topic(Topics(connection), queue.name)
    assert letters.purge() == 100


def test_r36_a_redrive_goes_on_with_a_new_producer_when_an_end_may_come_again(
    letters, connection, queue, monkeypatch
):
    bury(connection, queue, 2_500)
    monkeypatch.setattr(librdkafka, "REPEATED_END_S", 0.0)
    opened = []
    init = librdkafka.Producer.init_transactions
    monkeypatch.setattr(
        librdkafka.Producer, "init_transactions", lambda *args: (opened.append(True), init(*args))
    )
    assert letters.run_redrive() == RedriveResult(2_500)
    assert len(opened) == 3
    assert_each_once(connection, queue, 2_500)


def test_what_stops_it_halfway_says_how_far_it_got(connection, queue):
    bury(connection, queue, 1_500)
    hasty = dataclasses.replace(connection, kafka={"message.timeout.ms": 1_000})

    def progress(done: int, total: int) -> None:
        delete_topic(Topics(connection), queue.name)

    with KafkaDeadLetters(queue, hasty) as letters:
        with pytest.raises(Unfinished, match="after 500 dead letters") as raised:
            letters.run_redrive(progress=progress)
        assert raised.value.done == 500
        assert len(letters.list(1_000)) == 1_000


def test_redrive_waits_for_end_markers_behind_an_open_transaction(letters, connection, queue):
    """An acknowledgement that a read_committed reader can't see yet counts all the same (rule R1)."""
    bury(connection, queue, 3)
    topic = dead_letter_queue(queue).markers_topic
    producer = transactional(connection, queue)
    producer.begin_transaction()
    producer.produce(topic, b"\x00", codec.encode_key(0, 12345), 0)
    producer.flush(60)
    write(connection, topic, {"key": codec.encode_key(0, 0), "value": b"\x00", "partition": 0})

    timer = threading.Timer(1.0, lambda: producer.commit_transaction(60))
    timer.start()
    assert letters.run_redrive() == RedriveResult(2)
    timer.join()
    assert sorted(r.value() for r in delivered(connection, queue)) == [b"1", b"2"]


def test_r27_what_is_finished_while_a_redrive_runs_is_not_sent_back(letters, connection, queue, monkeypatch):
    bury(connection, queue, 6)
    execute = CopyTransaction.execute
    finished: list[bool] = []

    def finish_one_first(transaction: CopyTransaction, *args: Any, **more: Any) -> None:
        if not finished:
            finished.append(True)
            with MarkerWriter(connection, dead_letter_queue(queue)) as writer:
                writer.end(0, [1])
                writer.end(2, [0])
                assert writer.flush(60) == 0
        execute(transaction, *args, **more)

    monkeypatch.setattr(CopyTransaction, "execute", finish_one_first)
    assert letters.redrive() == 4
    assert len(committed_records(connection, queue.name)) == 4
    assert letters.list() == []
    assert letters.redrive() == 0
