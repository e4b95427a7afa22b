"""Trackers on Spark without Spark: what a session must be like, what executors must have, what is told."""

import contextlib
import itertools
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from kmqpy.errors import ConfigError, Unavailable
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.testing import ManualClock
from kmqpy.zookeeper.settings import ZooKeeperConnection, ZooKeeperSecurity
from tracker.health.metrics import TrackerMetrics
from tracker.settings import TrackerSettings
from tracker.spark import task
from tracker.spark.checks import MAX_FAILURES, check_session, slots, with_retries
from tracker.spark.job import TrackerJob, _is_gone, _probe
from tracker.spark.task import REPORT, TrackerTask, _total

KAFKA, ZOOKEEPER = KafkaConnection(), ZooKeeperConnection(hosts="nowhere:1")
TASK = TrackerTask(
    connection=KAFKA,
    zookeeper=ZOOKEEPER,
    settings=TrackerSettings(),
    job_znode="/kmq/jobs/a",
    name="a",
    log_level="INFO",
    log_format="text",
)


def conf(**settings):
    """Settings of Spark without `spark.`, with _ for a dot."""
    known = {f"spark.{name.replace('_', '.')}": value for name, value in settings.items()}
    return lambda key: known.get(key, "")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"master": "local"}, 1),
        ({"master": "local[3]"}, 3),
        ({"master": "local[3,9]"}, 3),
        ({"master": "local[*]"}, 8),
        ({"master": "local[*,9]", "task_cpus": "3"}, 2),
        ({"master": "local-cluster[2,3,1024]", "task_cpus": "2"}, 2),
        ({"master": "spark://host:7077"}, None),
        ({"master": "spark://host:7077", "executor_instances": "4"}, None),
        ({"master": "yarn", "executor_instances": "4", "executor_cores": "2"}, 8),
        ({"master": "yarn", "executor_instances": "4", "executor_cores": "2", "task_cpus": "2"}, 4),
        ({}, None),
    ],
)
def test_slots_are_known_where_the_settings_tell(settings, found):
    assert slots(conf(**settings), 8) == found


def test_slots_that_spark_adds_by_itself_are_not_known():
    settings = conf(master="yarn", executor_instances="1", executor_cores="1")
    dynamic = {"spark.dynamicAllocation.enabled": "true"}
    assert slots(lambda key: dynamic.get(key) or settings(key), 8) is None


@pytest.mark.parametrize(
    ("trackers", "settings", "told"),
    [
        (0, {}, "trackers: 0 must be at least 1"),
        (3, {"master": "local[2,9]"}, r"trackers: 3, but Spark \(local\[2,9\]\) runs 2 tasks at a time"),
        (2, {"master": "local"}, r"runs 1 task at a time"),
        (1, {"master": "local[2]", "speculation": "true"}, "speculation: must be false"),
    ],
)
def test_a_session_that_can_not_run_them_is_refused(trackers, settings, told):
    with pytest.raises(ConfigError, match=told):
        check_session(trackers, conf(**settings), 8)


def test_a_session_that_can():
    check_session(2, conf(master="local[2]", speculation="false"), 8)
    check_session(9, conf(master="spark://host:7077"), 8)


@pytest.mark.parametrize(
    ("master", "used"),
    [
        ("local", f"local[1,{MAX_FAILURES}]"),
        ("local[4]", f"local[4,{MAX_FAILURES}]"),
        ("local[*]", f"local[*,{MAX_FAILURES}]"),
        ("local[4,2]", "local[4,2]"),
        ("spark://host:7077", "spark://host:7077"),
        ("sc://host", "sc://host"),
    ],
)
def test_local_masters_retry(master, used):
    assert with_retries(master) == used


@pytest.mark.parametrize("missing", ["kmqpy", "confluent_kafka"])
def test_an_executor_that_lacks_something_says_what(missing):
    """In a process that has imported nothing yet, as an executor; the probe is unpickled without kmqpy."""
    code = f"""
import sys
import pyarrow as pa
sys.modules[{missing!r}] = None
from pyspark import cloudpickle
probe = cloudpickle.loads(sys.stdin.buffer.read())
(found,) = probe(iter([pa.RecordBatch.from_pylist([{{"id": 0}}])]))
print(found.to_pylist()[0]["problem"])
"""
    from pyspark import cloudpickle

    sent = cloudpickle.dumps(_probe(ZooKeeperConnection(hosts="nowhere:1")))
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    told = done.stdout.decode()
    assert missing in told
    assert "install kmqpy with its dependencies there" in told


def test_what_is_sent_to_executors_shows_no_secret():
    secret = replace(
        TASK,
        connection=KafkaConnection(bootstrap="h:1", kafka={"sasl.password": "hidden-1"}),
        zookeeper=ZooKeeperConnection(
            hosts="h:2", security=ZooKeeperSecurity(username="me", password="hidden-2")
        ),
    )
    assert "hidden" not in f"{secret!r} {secret}"


def test_what_a_tracker_did_is_summed_over_its_queues():
    metrics = TrackerMetrics()
    metrics.redelivered.labels("a").inc(2)
    metrics.redelivered.labels("b").inc(3)
    assert _total(metrics.redelivered) == 5
    assert REPORT.startswith("number long, tracker string, host string, starts long")


def test_a_jvm_that_is_gone_is_told_from_a_job_that_failed():
    assert _is_gone(Py4JNetworkError("Answer from Java side is empty"))
    assert _is_gone(Py4JError("An error occurred while calling o65.collectToPython"))
    assert _is_gone(ConnectionRefusedError())
    assert not _is_gone(RuntimeError("Job aborted due to stage failure"))


@pytest.mark.parametrize(
    ("dies", "calls"),
    [("before its tracker runs", ["stop"]), ("while its tracker runs", ["run", "stop", "stopped"])],
)
def test_a_tracker_does_not_outlive_its_driver(monkeypatch, dies, calls):
    """The znode of the driver ends with the session of the driver."""
    done = []

    def watch(_znode, look):
        look(*(None, None) if dies.startswith("before") else (b"", object()))
        znode.append(look)

    def run():
        done.append("run")
        znode[0](None, None)
        done.append("stopped" if "stop" in done else "holds its slot and partitions for ever")

    znode = []
    tracker = SimpleNamespace(owned=lambda: {0, 1}, request_stop=lambda: done.append("stop"), run=run)
    monkeypatch.setattr(task, "connect", lambda _: contextlib.nullcontext(SimpleNamespace(DataWatch=watch)))
    owned = TASK._run_while_driver_lives(tracker)
    assert done == calls
    assert owned == 2


def test_trackers_that_have_ended_are_started_again_after_a_pause(monkeypatch):
    """They end when ZooKeeper was away for longer than a session, and when Spark gave up a task."""
    ends = iter(([], Unavailable("ZooKeeper does not answer"), RuntimeError("stage failure"), ["a report"]))
    submitted = []

    clock = ManualClock()

    def submit():
        submitted.append(clock.monotonic())
        end = next(ends)
        if isinstance(end, Exception):
            raise end
        if end:
            job.request_stop()
        return end

    job = TrackerJob(None, KAFKA, ZOOKEEPER, clock=clock)
    monkeypatch.setattr(job, "_connect", lambda: None)
    monkeypatch.setattr(job, "_submit", submit)
    reports = job.run()
    assert len(submitted) == 4, "no tracker runs on Spark any more"
    assert all(later - sooner >= 0.4 for sooner, later in itertools.pairwise(submitted))
    assert reports == ["a report"]
