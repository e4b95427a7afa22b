"""The pipeline: from a queue to files, on a real Kafka with a tracker."""

import json
import time

import psycopg
import pytest
from click.testing import CliRunner
from pyspark.errors import StreamingQueryException
from support import collect, delete_topic, make_topic, stopped_after, until

from kmqpy.cli.app import kmq
from kmqpy.errors import ConfigError, Unfinished
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import KmqSpark, checkpoint, pipeline
from kmqpy.spark.health import health
from kmqpy.spark.pipeline import Sink, check_aggregate, run_pipeline, write_aggregate
from kmqpy.spark.process import parse_schema
from kmqpy.spark.sinks import target_of
from kmqpy.spark.sinks.files import check_owner, place_of, take_over
from kmqpy.spark.sinks.origin import with_origin
from tests.spark.waiting import settled


def test_the_command_writes_rows_an_aggregate_and_a_report(spark, make_queue, tmp_path, monkeypatch):
    monkeypatch.setattr(type(spark), "stop", lambda _: None)  # it is everybody's
    queue = make_queue(2)
    producer = queue.producer()
    for number in range(40):
        body = "broken" if number % 20 == 7 else json.dumps({"id": number, "n": number % 3, "more": 1})
        producer.send(body, partition=number % 2)
    out, report = tmp_path / "rows", tmp_path / "report"
    where = ["--bootstrap", queue.connection.bootstrap, "--zookeeper", queue.zookeeper.hosts]
    line = ["pipeline", queue.name, *where, "--root", queue.connection.root, "-o", "json", "--drain"]
    line += ["--schema", "id long, n int", "--out", str(out), "--report", str(report)]
    line += ["--aggregate", "select n, count(*) ids, sum(id) total from rows group by n"]
    with stopped_after(queue.tracker()):
        done = CliRunner().invoke(kmq, line, catch_exceptions=False)
    assert done.exit_code == 1, done.output
    assert "2 messages became dead letters" in done.stderr
    good = [number for number in range(40) if number % 20 != 7]
    rows = spark.read.parquet(str(out))
    assert sorted((row["id"], row["n"]) for row in rows.collect()) == [(one, one % 3) for one in good]
    totals = {
        row["n"]: (row["ids"], row["total"]) for row in spark.read.parquet(f"{out}-aggregate").collect()
    }
    assert totals == {
        n: (len(part), sum(part)) for n in range(3) if (part := [o for o in good if o % 3 == n])
    }

    shown = json.loads(done.stdout.splitlines()[-1])
    assert {row["reason"].partition(" ")[0] for row in shown["reasons"]} == {"rejected:"}
    assert [row["processed"] + row["dead"] for row in shown["depth"]] == [20, 20]
    assert shown["ages"] == []
    names = {"report.txt", "depth.png", "attempts.png", "latency.png", "reasons.png"}
    assert {path.name for path in report.iterdir()} == names
    assert all(path.stat().st_size > 100 for path in report.iterdir())
    assert "depth" in (report / "report.txt").read_text()
    left = stats.queue_stats(queue.connection, queue.settings)
    assert (left.depth, left.in_flight, left.dead_letters) == (0, 0, 2)


