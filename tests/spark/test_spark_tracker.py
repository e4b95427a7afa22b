"""The tracker on Spark: what trackers do, in executors; beside classic ones; when it may not go on.

KMQ_KILLS=<rounds>: kill -9 at every step, of executor and driver, that many times, and the controls.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import SMALL
from pyspark.sql.connect.session import SparkSession as ConnectSession
from support import SESSION_MS, collect, until, value

from kmqpy import log_reader
from kmqpy.errors import ConfigError, QueueNotFound, TopicError
from kmqpy.markers import Marker, Op
from kmqpy.registry import Paths, connect
from tests.spark.deaths import STEPS
from tracker.settings import TrackerSettings
from tracker.spark import SparkTracker, track

TRIGGER_S = 0.2
LONG_S = 300.0  # what Spark may need on a busy machine; a few seconds elsewhere
ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.timeout(1_200)


@pytest.fixture
def start(spark, tmp_path):
    """Start a tracker on Spark; stopped at the end."""
    with contextlib.ExitStack() as ends:

        def start(queue, checkpoint="checkpoint", *, wait=True, **settings) -> SparkTracker:
            settings = {
                "session_timeout_ms": SESSION_MS,
                "offset_interval_ms": 200,
                "http_port": -1,
                **settings,
            }
            tracker = track(
                spark,
                queue.connection,
                queue.name,
                checkpoint=str(tmp_path / checkpoint),
                trigger=TRIGGER_S,
                settings=TrackerSettings(**settings),
            )
            ends.callback(tracker.stop)
            if wait:
                until(lambda: len(tracker.owned()) == queue.partitions, LONG_S, tracker.problems)
            return tracker

        yield start


def take(queue, each, name, lease_ms=lambda number: 200):
    """Send `each` messages to every partition, and take them; their bodies."""
    bodies, markers = [], []
    for partition in range(queue.partitions):
        ends = log_reader.bounds(queue.connection, queue.name, [partition], uncommitted=True)
        new = [f"{name}-{partition}-{number}" for number in range(each)]
        queue.send(*new, partition=partition)
        bodies += new
        first = ends[partition][1]
        markers += [Marker(partition, first + n, Op.TAKE, lease_ms(n)) for n in range(each)]
    queue.mark_all(markers)
    return bodies


def each_came_again_once(queue, bodies):
    def came():
        copies = queue.copies()
        return all(copies[body] >= 2 for body in bodies)

    until(came, LONG_S, queue.copies, every=0.2)
    copies = queue.copies()
    assert {body: copies[body] for body in bodies if copies[body] != 2} == {}


def test_redelivery_and_dead_letters_in_both_formats(make_queue, start):
    queue = make_queue(2, max_redeliveries=1)
    tracker = start(queue, http_port=0)
    bodies = [f"m{number}" for number in range(60)]
    queue.send(*bodies[:30], partition=0)
    queue.send(*bodies[30:], partition=1)
    for markers in ("jvm", "range"):
        with queue.client(markers=markers) as client:
            found = collect(client, 60, LONG_S, lease=600.0)
            assert {message.body.decode() for message in found} == {*bodies}
            # Nobody writes markers when it is due: the queue is idle.
            client.nack(*found, delay=0.3)
    until(lambda: len(queue.dead_letters()) == 60, LONG_S, tracker.problems)
    assert queue.copies() == dict.fromkeys(bodies, 2)
    until(lambda: value(tracker, queue.name, "dead_lettered") == 60)
    assert value(tracker, queue.name, "redelivered") == 60
    assert tracker.metrics.registry.get_sample_value(
        "kmq_redelivery_lateness_seconds_count", {"queue": queue.name}
    ) == (120)
    assert tracker.problems() == []
    assert tracker.alive()
    progress = tracker.progress()
    assert progress["stateOperators"][0]["numRowsTotal"] > 0
    assert progress["observedMetrics"]["kmq"].asDict().keys() >= {"markers", "redelivered", "in_flight"}
    tracker.stop()
    with queue.registry() as registry:
        assert registry.owners(queue.name) == {}
        offsets = registry.offsets(queue.name)
    ends = log_reader.bounds(queue.connection, queue.settings.markers_topic, [0, 1])
    assert {p: stored.offset >= ends[p][1] - 2 for p, stored in offsets.items()} == {0: True, 1: True}


def test_beside_classic_trackers_and_handed_over_both_ways(make_queue, start):
    """Never do both redeliver a partition: each message comes again once, whoever leaves or joins."""
    queue = make_queue(4)
    on_spark = start(queue)
    bodies = take(queue, 40, "first", lambda number: 500 + 150 * number)
    classic = queue.tracker(wait=False)

    def shared():
        theirs = {partition for _, partition in classic.owned()}
        return theirs and on_spark.owned() and theirs | {*on_spark.owned()} == {0, 1, 2, 3}

    until(shared, LONG_S, lambda: (classic.owned(), on_spark.owned()))
    each_came_again_once(queue, bodies)
    assert value(classic, queue.name, "redelivered") > 0
    assert value(on_spark, queue.name, "redelivered") > 0
    bodies = take(queue, 40, "second", lambda number: 500 + 100 * number)
    on_spark.stop()
    until(lambda: len(classic.owned()) == 4, LONG_S)
    again = start(queue, wait=False)
    until(again.owned, LONG_S, again.problems)
    classic.stop()
    until(lambda: len(again.owned()) == 4, LONG_S, again.problems)
    each_came_again_once(queue, bodies)
    each_came_again_once(queue, take(queue, 40, "third"))


def test_the_query_ends_with_the_leadership_and_begins_again_with_it(make_queue, start):
    queue = make_queue(1)
    tracker = start(queue)
    first = tracker._query
    leader = Paths(queue.connection.root).leader(queue.name, 0)
    with connect(queue.connection.zookeeper) as zk:
        zk.delete(leader)
        until(lambda: not first.isActive, LONG_S)
    until(lambda: tracker.owned() == [0] and tracker._query is not first, LONG_S, tracker.problems)
    each_came_again_once(queue, take(queue, 20, "after"))


def test_a_queue_that_grows_and_is_removed(make_queue, start):
    queue = make_queue(1)
    tracker = start(queue)
    queue.topics.grow(queue.settings, 2)
    queue.register(2)
    queue.partitions = 2
    until(lambda: tracker.owned() == [0, 1], LONG_S, tracker.problems)
    each_came_again_once(queue, take(queue, 10, "grown"))
    with queue.registry() as registry:
        registry.remove(queue.name, 30.0)
    until(lambda: not tracker._thread.is_alive(), LONG_S)
    with pytest.raises(QueueNotFound, match="removed"):
        tracker.stop()


def test_bad_input(make_queue, start, tmp_path, spark):
    queue, other = make_queue(1, name="a-" + tmp_path.name.lower()), make_queue(1)
    start(queue, wait=False).stop()
    with pytest.raises(ConfigError, match=rf"checkpoint: .*of queue '{queue.name}', not of '{other.name}'"):
        start(other)
    queue.topics.delete(queue.settings)
    until(lambda: not queue.topics.describe([queue.name, queue.settings.markers_topic]))
    queue.topics.create(queue.settings, 1)
    with pytest.raises(ConfigError, match=r"checkpoint: .* deleted and created anew"):
        start(queue)
    with pytest.raises(QueueNotFound):
        track(spark, queue.connection, "nobodys", checkpoint=str(tmp_path))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint: .*file can't be used"):
        start(other, "file")
    connection = queue.connection
    for wrong in ({"trigger": -1.0}, {"tasks": 0}, {"checkpoint": ""}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SparkTracker(spark, connection, queue.name, **{"checkpoint": "x", **wrong})
    remote = object.__new__(ConnectSession)
    with pytest.raises(ConfigError, match="Spark Connect"):
        track(remote, connection, queue.name, checkpoint="x")


def test_topics_created_anew_while_it_runs(make_queue, start):
    queue = make_queue(1)
    tracker = start(queue)
    queue.topics.delete(queue.settings)
    until(lambda: not queue.topics.describe([queue.name, queue.settings.markers_topic]))
    queue.topics.create(queue.settings, 1)
    until(lambda: not tracker._thread.is_alive(), LONG_S)
    with pytest.raises(TopicError, match="created anew"):
        tracker.stop()


# --- killed -----------------------------------------------------------------------------------------------


class SparkTrackerProcess:
    """`kmq spark-tracker`, started again whenever it dies; executors and driver die as told."""

    def __init__(self, queue, folder: Path, deaths: list[str], sabotage: str = "") -> None:
        self._deaths = folder / "deaths"
        conf = {
            **SMALL,
            "spark.python.daemon.module": "tests.spark.executor_daemon",
            "spark.sql.shuffle.partitions": "2",
        }
        options = {
            "bootstrap": queue.connection.bootstrap,
            "zookeeper": queue.connection.zookeeper,
            "root": queue.connection.root,
            "queue": queue.name,
            "checkpoint": str(folder / "checkpoint"),
            "trigger": "200ms",
            "session-timeout": f"{SESSION_MS}ms",
            "offset-interval": "200ms",
            "max-batch-messages": "20",
            "http-port": "-1",
            "log-level": "WARNING",
            # A task is tried three times, then the query fails and is started again.
            "master": "local[2,3]",
        }
        self._command = [sys.executable, "-m", "tests.spark.deaths"]
        self._command += [f"--{name}={value}" for name, value in options.items()]
        self._command += [f"--conf={name}={value}" for name, value in conf.items()]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "KMQ_TEST_DEATHS": ",".join(deaths),
            "KMQ_TEST_DEATHS_DONE": str(self._deaths),
            "KMQ_TEST_SABOTAGE": sabotage,
        }
        self.starts = 0
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._environment)
        self.starts += 1

    def keep_running(self) -> None:
        code = self._process.poll()
        if code is not None:
            assert code == -signal.SIGKILL, f"it ended by itself: {code}"
            self._start()

    def died(self) -> int:
        return len(list(self._deaths.parent.glob(f"{self._deaths.name}.*")))

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()


def killed(queue, folder, deaths, each=60, sabotage="") -> Counter[str]:
    """How often each message stands in the topic when all these deaths have been died and it is quiet."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = len(deaths)
    with SparkTrackerProcess(queue, folder, deaths, sabotage) as tracker:
        # Something is due all the time, so that there is a transaction to die in.
        bodies = take(queue, each, "one", lambda number: 20 * number)
        rounds, deadline = 0, time.monotonic() + LONG_S + 90 * wanted
        while (died := tracker.died()) < wanted or any(queue.copies()[body] < 2 for body in bodies):
            assert time.monotonic() < deadline, f"{died} deaths of {deaths}, {tracker.starts} starts"
            tracker.keep_running()
            time.sleep(0.2)
            if died < wanted and all(queue.copies()[body] >= 2 for body in bodies):
                rounds += 1
                bodies += take(queue, each, f"more{rounds}", lambda number: 20 * number)
        time.sleep(1.0)
        assert tracker.stop() == 0
    copies = queue.copies()
    assert copies.keys() == {*bodies}
    return copies


