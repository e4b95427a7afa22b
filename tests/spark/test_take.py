"""Taking messages for any expressions of Spark, and acknowledging those whose rows are ok."""

import contextlib
from collections import Counter

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F  # noqa: N812
from support import until

from kmqpy.core.backoff import Backoff
from kmqpy.errors import ConfigError
from kmqpy.kafka.admin import stats
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.records import read_marker
from kmqpy.spark import KmqSpark
from tests.spark.waiting import counted, settled, until_ready

SOON = Backoff(first=0.05, jitter=0)
NUMBER = "try_cast(cast(value AS string) AS long) AS number"


class Job:
    """One queue, its KmqSpark, and the rows that its sink has got."""

    def __init__(self, spark, queue, checkpoint):
        self.queue = queue
        self.checkpoint = str(checkpoint)
        self.kmq = KmqSpark(spark, queue.connection, queue.settings)
        self.rows = []
        self.in_flight = []

    def sink(self, batch, _batch_id):
        self.rows += batch.collect()
        self.in_flight.append(self.counted().in_flight)

    def once(self, out, sink=None, **given):
        writer = self.kmq.write_stream(out, self.checkpoint, **given).foreachBatch(sink or self.sink)
        self.kmq.await_termination(writer.trigger(availableNow=True).start())
        self.kmq.flush()

    def counted(self):
        return counted(self.queue)

    def settled(self):
        return settled(self.queue)

    def got(self, name="number"):
        return sorted(row[name] for row in self.rows)


@pytest.fixture
def make_job(spark, make_queue, tmp_path):
    with contextlib.ExitStack() as ends:

        def make(partitions=1, **settings):
            job = Job(spark, make_queue(partitions, **settings), tmp_path / "checkpoint")
            ends.callback(job.kmq.close)
            return job

        yield make


@pytest.mark.parametrize("markers", ["range", pytest.param("jvm", marks=pytest.mark.breadth)])
def test_rows_that_are_not_ok_come_again_and_become_dead_letters(make_job, markers):
    job = make_job(2, markers=markers, max_redeliveries=1)
    job.queue.tracker()
    for partition in (0, 1):
        job.queue.send("1", "2", "odd", "4", partition=partition)
    taken = job.kmq.take(job.kmq.read_stream())
    out = taken.selectExpr("kmq_message", "attempts", NUMBER)
    reason = F.concat(F.lit("no number, try "), "attempts")

    def again():
        job.once(out, ok=F.col("number").isNotNull(), reason=reason, backoff=SOON)
        until_ready(job.queue)
        return len(job.queue.dead_letters()) == 2 and job.settled()

    until(again, 120, lambda: job.rows)
    assert job.got() == [1, 1, 2, 2, 4, 4]
    assert set(job.rows[0].asDict()) == {"attempts", "number"}
    reasons = [dict(letter.headers())["kmq-dead-letter-reason"] for letter in job.queue.dead_letters()]
    assert reasons == [b"nack: no number, try 2"] * 2


def test_filtered_messages_are_done_and_exploded_ones_when_all_their_rows_are_ok(make_job):
    job = make_job()
    job.queue.send("1 2", "", "3 x", "y 4", "5")
    taken = job.kmq.take(job.kmq.read_stream())
    words = F.explode(F.split(F.col("value").cast("string"), " "))
    out = taken.filter("length(value) > 0").select("kmq_message", words.alias("word"))
    out = out.withColumns(
        {"number": F.col("word").try_cast("long"), "kmq_reason": F.concat("word", F.lit("?"))}
    )
    job.once(out.withColumn("kmq_ok", F.col("number").isNotNull()), ok="kmq_ok", reason="kmq_reason")
    assert job.got() == [1, 2, 3, 4, 5]
    assert set(job.rows[0].asDict()) == {"word", "number"}
    in_flight = stats.in_flight(job.queue.connection, job.queue.settings)
    assert sorted(one.offset for one in in_flight) == [2, 3]
    records = job.queue.records(job.queue.settings.markers_topic)
    nacks = [marker for marker in map(read_marker, records) if marker.op is Op.NACK]
    assert {(nack.offset, nack.reason) for nack in nacks} == {(2, "x?"), (3, "y?")}


def test_start_markers_precede_expressions_and_the_sink_precedes_end_markers(make_job):
    job = make_job()
    job.queue.send("1", "2", "x")
    taken = job.kmq.take(job.kmq.read_stream())
    with pytest.raises(StreamingQueryException, match="CAST_INVALID_INPUT"):
        job.once(taken.select(F.col("value").cast("string").cast("long").alias("number")))
    assert job.counted().in_flight == 3
    job.once(taken.selectExpr(NUMBER))
    assert job.in_flight == [3]
    assert job.settled()
    assert Counter(row.number for row in job.rows) == {1: 1, 2: 1, None: 1}