@pytest.mark.breadth
def test_an_aggregate_of_text_files(spark, make_queue, tmp_path, monkeypatch):
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    queue = make_queue(1)
    queue.send('{"id": 1, "name": "a, b"}', '{"id": 2}')
    out = tmp_path / "rows"
    where = ["--bootstrap", queue.connection.bootstrap, "--zookeeper", queue.zookeeper.hosts]
    line = ["pipeline", queue.name, *where, "--root", queue.connection.root, "--out", str(out)]
    line += ["--schema", "id long, name string", "--format", "csv", "--option", "header=true"]
    line += ["--aggregate", "select max(name) name, sum(id) total, count(id) ids from rows"]
    done = CliRunner().invoke(kmq, line, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (row,) = spark.read.csv(f"{out}-aggregate", header=True).collect()
    assert tuple(row) == ("a, b", "3", "2")


def test_an_aggregate_of_nothing_has_its_row(spark, tmp_path):
    sink, schema = Sink(path=str(tmp_path / "rows"), format="csv"), "id long, name string"
    connection = KafkaConnection(bootstrap="127.0.0.1:1")
    # As a pipeline does before the first row.
    target_of(sink, connection).check(spark, with_origin(parse_schema(spark, schema)))
    path = write_aggregate(spark, sink, schema, "select max(name) name, count(id) ids from rows", connection)
    assert [tuple(row) for row in spark.read.csv(path).collect()] == [(None, "0")]


def test_a_sink_with_rows_of_another_queue(spark, make_queue, tmp_path):
    queue, sink = make_queue(1), Sink(path=str(tmp_path / "rows"))
    target_of(sink, queue.connection).bind("others", "id")
    with pytest.raises(ConfigError, match="has rows of queue 'others'"):
        run_pipeline(spark, queue.settings, queue.connection, schema="id int", sink=sink)


@pytest.mark.breadth
def test_a_pipeline_whose_checkpoint_is_refused_stops_no_other(spark, make_queue, tmp_path):
    queue, path, folder = make_queue(1), str(tmp_path / "rows"), str(tmp_path / "checkpoint")
    take_over(place_of(path), "running")
    checkpoint.bind_checkpoint(spark, folder, "others", "id")
    sink = Sink(path=path, checkpoint=folder)
    with pytest.raises(ConfigError, match="belongs to queue 'others'"):
        run_pipeline(spark, queue.settings, queue.connection, schema="id int", sink=sink)
    check_owner(place_of(path), "running")


@pytest.mark.breadth
@pytest.mark.parametrize("signalled", [True, False])
def test_the_command_when_its_jvm_goes_first(spark, tmp_path, monkeypatch, signalled):
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    monkeypatch.setattr("kmqpy.cli.spark._stop_signal", lambda: lambda: signalled)
    monkeypatch.setattr("kmqpy.kafka.settings_mirror.settings_of", lambda name, _: QueueSettings(name=name))

    def gone(*_, **__):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(pipeline, "dead_letters", lambda *_: 0)
    monkeypatch.setattr(pipeline, "run_pipeline", gone)
    line = ["pipeline", "q", "--schema", "id int", "--out", str(tmp_path), "--follow"]
    done = CliRunner().invoke(kmq, line)
    assert done.exit_code == (0 if signalled else 1)
    assert ("will be redelivered" if signalled else "Spark: ") in done.output


@pytest.mark.parametrize("how", ["follow", pytest.param("drain", marks=pytest.mark.breadth)])
def test_a_stop_lets_the_running_batch_end(spark, make_queue, tmp_path, how):
    """Else its messages would stay in flight until their leases end."""
    queue = make_queue(1)
    queue.send(*(str(number) for number in range(20)))
    begun, asked, told = tmp_path / "begun", tmp_path / "asked", []

    def slowly(frame):
        begun.touch()
        while not asked.exists():
            time.sleep(0.05)
        return frame.assign(body=frame["value"].str.decode("utf-8"))

    ended = run_pipeline(
        spark,
        queue.settings,
        queue.connection,
        schema="body string",
        sink=Sink(path=str(tmp_path / "rows")),
        function=slowly,
        stop=lambda: begun.exists() and (asked.touch() or True),
        progress=told.append,
        **{how: True},
    )
    assert not ended
    left = stats.queue_stats(queue.connection, queue.settings)
    assert (left.depth, left.in_flight) == (0, 0)
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 20
    assert told[0].messages == 0
    assert told[-1].messages == 20


def test_the_command_says_what_a_run_that_was_stopped_has_left(spark, make_queue, tmp_path, monkeypatch):
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    monkeypatch.setattr("kmqpy.cli.spark._stop_signal", lambda: lambda: True)
    monkeypatch.setattr(pipeline, "run_pipeline", lambda *_, **__: False)
    queue = make_queue(1)
    queue.send("a", "b")
    where = ["--bootstrap", queue.connection.bootstrap, "--zookeeper", queue.zookeeper.hosts]
    line = ["pipeline", queue.name, *where, "--root", queue.connection.root, "--schema", "id int"]
    done = CliRunner().invoke(kmq, [*line, "--out", str(tmp_path / "rows"), "--follow"])
    assert done.exit_code == 0, done.output
    assert "The queue holds: 2 waiting, 0 in flight, 0 dead letters" in done.output


def test_a_topic_is_a_sink(spark, make_queue, queue_name, tmp_path):
    queue, target = make_queue(1), make_queue(1, f"{queue_name}-target")
    queue.send('{"key": "a", "n": 1}', '{"n": 2}')
    sink = Sink(path=target.name, format="kafka", checkpoint=str(tmp_path / "ck"))
    assert run_pipeline(spark, queue.settings, queue.connection, schema="key string, n int", sink=sink)
    found = KmqSpark(spark, queue.connection, target.settings).read().orderBy("offset").collect()
    assert [(row["key"], json.loads(row["value"])) for row in found] == [
        (b"a", {"key": "a", "n": 1}),
        (None, {"n": 2}),
    ]
    headers = {header["key"]: bytes(header["value"]) for header in found[0]["headers"]}
    assert headers == {"original_partition": b"0", "original_offset": b"0", "original_row": b"0"}


@pytest.mark.breadth
def test_files_are_named_by_day_and_batch(spark, make_queue, tmp_path):
    queue = make_queue(1)
    queue.send(*(json.dumps({"n": n, "day": f"2026-01-0{1 + n % 2}"}) for n in range(8)))
    sink = Sink(path=str(tmp_path / "rows"), partition_by=("day",))
    assert run_pipeline(
        spark, queue.settings, queue.connection, schema="n int, day date", sink=sink, max_batch=4
    )
    assert {path.parent.name for path in (tmp_path / "rows").rglob("*.parquet")} == {
        "day=2026-01-01",
        "day=2026-01-02",
    }
    assert {path.name.split("-")[2] for path in (tmp_path / "rows").rglob("*.parquet")} == {
        "000000000",
        "000000001",
    }


@pytest.mark.breadth
def test_without_a_tracker_it_says_what_is_left(spark, make_queue, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "_STALL_TIMEOUT_S", 0.5)
    queue = make_queue(1)
    queue.producer().send("broken")
    sink = Sink(path=str(tmp_path / "rows"))
    with pytest.raises(Unfinished, match=r"1 messages in flight .* is a tracker running"):
        run_pipeline(spark, queue.settings, queue.connection, schema="id int", sink=sink, drain=True)
    found = health(KmqSpark(spark, queue.connection, queue.settings))
    assert found.tables["ages"][["state", "messages"]].to_numpy().tolist() == [["overdue", 1]]
    assert "ages.png" in {path.name for path in found.save(tmp_path / "report")}


def test_an_invalid_schema_is_refused(spark, make_queue, tmp_path):
    queue = make_queue(1)
    sink = Sink(path=str(tmp_path / "rows"))
    with pytest.raises(ConfigError, match="schema: invalid schema 'id is long': write it like"):
        run_pipeline(spark, queue.settings, queue.connection, schema="id is long", sink=sink)


def test_an_aggregate_that_cant_be_run_is_refused_first(spark):
    with pytest.raises(ConfigError, match=r"aggregate: 'select nope from rows' can't be run: .*nope"):
        check_aggregate(spark, "id int", "select nope from rows")
    check_aggregate(spark, "id int", "select sum(id) from rows")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--function", "nonsense"], "--function nonsense: write it as module:name"),
        (["--function", "json:nope"], "--function json:nope: write it as module:name"),
        (["--drain", "--follow"], "--drain and --follow: give one of them"),
        (["--follow", "--report", "r"], "--aggregate and --report: these need the end"),
        (["--master", "local", "--remote", "sc://h"], "--master and --remote: give one of them"),
        (["--option", "x"], "--option: 'x': write it as key=value"),
        (["--format", "excel"], "format: unknown sink 'excel': use parquet, orc, json, csv, delta"),
        (["--format", "jdbc"], "unsupported URL of a database"),
        (["--format", "kafka"], "checkpoint: name a folder"),
        (
            ["--format", "kafka", "--aggregate", "x"],
            "--aggregate: only for files and Delta tables, not for kafka",
        ),
        (["--conf", "x"], "--conf: 'x': write it as key=value"),
        (["--conf", "executor.memory=1g"], "--conf executor.memory: is not a setting of Spark"),
        (["--max-batch", "0"], "--max-batch"),
        (["--trigger", "soon"], "--trigger"),
    ],
)
def test_bad_use_is_refused(more, expected):
    done = CliRunner().invoke(kmq, ["pipeline", "q", "--schema", "id int", "--out", "o", *more])
    assert done.exit_code != 0
    assert expected in (done.output + str(done.exception))


