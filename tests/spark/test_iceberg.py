"""Iceberg tables of a SQLite catalog: each row once, for pyiceberg and Arrow. Kafka is not needed."""

import datetime as dt
import sys
from datetime import date
from pathlib import Path

import pyarrow.dataset
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.types import LongType, NestedField, StringType

from kmqpy.cli.app import run
from kmqpy.errors import ConfigError, MissingExtra, Unavailable
from kmqpy.spark.process import parse_schema
from kmqpy.spark.sinks import target_of
from kmqpy.spark.sinks.origin import with_copy, with_origin
from kmqpy.spark.sinks.target import Sink
from tests.spark.test_sinks import NOWHERE, batch_of, ids_in, made, other_numbers_than_written


@pytest.fixture
def options(tmp_path):
    folder = tmp_path / "all of it"
    folder.mkdir()
    return {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}


def sink_of(catalog, **more):
    return Sink(**{"path": "shop.rows", "format": "iceberg", "options": catalog, "checkpoint": "c", **more})


def table_of(options):
    return load_catalog("default", **options).load_table("shop.rows")


def test_each_row_once(spark, options):
    target = made(spark, sink_of(options))
    target.write(batch_of(spark, range(10)), 0, "a")
    target.write(batch_of(spark, range(10)), 0, "a")  # the driver died before Spark knew of it
    target.write(batch_of(spark, range(8, 22), copied=True), 1, "a")  # of which two were written
    target.write(batch_of(spark, []), 2, "a")
    made(spark, sink_of(options)).write(batch_of(spark, range(22, 24)), 0, "b")  # of a new checkpoint
    table = table_of(options)
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(24))
    assert ids_in(spark, target) == list(range(24))
    files = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
    assert sorted(pyarrow.dataset.dataset(files).to_table()["id"].to_pylist()) == list(range(24))
    told = [(one.summary["kmq.run"], one.summary["kmq.batch"]) for one in table.snapshots()]
    assert told == [("a", "0"), ("a", "1"), ("b", "0")]


@pytest.mark.breadth
def test_a_death_between_files_and_commit_and_commits_of_others(spark, options, monkeypatch):
    target = made(spark, sink_of(options))
    tries = []

    def dying(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "commit_transaction", dying)
        with pytest.raises(KeyboardInterrupt):
            target.write(batch_of(spark, range(9)), 0, "a")
    assert ids_in(spark, target) == []
    commit = Transaction.commit_transaction

    def second(transaction):
        tries.append(transaction)
        if len(tries) == 1:
            raise CommitFailedException("somebody was first")
        return commit(transaction)

    monkeypatch.setattr(Transaction, "commit_transaction", second)
    target.write(batch_of(spark, range(5)), 0, "a")
    assert ids_in(spark, target) == list(range(5))
    assert tries_of(options, "a", 0) == 1  # what the dead one had written is deleted
    tries.clear()
    monkeypatch.setattr(Transaction, "commit_transaction", lambda _: tries.append(1) or _fail())
    with pytest.raises(Unavailable, match=r"out: Iceberg table 'shop\.rows': somebody was first"):
        target.write(batch_of(spark, range(5, 9)), 1, "a")
    assert len(tries) > 1


def at_its_commit(monkeypatch, other):
    """Have the next commit come after `other`, as that of a driver does that was thought dead."""
    commit = Transaction.commit_transaction

    def late(transaction):
        monkeypatch.setattr(Transaction, "commit_transaction", commit)
        other()
        return commit(transaction)

    monkeypatch.setattr(Transaction, "commit_transaction", late)


def tries_of(options, run, number):
    """How many tries to write a micro-batch have left a folder."""
    data = Path(table_of(options).location().removeprefix("file://")) / "data"
    return len(list((data / f"kmq-{run}-{number:09d}").glob("*")))


def test_two_drivers_with_one_micro_batch(spark, options, monkeypatch):
    target = made(spark, sink_of(options))
    rows = batch_of(spark, range(5))
    at_its_commit(monkeypatch, lambda: target.write(rows, 0, "a"))
    target.write(rows, 0, "a")
    assert ids_in(spark, target) == list(range(5))
    assert tries_of(options, "a", 0) == 1


