"""The pipeline: from a queue to files, on a real Kafka with a tracker."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import stopped_after

from kmqpy import stats
from kmqpy.cli.app import kmq
from kmqpy.errors import ConfigError, Unfinished
from kmqpy.spark import KmqSpark, pipeline
from kmqpy.spark.health import health
from kmqpy.spark.pipeline import Sink, check_aggregate, run_pipeline, written

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_pipeline.py"


def test_the_command(spark, make_queue, tmp_path, monkeypatch):
    monkeypatch.setattr(type(spark), "stop", lambda _: None)  # it is everybody's
    queue = make_queue(2)
    producer = queue.producer()
    for number in range(40):
        body = "broken" if number % 20 == 7 else json.dumps({"id": number, "n": number % 3, "more": 1})
        producer.send(body, partition=number % 2)
    out, report = tmp_path / "rows", tmp_path / "report"
    where = ["--bootstrap", queue.connection.bootstrap, "--zookeeper", queue.connection.zookeeper]
    line = ["pipeline", queue.name, *where, "--root", queue.connection.root, "-o", "json", "--drain"]
    line += ["--schema", "id long, n int", "--out", str(out), "--report", str(report)]
    line += ["--aggregate", "select n, count(*) ids, sum(id) total from rows group by n"]
    with stopped_after(queue.tracker()):
        done = CliRunner().invoke(kmq, line, catch_exceptions=False)
    assert done.exit_code == 0, done.output
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


@pytest.mark.timeout(300)
def test_the_example_by_way_of_connect(spark, make_queue, tmp_path):
    queue = make_queue(4)
    out, report = tmp_path / "orders", tmp_path / "report"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KMQ_BOOTSTRAP": queue.connection.bootstrap,
        "KMQ_ZOOKEEPER": "",
        "SPARK_TESTING": "1",
    }
    command = [sys.executable, str(EXAMPLE), "--queue", queue.name, "--orders", "200", "--out", str(out)]
    command += ["--report", str(report), "--remote", "local[2]"]
    with stopped_after(queue.tracker()):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = written(spark, Sink(path=str(out))).collect()
    good = [number for number in range(200) if number % 100 != 99]
    assert sorted((row["id"], row["attempts"]) for row in rows) == [
        (number, 2 if number % 10 == 0 else 1) for number in good
    ]
    assert "no order: JSONDecodeError" in (report / "report.txt").read_text()
    customers = spark.read.parquet(f"{out}-by-customer")
    assert sum(row["orders"] for row in customers.collect()) == len(good)


def test_without_a_tracker_it_says_what_is_left(spark, make_queue, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "_PATIENCE_S", 0.5)
    queue = make_queue(1)
    queue.producer().send("broken")
    sink = Sink(path=str(tmp_path / "rows"))
    with pytest.raises(Unfinished, match=r"1 messages in flight .* is a tracker running"):
        run_pipeline(spark, queue.settings, queue.connection, schema="id int", sink=sink, drain=True)
    found = health(KmqSpark(spark, queue.connection, queue.settings))
    assert found.tables["ages"][["state", "messages"]].to_numpy().tolist() == [["overdue", 1]]
    assert "ages.png" in {path.name for path in found.save(tmp_path / "report")}


def test_a_schema_that_is_none(spark, make_queue, tmp_path):
    queue = make_queue(1)
    sink = Sink(path=str(tmp_path / "rows"))
    with pytest.raises(ConfigError, match="schema: 'id is long' is none; write it like"):
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
        (["--master", "local", "--remote", "sc://h"], "--master and --remote: give one of them"),
        (["--option", "x"], "--option: 'x': write it as key=value"),
    ],
)
def test_bad_use(more, expected):
    done = CliRunner().invoke(kmq, ["pipeline", "q", "--schema", "id int", "--out", "o", *more])
    assert done.exit_code != 0
    assert expected in (done.output + str(done.exception))
