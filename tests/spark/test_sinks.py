"""Sinks of the pipeline: each row once, whatever comes again. Kafka is not needed for that."""

import json
import math

import pandas as pd
import pyarrow.dataset
import pytest
from pyspark import cloudpickle

from kmqpy.errors import ConfigError, Unavailable
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.spark.process import parse_schema
from kmqpy.spark.sinks import NAMES, checkpoint_of, files, target_of
from kmqpy.spark.sinks.origin import WithOrigin, with_copy, with_origin
from kmqpy.spark.sinks.target import Sink

SCHEMA = "id int, name string"
NOWHERE = KafkaConnection(bootstrap="127.0.0.1:1")


def batch_of(spark, ids, *, copied=False, partitions=2, rows=1):
    made = [(n, f"name {(n + row) % 2}", 0, n, row, copied) for n in ids for row in range(rows)]
    return spark.createDataFrame(made, with_copy(parse_schema(spark, SCHEMA))).repartition(partitions)


def made(spark, sink):
    target = target_of(sink, NOWHERE)
    target.check(spark, with_origin(parse_schema(spark, SCHEMA)))
    return target


def ids_in(spark, target):
    return sorted(row["id"] for row in target.read(spark, with_origin(parse_schema(spark, SCHEMA))).collect())


@pytest.mark.parametrize(
    "form", ["parquet", *(pytest.param(form, marks=pytest.mark.breadth) for form in ("orc", "json", "csv"))]
)
def test_any_reader_of_files_sees_each_row_once(spark, tmp_path, form):
    out = tmp_path / "all rows, 100%20"
    target = made(spark, Sink(path=str(out), format=form))
    target.write(batch_of(spark, range(10)), 0, "a")
    target.write(batch_of(spark, range(10)), 0, "a")  # the driver died before Spark knew of it
    target.write(batch_of(spark, range(8, 22), copied=True), 1, "a")  # of which two were written
    if form == "parquet":
        target.write(batch_of(spark, []), 2, "a")
        target.write(batch_of(spark, range(22, 24)), 0, "b")  # the first one of a new checkpoint
    assert ids_in(spark, target) == list(range(24 if form == "parquet" else 22))
    others = [path for path in out.rglob("*") if path.is_file() and not path.name.startswith("kmq-")]
    assert others == []
    assert {path.name for path in tmp_path.iterdir()} == {out.name, f"{out.name}.kmq"}
    if form == "parquet":
        assert sorted(pyarrow.dataset.dataset(str(out)).to_table()["id"].to_pylist()) == list(range(24))


@pytest.mark.breadth
def test_a_death_while_files_are_moved(spark, tmp_path, monkeypatch):
    out = tmp_path / "rows"
    target = made(spark, Sink(path=str(out), partition_by=("name",), file_bytes=200))
    target.write(batch_of(spark, range(5)), 0, "a")
    place = type(target)._place(target)
    moved = []

    class Dying:
        def __getattr__(self, name):
            return getattr(place.system, name)

        def move(self, source, to):
            if len(moved) == 2:
                raise OSError(5, "gone")
            moved.append(to)
            place.system.move(source, to)

    def die(rows, number):
        moved.clear()
        with monkeypatch.context() as patch:
            patch.setattr(type(target), "_place", lambda _: type(place)(Dying(), place.uri, place.root))
            with pytest.raises(Unavailable, match="gone"):
                target.write(rows, number, "a")

    die(batch_of(spark, range(5, 12)), 1)
    assert any("name=" in path for path in moved)
    target.write(batch_of(spark, range(5, 11)), 1, "a")  # one was redelivered meanwhile
    assert ids_in(spark, target) == list(range(11))
    assert {path.name for path in out.iterdir()} == {"name=name 0", "name=name 1"}

    # Only one row of a message was moved. The next pipeline must not take that for the whole message.
    die(batch_of(spark, [11], rows=2), 2)
    target.write(batch_of(spark, [11], rows=2, copied=True), 0, "b")
    assert ids_in(spark, target) == [*range(11), 11, 11]


@pytest.mark.breadth
def test_a_list_of_files_of_an_older_kmqpy(spark, tmp_path):
    """It says nothing of whether the files were moved; their messages may be acknowledged."""
    target = made(spark, Sink(path=str(tmp_path / "rows")))
    target.write(batch_of(spark, range(3)), 0, "a")
    last = tmp_path / "rows.kmq" / "last.json"
    told = json.loads(last.read_text())
    last.write_text(json.dumps({name: told[name] for name in ("run", "batch", "files", "row_bytes")}))
    target.write(batch_of(spark, [3]), 1, "a")
    assert ids_in(spark, target) == list(range(4))


