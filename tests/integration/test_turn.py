"""Turns as executors do them: with state that is given, done again, mixed up; beside classic trackers.

Spark's part is small, and tested in tests/spark; here its state store is a dict.
"""

import contextlib
import copy
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import foreign_headers
import pytest
from support import SESSION_MS, collect, stopped_after, until

from kmqpy.errors import Unavailable
from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.copies.copy_transaction import ProducerUnusable
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import MAX_SPAN, Marker, Op
from kmqpy.kafka.settings import QueueSettings
from tracker.leadership.leadership import Leadership
from tracker.redelivery.redeliverer import Redeliverer
from tracker.settings import TrackerSettings
from tracker.spark.buckets import Head
from tracker.spark.report import Report
from tracker.spark.turn import Executor, Task, executor_for

HELD_MS = 600_000


class Kept:
    """A Store of one partition."""

    def __init__(self):
        self.text, self.buckets = None, {}

    def head(self):
        return self.text

    def set_head(self, text):
        self.text = text

    def load(self, bucket):
        return self.buckets.get(bucket)

    def save(self, bucket, text):
        if text is None:
            del self.buckets[bucket]
        else:
            self.buckets[bucket] = text

    def clear(self):
        self.__init__()


class Driver:
    """The member whose executors do turns, and the state of its partitions."""

    def __init__(self, queue, ends):
        self.queue, self._ends = queue, ends
        self.leadership = Leadership(
            queue.zookeeper,
            "driver",
            root=queue.connection.root,
            queues=frozenset({queue.name}),
            session_timeout_ms=SESSION_MS,
        ).start(10)
        ends.callback(self.leadership.close)
        self.stores = [Kept() for _ in range(queue.partitions)]
        self.executor = self.another_executor()

    def leads_all(self):
        until(lambda: len(self.leadership.snapshot().owned) == self.queue.partitions)
        return self

    def another_executor(self, turn_s=10.0, linger_s=0.0, **settings):
        settings = TrackerSettings(**{"snapshot_after_markers": 50, **settings})
        task = Task(
            self.queue.connection,
            self.queue.zookeeper,
            self.queue.settings,
            "driver",
            settings,
            turn_s,
            linger_s,
        )
        executor = Executor(task)
        self._ends.callback(executor.close)
        return executor

    def turn(self, partition=0, executor=None) -> Report:
        (report,) = (executor or self.executor).turns({partition: self.stores[partition]})
        return report

    def store_offset(self, report):
        self.leadership.write_offsets({(self.queue.name, report.partition): report.stored})

    def turns_until(self, condition, executor=None):
        """Turns of all partitions until it holds of their reports' sum."""
        total = {"redelivered": 0, "dead_lettered": 0, "takeovers": 0, "ticks": 0}

        def enough():
            for partition in range(self.queue.partitions):
                report = self.turn(partition, executor)
                assert report.problem == "", report
                total.update({key: total[key] + getattr(report, key) for key in total})
            return condition(total)

        until(enough, 20.0, lambda: total, every=0.05)
        return total


@pytest.fixture
def drive(request):
    with contextlib.ExitStack() as ends:
        yield lambda queue: Driver(queue, ends)


def take(queue, bodies, lease_ms=200, partition=0):
    first = partition_reader.bounds(queue.connection, queue.name, [partition], uncommitted=True)[partition][1]
    queue.send(*bodies, partition=partition)
    numbers = range(first, first + len(bodies))
    queue.mark_all(Marker(partition, number, Op.TAKE, lease_ms) for number in numbers)


def give_back(queue, count, partition=0):
    """Everything is due now."""
    queue.mark_all(Marker(partition, number, Op.NACK, 0) for number in range(count))


def names(count, prefix="m"):
    return [f"{prefix}{number}" for number in range(count)]


def test_what_is_due_is_redelivered_once_and_dead_lettered_in_the_end(either_queue, drive):
    queue = either_queue
    driver = drive(queue).leads_all()
    client = queue.client()
    queue.send(*names(40))
    for _ in range(4):
        # Taken for so short, they would not be handed out where writing the start markers takes longer.
        client.extend(*collect(client, 40, 20.0, lease=60.0), lease=0.2, wait=True)
        driver.turns_until(lambda total: total["redelivered"] + total["dead_lettered"] >= 40)
    assert queue.copies() == dict.fromkeys(names(40), 4)
    assert len(queue.dead_letters()) == 40
    report = driver.turn()
    assert (report.in_flight, report.redelivered, report.active) == (0, 0, True)
    assert driver.stores[0].buckets == {}