@pytest.mark.parametrize("is_first_a_copy", [True, pytest.param(False, marks=pytest.mark.breadth)])
def test_two_runs_with_one_message(spark, options, monkeypatch, is_first_a_copy):
    """It was redelivered while the one that had it was late."""
    target = made(spark, sink_of(options))
    target.write(batch_of(spark, range(90, 95)), 0, "a")
    first = batch_of(spark, range(5), copied=is_first_a_copy)
    second = batch_of(spark, range(3, 9), copied=not is_first_a_copy)
    at_its_commit(monkeypatch, lambda: target.write(first, 0, "b"))
    target.write(second, 1, "a")
    assert ids_in(spark, target) == [*range(9), *range(90, 95)]
    target.write(batch_of(spark, range(4)), 0, "c")  # the others were first
    assert ids_in(spark, target) == [*range(9), *range(90, 95)]
    assert [tries_of(options, *which) for which in (("a", 1), ("b", 0))] == [1, 1]


@pytest.mark.breadth
def test_files_that_may_be_in_use_are_not_deleted(spark, options, monkeypatch):
    target = made(spark, sink_of(options))
    monkeypatch.setattr(Transaction, "commit_transaction", lambda _: _fail())
    with pytest.raises(Unavailable):
        target.write(batch_of(spark, range(5)), 0, "a")
    monkeypatch.undo()
    folder = Path(table_of(options).location().removeprefix("file://")) / "data" / "kmq-a-000000000"
    (folder / "of others").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Table, "snapshots", lambda _: [])  # they have expired
        target.write(batch_of(spark, range(5)), 0, "a")
        assert tries_of(options, "a", 0) == 3
    target.write(batch_of(spark, range(5)), 0, "a")
    assert tries_of(options, "a", 0) == 2
    assert ids_in(spark, target) == list(range(5))


@pytest.mark.breadth
def test_files_of_a_number_that_was_written_twice_stay_when_its_first_snapshot_has_expired(
    spark, options, monkeypatch
):
    target = made(spark, sink_of(options))
    target.write(batch_of(spark, [0]), 0, "a")
    snapshots = Table.snapshots
    with monkeypatch.context() as patch:
        patch.setattr(Table, "snapshots", lambda table: snapshots(table)[-1:])
        target.write(batch_of(spark, [0, 1]), 0, "a")
    assert tries_of(options, "a", 0) == 2
    assert ids_in(spark, target) == [0, 1]


@pytest.mark.breadth
def test_a_micro_batch_of_a_number_that_was_written(spark, options):
    target = made(spark, sink_of(options))
    other_numbers_than_written(spark, target)
    before = len(table_of(options).snapshots())
    for value in ("x", "-1", "1" * 5_000, "7"):  # somebody has changed it
        with table_of(options).transaction() as transaction:
            transaction.set_properties({"kmq.batch.a": value})
        target.write(batch_of(spark, [7, 8]), 2, "a")
    assert len(table_of(options).snapshots()) == before
    target.write(batch_of(spark, [8, 9]), 2, "a")
    assert ids_in(spark, target) == list(range(10))


def test_a_table_with_rows_of_another_queue(spark, options):
    target = made(spark, sink_of(options))
    for _ in range(2):
        target.bind("jobs", "id")
    with pytest.raises(ConfigError, match=r"'shop\.rows' has rows of queue 'jobs', not of 'others'"):
        target.bind("others", "id")


def _fail():
    raise CommitFailedException("somebody was first")