@pytest.mark.breadth
@pytest.mark.parametrize(("number", "copied"), [(0, False), (1, True)])
def test_rows_that_were_there_already_hardly_change_the_size_of_a_row(spark, tmp_path, number, copied):
    """One row of nine is written. If its bytes were divided by nine, the next files would be too large."""
    target = made(spark, Sink(path=str(tmp_path / "rows")))
    last = tmp_path / "rows.kmq" / "last.json"
    target.write(batch_of(spark, range(8)), 0, "a")
    measured = json.loads(last.read_text())["row_bytes"]
    target.write(batch_of(spark, range(9), copied=copied), number, "a")
    assert ids_in(spark, target) == list(range(9))
    assert json.loads(last.read_text())["row_bytes"] >= measured // 2


@pytest.mark.parametrize("form", ["parquet", pytest.param("delta", marks=pytest.mark.breadth)])
def test_two_pipelines_in_one_folder(spark, tmp_path, form):
    target = made(spark, Sink(path=str(tmp_path / "rows"), format=form))
    target.take_over("a")
    target.write(batch_of(spark, [0]), 0, "a")
    target.take_over("b")
    with pytest.raises(ConfigError, match="a pipeline with another checkpoint was started there; run one"):
        target.write(batch_of(spark, [1]), 1, "a")
    target.write(batch_of(spark, [2]), 0, "b")
    assert ids_in(spark, target) == [0, 2]


@pytest.mark.breadth
def test_a_folder_that_another_pipeline_takes_while_files_are_moved(spark, tmp_path, monkeypatch):
    """It may have removed them, so that their messages must not be acknowledged."""
    target = made(spark, Sink(path=str(tmp_path / "rows")))
    noted = files.replace_file

    def taken_over(system, path, data):
        noted(system, path, data)
        if b'"moved": false' in data:
            target.take_over("b")

    monkeypatch.setattr(files, "replace_file", taken_over)
    with pytest.raises(ConfigError, match="a pipeline with another checkpoint was started there; run one"):
        target.write(batch_of(spark, [0, 1]), 0, "a")
    monkeypatch.undo()
    target.write(batch_of(spark, [0, 1, 2]), 0, "b")
    assert ids_in(spark, target) == [0, 1, 2]


@pytest.mark.breadth
def test_a_folder_that_another_pipeline_takes_while_the_last_files_are_looked_up(
    spark, tmp_path, monkeypatch
):
    """The list of the files that it moves must not be taken for that of a driver that died."""
    target = made(spark, Sink(path=str(tmp_path / "rows")))
    found = files._object_in

    def overtaken(system, path):
        if path.endswith("last.json"):
            monkeypatch.undo()
            target.take_over("b")
            target.write(batch_of(spark, [0, 1]), 0, "b")
            return {**found(system, path), "moved": False}
        return found(system, path)

    monkeypatch.setattr(files, "_object_in", overtaken)
    with pytest.raises(ConfigError, match="a pipeline with another checkpoint was started there; run one"):
        target.write(batch_of(spark, [2]), 0, "a")
    assert ids_in(spark, target) == [0, 1]


@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_a_micro_batch_of_a_number_that_was_written(spark, tmp_path, form):
    """Nothing of it may be left out but what is there: its messages are acknowledged afterwards."""
    target = made(spark, Sink(path=str(tmp_path / "rows"), format=form))
    other_numbers_than_written(spark, target)
    (tmp_path / "rows.kmq" / "begun-a.json").unlink(missing_ok=True)
    target.write(batch_of(spark, [90]), 1, "a")
    assert ids_in(spark, target) == [*range(9), 90]


def other_numbers_than_written(spark, target):
    target.write(batch_of(spark, [0, 1]), 0, "a")
    target.write(batch_of(spark, [2, 3]), 1, "a")  # and the driver dies
    target.write(batch_of(spark, [2, 3, 4]), 1, "a")  # the function had failed for the last one
    target.write(batch_of(spark, [5, 6]), 1, "a")  # of an old copy of the checkpoint, as are those below
    target.write(batch_of(spark, [1, 7]), 0, "a")
    target.write(batch_of(spark, [3, 8]), 1, "a")
    assert ids_in(spark, target) == list(range(9))


@pytest.mark.breadth
def test_files_have_the_size_that_is_aimed_at(spark, tmp_path):
    def files(size):
        out = tmp_path / str(size)
        target = made(spark, Sink(path=str(out), file_bytes=size))
        target.write(batch_of(spark, range(400), partitions=8), 0, "a")
        target.write(batch_of(spark, range(400, 800), partitions=8), 1, "a")
        return len(list(out.glob("*-000000001-*")))

    assert files(2**20) == 1
    assert files(2_000) > 2


