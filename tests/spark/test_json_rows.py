"""Bodies that are JSON become rows, or are refused with a reason."""

import datetime as dt
import json
from decimal import Decimal

import pytest
from pyspark.sql import functions as sf

from kmqpy.errors import ConfigError
from kmqpy.spark.json_rows import check_readable, with_fields, with_refusals
from kmqpy.spark.process import parse_schema

SCHEMA = (
    "id long, at timestamp, day date, price decimal(8,2), tags array<string>, place struct<x: double, n: int>"
)
WHOLE = {
    "id": 2**60,
    "at": "2026-01-02T03:04:05.123456+01:00",
    "day": "2026-02-28",
    "price": 123456.78,
    "tags": ["a", "b"],
    "place": {"x": 1.5, "n": 7},
}


def read(spark, schema, *bodies):
    fields = parse_schema(spark, schema)
    given = spark.createDataFrame([(n, body) for n, body in enumerate(bodies)], "n int, value binary")
    found = with_fields(with_refusals(given, fields).withColumn("why", sf.col("refused")), fields)
    return [row.asDict() for row in found.orderBy("n").collect()]


def test_values_of_any_type(spark):
    (row,) = read(spark, SCHEMA, json.dumps(WHOLE).encode())
    assert row.pop("why") is None
    assert row["place"].asDict() == {"x": 1.5, "n": 7}
    row.pop("place")
    assert row == {
        "n": 0,
        "id": 2**60,
        "at": dt.datetime(2026, 1, 2, 2, 4, 5, 123456),  # noqa: DTZ001 # as collect() shows it, in UTC
        "day": dt.date(2026, 2, 28),
        "price": Decimal("123456.78"),
        "tags": ["a", "b"],
    }


def test_what_is_refused_and_why(spark):
    refused = {
        "id is no bigint": [{"id": 1.5}, {"id": "1"}, {"id": True}, {"id": 2**70}],
        "at is no timestamp": [{"at": "yesterday"}],
        "day is no date": [{"day": "2026-02-30"}, {"day": 20260228}],
        "price is no decimal(8,2)": [{"price": 1234567}],
        "tags is no array<string>": [{"tags": "a"}],
        "place is no struct<x:double,n:int>": [{"place": {"n": "x"}}, {"place": 3}],
        "id is no bigint, day is no date": [{"id": [], "day": "x"}],
    }
    expected = {
        json.dumps(b).encode(): f"not of the schema: {w}" for w, ones in refused.items() for b in ones
    }
    deep = b"[" * 100_000
    broken = [
        b"\xff",
        deep,
        b'{"id": ' + deep,
        b"",
        b"broken",
        b"5",
        b"null",
        b"[]",
        b'[{"id": 1}]',
        b'{"id": 1} {"id": 2}',
        b'{"id": 1,}',
        None,
    ]
    expected |= dict.fromkeys(broken, "not a JSON object")
    rows = read(spark, SCHEMA, *expected)
    assert [row["why"] for row in rows] == list(expected.values())


def test_what_is_missing_null_or_more_is_no_mistake(spark):
    rows = read(
        spark, "id long, `a'b` string", b"{}", b'{"id": null, "other": 1}', b'{"id": 3, "a\'b": {"x": 1}}'
    )
    assert [(row["id"], row["a'b"], row["why"]) for row in rows] == [
        (None, None, None),
        (None, None, None),
        (3, '{"x":1}', None),
    ]


def test_types_that_json_has_not_are_refused_first(spark):
    check_readable(spark, parse_schema(spark, SCHEMA))
    with pytest.raises(ConfigError, match="schema: JSON has no such values"):
        check_readable(spark, parse_schema(spark, "id long, m map<int, string>"))
