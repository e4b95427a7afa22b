"""Trackers as tasks of a Spark job: beside an ordinary one, stopped, started again, and what is refused."""

import contextlib
import urllib.request

import pytest
from support import SESSION_MS, until, value

from kmqpy.dev.ports import free_ports
from kmqpy.errors import ConfigError, Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.spark.tracking import LONG_S, each_came_again_once, take
from tracker.leadership.assignment import capacity
from tracker.settings import TrackerSettings
from tracker.spark.job import TrackerJob


@pytest.fixture
def start(spark):
    """Start trackers on Spark; stopped at the end."""
    with contextlib.ExitStack() as ends:

        def start(queue, trackers=2, **settings) -> TrackerJob:
            settings = {
                "session_timeout_ms": SESSION_MS,
                "offset_interval_ms": 200,
                "http_port": -1,
                **settings,
            }
            job = TrackerJob(
                spark,
                queue.connection,
                queue.zookeeper,
                trackers=trackers,
                settings=TrackerSettings(**settings),
                log_level="WARNING",
            ).start()
            ends.callback(job.stop)
            until(lambda: len(job.running()) == trackers, LONG_S, job.running)
            return job

        yield start


def members(queue) -> list[str]:
    with queue.registry() as registry:
        return [one.id for one in registry.trackers()]


def owners(queue) -> dict[int, str]:
    with queue.registry() as registry:
        return registry.owners(queue.name)


def test_they_share_partitions_with_an_ordinary_tracker_and_say_what_they_did(make_queue, start):
    queue = make_queue(6, max_redeliveries=1)
    ordinary = queue.tracker(wait=False)
    job = start(queue)
    ids = job.running()

    def owned() -> list[int]:
        return [partition for partition, owner in owners(queue).items() if owner in ids]

    # At random ids one of the three may be proposed none, but none more than this.
    most = capacity(6, 3)
    until(lambda: len(owners(queue)) == 6 and len(owned()) >= 6 - most, LONG_S, lambda: owners(queue))
    bodies = take(queue, 20, "any")
    each_came_again_once(queue, bodies)
    own = len(owned())
    reports = job.stop()
    # At once, and not when their sessions time out.
    assert not {*members(queue)} & {*ids}
    assert not {*owners(queue).values()} & {*ids}
    assert {report.tracker for report in reports} == {*ids}
    assert {(report.number, report.starts) for report in reports} == {(0, 1), (1, 1)}
    assert sum(report.partitions for report in reports) == own
    redelivered = sum(report.redelivered for report in reports)
    assert redelivered > 0
    assert redelivered + value(ordinary, queue.name, "redelivered") == len(bodies)
    until(lambda: len(ordinary.owned()) == 6, LONG_S)
    each_came_again_once(queue, take(queue, 5, "later"))


def test_they_store_offsets_when_they_are_stopped(make_queue, start):
    queue = make_queue(1, max_redeliveries=0)
    job = start(queue, trackers=1, offset_interval_ms=600_000)
    take(queue, 10, "dead")
    until(lambda: len(queue.dead_letters()) == 10, LONG_S)
    (report,) = job.stop()
    assert (report.redelivered, report.dead_lettered) == (0, 10)
    with queue.registry() as registry:
        stored = registry.offsets(queue.name)[0]
    end = partition_reader.bounds(queue.connection, queue.settings.markers_topic, [0])[0][1]
    assert stored.offset >= end - 2


@pytest.mark.breadth
def test_without_the_znode_of_the_driver_they_stop_and_are_started_again(make_queue, start):
    queue = make_queue(2)
    job = start(queue, trackers=1)
    before = job.running()
    znode = ZnodePaths(queue.connection.root).job(job._name)
    with connect(queue.zookeeper) as zk, queue.registry() as registry:

        def running() -> set[str]:
            assert job._thread.is_alive(), "the job has ended: no tracker runs on Spark any more"
            return {one.id for one in registry.trackers()}

        zk.delete(znode)
        until(lambda: not running() & {*before}, what="a tracker outlives its driver", every=0.1)
        until(running, LONG_S, "no tracker was started again", every=0.1)
    each_came_again_once(queue, take(queue, 10, "after"))


def test_each_serves_its_health_and_metrics(make_queue, start):
    queue = make_queue(1)
    (port,) = free_ports(1)
    start(queue, trackers=1, http_port=port)
    until(lambda: owners(queue), LONG_S)

    def asked(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
            return answer.read().decode()

    assert f'kmq_owned_partitions{{queue="{queue.name}"}}' in asked("metrics")
    assert "true" in asked("livez")


def test_more_trackers_than_spark_has_slots_are_refused(make_queue, start):
    queue = make_queue(1)
    with pytest.raises(ConfigError, match=r"trackers: 1000, but Spark \(local.+\) runs \d+ tasks at a time"):
        start(queue, trackers=1_000)


@pytest.mark.breadth
def test_where_not_all_find_a_slot_all_are_stopped(spark, make_queue, monkeypatch):
    """Seen only by waiting: a cluster says not how many slots are free."""
    queue = make_queue(1)
    monkeypatch.setattr("tracker.spark.job.check_session", lambda *_: None)
    monkeypatch.setattr("tracker.spark.job._START_TIMEOUT_S", 1.0)
    settings = TrackerSettings(session_timeout_ms=SESSION_MS, http_port=-1)
    job = TrackerJob(spark, queue.connection, queue.zookeeper, trackers=3, settings=settings)
    with pytest.raises(ConfigError, match=r"trackers: [012] of 3 have started within 1 s; .* free slots"):
        job.run()
    assert members(queue) == []


def test_a_zookeeper_that_is_away_is_said_in_one_line(spark, make_queue, monkeypatch):
    (port,) = free_ports(1)
    away = ZooKeeperConnection(hosts=f"127.0.0.1:{port}")
    monkeypatch.setattr("kmqpy.zookeeper.session.patience_s", lambda *_: 0.5)
    with pytest.raises(Unavailable, match=rf"^ZooKeeper at 127.0.0.1:{port} does not answer.*$"):
        TrackerJob(spark, make_queue(1).connection, away).start()