def test_an_idle_queue_is_redelivered_on_time_and_left_in_peace_otherwise(queue, drive):
    driver = drive(queue).leads_all()
    driver.turn()
    take(queue, ["held"], HELD_MS)
    assert driver.turn().in_flight == 1
    idle = [driver.turn() for _ in range(3)]
    assert sum(report.ticks + report.takeovers for report in idle) == 0
    take(queue, ["a"], lease_ms=500)
    driver.turns_until(lambda total: total["redelivered"] == 1)
    assert queue.copies() == {"held": 1, "a": 2}
    assert driver.turn().ticks == 0


def test_a_turn_done_again_from_older_state_makes_no_copy_again(queue, drive):
    """A batch that Spark runs again: the state is that of before, the transaction was committed."""
    driver = drive(queue).leads_all()
    take(queue, names(300), HELD_MS)
    assert driver.turn().in_flight == 300
    before = copy.deepcopy(driver.stores)
    give_back(queue, 300)
    driver.turns_until(lambda total: total["redelivered"] == 300)
    for executor in (driver.executor, driver.another_executor()):
        driver.stores = copy.deepcopy(before)
        report = driver.turn(executor=executor)
        assert (report.redelivered, report.in_flight) == (0, 0), report
    assert queue.copies() == dict.fromkeys(names(300), 2)


def test_a_late_executor_is_fenced(queue, drive, monkeypatch):
    """Two run the same turn; the first stands still before its transaction while the second does it all."""
    driver = drive(queue).leads_all()
    take(queue, names(100), HELD_MS)
    assert driver.turn().in_flight == 100
    give_back(queue, 100)
    other, real = driver.another_executor(), Redeliverer._transact
    mine = driver.executor.redeliverer(0)
    reports = []

    def transact(self, *arguments):
        if self is mine and not reports:
            state = copy.deepcopy(driver.stores[0])
            reports.extend(other.turns({0: state}))
        real(self, *arguments)

    monkeypatch.setattr(Redeliverer, "_transact", transact)
    late = driver.turn()
    assert reports[0].redelivered == 100
    assert late.redelivered == 0
    assert "FENCED" in late.problem
    until(lambda: driver.turn().in_flight == 0)
    assert queue.copies() == dict.fromkeys(names(100), 2)


def test_an_executor_killed_within_a_transaction(queue, drive):
    driver = drive(queue).leads_all()
    take(queue, names(200), lease_ms=100)
    program = (
        "import sys, pickle; from tests.chaos import sabotage; sabotage.apply('die-within-transaction');"
        "from tracker.spark.turn import Executor; from test_turn import Kept;"
        "Executor(pickle.loads(bytes.fromhex(sys.argv[1]))).turns({0: Kept()})"
    )
    command = [sys.executable, "-c", program, pickle.dumps(driver.executor.task).hex()]
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1]), str(here), *sys.path])
    time.sleep(0.3)
    died = subprocess.run(command, check=False, timeout=60, env={**os.environ, "PYTHONPATH": path})
    assert died.returncode == -signal.SIGKILL
    uncommitted = partition_reader.bounds(queue.connection, queue.name, [0], uncommitted=True)[0][1]
    assert uncommitted == 400
    assert queue.copies(at_once=True) == dict.fromkeys(names(200), 1)
    driver.turns_until(lambda total: total["redelivered"] == 200)
    assert queue.copies() == dict.fromkeys(names(200), 2)


def test_a_partition_that_the_driver_does_not_lead_is_left_alone(queue, drive):
    tracker = queue.tracker()
    driver = drive(queue)
    report = driver.turn()
    assert (report.owned, report.stored) == (False, None)
    assert driver.stores[0].text is None
    tracker.stop()
    driver.leads_all()
    assert driver.turn().owned


def test_leadership_lost_within_a_turn(queue, drive, monkeypatch):
    """The znode goes between the plan and the transaction: nothing is redelivered."""
    driver = drive(queue).leads_all()
    driver.turn()
    take(queue, ["a"], lease_ms=50)
    real = Redeliverer.redeliver

    def redeliver(self, *arguments):
        driver.leadership.close()
        return real(self, *arguments)

    monkeypatch.setattr(Redeliverer, "redeliver", redeliver)
    until(lambda: not driver.turn().owned)
    assert queue.copies() == {"a": 1}


