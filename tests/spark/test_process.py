"""Processing with acknowledgement, on real servers with a real tracker."""

import contextlib
import os
import signal
import threading
from collections import Counter
from operator import attrgetter
from pathlib import Path

import foreign_headers
import pytest
from pyspark.errors import StreamingQueryException
from support import delete_topic, until

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import wait_until
from kmqpy.errors import ConfigError
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.group_commits import group_commits
from kmqpy.kafka.markers.codec import MAX_SPAN, Marker, Op, encode, encode_key, encode_start, ranges
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.kafka.settings_mirror import SettingsMirror
from kmqpy.spark import KmqSpark, register
from kmqpy.spark.process import NEEDED_COLUMNS
from kmqpy.spark.records import kafka_options, stream_topics
from kmqpy.spark.taker import Taker
from kmqpy.worker.outcome import Reject
from tests.spark.waiting import settled, until_ready

SOON = Backoff(first=0.05, jitter=0)


class Run:
    """One queue, its KmqSpark, and what sinks have got of it."""

    def __init__(self, spark, queue, checkpoint: Path) -> None:
        self.spark = spark
        self.queue = queue
        self.checkpoint = str(checkpoint)
        self.kmq = KmqSpark(spark, queue.connection, queue.settings)
        self.got: Counter[str] = Counter()
        self.lock = threading.Lock()

    def sink(self, batch, _batch_id) -> None:
        rows = batch.collect()
        with self.lock:
            self.got.update(bytes(row.value).decode() for row in rows)

    def writer(self, out, sink=None):
        return self.kmq.write_stream(out, self.checkpoint).foreachBatch(sink or self.sink)

    def once(self, out, sink=None) -> None:
        """Process what is there now."""
        self.kmq.await_termination(self.writer(out, sink).trigger(availableNow=True).start())

    @contextlib.contextmanager
    def running(self, out):
        query = self.writer(out).trigger(processingTime="100 milliseconds").start()
        try:
            yield
        finally:
            query.stop()
            self.kmq.await_termination(query)

    def settled(self) -> bool:
        return settled(self.queue)


@pytest.fixture
def make_run(spark, make_queue, tmp_path):
    with contextlib.ExitStack() as ends:

        def make(partitions=1, **settings):
            queue = make_queue(partitions, **settings)
            found = Run(spark, queue, tmp_path / "checkpoint")
            ends.callback(found.kmq.close)
            return found

        yield make


def bodies(count, name="m"):
    return [f"{name}{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("form", "markers"), [("frames", "range"), pytest.param("rows", "jvm", marks=pytest.mark.breadth)]
)
def test_what_fails_comes_again_and_poison_becomes_a_dead_letter(make_run, form, markers):
    run = make_run(2, markers=markers, max_redeliveries=2)
    run.queue.tracker()
    good, flaky, poison = bodies(360), bodies(36, "flaky"), bodies(4, "poison")
    for partition in (0, 1):
        run.queue.send(
            *[one for one in [*good, *flaky, *poison] if len(one) % 2 == partition], partition=partition
        )

    def fails(value, attempts):
        return value.startswith(b"poison") or (value.startswith(b"flaky") and attempts == 1)

    def frames(frame):
        failed = [fails(*row) for row in zip(frame["value"], frame["attempts"], strict=True)]
        return frame.assign(kmq_error=["odd" if one else None for one in failed])

    def rows(row):
        if fails(row.value, row.attempts):
            raise ValueError("odd")
        return {"value": row.value, "attempts": row.attempts}

    df = run.kmq.read_stream()
    schema = "value binary, attempts int"
    if form == "frames":
        out = run.kmq.process(df, frames, schema, backoff=SOON)
    else:
        out = run.kmq.process_rows(df, rows, schema, backoff=SOON)
    with run.running(out):
        until(lambda: len(run.queue.dead_letters()) == len(poison) and run.settled(), 170, run.got)
    assert run.got == Counter([*good, *flaky])
    letters = {letter.value().decode(): dict(letter.headers()) for letter in run.queue.dead_letters()}
    assert sorted(letters) == poison
    reason = b"nack: odd" if form == "frames" else b"nack: ValueError: odd"
    assert {headers["kmq-dead-letter-reason"] for headers in letters.values()} == {reason}