def test_types_and_partitions(spark, options):
    schema = (
        "name string, day date, at timestamp, plain timestamp_ntz, small byte, price decimal(10, 2), "
        "tags array<string>, part struct<a: int>, counts map<string, long>, raw binary, fine boolean"
    )
    values = "named_struct('a', 1) part, map('k', 2L) counts, cast('b' as binary) raw, true fine"
    rows = spark.sql(
        "select if(id = 3, null, concat('n ', id % 2)) name, date '2026-11-25' day, "
        "timestamp '2026-11-25 01:02:03.000004' at, timestamp_ntz '1850-01-01 00:00:00' plain, "
        f"cast(1 as byte) small, 1.50BD price, array('x', null) tags, {values}, "
        "0 original_partition, id original_offset, 0L original_row, false original_copied from range(6)"
    )
    rows = rows.to(with_copy(parse_schema(spark, schema)))
    target = target_of(sink_of(options, partition_by=("name", "day")), NOWHERE)
    for number in range(2):  # the second finds the table
        target.check(spark, with_origin(parse_schema(spark, schema)))
        target.write(rows, number, "a")
    table = table_of(options)
    found = table.scan(row_filter="name = 'n 1' and day = '2026-11-25'").to_arrow().to_pylist()
    assert len(found) == 4
    assert (found[0]["at"].microsecond, found[0]["plain"].year, found[0]["day"]) == (
        4,
        1850,
        date(2026, 11, 25),
    )
    assert (found[0]["tags"], found[0]["part"], found[0]["counts"]) == (["x", None], {"a": 1}, [("k", 2)])
    assert len(list(table.scan(row_filter="name = 'n 0'").plan_files())) == 2
    assert len(list(table.scan(row_filter="name is null").plan_files())) == 2
    assert "kmq_folder" not in str(table.schema())
    assert (
        target.read(spark, with_origin(parse_schema(spark, schema))).select("name", "at").distinct().count()
        == 3
    )


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"path": "rows"}, "out: 'rows' names no Iceberg table; write it as namespace.table"),
        ({"path": "shop..rows"}, r"out: Iceberg table 'shop\.\.rows': .*empty"),
        ({"options": {}}, "out: Iceberg table 'shop.rows': URI missing"),
        ({"options": {"uri": "sqlite:////nope/x.db"}}, "out: .*unable to open database file"),
        ({"options": {"uri": "http://127.0.0.1:1"}}, "out: .*Connection refused"),
        ({"options": {"type": "nope"}}, "out: .*'nope' is not a valid CatalogType"),
        ({"partition_by": ("nope",)}, "partition by: no column 'nope'"),
        ({"options": {"warehouse": "file:///proc/nope"}}, "out: Iceberg table 'shop.rows': "),
    ],
)
def test_bad_tables(spark, options, more, expected):
    if "warehouse" in more.get("options", {}):
        more = {"options": {**options, **more["options"]}}
    with pytest.raises(ConfigError, match=expected) as caught:
        made(spark, sink_of(options, **more))
    assert "\n" not in str(caught.value)


def test_tables_of_others_that_do_not_fit(spark, options):
    catalog = load_catalog("default", **options)
    catalog.create_namespace("shop")
    target = target_of(sink_of(options), NOWHERE)

    def refused(schema, fields, expected):
        catalog.create_table("shop.rows", Schema(*fields))
        with pytest.raises(ConfigError, match=expected):
            target.check(spark, parse_schema(spark, schema))
        catalog.drop_table("shop.rows")

    long, name = NestedField(1, "id", LongType()), NestedField(2, "name", StringType(), required=True)
    refused("id int", [long], "schema: column 'id': int, but table 'shop.rows' has long")
    refused("id long, more int", [long], "Could not find field with name: more")
    refused("id long", [long, name], "column 'name' is required; Spark's may be null")
    made(spark, sink_of(options, partition_by=("name",)))
    with pytest.raises(ConfigError, match=r"partition by: table 'shop\.rows' has"):
        made(spark, sink_of(options))


@pytest.mark.breadth
def test_rows_that_were_deleted(spark, options):
    """They stay known: a message that comes again is not written again; but Spark can't leave them out."""
    target = made(spark, sink_of(options))
    target.write(batch_of(spark, range(10)), 0, "a")
    table_of(options).delete("id = 3")  # pyiceberg writes the file again
    assert ids_in(spark, target) == [0, 1, 2, *range(4, 10)]


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    monkeypatch.delitem(sys.modules, "kmqpy.spark.sinks.iceberg")
    line = ["pipeline", "q", "--schema", "id int", "--out", "a.b", "--format", "iceberg", "--checkpoint", "c"]
    assert run(line) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"kmq: error: {MissingExtra('iceberg', 'Writing to Iceberg tables')}"
    ]


@pytest.mark.breadth
def test_a_session_that_writes_other_timestamps(spark, options):
    spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")  # no type of Iceberg
    try:
        target, schema = target_of(sink_of(options), NOWHERE), parse_schema(spark, "at timestamp")
        target.check(spark, with_origin(schema))
        at = dt.datetime(9999, 12, 31, tzinfo=dt.UTC)
        target.write(spark.createDataFrame([(at, 0, 0, 0, False)], with_copy(schema)), 0, "a")
        (row,) = target.read(spark, with_origin(schema)).selectExpr("unix_micros(at) at").collect()
        assert row["at"] == round(at.timestamp() * 10**6)
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