def test_handed_to_a_classic_tracker_and_back(queue, drive):
    """Either begins where the other stored that it was, with what was in flight then."""
    driver = drive(queue).leads_all()
    take(queue, names(60, "held"), HELD_MS)
    take(queue, names(60, "theirs"), lease_ms=100)
    driver.turns_until(lambda total: total["redelivered"] == 60)
    driver.store_offset(driver.turn())
    driver.leadership.close()
    with stopped_after(queue.tracker()) as tracker:
        until(lambda: len(tracker._parts[queue.name, 0].state) == 60, 30.0)
        take(queue, names(60, "mine"), lease_ms=100)
        until(lambda: queue.copies()["mine59"] == 2, 30.0, queue.copies)
    kept = driver.stores
    driver = drive(queue).leads_all()
    driver.stores = kept
    give_back(queue, 60)
    driver.turns_until(lambda total: total["redelivered"] == 60)
    assert set(queue.copies().values()) == {2}


@pytest.mark.parametrize("beyond", [0, 2])
def test_old_state_when_what_another_read_since_is_deleted(queue, drive, beyond):
    """A checkpoint of last month: what was in flight then was acknowledged, in markers that are gone."""
    driver = drive(queue).leads_all()
    take(queue, names(5, "acked"), HELD_MS)
    assert driver.turn().in_flight == 5
    old = driver.stores
    driver.leadership.close()
    queue.mark_all(Marker(0, number, Op.END, 0) for number in range(5))
    other = drive(queue).leads_all()
    take(queue, ["held"], HELD_MS)
    take(queue, names(100), HELD_MS)
    queue.mark_all(Marker(0, number, Op.END, 0) for number in range(6, 106))
    report = other.turn()
    assert [row.offset for row in report.stored.in_flight] == [5]
    other.store_offset(report)
    other.leadership.close()
    for _ in range(3):
        queue.mark(Marker(0, -1, Op.END, 0))
    queue.topics.delete_records(queue.settings.markers_topic, {0: report.stored.offset + beyond})
    driver = drive(queue).leads_all()
    driver.stores = old
    report = driver.turn()
    assert (report.in_flight, report.markers_lost) == (1, int(beyond > 0))
    queue.mark_all(Marker(0, number, Op.NACK, 0) for number in (5,))
    until(lambda: driver.turn().redelivered)
    copies = queue.copies()
    assert [body for body in copies if copies[body] > 1] == ["held"]


def test_without_its_state_it_begins_at_the_safe_offset(queue, drive):
    """A new checkpoint; also what is left when the state does not fit together."""
    driver = drive(queue).leads_all()
    take(queue, names(120), HELD_MS)
    report = driver.turn()
    assert report.in_flight == 120
    driver.store_offset(report)
    driver.stores[0].buckets[0] = "nonsense"
    take(queue, ["one"], HELD_MS)
    report = driver.turn()
    assert "thrown away" in report.problem
    assert report.stored is None
    report = driver.turn()
    assert (report.in_flight, report.takeovers) == (121, 1)
    give_back(queue, 121)
    driver.turns_until(lambda total: total["redelivered"] == 121)
    assert set(queue.copies().values()) == {2}


def test_zookeeper_gets_a_snapshot_where_one_message_is_held_for_long(queue, drive):
    driver = drive(queue).leads_all()
    take(queue, ["held"], lease_ms=HELD_MS)
    for first in range(1, 200, 40):
        take(queue, names(40), lease_ms=HELD_MS)
        queue.mark_all(Marker(0, number, Op.END, 0) for number in range(first, first + 40))
    report = driver.turn()
    assert report.in_flight == 1
    assert 0 < report.oldest_s < 30
    assert report.stored.offset > 300
    assert [row.offset for row in report.stored.in_flight] == [0]


def test_a_message_of_a_newer_version_pins_the_safe_offset(queue, drive):
    driver = drive(queue).leads_all()
    driver.turn()
    at = queue.append(b"\0\0\0\0" + b"\0" * 8, b"\x0f")
    take(queue, ["a"], lease_ms=100)
    until(lambda: driver.turn().redelivered)
    report = driver.turn()
    assert "newer kmqpy" in report.problem
    assert report.stored.offset == at
    assert driver.turn(executor=driver.another_executor()).stored.offset == at


def test_markers_that_lie_hold_nothing_up(queue, drive):
    take(queue, names(2), lease_ms=1)
    forever_ms = 2**63 - 1
    for first in range(0, 20 * MAX_SPAN, MAX_SPAN):
        queue.mark_all(
            codec.ranges(0, Op.TAKE, range(first, first + MAX_SPAN), redeliver_after_ms=forever_ms)
        )
    queue.append(*codec.encode(Marker(1, 0, Op.TAKE, forever_ms)))
    not_utf8 = [(b"caf\xe9", b"")]
    foreign_headers.write(
        *(queue.connection.bootstrap, queue.settings.markers_topic, codec.encode_end(), not_utf8),
        key=codec.encode_key(0, 1),
    )
    driver = drive(queue).leads_all()
    reports = []

    def both_are_redelivered():
        reports.append(driver.turn())
        return queue.copies() == {"m0": 2, "m1": 2}

    until(both_are_redelivered, 20.0, lambda: reports, every=0.05)
    assert sum(report.undecodable_markers for report in reports) == 22
    assert driver.turn().in_flight == 0