@pytest.mark.breadth
def test_it_goes_on_behind_messages_that_were_purged(spark, make_queue, tmp_path, monkeypatch):
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    queue = make_queue(1)
    where = ["--bootstrap", queue.connection.bootstrap, "--zookeeper", queue.zookeeper.hosts]
    where += ["--root", queue.connection.root]
    line = ["pipeline", queue.name, *where, "--schema", "id long", "--out", str(tmp_path / "rows")]

    def pipeline():
        done = CliRunner().invoke(kmq, line, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stderr

    queue.send('{"id": 0}')
    assert "deleted" not in pipeline()
    queue.send('{"id": 1}', '{"id": 2}', '{"id": 3}')
    purged = CliRunner().invoke(kmq, ["purge", queue.name, *where, "--yes"])
    assert purged.exit_code == 0, purged.output
    queue.send('{"id": 4}')
    assert "3 messages were deleted" in pipeline()
    assert [row["id"] for row in spark.read.parquet(str(tmp_path / "rows")).orderBy("id").collect()] == [0, 4]
    assert "deleted" not in pipeline()


def test_the_command_prints_the_cause_of_a_failure(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    monkeypatch.setattr("kmqpy.kafka.settings_mirror.settings_of", lambda name, _: QueueSettings(name=name))
    monkeypatch.setattr(pipeline, "dead_letters", lambda *_: 0)

    def fail(*_, **__):
        raise StreamingQueryException(
            "Query terminated: " + "x" * 600 + "\nCaused by: java.io.IOException: full"
        )

    monkeypatch.setattr(pipeline, "run_pipeline", fail)
    done = CliRunner().invoke(kmq, ["pipeline", "q", "--schema", "id int", "--out", str(tmp_path)])
    assert done.exit_code != 0
    assert "Spark: IOException: full" in done.output


@pytest.mark.breadth
@pytest.mark.parametrize("by_function", [False, pytest.param(True, marks=pytest.mark.breadth)])
def test_values_that_a_sink_cant_hold_are_refused_and_the_batch_goes_on(
    spark, make_queue, tmp_path, by_function
):
    queue = make_queue(1)
    bodies = [
        rb'{"day": "__HIVE_DEFAULT_PARTITION__"}',
        json.dumps({"day": "x" * 252}).encode(),
        b'{"day": null}',
    ]
    bodies += [b'{"day": "a"}', rb'{"day": "\ud800"}', *([] if by_function else [b'{"day": "\xff"}'])]
    for body in bodies:
        queue.producer().send(body)
    function = (
        (lambda frame: frame.assign(day=frame["value"].map(lambda one: json.loads(one)["day"])))
        if by_function
        else None
    )
    sink = Sink(path=str(tmp_path / "rows"), partition_by=("day",))
    assert run_pipeline(
        spark, queue.settings, queue.connection, schema="day string", sink=sink, function=function
    )
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {
        "day=a",
        "day=__HIVE_DEFAULT_PARTITION__",
    }
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 2
    # A function's text that is no text may be another one the next time.
    assert pipeline.dead_letters(queue.connection, queue.settings) == (2 if by_function else 4)


@pytest.mark.breadth
def test_texts_with_u0000_are_refused_and_postgresql_gets_the_others(
    spark, make_queue, database_url, tmp_path
):
    queue = make_queue(1)
    for body in (rb'{"name": "a"}', rb'{"name": "b\u0000"}', rb'{"name": "c"}'):
        queue.producer().send(body)
    user, _, host = database_url("postgresql").partition("postgresql://")[2].rpartition("@")
    sink = Sink(
        path=f"jdbc:postgresql://{host}",
        format="jdbc",
        checkpoint=str(tmp_path / "checkpoint"),
        options={"table": "names", "user": user},
    )
    assert run_pipeline(spark, queue.settings, queue.connection, schema="name string", sink=sink)
    with psycopg.connect(database_url("postgresql")) as there:
        assert there.execute("SELECT name FROM names ORDER BY name").fetchall() == [("a",), ("c",)]
        with pytest.raises(psycopg.DataError, match="NUL"):
            there.execute("SELECT %s::text", ["b\0"])
    assert pipeline.dead_letters(queue.connection, queue.settings) == 1


@pytest.mark.breadth
def test_a_sink_has_each_message_of_all_lanes_once(spark, make_queue, tmp_path):
    queue, sink = make_queue(1), Sink(path=str(tmp_path / "rows"))

    def run():
        run_pipeline(spark, queue.settings, queue.connection, schema="id int", sink=sink)
        found = spark.read.parquet(sink.path).collect()
        return sorted((row["id"], row["original_partition"], row["original_offset"]) for row in found)

    queue.send('{"id": 0}', '{"id": 1}')
    assert run() == [(0, 0, 0), (1, 0, 1)]
    with Admin(queue.connection, queue.zookeeper) as admin:
        queue.settings = admin.alter_queue(queue.name, retry_lane=True, priorities=2)
    queue.send('{"id": 2}')
    queue.send('{"id": 10}', '{"id": 11}', priority=1)
    with stopped_after(queue.tracker()), queue.client() as client:
        client.nack(*collect(client, 3))  # so there are copies, of messages at offsets that the sink has
        until(lambda: len(queue.records(f"{queue.name}__retry")) >= 3)
    expected = [(0, 0, 0), (1, 0, 1), (2, 0, 2), (10, 100_000_000, 0), (11, 100_000_000, 1)]
    assert run() == expected
    assert settled(queue)
    delete_topic(queue.topics, f"{queue.name}__priority1")
    make_topic(queue.topics, f"{queue.name}__priority1")
    with pytest.raises(ConfigError, match=r"of a lane '.*__priority1' whose topic was deleted"):
        run()