def test_a_rejected_message_is_dead_lettered_at_once(make_run):
    run = make_run()
    run.queue.tracker()
    run.queue.send("bad", "good")

    def rows(row):
        if row.value == b"bad":
            raise Reject("not for us")
        return (row.value,)

    run.once(run.kmq.process_rows(run.kmq.read_stream(), rows, "value binary"))
    until(lambda: len(run.queue.dead_letters()) == 1)
    assert dict(run.queue.dead_letters()[0].headers())["kmq-dead-letter-reason"] == b"rejected: not for us"
    assert run.got == Counter(["good"])
    until(run.settled)


@pytest.mark.breadth
def test_both_sources_have_the_same_rows(spark, make_run):
    run = make_run(2)
    run.queue.tracker()
    for partition in (0, 1):
        run.queue.send(*bodies(12), partition=partition, key="k", headers={"h": "1"})
    with run.queue.client() as client:
        for message in client.receive(24, wait=10):
            client.nack(message)
    until(lambda: len(run.queue.records()) > 24)
    run.queue.send("later", delay=3_600)
    register(spark)
    options = {"bootstrap": run.queue.connection.bootstrap, "queue": run.queue.name}
    at_once = spark.read.format("kmq").options(**options).load()
    kafka = run.kmq.read_stream(start="earliest")
    # Control records of the tracker's transactions lie between the messages, and some batches end there.
    own = (
        spark.readStream.format("kmq").options(**options, start="earliest", max_offsets_per_trigger=5).load()
    )
    place = attrgetter("partition", "offset")
    found = []
    for stream, folder in ((kafka, "kafka"), (own, "own")):
        rows = []
        writer = stream.writeStream.foreachBatch(lambda batch, _, rows=rows: rows.extend(batch.collect()))
        writer = writer.option("checkpointLocation", f"{run.checkpoint}-{folder}")
        writer.trigger(availableNow=True).start().awaitTermination()
        found.append(sorted(rows, key=place))
    assert found[0] == found[1] == sorted(at_once.collect(), key=place)
    assert kafka.schema.simpleString() == own.schema.simpleString()
    assert len(found[0]) == len(run.queue.records())
    assert {row.attempts for row in found[0]} == {1, 2}
    assert sum(row.deliver_at_ms is not None for row in found[0]) == 1
    copies = [row for row in found[0] if row.attempts == 2]
    assert all(row.original_offset < row.offset and row.headers[0].key == "h" for row in copies)


@pytest.mark.breadth
def test_an_empty_queue_is_an_empty_frame(spark, make_queue):
    queue = make_queue(2)
    register(spark)
    options = {"bootstrap": queue.connection.bootstrap, "queue": queue.name}
    assert spark.read.format("kmq").options(**options).load().collect() == []


def test_the_source_without_jars_is_processed_like_the_other(spark, make_run):
    run = make_run(2)
    run.queue.send(*bodies(20), partition=1)
    register(spark)
    options = {"bootstrap": run.queue.connection.bootstrap, "queue": run.queue.name}
    df = spark.readStream.format("kmq").options(**options).load()
    run.once(run.kmq.process(df, lambda frame: frame, "value binary"))
    assert run.got == Counter(bodies(20))
    assert run.settled()
    run.queue.send(*bodies(5, "n"))
    run.once(run.kmq.process(df, lambda frame: frame, "value binary"))
    assert run.got == Counter([*bodies(20), *bodies(5, "n")])


