"""A query that fails: its good messages get through, and only the one that is the cause pays."""

import contextlib
import os
import time
from collections import Counter

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812
from support import until

from kmqpy.core.backoff import Backoff
from kmqpy.kafka.admin import stats
from kmqpy.spark import KmqSpark
from tests.spark.waiting import settled, until_ready

SLOW = [
    pytest.mark.skipif("KMQ_KILLS" not in os.environ, reason="KMQ_KILLS is not set"),
    pytest.mark.timeout(2_400),
]
SOON = Backoff(first=0.05, jitter=0)
LEASE_S = 30
"""Longer than a micro-batch takes on a busy machine."""


class Job:
    """A query whose sink takes numbers only, that is started again whenever it fails."""

    def __init__(self, spark, queue, checkpoint, how):
        self.queue = queue
        self.checkpoint = str(checkpoint)
        self.kmq = KmqSpark(spark, queue.connection, queue.settings)
        df = self.kmq.read_stream()
        if how == "take":
            bodies = self.kmq.take(df, lease=LEASE_S).selectExpr("cast(value as string) body")
        else:
            bodies = self.kmq.process(
                df,
                lambda frame: frame.assign(body=frame["value"].str.decode("utf-8")),
                "body string",
                lease=LEASE_S,
            )
        self.out = bodies.select(F.col("body").cast("long").alias("number"))
        self.away = False
        self.got = Counter()
        self.failures = 0

    def sink(self, batch, _batch_id):
        rows = [row.number for row in batch.collect()]
        if self.away:
            raise OSError("the sink is away")
        self.got.update(rows)

    def again(self):
        """Run it; then wait until there is something to run it on, if it got through."""
        writer = self.kmq.write_stream(self.out, self.checkpoint, backoff=SOON).foreachBatch(self.sink)
        try:
            self.kmq.await_termination(writer.trigger(availableNow=True).start())
        except StreamingQueryException:
            self.failures += 1
        else:
            until_ready(self.queue)

    def in_flight(self):
        return [
            entry
            for one in stats.open_entries(self.queue.connection, self.queue.settings).values()
            for entry in one
        ]


pytestmark = [pytest.mark.timeout(600), pytest.mark.breadth]


@pytest.fixture
def make_job(spark, make_queue, tmp_path):
    with contextlib.ExitStack() as ends:

        def make(how="take", **settings):
            job = Job(spark, make_queue(**settings), tmp_path / "checkpoint", how)
            ends.callback(job.kmq.close)
            return job

        yield make


@pytest.mark.parametrize(
    ("how", "redeliveries", "pause_s"),
    [
        ("take", 0, 0),
        ("process", 1, 0),
        pytest.param("take", 1, LEASE_S + 1, marks=SLOW),
    ],
)
def test_the_message_that_makes_a_query_fail_becomes_the_only_dead_letter(
    make_job, how, redeliveries, pause_s
):
    job = make_job(how, max_redeliveries=redeliveries)
    job.queue.tracker()
    job.queue.send("1", "odd", "3")

    def ended():
        job.again()
        time.sleep(pause_s)
        return len(job.queue.dead_letters()) == 1 and settled(job.queue)

    until(ended, 500 + 40 * pause_s, lambda: (job.got, job.failures, job.in_flight()))
    (letter,) = job.queue.dead_letters()
    assert letter.value() == b"odd"
    reason = dict(letter.headers())["kmq-dead-letter-reason"].decode()
    assert reason.startswith("nack: the query failed: ")
    assert "CAST_INVALID_INPUT" in reason
    assert job.got.keys() == {1, 3}
    assert job.failures >= 3


@pytest.mark.parametrize("pause_s", [0, pytest.param(LEASE_S + 1, marks=SLOW)])
def test_a_sink_that_is_away_costs_no_attempt(make_job, pause_s):
    job = make_job(max_redeliveries=0)
    job.queue.tracker()
    job.queue.send("1", "2", "3")
    job.away = True
    for _ in range(5):
        job.again()
        assert not any(entry.counts for entry in job.in_flight())
        time.sleep(pause_s)
    assert job.failures >= 3
    assert job.got == {}
    job.away = False
    until(lambda: job.again() or settled(job.queue), 500, lambda: (job.got, job.in_flight()))
    assert job.got.keys() == {1, 2, 3}
    assert job.queue.dead_letters() == []


def test_what_a_failed_query_has_taken_waits_for_its_next_run_and_pays_nothing(make_job):
    job = make_job()
    job.queue.send("1", "odd")
    job.again()
    found = job.in_flight()
    assert [entry.offset for entry in found] == [0, 1]
    assert not any(entry.counts for entry in found)
    assert all(entry.due_ms - entry.since_ms >= 7_200_000 for entry in found)