def test_leases_count_at_most_as_the_queue_allows(make_queue, drive):
    queue = make_queue(max_hold_ms=200)
    take(queue, names(2), lease_ms=2**63 - 1)
    driver = drive(queue).leads_all()
    driver.turns_until(lambda total: total["redelivered"] == 2)


def test_markers_deleted_before_they_were_read(queue, drive):
    driver = drive(queue).leads_all()
    take(queue, names(3), HELD_MS)
    assert driver.turn().in_flight == 3
    for _ in range(5):
        queue.mark(Marker(0, -1, Op.END, 0))
    queue.topics.delete_records(queue.settings.markers_topic, {0: 6})
    report = driver.turn()
    assert "deleted before" in report.problem
    assert (report.markers_lost, report.in_flight, report.missed_markers) == (1, 3, True)
    give_back(queue, 3)
    driver.turns_until(lambda total: total["redelivered"] == 3)
    assert queue.copies() == dict.fromkeys(names(3), 2)


def test_zookeeper_away_is_told_at_once_from_then_on(queue, drive, monkeypatch):
    driver = drive(queue).leads_all()
    mandate = driver.executor.mandate

    def away(_path):
        raise Unavailable("ZooKeeper is away")

    monkeypatch.setattr(mandate._zk, "sync_async", away)
    report = driver.turn()
    assert "away" in report.problem
    assert not report.owned
    assert "just now" in driver.turn().problem
    mandate._quiet_until = 0.0
    monkeypatch.undo()
    assert driver.turn().active


def test_an_executor_is_kept_for_its_task_only(queue, drive):
    task = drive(queue).executor.task
    first = executor_for(task)
    assert executor_for(task) is first
    changed = Task(
        task.connection, task.zookeeper, QueueSettings(name=queue.name), task.tracker_id, task.settings
    )
    second = executor_for(changed)
    assert second is not first
    second.close()


def test_a_stranger_with_an_open_transaction_holds_a_turn_up_but_not_for_ever(queue, drive):
    driver = drive(queue).leads_all()
    driver.turn()
    take(queue, ["a"], lease_ms=100)
    stranger = librdkafka.new_producer(queue.connection, {"transactional.id": f"stranger-{queue.name}"})
    stranger.init_transactions(10)
    stranger.begin_transaction()
    stranger.produce(queue.settings.markers_topic, b"\0", b"\0\0\0\0" + b"\xff" * 8, 0)
    stranger.flush(10)
    quick = driver.another_executor(turn_s=1.0)
    time.sleep(0.2)
    report = driver.turn(executor=quick)
    for _ in range(10):  # what its takeover says first on a machine that is busy
        if "Not coordinator" in str(report.problem):
            report = driver.turn(executor=quick)
    assert "transaction may be open" in report.problem
    assert not report.active
    stranger.abort_transaction(10)
    driver.turns_until(lambda total: total["redelivered"] == 1)


def test_turns_linger_for_what_is_due_soon(make_queue, drive):
    queue = make_queue(2)
    driver = drive(queue).leads_all()
    leases_ms = range(600, 3_000, 200)
    take(queue, ["held"], HELD_MS)
    for partition in (0, 1):
        queue.send(*names(len(leases_ms), f"{partition}-"), partition=partition)
    queue.mark_all(
        Marker(partition, number + (partition == 0), Op.TAKE, lease_ms)
        for partition in (0, 1)
        for number, lease_ms in enumerate(leases_ms)
    )
    reports = driver.another_executor(linger_s=4.0).turns(dict(enumerate(driver.stores)))
    assert [report.problem for report in reports] == ["", ""]
    assert [report.redelivered for report in reports] == [len(leases_ms)] * 2
    assert max(report.ticks for report in reports) > 2  # not all at once
    assert max(report.takeovers for report in reports) == 1
    assert [driver.turn(partition).in_flight for partition in (0, 1)] == [1, 0]
    assert queue.copies().pop("held") == 1
    assert driver.another_executor(linger_s=2.0).turns({}) == []  # more tasks than partitions


