"""Bodies that are JSON become rows, or are refused with a reason."""

import datetime as dt
import json
from decimal import Decimal

import pytest
from pyspark.sql import functions as sf

from kmqpy.errors import ConfigError
from kmqpy.spark.json_rows import check_readable, with_fields, with_refusals
from kmqpy.spark.process import parse_schema
from kmqpy.spark.sinks.limits import folder_limits, no_nul

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


def reasons(spark, schema, *bodies, limits=()):
    given = spark.createDataFrame([(n, body) for n, body in enumerate(bodies)], "n int, value binary")
    found = with_refusals(given, parse_schema(spark, schema), limits).orderBy("n")
    return [row["refused"] for row in found.select("refused").collect()]


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
        "id is not of type bigint": [{"id": 1.5}, {"id": "1"}, {"id": True}, {"id": 2**70}],
        "at is not of type timestamp": [{"at": "yesterday"}],
        "day is not of type date": [{"day": "2026-02-30"}, {"day": 20260228}],
        "price is not of type decimal(8,2)": [{"price": 1234567}],
        "tags is not of type array<string>": [{"tags": "a"}],
        "place is not of type struct<x:double,n:int>": [{"place": {"n": "x"}}, {"place": 3}],
        "id is not of type bigint, day is not of type date": [{"id": [], "day": "x"}],
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


VALUES = (
    "name string, x double, f float, at timestamp, day date, m map<string, string>, tags array<string>, "
    "times array<timestamp>"
)
NULL = "__HIVE_DEFAULT_PARTITION__"
NO_NUMBER = "not JSON, which has no NaN and no Infinity"


def test_values_that_spark_would_change_silently(spark):
    expected = {
        b'{"name": "a\xffb", "tags": ["b"]}': "not UTF-8: name",
        b'{"name": "\xed\xa0\x80"}': "not UTF-8: name",
        b'{"other": "\xff"}': "not UTF-8",
        rb'{"name": "\ud800", "tags": ["b"]}': "lone surrogates are no text: name",
        rb'{"tags": ["a", "\ude00\ud83d"]}': "lone surrogates are no text: tags",
        rb'{"m": {"\ud83d": "a"}, "name": "\\\ud83d\ude00"}': "lone surrogates are no text: m",
        rb'{"name": "\\\\ud83d \ud83d\ude00", "other": "\ud83d"}': None,
        b'{"x": NaN}': f"{NO_NUMBER}: x is not of type double",
        b'{"x": -Infinity, "name": 1}': f"{NO_NUMBER}: x is not of type double",
        b'{"name": {"x": NaN}}': NO_NUMBER,
        b'{"x": "NaN"}': "not of the schema: x is not of type double",
        b'{"x": 1e999, "f": 1e39}': "not of the schema: x is not of type double, f is not of type float",
        b'{"at": 1764250000}': None,
        b'{"at": 1764250000000}': "not of the schema: at is not of type timestamp",
        b'{"at": 9223372036854775807}': "not of the schema: at is not of type timestamp",
        b'{"at": 1764250000.5}': "not of the schema: at is not of type timestamp",
        b'{"times": ["2026-01-01T00:00:00Z", -9223372036854775808]}': (
            "not of the schema: times is not of type array<timestamp>"
        ),
        b'{"at": "+10000-01-01T00:00:00Z"}': "not of the schema: at is not of type timestamp",
        b'{"day": "+10000-01-01"}': "not of the schema: day is not of type date",
        b'{"at": "9999-12-31T23:59:59.999999Z", "day": "0001-01-01"}': None,
    }
    assert reasons(spark, VALUES, *expected) == list(expected.values())


def test_values_that_a_sink_cant_hold(spark):
    schema = parse_schema(spark, VALUES)
    limits = (*no_nul(schema), *folder_limits(schema, ["name"]))
    expected = {
        rb'{"name": "a\u0000b"}': "name: PostgreSQL's texts have no U+0000",
        rb'{"tags": ["a", "\u0000"]}': "tags: PostgreSQL's texts have no U+0000",
        rb'{"m": {"\u0000": "a"}}': "m: PostgreSQL's texts have no U+0000",
        json.dumps({"name": NULL}).encode(): f"name: {NULL!r} names the folder of null",
        json.dumps({"name": "x" * 251}).encode(): "name: names a folder by more than 255 bytes",
        json.dumps({"name": "\u00fc" * 126}).encode(): "name: names a folder by more than 255 bytes",
        json.dumps({"name": "=" * 84}).encode(): "name: names a folder by more than 255 bytes",
        json.dumps({"name": "x" * 250, "tags": []}).encode(): None,
        json.dumps({"name": "=" * 83}).encode(): None,
        b'{"name": null, "tags": null}': None,
    }
    assert reasons(spark, VALUES, *expected, limits=limits) == [
        why and f"not for the sink: {why}" for why in expected.values()
    ]