@pytest.mark.breadth
def test_what_others_finished_or_have_is_not_handed_out(make_job):
    job = make_job()
    job.queue.send(*map(str, range(6)))
    hour_ms = 3_600_000
    job.queue.mark_all(
        [
            Marker(0, 0, Op.TAKE, hour_ms, runs=((0, 5),)),
            Marker(0, 0, Op.END),
            Marker(0, 1, Op.NACK, hour_ms),
            *[Marker(0, 2, Op.TAKE, hour_ms)] * 5,  # each by a query that failed: they pay nothing for it
        ]
    )
    taken = job.kmq.take(job.kmq.read_stream(start="earliest"))
    job.once(taken.selectExpr(NUMBER))
    assert job.got() == [2, 3, 4, 5]
    assert [one.offset for one in stats.in_flight(job.queue.connection, job.queue.settings)] == [1]


@pytest.mark.breadth
def test_a_delayed_message_waits_and_then_comes_once(make_job):
    job = make_job()
    job.queue.tracker()
    job.queue.send("1")
    job.queue.send("2", delay=1)
    out = job.kmq.take(job.kmq.read_stream()).selectExpr(NUMBER)

    def again():
        job.once(out)
        until_ready(job.queue)
        return len(job.rows) >= 2 and job.settled()

    until(again, 120, lambda: job.rows)
    assert job.got() == [1, 2]


@pytest.mark.breadth
def test_an_unread_rest_of_the_batch_is_not_acknowledged(make_job):
    job = make_job()
    job.queue.send(*map(str, range(20)))
    out = job.kmq.take(job.kmq.read_stream()).selectExpr(NUMBER)
    job.once(out, lambda batch, _: job.rows.extend(batch.limit(3).collect()))
    assert len(job.rows) == 3
    assert job.counted().in_flight == 20


@pytest.mark.breadth
def test_bad_input_is_refused_with_a_clear_error(spark, make_job):
    job = make_job()
    df = job.kmq.read_stream()
    with pytest.raises(ConfigError, match="take: column 'topic' is missing"):
        job.kmq.take(df.drop("topic"))
    options = {"kafka.bootstrap.servers": job.queue.connection.bootstrap, "subscribe": job.queue.name}
    others = spark.readStream.format("kafka").options(**options).load()  # reads aborted records, too
    with pytest.raises(ConfigError, match=r"take: column 'attempts' is missing.*read_stream\(options=…\)"):
        job.kmq.take(others)
    with pytest.raises(ConfigError, match=r"process: column 'attempts' .*read_stream\(options=…\)"):
        job.kmq.process(others, lambda frame: frame, "value binary")
    with pytest.raises(ConfigError, match="take: not a stream"):
        job.kmq.take(spark.createDataFrame([], df.schema))
    with pytest.raises(ConfigError, match="lease: 1 ms is not from"):
        job.kmq.take(df, lease=0.001)
    taken = job.kmq.take(df)
    for out, given, problem in [
        (df, {"ok": "ok"}, "column 'kmq_message' of take\\(\\) is missing"),
        (taken, {"ok": "missing"}, "ok, reason: .*missing"),
        (taken, {"ok": "offset"}, "ok: bigint, not boolean"),
        (taken, {"reason": "value"}, "reason without ok"),
        (taken, {"ok": 5}, "ok: 5 is neither an expression nor the name of a column"),
        (taken, {"ok": F.expr("true"), "reason": 5}, "reason: 5 is neither"),
        (taken, {"ok": F.expr("true"), "backoff": 5}, "backoff: must be a Backoff, not 5"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            job.kmq.write_stream(out, job.checkpoint, **given)
    job.queue.send("1")
    with pytest.raises(StreamingQueryException, match="rows that are not of queue"):
        job.once(job.kmq.take(df.withColumn("topic", F.lit("other"))))
    with pytest.raises(StreamingQueryException, match="has a message more than once"):
        job.once(job.kmq.take(df.withColumn("twice", F.explode(F.expr("array(1, 2)")))))


@pytest.mark.breadth
def test_a_row_that_is_not_ok_is_given_back_in_the_lane_of_its_message(make_job):
    job = make_job(retry_lane=True, priorities=2, max_redeliveries=1)
    job.queue.tracker()
    with job.queue.producer() as producer:
        producer.send_many(["1", "2", "3"])
        producer.send_many(["4", "x", "6"], priority=1)
    out = job.kmq.take(job.kmq.read_stream()).selectExpr("kmq_message", "topic", NUMBER)

    def again():
        job.once(out, ok=F.col("number").isNotNull(), backoff=SOON)
        until_ready(job.queue)
        return job.queue.dead_letters() and job.settled()

    until(again, 120, lambda: job.rows)
    assert job.got() == [1, 2, 3, 4, 6]
    (letter,) = job.queue.dead_letters()
    headers = dict(letter.headers())
    assert (letter.value(), headers["kmq-original-topic"]) == (b"x", f"{job.queue.name}__priority1".encode())
    assert headers["kmq-dead-letter-topic"] == f"{job.queue.name}__retry".encode()
