"""What is written is the same on every machine: UTC, and timestamps that other readers understand."""

import datetime as dt
import sqlite3

import pyarrow.parquet
import pytest

from kmqpy.kafka.settings import KafkaConnection
from kmqpy.spark import state_table
from kmqpy.spark.json_rows import with_fields, with_refusals
from kmqpy.spark.pipeline import write_aggregate
from kmqpy.spark.portable import SETTINGS
from kmqpy.spark.process import parse_schema
from kmqpy.spark.sinks import target_of
from kmqpy.spark.sinks.origin import with_copy, with_origin
from kmqpy.spark.sinks.target import Sink

NOWHERE = KafkaConnection(bootstrap="127.0.0.1:1")
SCHEMA = "at timestamp, day timestamp"
SUMMER = dt.datetime(2026, 7, 1, 12, 30, 0, 123456, tzinfo=dt.UTC)
LAST = dt.datetime(9999, 12, 31, 23, 0, tzinfo=dt.UTC)


@pytest.fixture
def elsewhere(spark):
    """The session as in New York, with Spark's own type of timestamps in Parquet files."""
    here = {
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.parquet.outputTimestampType": "INT96",
    }
    before = {name: spark.conf.get(name) for name in here}
    zones = spark._jvm.java.util.TimeZone
    zone = zones.getDefault()
    zones.setDefault(zones.getTimeZone("America/New_York"))
    for name, value in here.items():
        spark.conf.set(name, value)
    yield spark
    assert {name: spark.conf.get(name) for name in here} == here
    zones.setDefault(zone)
    for name, value in before.items():
        spark.conf.set(name, value)


def written(spark, sink):
    target = target_of(sink, NOWHERE)
    schema = parse_schema(spark, SCHEMA)
    target.check(spark, with_origin(schema))
    rows = [(LAST, SUMMER, 0, 0, 0, False), (SUMMER, SUMMER, 0, 1, 0, False)]
    target.write(spark.createDataFrame(rows, with_copy(schema)), 0, "a")
    found = target.read(spark, with_origin(schema)).selectExpr("unix_micros(at)", "unix_micros(day)")
    wanted = {(round(LAST.timestamp() * 10**6), round(SUMMER.timestamp() * 10**6))}
    wanted.add((round(SUMMER.timestamp() * 10**6),) * 2)
    assert {tuple(row) for row in found.collect()} == wanted
    return target


@pytest.mark.parametrize(
    "form",
    ["parquet", "json", *(pytest.param(form, marks=pytest.mark.breadth) for form in ("delta", "orc", "csv"))],
)
def test_files(elsewhere, tmp_path, form):
    out = tmp_path / "rows"
    options = {"header": "true"} if form == "csv" else {}
    written(elsewhere, Sink(path=str(out), format=form, partition_by=("day",), options=options))
    files = [
        path for path in out.rglob(f"*.{form if form != 'delta' else 'parquet'}*") if path.name[0] != "."
    ]
    if form != "delta":
        assert {path.parent.name for path in files} == {"day=2026-07-01 12%3A30%3A00.123456"}
    data = [path for path in files if "_delta_log" not in path.parts]
    assert data
    if form in ("parquet", "delta"):
        for path in data:
            file = pyarrow.parquet.ParquetFile(path)
            assert {column.physical_type for column in file.schema} <= {"INT32", "INT64"}
        values = [one for path in data for one in pyarrow.parquet.ParquetFile(path).read()["at"].to_pylist()]
        assert sorted(values) == [SUMMER, LAST]
    if form in ("json", "csv"):
        text = "".join(path.read_text() for path in data)
        assert "2026-07-01T12:30:00.123456Z" in text


def test_an_aggregate(elsewhere, tmp_path):
    sink = Sink(path=str(tmp_path / "rows"))
    written(elsewhere, sink)
    path = write_aggregate(elsewhere, sink, SCHEMA, "select max(at) at, max(hour(day)) h from rows", NOWHERE)
    table = pyarrow.parquet.read_table(path)
    assert (table["at"].to_pylist(), table["h"].to_pylist()) == ([LAST], [12])


def test_a_table_of_sqlite(elsewhere, tmp_path):
    written(
        elsewhere,
        Sink(path=f"jdbc:sqlite:{tmp_path}/rows.db", format="jdbc", options={"table": "t"}),
    )
    with sqlite3.connect(tmp_path / "rows.db") as connection:
        found = connection.execute("select at from t order by at").fetchall()
    assert found == [("2026-07-01 12:30:00.123456",), ("9999-12-31 23:00:00",)]


def test_a_table_of_postgresql(elsewhere, database_url):
    _, _, where = database_url("postgresql").partition("postgresql://")
    user, _, host = where.rpartition("@")
    options = {"table": "times", "user": user}
    written(elsewhere, Sink(path=f"jdbc:postgresql://{host}", format="jdbc", options=options))


def test_times_without_a_zone_in_bodies_are_utc(elsewhere):
    schema = parse_schema(elsewhere, "at timestamp, times array<timestamp>")
    body = b'{"at": "2026-07-01T12:30:00.123456", "times": ["2026-07-01 12:30:00.123456"]}'
    given = elsewhere.createDataFrame([(body,)], "value binary")
    found = with_fields(with_refusals(given, schema), schema)
    (row,) = found.selectExpr("unix_micros(at) at", "unix_micros(times[0]) first").collect()
    assert tuple(row) == (round(SUMMER.timestamp() * 10**6),) * 2


def test_the_state_table_has_no_timestamps(spark):
    assert "timestamp" not in state_table._COLUMNS
    assert all(spark.conf.isModifiable(name) for name in SETTINGS)
