"""Which values are taken for a column of which type: the same for frames and for rows, and as documented."""

import re
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructType,
    TimeType,
)

from kmqpy.spark.values import RULES, NotOfSchema, array_of, as_column, converted

DOCS = Path(__file__).parents[2] / "docs" / "spark.md"
NEW_YORK = ZoneInfo("America/New_York")
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
LATE = datetime(2026, 1, 1, 23, tzinfo=NEW_YORK)
NAIVE = NOON.replace(tzinfo=None)
DAY = date(2026, 1, 2)


class Named(NamedTuple):
    b: str
    a: int


TYPES = {
    "int": IntegerType(),
    "array<int>": ArrayType(IntegerType()),
    "array<long>": ArrayType(LongType()),
    "array<string>": ArrayType(StringType()),
    "interval": DayTimeIntervalType(),
    "map<string,long>": MapType(StringType(), LongType()),
    "struct<a:long,b:string>": StructType().add("a", "long").add("b", "string"),
    "struct<a:struct<b:long>>": StructType().add("a", StructType().add("b", "long")),
    "void": NullType(),
}


def kind_of(name):
    """A type, and its Arrow type."""
    schema = StructType().add("c", TYPES.get(name, name))
    return schema[0].dataType, to_arrow_schema(schema, timezone="UTC")[0].type


def from_frame(values, ddl, dtype=object):
    return as_column("c", pd.Series(values, dtype=dtype), *kind_of(ddl)).to_pylist()


def from_rows(values, ddl):
    kind, arrow = kind_of(ddl)
    return array_of("c", [converted("c", value, kind) for value in values], kind, arrow).to_pylist()


@pytest.fixture(params=[from_frame, from_rows], ids=["frame", "rows"])
def column(request):
    return request.param


TAKEN = [
    (True, "boolean", True),
    (np.False_, "boolean", False),
    (1, "long", 1),
    (1.0, "long", 1),
    (Decimal(2), "int", 2),
    (np.int16(3), "long", 3),
    (np.float32(4), "short", 4),
    (0.5, "float", 0.5),
    (3, "double", 3.0),
    (float("inf"), "double", float("inf")),
    (Decimal("1.50"), "decimal(5,2)", Decimal("1.50")),
    (7, "decimal(5,2)", Decimal("7.00")),
    ("a", "string", "a"),
    (b"a", "binary", b"a"),
    (bytearray(b"a"), "binary", b"a"),
    (DAY, "date", DAY),
    (NAIVE.replace(hour=0), "date", DAY),
    (pd.Timestamp(2026, 1, 2), "date", DAY),
    (NOON, "timestamp", NOON),
    (NAIVE, "timestamp", NOON),
    (pd.Timestamp(LATE), "timestamp", LATE),
    (np.datetime64("2026-01-02T12:00"), "timestamp", NOON),
    (NAIVE, "timestamp_ntz", NAIVE),
    (timedelta(seconds=1), "interval", timedelta(seconds=1)),
    (np.timedelta64(1, "s"), "interval", timedelta(seconds=1)),
    ([1, None, 2.0, float("nan")], "array<long>", [1, None, 2, None]),
    (np.array([1, 2]), "array<long>", [1, 2]),
    (("a",), "array<string>", ["a"]),
    ({"a": 1}, "map<string,long>", [("a", 1)]),
    ([("a", None)], "map<string,long>", [("a", None)]),
    ({"a": 1, "b": "x", "c": 0}, "struct<a:long,b:string>", {"a": 1, "b": "x"}),
    (Row(b="x", a=1), "struct<a:long,b:string>", {"a": 1, "b": "x"}),
    (Named("x", 1), "struct<a:long,b:string>", {"a": 1, "b": "x"}),
    ((1, None), "struct<a:long,b:string>", {"a": 1, "b": None}),
]