def test_a_table_of_sqlite(spark, tmp_path):
    sink = Sink(path=f"jdbc:sqlite:{tmp_path}/rows.db", format="jdbc", options={"table": "all rows"})
    target = made(spark, sink)
    _upserts(spark, target)


def test_a_table_of_postgresql(spark, database_url):
    _, _, where = database_url("postgresql").partition("postgresql://")
    user, _, host = where.rpartition("@")
    options = {"table": "public.Rows of Spark", "user": user}
    target = made(spark, Sink(path=f"jdbc:postgresql://{host}", format="jdbc", options=options))
    _upserts(spark, target)


def _upserts(spark, target):
    for _ in range(2):
        target.bind("jobs", "id")
    target.write(batch_of(spark, range(10)), 0, "a")
    target.write(batch_of(spark, range(10)), 0, "a")
    target.write(batch_of(spark, range(8, 20), copied=True), 1, "a")
    assert ids_in(spark, target) == list(range(20))


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        ({"format": "excel", "checkpoint": "c"}, f"format: unknown sink 'excel': use {', '.join(NAMES)}"),
        (
            {"format": "jdbc", "checkpoint": "c"},
            "use jdbc:postgresql:… or jdbc:sqlite:…",
        ),
        ({"format": "jdbc", "path": "jdbc:sqlite:x", "checkpoint": "c"}, "which table"),
        (
            {
                "path": "jdbc:postgresql:x",
                "format": "jdbc",
                "options": {"table": f"a.{'t' * 58}"},
                "checkpoint": "c",
            },
            "PostgreSQL cuts names",
        ),
        ({"format": "kafka"}, "checkpoint: name a folder"),
        ({"path": "nope://x/y"}, "out: 'nope://x/y' can't be used"),
        ({"partition_by": ("nope",)}, "partition by: no column 'nope'"),
        ({"partition_by": ("id",), "format": "kafka", "checkpoint": "c"}, "a topic has no folders"),
        ({"options": {"compression": "nope"}}, "out: .* can't be used: .*nope"),
        (
            {
                "path": "jdbc:sqlite:/nope/x.db",
                "format": "jdbc",
                "options": {"table": "t"},
                "checkpoint": "c",
            },
            "out: ",
        ),
    ],
)
def test_bad_sinks(spark, tmp_path, sink, expected):
    given = Sink(**{"path": str(tmp_path / "rows"), **sink})

    def use():
        checkpoint_of(given)
        made(spark, given)

    with pytest.raises((ConfigError, Unavailable), match=expected):
        use()


@pytest.mark.breadth
def test_a_folder_with_files_of_others(spark, tmp_path):
    spark.range(3).write.parquet(str(tmp_path / "theirs"))
    with pytest.raises(ConfigError, match="not a parquet file of a pipeline; name an empty or a new folder"):
        made(spark, Sink(path=str(tmp_path / "theirs")))
    made(spark, Sink(path=str(tmp_path / "ours"))).write(batch_of(spark, [1]), 0, "a")
    with pytest.raises(ConfigError, match="not a csv file of a pipeline"):
        made(spark, Sink(path=str(tmp_path / "ours"), format="csv"))


@pytest.mark.parametrize("form", ["parquet", "delta", "jdbc", "kafka"])
def test_a_place_with_rows_of_another_queue(tmp_path, form):
    """They can't be told from copies, so a sink would leave them out, and they would be acknowledged."""
    path = f"jdbc:sqlite:{tmp_path}/rows.db" if form == "jdbc" else str(tmp_path / "rows")
    target = target_of(Sink(path=path, format=form, options={"table": "all rows"}), NOWHERE)
    for _ in range(2):
        target.bind("jobs", "id")
    if form == "kafka":  # where rows have no place of their own, and none is left out
        target.bind("others", "id")
        return
    for _ in range(2):
        target.bind("jobs__priority1", "id-1", "__priority1")
        target.bind("jobs", "id")
    with pytest.raises(ConfigError, match=r"rows.*' has rows of queue 'jobs', not of 'others'; name another"):
        target.bind("others", "id")
    with pytest.raises(ConfigError, match="of a lane 'jobs__priority1' whose topic was deleted"):
        target.bind("jobs__priority1", "id-2", "__priority1")
    with pytest.raises(ConfigError, match="of a queue 'jobs' whose topic was deleted and recreated since"):
        target.bind("jobs", "id 2")


