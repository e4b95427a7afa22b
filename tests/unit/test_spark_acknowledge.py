"""What is acknowledged when Spark tells of a micro-batch; without Spark and without Kafka."""

from types import SimpleNamespace

import pytest
from pyspark.sql import Row

from kmqpy.errors import ConfigError
from kmqpy.kafka import librdkafka
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import CurrentSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.spark import lanes
from kmqpy.spark.acknowledge import Acknowledger
from kmqpy.spark.failed_query import LeftoverMessages
from kmqpy.spark.report import BatchReport


class Kafka:
    """The writer of end markers and the consumer group, which note what they are told."""

    def __init__(self):
        self.ended = []
        self.committed = []
        self.spared = []
        self.removed = []

    def flush(self, _):
        return 0

    def close(self, *_):
        pass

    def put(self, markers):
        self.ended += [(marker.partition, offset) for marker in markers for offset in marker.offsets()]

    def commit(self, offsets, **_):
        self.committed += [(place.partition, place.offset, place.metadata) for place in offsets]


@pytest.fixture
def servers(monkeypatch):
    servers = Kafka()
    monkeypatch.setattr(lanes, "MarkerWriter", lambda *_, **__: servers)
    monkeypatch.setattr(librdkafka, "new_consumer", lambda *_: servers)
    return servers


@pytest.fixture
def listener(servers, monkeypatch):
    monkeypatch.setattr(LeftoverMessages, "spare", lambda _, failure: servers.spared.append(failure))
    streams = SimpleNamespace(addListener=lambda _: None, removeListener=servers.removed.append, active=[])
    spark = SimpleNamespace(streams=streams)
    made = Acknowledger(spark, QueueSettings(name="q"), KafkaConnection(), {"q": TopicIds("Q", "M")})
    made.watch("one")
    made.watch("another")
    return made


def progress(run, **metrics):
    """What Spark tells of a micro-batch: of each `process()` by its name, the offset that is done."""
    observed = {
        name: Row(reports=[str(BatchReport(done={0: OffsetRuns([(at, 1)])}, next={0: (at + 1, at + 100)}))])
        for name, at in metrics.items()
    }
    return SimpleNamespace(progress=SimpleNamespace(runId=run, observedMetrics=observed, stateOperators=[]))


def test_of_two_queries_on_one_result_only_the_first_is_acknowledged(listener, servers, caplog):
    """Each has a sink of its own; what one has must not end what the other may have lost."""
    listener.onQueryProgress(progress("first", one=1))
    assert caplog.records == []
    listener.onQueryProgress(progress("second", one=2))
    assert "two queries run on one result of process() or take()" in caplog.text
    listener.onQueryProgress(progress("first", one=3))
    assert servers.ended == [(0, 1), (0, 3)]
    assert servers.committed == [(0, 2, "kmq2:101:Q:M"), (0, 4, "kmq2:103:Q:M")]


def test_queries_on_several_results_and_one_after_another_are_all_acknowledged(listener, servers, caplog):
    listener.onQueryProgress(progress("first", one=1, of_somebody_else=9))
    listener.onQueryProgress(progress("second", another=2))
    listener.onQueryTerminated(SimpleNamespace(runId="first", exception=None))
    listener.onQueryProgress(progress("third", one=3))
    listener.onQueryProgress(progress("second", another=4))
    assert servers.ended == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert caplog.records == []


def ended(run, exception=None):
    return SimpleNamespace(runId=run, exception=exception)


def refused_progress(run, **metrics):
    """What Spark tells of a query with a stateful operator."""
    found = progress(run, **metrics).progress
    found.name, found.stateOperators = "q", [SimpleNamespace(operatorName="dedupe")]
    return SimpleNamespace(progress=found)


def test_what_a_query_has_left_is_spared_once_and_not_that_of_other_queues(listener, servers):
    listener.onQueryProgress(progress("first", one=1))
    listener.onQueryTerminated(ended("of another queue", "odd"))
    assert servers.spared == []
    listener.onQueryTerminated(ended("first", "failed\nCaused by: A: outer\nCaused by: B: inner\n\tat C"))
    assert servers.spared == ["B: inner"]
    listener.wait_for_end("first")
    listener.onQueryTerminated(ended("without progress"))
    listener.wait_for_end("without progress")
    assert servers.spared == ["B: inner", None]


def test_a_refusal_is_raised_once_and_leaves_no_listener(listener, servers):
    listener.onQueryStarted(SimpleNamespace(runId="first"))
    listener.onQueryProgress(refused_progress("first", one=1))
    listener.onQueryTerminated(ended("first"))
    with pytest.raises(ConfigError, match="stateful operators"):
        listener.close()
    assert (servers.ended, servers.removed) == ([], [listener])


def test_stateful_queries_of_others_are_left_alone(listener):
    listener.onQueryProgress(refused_progress("of somebody else"))
    listener.onQueryTerminated(ended("of somebody else"))
    listener.wait_for_end("of somebody else")
    listener.close()


def test_a_refusal_that_was_told_is_not_told_again(listener, servers):
    listener.onQueryProgress(refused_progress("first", one=1))
    listener.onQueryTerminated(ended("first"))
    with pytest.raises(ConfigError, match="stateful operators"):
        listener.wait_for_end("first")
    listener.close()
    assert servers.removed == [listener]


def test_a_query_tells_once_that_the_queue_has_got_other_lanes(listener, monkeypatch, caplog):
    def recent(current):
        current.value = QueueSettings(name="q", retry_lane=True)
        return current.value

    monkeypatch.setattr(CurrentSettings, "recent", recent)
    told = []
    for tell, event in (
        (listener.onQueryIdle, None),  # all that comes may go to a new lane
        (listener.onQueryProgress, progress("first", one=2)),
    ):
        tell(event)
        told.append([record.getMessage().partition(";")[0] for record in caplog.records])
    assert told == [["the lanes of the queue have changed"]] * 2