REFUSED = [
    (1, "boolean"),
    ("true", "boolean"),
    (True, "long"),
    (1.9, "long"),
    (Decimal("1.5"), "long"),
    (float("inf"), "long"),
    ("5", "long"),
    (NOON, "long"),
    (pd.Timestamp(NAIVE), "long"),
    (np.datetime64("2026-01-02"), "long"),
    (2**70, "long"),
    (300, "byte"),
    (True, "double"),
    ("0.5", "double"),
    (Decimal("0.5"), "double"),
    (2**53 + 1, "double"),
    (1e300, "float"),
    (0.5, "decimal(5,2)"),
    (Decimal("1.234"), "decimal(5,2)"),
    (Decimal(12345), "decimal(5,2)"),
    (5, "string"),
    (b"a", "string"),
    ("a", "binary"),
    (5, "binary"),
    (LATE, "date"),
    (NAIVE, "date"),
    ("2026-01-02", "date"),
    (1, "date"),
    (1_700_000_000, "timestamp"),
    ("2026-01-02", "timestamp"),
    (DAY, "timestamp"),
    (pd.Timestamp(1, unit="ns"), "timestamp"),
    (datetime(1, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo")), "timestamp"),
    (NOON, "timestamp_ntz"),
    (pd.Timestamp(NOON), "timestamp_ntz"),
    (5, "interval"),
    (pd.Timedelta(1, unit="ns"), "interval"),
    ("abc", "array<string>"),
    (b"abc", "array<int>"),
    ({"a": 1}, "array<string>"),
    ([1, 1.5], "array<long>"),
    ({"a": 1.5}, "map<string,long>"),
    ({None: 1}, "map<string,long>"),
    (["a"], "map<string,long>"),
    (5, "map<string,long>"),
    ({"a": 1, "bb": "x"}, "struct<a:long,b:string>"),
    (Row(a=1), "struct<a:long,b:string>"),
    ((1,), "struct<a:long,b:string>"),
    ([1, "x"], "struct<a:long,b:string>"),
    ({"a": {"b": 1.5}}, "struct<a:struct<b:long>>"),
    (5, "void"),
]


def beside_null(value, null=None):
    values = np.empty(2, dtype=object)  # pandas would make a row of each element of an array
    values[0], values[1] = value, null
    return values


@pytest.mark.parametrize(("value", "ddl", "made"), TAKEN)
@pytest.mark.parametrize(
    "null", [None, float("nan"), pd.NA, pd.NaT, Decimal("NaN"), np.datetime64("NaT", "ns")]
)
def test_taken_beside_null(column, value, ddl, made, null):
    assert column(beside_null(value, null), ddl) == [made, None]


@pytest.mark.parametrize(("value", "ddl"), REFUSED)
def test_refused_with_the_column_and_its_type(column, value, ddl):
    with pytest.raises(NotOfSchema) as raised:
        column(beside_null(value), ddl)
    kind = kind_of(ddl)[0]
    names = [kind.simpleString(), "bigint", "void"]  # or those of the part that does not fit
    assert re.match(r"c[\w.\[\]]*( key)?: (.* is )?not of type ", str(raised.value))
    assert any(name in str(raised.value) for name in names)


def test_times_of_day():
    assert converted("c", time(12), TimeType()) == time(12)
    with pytest.raises(NotOfSchema, match="is not of type time"):
        converted("c", NAIVE, TimeType())


@pytest.mark.parametrize(
    ("values", "ddl", "made"),
    [
        (pd.array([True, None], "boolean"), "boolean", [True, None]),
        (pd.array([1, None], "Int64"), "long", [1, None]),
        (np.array([1.0, np.nan]), "long", [1, None]),
        (np.array([1, 2]), "double", [1.0, 2.0]),
        (np.array([0.1, np.nan]), "double", [0.1, None]),
        (np.array([1, 2]), "decimal(5,2)", [Decimal(1), Decimal(2)]),
        (pd.array(["a", None], "string"), "string", ["a", None]),
        (pd.Categorical(["a", None]), "string", ["a", None]),
        (pd.to_datetime(["2026-01-02", None]), "date", [DAY, None]),
        (pd.to_datetime(["2026-01-02T12:00", None]), "timestamp", [NOON, None]),
        (pd.to_datetime(["2026-01-02T12:00", None]), "timestamp_ntz", [NAIVE, None]),
        (pd.DatetimeIndex([LATE]), "timestamp", [LATE]),
        (pd.to_timedelta(["1s", None]), "interval", [timedelta(seconds=1), None]),
        (np.array([np.nan, np.nan]), "string", [None, None]),
        (np.array([np.nan, np.nan]), "timestamp", [None, None]),
    ],
)
def test_columns_of_pandas_types_that_are_taken(values, ddl, made):
    assert from_frame(values, ddl, dtype=None) == made


@pytest.mark.parametrize(
    ("values", "ddl"),
    [
        (np.array([1, 0]), "boolean"),
        (np.array([1.0, 0.0]), "boolean"),
        (np.array([True]), "long"),
        (np.array([1.5, np.nan]), "long"),
        (pd.to_datetime(["2026-01-02"]), "long"),
        (pd.DatetimeIndex([LATE]), "long"),
        (np.array([2**53 + 1]), "double"),
        (np.array([1e300, 1.0]), "float"),
        (np.array([1.5]), "decimal(5,2)"),
        (np.array([1]), "string"),
        (np.array([1.5, np.nan]), "binary"),
        (np.array([1_700_000_000]), "timestamp"),
        (pd.DatetimeIndex([NOON]), "timestamp_ntz"),
        (pd.DatetimeIndex([LATE]), "date"),
        (pd.to_datetime(["2026-01-02T12:00"]), "date"),
        (pd.to_datetime([1], unit="ns"), "timestamp"),
        (np.array([1]), "interval"),
        (pd.Categorical([1, 2]), "string"),
    ],
)
def test_columns_of_pandas_types_that_are_refused(values, ddl):
    with pytest.raises(NotOfSchema, match=f"^c: .*not of type {re.escape(kind_of(ddl)[0].simpleString())}"):
        from_frame(values, ddl, dtype=None)


def test_the_documentation_has_the_table():
    text = DOCS.read_text()
    for rule in RULES:
        types = ", ".join(f"`{name}`" for name in rule.names)
        assert f"| {types} | {rule.values} |" in text