def test_a_micro_batch_is_not_acknowledged_before_its_sink_has_it(make_run):
    run = make_run()
    run.queue.send(*bodies(10))
    in_flight = []

    def sink(batch, batch_id):
        run.sink(batch, batch_id)
        in_flight.append(stats.queue_stats(run.queue.connection, run.queue.settings).in_flight)
        if len(in_flight) == 1:
            raise OSError("the sink is away")

    out = run.kmq.process(run.kmq.read_stream(), lambda frame: frame, "value binary")
    with pytest.raises(StreamingQueryException, match="the sink is away"):
        run.once(out, sink)
    assert not run.settled()
    run.once(out, sink)  # again, and at once: they are taken again rather than left until their lease ends
    assert in_flight == [10, 10]
    assert run.settled()
    assert run.got == Counter(bodies(10) * 2)


@pytest.mark.breadth
def test_a_new_checkpoint_goes_on_where_the_old_one_was(make_run, tmp_path):
    run = make_run()
    run.queue.send(*bodies(10))
    run.once(run.kmq.process(run.kmq.read_stream(), lambda frame: frame, "value binary"))
    run.queue.send(*bodies(5, "n"))
    run.checkpoint = str(tmp_path / "other")
    run.once(run.kmq.process(run.kmq.read_stream(), lambda frame: frame, "value binary"))
    assert run.got == Counter([*bodies(10), *bodies(5, "n")])
    # Nor are finished messages processed again when everything is read again.
    run.checkpoint = str(tmp_path / "third")
    run.once(run.kmq.process(run.kmq.read_stream(start="earliest"), lambda frame: frame, "value binary"))
    assert run.got.total() == 15


@pytest.mark.breadth
def test_what_was_finished_behind_unfinished_messages_is_not_processed_again(make_run):
    run = make_run()
    run.queue.send(*bodies(10))
    run.queue.send(*bodies(10, "n"))
    runs = ((10, 10),)
    run.queue.mark_all([Marker(0, 10, Op.TAKE, 10**6, runs=runs), Marker(0, 10, Op.END, runs=runs)])
    # Those that nobody has taken so far are taken behind the others, in micro-batches of their own.
    df = run.kmq.read_stream(start="earliest", max_offsets_per_trigger=5)
    run.once(run.kmq.process(df, lambda frame: frame, "value binary"))
    assert run.got == Counter(bodies(10))
    assert run.settled()


@pytest.mark.breadth
def test_a_message_is_ended_only_if_both_sides_of_a_union_handed_it_on(make_run, tmp_path):
    run = make_run()
    run.queue.send("good", "bad")
    df = run.kmq.read_stream()

    begun = tmp_path / "begun"

    def lenient(frame):
        begun.touch()
        return frame

    def picky(frame):
        wait_until(
            begun.exists, 60, every_s=0.01
        )  # else the other would leave alone what this one gives back
        return frame.assign(kmq_error=["no" if value == b"bad" else None for value in frame["value"]])

    one, other = (run.kmq.process(df, function, "value binary") for function in (lenient, picky))
    run.once(one.union(other))
    assert run.got == Counter(["good", "good", "bad"])
    assert stats.queue_stats(run.queue.connection, run.queue.settings).in_flight == 1


@pytest.mark.breadth
def test_two_actions_on_one_micro_batch_see_the_same_messages(make_run):
    run = make_run()
    run.queue.send(*bodies(10))

    def sink(batch, batch_id):
        assert not batch.isEmpty()
        assert [row.value for row in batch.orderBy("value").collect()] == sorted(map(str.encode, bodies(10)))
        run.sink(batch, batch_id)

    run.once(run.kmq.process(run.kmq.read_stream(), lambda frame: frame, "value binary"), sink)
    until(run.settled)
    assert run.got == Counter(bodies(10))


def test_a_delayed_message_waits_and_then_comes_once(make_run):
    run = make_run()
    run.queue.tracker()
    run.queue.send("now")
    run.queue.send("later", delay=1)
    out = run.kmq.process(run.kmq.read_stream(), lambda frame: frame, "value binary, attempts int")
    with run.running(out):
        until(lambda: run.got.total() == 2 and run.settled(), 60, run.got)
    assert run.got == Counter(["now", "later"])