def test_leadership_lost_while_lingering(queue, drive):
    """Whoever has the partition by then is not fenced, and nothing is redelivered."""
    driver = drive(queue).leads_all()
    driver.turn()
    executor = driver.another_executor(linger_s=5.0)
    take(queue, ["a", "b"], 3_000)
    driver.turn()  # which knows the broker's clock
    executor.anchors = driver.executor.anchors
    opened, redeliverer = [], executor.redeliverer(0)
    redeliverer.open = opened.append

    class ClosesFirst:
        monotonic = staticmethod(time.monotonic)

        def sleep(self, seconds):
            driver.leadership.close()
            time.sleep(seconds)

    executor.clock = ClosesFirst()
    report = driver.turn(executor=executor)
    assert (report.redelivered, report.in_flight, opened) == (0, 2, [])
    assert report.ticks == 0
    kept = driver.stores
    driver = drive(queue).leads_all()
    driver.stores = kept
    driver.turns_until(lambda total: total["redelivered"] == 2)
    assert queue.copies() == {"a": 2, "b": 2}


@pytest.mark.parametrize("done", [False, True], ids=["aborted", "committed"])
def test_one_that_breaks_while_lingering_holds_up_nobody(make_queue, drive, monkeypatch, done):
    queue = make_queue(2)
    driver = drive(queue).leads_all()
    for partition in (0, 1):
        for lease_ms in (50, 600, 1_200, 1_500):
            take(queue, [f"{partition}-{lease_ms}"], lease_ms, partition)
    executor = driver.another_executor(linger_s=2.0)
    bad, real, tries = executor.redeliverer(0), Redeliverer._transact, []

    def transact(self, *arguments):
        tries.extend([1] if self is bad else [])
        breaks = self is bad and len(tries) == 2
        if done or not breaks:
            real(self, *arguments)
        if breaks:
            raise ProducerUnusable("outcome unknown")

    monkeypatch.setattr(Redeliverer, "_transact", transact)
    reports = executor.turns(dict(enumerate(driver.stores)))
    assert reports[1].redelivered == 4
    until(lambda: [driver.turn(partition).in_flight for partition in (0, 1)] == [0, 0])
    assert set(queue.copies().values()) == {2}


def test_short_turns_redeliver_too(queue, drive):
    """Many partitions and few tasks: one takeover needs longer than a turn has."""
    driver = drive(queue).leads_all()
    take(queue, names(20), lease_ms=100)
    driver.turns_until(lambda total: total["redelivered"] == 20, driver.another_executor(turn_s=0.001))
    assert queue.copies() == dict.fromkeys(names(20), 2)


def test_more_than_is_read_at_once_is_redelivered_in_one_turn(queue, drive, monkeypatch):
    monkeypatch.setattr("tracker.redelivery.originals._MAX_FETCH_BYTES", 1_000)
    driver = drive(queue).leads_all()
    driver.turn()
    take(queue, ["x" * 400 + str(number) for number in range(12)], lease_ms=100)
    time.sleep(0.2)
    report = driver.turn()
    assert report.redelivered == 12
    assert all(0 < late_s < 30 for late_s in report.lateness)


def test_reasons_that_fill_a_bucket(queue, drive):
    """Anybody can write them as long as a record may be."""
    driver = drive(queue).leads_all()
    take(queue, names(20), HELD_MS)
    queue.mark_all(Marker(0, n, Op.NACK, HELD_MS, reason="r" * 900_000) for n in range(20))
    assert driver.turn().in_flight == 20
    give_back(queue, 20)
    driver.turns_until(lambda total: total["redelivered"] == 20)


def test_markers_topic_cut_short(queue, drive):
    """A broker that lost its disk: what is written anew below our position is not passed over."""
    driver = drive(queue).leads_all()
    driver.turn()
    head = Head.from_json(driver.stores[0].text)
    driver.stores[0].set_head(replace(head, position=head.position + 1_000).to_json())
    take(queue, ["a"], lease_ms=100)
    assert "shorter" in driver.turn().problem
    driver.turns_until(lambda total: total["redelivered"] == 1)


def test_r7_a_message_that_no_topic_takes_a_copy_of_is_named_by_each_turn_until_it_has_ended(
    make_queue, drive
):
    queue = make_queue(max_redeliveries=1)
    driver = drive(queue).leads_all()
    take(queue, [os.urandom(4_000), "other"], lease_ms=1)
    for topic in (queue.name, queue.settings.dead_letter_topic):
        queue.configure(topic, {"max.message.bytes": "3000"})
    report = driver.turn()
    while not report.redelivered:
        report = driver.turn()
    for _ in range(5):  # most of them come before the next try
        assert report.problem.startswith("offset 0: topic "), report
        report = driver.turn()
    queue.mark(Marker(0, 0, Op.END))
    assert driver.turn().problem == ""
    assert queue.dead_letters() == []
