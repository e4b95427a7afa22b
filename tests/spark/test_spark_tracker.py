"""The tracker on Spark: what trackers do, in executors; beside classic ones; when it may not go on."""

import contextlib
import shutil

import pytest
from pyspark.sql import functions as sf
from pyspark.sql.connect.session import SparkSession as ConnectSession
from support import SESSION_MS, collect, until, value

from kmqpy.errors import ConfigError, QueueNotFound, TopicError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.kafka.topic_names import topics_of
from kmqpy.zookeeper.session import connect
from tests.spark.tracking import LONG_S, stored, take
from tracker.settings import TrackerSettings
from tracker.spark.query import _keys
from tracker.spark.tracker import SparkTracker, track

TRIGGER_S = 0.2

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
                queue.zookeeper,
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


def each_came_again_once(queue, bodies):
    def came():
        copies = stored(queue)
        return all(copies[body] >= 2 for body in bodies)

    until(came, LONG_S, lambda: stored(queue), every=0.2)
    copies = stored(queue)
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
    ends = partition_reader.bounds(queue.connection, queue.settings.markers_topic, [0, 1])
    assert {p: stored.offset >= ends[p][1] - 2 for p, stored in offsets.items()} == {0: True, 1: True}


@pytest.mark.parametrize("tasks", [2, 3, 8])
def test_each_task_has_one_key(spark, tasks):
    keys = _keys(spark, tasks)
    key = sf.get(sf.array(*map(sf.lit, keys)), sf.col("id"))
    shares = spark.range(tasks).repartition(1).select(key.alias("share")).repartition(tasks, "share")
    found = {
        row.task: row.share for row in shares.select("share", sf.spark_partition_id().alias("task")).collect()
    }
    assert found == dict(enumerate(keys))


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
    leader = ZnodePaths(queue.connection.root).leader(queue.name, 0)
    with connect(queue.zookeeper) as zk:
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
    queue.topics.delete(topics_of(queue.settings))
    until(lambda: not queue.topics.describe([queue.name, queue.settings.markers_topic]))
    queue.topics.create(queue.settings, 1)
    with pytest.raises(ConfigError, match=r"checkpoint: .* deleted and recreated"):
        start(queue)
    with pytest.raises(QueueNotFound):
        track(spark, queue.connection, queue.zookeeper, "nobodys", checkpoint=str(tmp_path))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint: .*file can't be used"):
        start(other, "file")
    servers = (queue.connection, queue.zookeeper)
    for wrong in ({"trigger": -1.0}, {"tasks": 0}, {"checkpoint": ""}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SparkTracker(spark, *servers, queue.name, **{"checkpoint": "x", **wrong})
    remote = object.__new__(ConnectSession)
    with pytest.raises(ConfigError, match="Spark Connect"):
        track(remote, *servers, queue.name, checkpoint="x")


@pytest.mark.slow
def test_a_checkpoint_that_does_not_work_is_given_up(make_queue, start, tmp_path):
    """Damaged between starts, and deleted while it runs: what it knew stands in the markers, too."""
    queue = make_queue(1)
    tracker = start(queue)
    held = take(queue, 20, "held", lambda _: 600_000)
    tracker.stop()
    query = tmp_path / "checkpoint" / "query"
    shutil.rmtree(query)
    query.write_text("not a folder")
    tracker = start(queue)
    each_came_again_once(queue, take(queue, 20, "after"))
    shutil.rmtree(query / "state")
    each_came_again_once(queue, take(queue, 20, "deleted"))
    assert {stored(queue)[body] for body in held} == {1}
    until(
        lambda: value(tracker, queue.name, "takeovers") and not tracker.problems(), LONG_S, tracker.problems
    )


def test_complaints_of_one_kind_are_logged_once(make_queue, start, caplog):
    queue = make_queue(1)
    tracker = start(queue)
    for number in range(1, 6):
        queue.append(b"not a marker", b"payload")
        until(lambda wanted=number: value(tracker, queue.name, "undecodable_markers") == wanted, LONG_S)
    assert sum("undecodable" in record.getMessage() for record in caplog.records) == 1
    assert "payload" not in caplog.text


def test_topics_created_anew_while_it_runs(make_queue, start):
    queue = make_queue(1)
    tracker = start(queue)
    queue.topics.delete(topics_of(queue.settings))
    until(lambda: not queue.topics.describe([queue.name, queue.settings.markers_topic]))
    queue.topics.create(queue.settings, 1)
    until(lambda: not tracker._thread.is_alive(), LONG_S)
    with pytest.raises(TopicError, match="recreated"):
        tracker.stop()