def test_bad_results_stop_the_query_and_lose_nothing(make_run):
    run = make_run()
    run.queue.send(*bodies(10))
    df = run.kmq.read_stream()
    bad = run.kmq.process(df, lambda frame: frame.reset_index(drop=True), "value binary")
    with pytest.raises(StreamingQueryException, match=r"ConfigError.*without the index 'kmq_row'"):
        run.once(bad)
    run.once(run.kmq.process(df, lambda frame: frame, "value binary"))
    assert run.got == Counter(bodies(10))
    assert run.settled()


def test_bad_input_is_refused_with_a_clear_error(spark, make_run, make_queue, queue_name):
    run = make_run()
    df = run.kmq.read_stream()
    for name in NEEDED_COLUMNS:
        with pytest.raises(ConfigError, match=f"column '{name}' is missing"):
            run.kmq.process(df.drop(name), lambda frame: frame, "value binary")
    with pytest.raises(ConfigError, match="not a stream"):
        run.kmq.process(spark.createDataFrame([], df.schema), lambda frame: frame, "value binary")
    for schema, problem in [
        ("KMQ_mine binary", "a column must not be named 'kmq_mine'"),
        ("id int, ID long", "more than one column 'id'"),
        ("no schema", "schema: invalid schema 'no schema': write it like"),
        ("id varchar(3)", r"schema: invalid schema 'id varchar\(3\)'"),
        (None, "schema: NoneType is neither"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            run.kmq.process(df, lambda frame: frame, schema)
    with pytest.raises(ConfigError, match="column 'offset' is string"):
        run.kmq.process(df.withColumn("offset", df["offset"].cast("string")), lambda frame: frame, "id int")
    with pytest.raises(ConfigError, match="function: str can't be called"):
        run.kmq.process(df, "enrich", "id int")
    with pytest.raises(ConfigError, match="backoff: must be a Backoff, not 5"):
        run.kmq.process(df, lambda frame: frame, "id int", backoff=5)
    with pytest.raises(ConfigError, match="start: unknown value 'first': use committed, earliest, latest"):
        run.kmq.read_stream(start="first")
    for number in (0, -1, "many", True):
        with pytest.raises(
            ConfigError, match=f"max_offsets_per_trigger: must be a whole number above 0, not {number!r}"
        ):
            run.kmq.read_stream(max_offsets_per_trigger=number)
    with pytest.raises(ConfigError, match=r"options: kafka\.isolation\.level: .* is not yours to choose"):
        run.kmq.read_stream(options={"kafka.isolation.level": "read_uncommitted"})
    for folder in ("", "/", None):
        with pytest.raises(ConfigError, match="checkpoint: invalid folder"):
            run.kmq.write_stream(df, folder)
    run.kmq.write_stream(df, run.checkpoint)
    other = make_queue(name=f"{queue_name}-other")
    other.send("x")
    kmq = KmqSpark(spark, other.connection, other.settings)
    with pytest.raises(ConfigError, match=f"belongs to queue '{queue_name}', not to '{other.name}'"):
        kmq.write_stream(df, run.checkpoint)
    out = run.kmq.process(kmq.read_stream(), lambda frame: frame, "value binary")
    with pytest.raises(StreamingQueryException, match=rf"ConfigError.*not of queue '{queue_name}'"):
        run.once(out)


@pytest.mark.parametrize("how", ["process", "take"])
def test_arrow_batches_are_larger_unless_somebody_has_set_their_size(spark, make_run, how):
    kmq, size = make_run().kmq, "spark.sql.execution.arrow.maxRecordsPerBatch"
    df = kmq.read_stream()
    try:
        for given, used in (None, "25000"), ("77", "77"):
            spark.conf.unset(size) if given is None else spark.conf.set(size, given)
            kmq.take(df) if how == "take" else kmq.process(df, lambda frame: frame, "value binary")
            assert spark.conf.get(size) == used
    finally:
        spark.conf.unset(size)


@pytest.mark.breadth
@pytest.mark.parametrize("source", ["kmq", pytest.param("kafka", marks=pytest.mark.breadth)])
def test_forged_headers_hold_nothing_up(spark, make_run, source):
    run = make_run()
    count = run.queue.settings.redelivery_count_header
    for header in [
        (count, b"\x7f\xff\xff\xff"),
        ("kmq-original-partition", b"9999999999"),
        ("kmq-deliver-at", b"-9223372036854775808"),
    ]:
        run.queue.append(None, header[0].encode(), [header], topic=run.queue.name)
    not_utf8 = [(b"good", b"1"), (b"caf\xe9", b"2"), (count.encode(), b"\x01")]
    foreign_headers.write(run.queue.connection.bootstrap, run.queue.name, b"foreign", not_utf8)
    df = run.kmq.read_stream()
    if source == "kmq":
        register(spark)
        options = {"bootstrap": run.queue.connection.bootstrap, "queue": run.queue.name}
        df = spark.readStream.format("kmq").options(**options).load()
    rows = []
    out = run.kmq.process(df, lambda frame: frame, "attempts int, original_partition int")
    run.once(out, lambda batch, _: rows.extend(batch.collect()))
    assert sorted(rows) == [(1, 0), (1, 0), (2, 0), (2**31 - 1, 0)]
    assert run.settled()


@pytest.mark.breadth
def test_lying_markers_hide_nothing_from_a_task(make_queue):
    queue = make_queue(max_lease_ms=60_000)
    queue.send("a", "b")
    forever_ms = 2**63 - 1
    for first in range(0, 100 * MAX_SPAN, MAX_SPAN):
        queue.mark_all(ranges(0, Op.TAKE, range(first, first + MAX_SPAN), redeliver_after_ms=forever_ms))
    queue.append(*encode(Marker(1, 0, Op.TAKE, forever_ms)))
    foreign_headers.write(
        queue.connection.bootstrap,
        queue.settings.markers_topic,
        *(encode_start(forever_ms), [(b"caf\xe9", b"")]),
        key=encode_key(0, 0),
    )
    queue.mark(Marker(0, 1, Op.TAKE, forever_ms))
    taker = Taker(queue.settings, queue.connection)
    found = taker.taken_before(0, 0)
    assert (found.taken([0, 1, 2]), found.takes(1), found.highest) == ([1], 1, 1)
    (entry,) = found.state
    assert entry.due_ms - entry.since_ms == 60_000


@pytest.mark.breadth
def test_a_number_too_large_for_its_column_fails_alone(make_run):
    run = make_run()
    run.queue.send("1", str(2**70), "3")
    df = run.kmq.read_stream()

    def number(frame):
        return frame.assign(number=[int(value) for value in frame["value"]])

    run.once(run.kmq.process(df, number, "value binary, number long"))
    assert run.got == Counter(["1", "3"])
    assert stats.queue_stats(run.queue.connection, run.queue.settings).in_flight == 1


def test_secrets_are_not_shown_in_plans(spark, make_run, capsys):
    run = make_run()
    secret = {"sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": "hunter2"}
    register(spark)
    options = {"queue": run.queue.name, **{f"kafka.{name}": value for name, value in secret.items()}}
    own = spark.readStream.format("kmq").options(**options).load()
    connection = KafkaConnection(bootstrap=run.queue.connection.bootstrap, kafka=secret)
    kafka = stream_topics(spark, kafka_options(connection), [run.queue.name])
    for df in (own, kafka):
        df.select("value").explain(extended=True)
        assert "value" in (shown := capsys.readouterr().out)
        assert "hunter2" not in shown


@pytest.mark.breadth
def test_a_checkpoint_of_another_topic_is_refused_by_the_source_too(spark, make_run, make_queue, queue_name):
    run = make_run()
    run.queue.send("x")
    register(spark)

    def start(queue):
        options = {"bootstrap": run.queue.connection.bootstrap, "queue": queue}
        df = spark.readStream.format("kmq").options(**options).load()
        writer = df.writeStream.format("noop").option("checkpointLocation", run.checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination()

    start(run.queue.name)
    other = make_queue(name=f"{queue_name}-other")
    with pytest.raises(
        StreamingQueryException, match=f"it belongs to queue '{queue_name}', not to '{other.name}'"
    ):
        start(other.name)


@pytest.mark.breadth
def test_a_message_that_kills_the_worker_becomes_a_dead_letter_and_no_other(make_run):
    run = make_run(max_redeliveries=1)
    run.queue.tracker()
    run.queue.send(*bodies(5), "killer", *bodies(5, "n"))

    def function(frame):
        if (frame["value"] == b"killer").any():
            os.kill(os.getpid(), signal.SIGKILL)
        return frame

    out = run.kmq.process(run.kmq.read_stream(), function, "value binary")

    def again() -> bool:
        with contextlib.suppress(StreamingQueryException):
            run.once(out)
        return len(run.queue.dead_letters()) == 1 and run.settled()

    until(again, 170, lambda: run.got)
    (letter,) = run.queue.dead_letters()
    assert letter.value() == b"killer"
    reason = dict(letter.headers())["kmq-dead-letter-reason"].decode()
    assert any(words in reason for words in ("died 3 times", "Python worker exited")), reason
    assert run.got.keys() == {*bodies(5), *bodies(5, "n")}


LANES = {"retry_lane": True, "priorities": 2}


def send_both(queue, *names, **more):
    """Send these bodies to the main lane, and with a u in front to that of priority 1: at equal offsets."""
    with queue.producer() as producer:
        producer.send_many(names, partition=0, **more)
        producer.send_many([f"u{name}" for name in names], partition=0, priority=1, **more)


def test_one_query_has_all_lanes_of_a_queue(make_run):
    run = make_run(2, **LANES, max_redeliveries=1)
    run.queue.tracker()
    send_both(run.queue, *bodies(20), "flaky", "poison")
    seen = []

    def fails(frame):
        rows = zip(frame["value"], frame["attempts"], strict=True)
        failed = [
            body.endswith(b"poison") or (body.endswith(b"flaky") and tries == 1) for body, tries in rows
        ]
        return frame.assign(kmq_error=["odd" if one else None for one in failed])

    def sink(batch, batch_id):
        seen.extend(batch.collect())
        run.sink(batch, batch_id)

    schema = "value binary, partition int, original_partition int, original_offset long"
    out = run.kmq.process(run.kmq.read_stream(), fails, schema, backoff=SOON)

    def again():
        run.once(out, sink)
        until_ready(run.queue)
        return len(run.queue.dead_letters()) == 2 and run.settled()

    until(again, 120, lambda: run.got)
    assert run.got == Counter([*bodies(20), *bodies(20, "um"), "flaky", "uflaky"])
    letters = {letter.value(): dict(letter.headers()) for letter in run.queue.dead_letters()}
    origins = {body: headers["kmq-original-topic"] for body, headers in letters.items() if body == b"upoison"}
    assert letters.keys() == {b"poison", b"upoison"}
    assert origins == {b"upoison": f"{run.queue.name}__priority1".encode()}
    places = {bytes(row.value): (row.original_partition, row.original_offset) for row in seen}
    assert len({*places.values()}) == 42
    assert {places[b"m3"], places[b"um3"]} == {(0, 3), (100_000_000, 3)}
    assert {places[b"flaky"], places[b"uflaky"]} == {(0, 20), (100_000_000, 20)}
    assert {row.partition for row in seen} == {0, 100_000_000, 1_000_000_000}
    commits = [
        group_commits(run.queue.connection, lane, [0], run.queue.topics.check(lane).ids)[0].offset
        for lane in run.queue.settings.lanes()
    ]
    assert commits[1:] == [22, 22]
    assert commits[0] >= 4


@pytest.mark.breadth
def test_a_query_goes_on_when_lanes_were_added_or_removed_and_not_in_recreated_ones(spark, make_run):
    run = make_run()
    run.queue.send(*bodies(3))

    def once(kmq):
        out = kmq.process(kmq.read_stream(), lambda frame: frame, "value binary")
        writer = kmq.write_stream(out, run.checkpoint).foreachBatch(run.sink)
        kmq.await_termination(writer.trigger(availableNow=True).start())

    once(run.kmq)
    with Admin(run.queue.connection, run.queue.zookeeper) as admin:
        run.queue.settings = admin.alter_queue(run.queue.name, **LANES)
    send_both(run.queue, "a")
    once(run.kmq)  # it knows the main lane only
    assert run.got == Counter([*bodies(3), "a"])
    with KmqSpark(spark, run.queue.connection, run.queue.name) as kmq:
        once(kmq)
        assert run.got == Counter([*bodies(3), "a", "ua"])
        send_both(run.queue, "b")
        once(kmq)
        assert run.got == Counter([*bodies(3), "a", "ua", "b", "ub"])
        assert run.settled()
    with Admin(run.queue.connection, run.queue.zookeeper) as admin:
        for lane in run.queue.settings.lanes()[:-1]:
            delete_topic(run.queue.topics, lane.name)  # else remove_lanes() waits for long
        admin.alter_queue(run.queue.name, retry_lane=False, priorities=1)
        run.queue.settings = admin.remove_lanes(run.queue.name)
        run.queue.send("c")
        with KmqSpark(spark, run.queue.connection, run.queue.name) as kmq:
            once(kmq)
        assert run.got == Counter([*bodies(3), "a", "ua", "b", "ub", "c"])
        admin.alter_queue(run.queue.name, **LANES)
    with (
        KmqSpark(spark, run.queue.connection, run.queue.name) as kmq,
        pytest.raises(ConfigError, match=r"belongs to a lane '.*__priority1' whose topics have been deleted"),
    ):
        once(kmq)


@pytest.mark.breadth
def test_what_a_killed_query_left_in_all_lanes_comes_again(spark, make_run):
    run = make_run(**LANES)
    send_both(run.queue, *bodies(3))
    out = run.kmq.process(run.kmq.read_stream(), lambda frame: frame, "value binary")

    def sink(batch, _):
        batch.collect()
        raise OSError("away")

    with pytest.raises(StreamingQueryException, match="away"):
        run.once(out, sink)
    assert stats.queue_stats(run.queue.connection, run.queue.settings).in_flight == 6
    with KmqSpark(spark, run.queue.connection, run.queue.settings) as run.kmq:
        run.once(run.kmq.process(run.kmq.read_stream(), lambda frame: frame, "value binary"))
    assert run.got == Counter([*bodies(3), *bodies(3, "um")])
    assert run.settled()


@pytest.mark.breadth
def test_the_source_without_jars_has_all_lanes_and_a_backlog_holds_none_up(spark, make_run):
    run = make_run(2, **LANES)
    SettingsMirror(run.queue.connection).write([run.queue.settings])
    run.queue.send(*bodies(40), partition=1)
    send_both(run.queue, *bodies(4, "n"))
    register(spark)
    options = {
        "bootstrap": run.queue.connection.bootstrap,
        "queue": run.queue.name,
        "root": run.queue.connection.root,
    }
    df = spark.readStream.format("kmq").options(**options, max_offsets_per_trigger=12).load()
    batches = []

    def sink(batch, batch_id):
        batches.append(Counter(row.original_partition for row in batch.collect()))
        run.sink(batch, batch_id)

    run.once(run.kmq.process(df, lambda frame: frame, "value binary, original_partition int"), sink)
    assert run.got == Counter([*bodies(40), *bodies(4, "n"), *bodies(4, "un")])
    assert run.settled()
    assert batches[0][100_000_000] == 4
    assert batches[0].total() <= 12 + 2