@pytest.mark.parametrize("told", ["", "[]", '{"queue": 5}'])
def test_a_note_that_somebody_has_changed(tmp_path, told):
    target = target_of(Sink(path=str(tmp_path / "rows")), NOWHERE)
    target.bind("jobs", "id")
    (tmp_path / "rows.kmq" / "queue.json").write_text(told)
    with pytest.raises(ConfigError, match=r"holds no JSON object; somebody has changed it|of queue '5'"):
        target.bind("jobs", "id")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("{}", "files: {} does not begin with kmq-a-000000001-"),
        ('["name=x/../../kmq-a-000000001-b"]', "does not begin with kmq-a-000000001-"),
        ('["part-0.parquet"]', "does not begin with kmq-a-000000001-"),
        ("", "holds no JSON object"),
    ],
)
def test_a_list_of_files_that_somebody_has_changed(spark, tmp_path, files, expected):
    """Its files are removed."""
    target = made(spark, Sink(path=str(tmp_path / "rows")))
    (tmp_path / "rows.kmq" / "last.json").write_text(f'{{"run": "a", "batch": 1, "files": {files}}}')
    with pytest.raises(ConfigError, match=expected):
        target.write(batch_of(spark, [1]), 1, "a")


@pytest.mark.parametrize("kind", ["struct<a:int>", "map<string,int>", "array<int>"])
def test_columns_that_a_database_has_not(spark, tmp_path, kind):
    target = target_of(
        Sink(path=f"jdbc:sqlite:{tmp_path}/x.db", format="jdbc", options={"table": "t"}), NOWHERE
    )
    with pytest.raises(ConfigError, match="schema: column 'c': a table of jdbc:sqlite:… can't hold"):
        target.check(spark, parse_schema(spark, f"c {kind}"))


@pytest.mark.parametrize(
    ("sink", "kind", "bad", "why"),
    [
        ({"format": "jdbc", "path": "jdbc:postgresql://h/d"}, "array<string>", ["a", "b\0"], "U+0000"),
        ({"format": "json"}, "struct<x: array<double>>", {"x": [1.0, math.inf]}, "no infinite numbers"),
        ({"format": "kafka"}, "map<string, float>", {"a": -math.inf}, "no infinite numbers"),
        ({"partition_by": ("value",)}, "string", "__HIVE_DEFAULT_PARTITION__", "the folder of null"),
        ({"partition_by": ("value",), "format": "delta"}, "string", "=" * 84, "more than 255 bytes"),
    ],
)
def test_values_of_functions_that_a_sink_cant_hold(spark, tmp_path, sink, kind, bad, why):
    field = "value" if sink.get("partition_by") else "v"
    schema = parse_schema(spark, f"{field} {kind}, other string")
    given = Sink(**{"path": str(tmp_path), "options": {"table": "t"}, **sink})
    limits = target_of(given, NOWHERE).limits(schema)

    def function(frame):
        return frame.assign(**{field: [None, bad, bad], "other": "o", "kmq_error": [None, None, "mine"]})

    places = {"partition": 0, "offset": range(3), "original_partition": 0, "original_offset": range(3)}
    frame = pd.DataFrame(places, index=pd.RangeIndex(3, name="kmq_row"))
    found = cloudpickle.loads(cloudpickle.dumps(WithOrigin(function, limits)))(frame)
    none, reason, mine = found["kmq_error"]
    assert none is None
    assert reason.startswith(f"{field}: ")
    assert why in reason
    assert mine == "mine"
    assert [one is True for one in found["kmq_reject"]] == [False, True, False]


@pytest.mark.breadth
def test_the_longest_folder(spark, tmp_path):
    target = target_of(Sink(path=str(tmp_path / "rows"), partition_by=("name",)), NOWHERE)
    target.check(spark, with_origin(parse_schema(spark, SCHEMA)))
    limits = target.limits(parse_schema(spark, SCHEMA))
    special = "".join(map(chr, range(1, 256)))
    texts = ["x" * 250, "\u00fc" * 125, "=" * 83 + "x", *(special[at : at + 40] for at in range(0, 255, 40))]
    for number, text in enumerate(texts):
        rows = [(1, text, 0, number, 0, False)]
        assert not any(limit.breaks(text) for limit in limits)
        target.write(spark.createDataFrame(rows, with_copy(parse_schema(spark, SCHEMA))), number, "a")
        (file,) = (tmp_path / "rows").glob(f"*/kmq-a-{number:09d}-*.parquet")
        folder = file.parent
        escaped = len(folder.name.encode()) - len("name=")
        longest = text + "x" * (250 - escaped)
        assert not any(limit.breaks(longest) for limit in limits)
        assert any(limit.breaks(longest + "x") for limit in limits)