@pytest.mark.timeout(1_500)
def test_an_executor_is_killed_at_every_step(make_queue, tmp_path):
    """Spark tries the task again, then the driver the query."""
    queue = make_queue(2)
    assert set(killed(queue, tmp_path, [*STEPS]).values()) == {2}


@pytest.mark.timeout(1_500)
def test_the_driver_is_killed(make_queue, tmp_path):
    """Within a transaction, which an executor then commits or not; and before a batch is complete."""
    queue = make_queue(2)
    assert set(killed(queue, tmp_path, ["sent:driver", "reported"]).values()) == {2}


ROUNDS = int(os.environ.get("KMQ_KILLS", "0"))


@pytest.mark.skipif(not ROUNDS, reason="KMQ_KILLS is not set")
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_again_and_again(make_queue, tmp_path, number):
    queue = make_queue(3)
    dice = random.Random(number)
    deaths = [*STEPS, *(f"{step}:driver" for step in STEPS), "reported"]
    dice.shuffle(deaths)
    copies = killed(queue, tmp_path, deaths, each=100)
    assert set(copies.values()) == {2}
    sys.stderr.write(f"round {number}: {len(deaths)} deaths, {len(copies)} messages, each came again once\n")


@pytest.mark.skipif(not ROUNDS, reason="KMQ_KILLS is not set")
@pytest.mark.timeout(1_800)
def test_without_transactions_there_are_duplicates(make_queue, tmp_path):
    """The control: the same deaths, and the checker sees them."""
    copies = killed(make_queue(2), tmp_path, [*STEPS], sabotage="two-sends")
    assert max(copies.values()) > 2
