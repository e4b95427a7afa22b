"""Turns bodies that are JSON objects into rows of a schema, with Spark's from_json.

Spark judges each body before its message is processed, and makes the row afterwards. In between, Python sees
the body unchanged, and the reason why it can't become a row. So Python converts no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kmqpy.errors import ConfigError
from kmqpy.spark.checkpoint import error_line
from kmqpy.spark.functions import ERROR, REJECT
from kmqpy.spark.sinks.limits import Limit, Test, holds, is_infinite, somewhere

BODY_SCHEMA = "value binary"
"""The schema of the rows that PassBodies returns."""

_REFUSAL = "refused"
"""The column with the reason why a body can't become a row; null where it can."""
_CORRUPT = "_kmq_corrupt"
_PARSED, _OBJECTS = "_kmq_parsed", "_kmq_objects"
"""Columns while reasons are found: what several conditions ask for, Spark parses for each unless it is a
column."""
_NO_OBJECT = "not a JSON object"
_NO_NUMBER = "not JSON, which has no NaN and no Infinity"
_NO_UTF8 = "not UTF-8"
_NO_TEXT = "lone surrogates are no text"
_OTHER_SCHEMA = "not of the schema"
_NOT_FOR_SINK = "not for the sink"
_OPTIONS = {"timeZone": "UTC"}
"""Times without a zone are UTC, whatever the session has."""

_SURROGATE = r"\\u[dD][89a-fA-F]"
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE = f"{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}"
"""A surrogate that belongs to no pair, where no backslash is escaped by another one."""
_BAD_BYTES = "\ufffd"
"""Stands for each sequence of bytes that is no UTF-8."""

_YEARS = "0001-01-01", "9999-12-31 23:59:59.999999"
_SECONDS = -62_135_596_800, 253_402_300_799
"""The same range as seconds since 1970: other numbers are no timestamps (ms, for example)."""


def check_readable(spark: SparkSession, schema: StructType) -> None:
    """Raise ConfigError unless from_json can make rows of this schema."""
    try:
        one = spark.range(1).select(F.lit("{}").alias("value"))
        assert with_fields(with_refusals(one, schema), schema).columns  # Connect analyses it only now
    except (PySparkException, Py4JError) as error:
        raise ConfigError(f"schema: JSON has no such values: {error_line(error)}") from None


def with_refusals(df: DataFrame, schema: StructType, limits: Iterable[Limit] = ()) -> DataFrame:
    """`df` with a column that says why its `value` can't become a row of this schema; null where it can.

    limits  of the sink for the row's values
    """
    text, row = F.col("value").cast("string"), F.col(_PARSED)
    times = [field for field in schema if holds(field.dataType, (TimestampType,))]
    texts = F.from_json(text, StructType([StructField(one.name, _with_texts(one.dataType)) for one in times]))
    unreadable = _listed(schema, _mismatch, lambda field: _parsed(text, [field])[_CORRUPT].isNotNull())
    beyond = _listed(schema, _mismatch, lambda field: _is_beyond(row, texts, field))
    bytes_ = _listed(schema, _name, lambda field: _differs(text, field, _BAD_BYTES))
    surrogates = _listed(schema, _name, lambda field: _differs(text, field, _LONE))
    unholdable = F.concat_ws(", ", *(F.when(one.broken(row[one.column]), one.reason) for one in limits))
    no_object = F.when(~_is_one(_objects(text, {})), _NO_OBJECT).otherwise(_with(_NO_NUMBER, beyond))
    reason = (
        F.when(~_is_one(F.col(_OBJECTS)), no_object)
        .when(~F.is_valid_utf8(text), _with(_NO_UTF8, bytes_))
        .when(row[_CORRUPT].isNotNull(), _with(_OTHER_SCHEMA, unreadable))
        .when(beyond != "", _with(_OTHER_SCHEMA, beyond))
        .when(text.rlike(_SURROGATE) & (surrogates != ""), _with(_NO_TEXT, surrogates))
        .when(unholdable != "", _with(_NOT_FOR_SINK, unholdable))
    )
    parsed = {
        _PARSED: _parsed(text, schema.fields),
        _OBJECTS: _objects(text, {"allowNonNumericNumbers": "false"}),
    }
    return df.withColumns(parsed).withColumn(_REFUSAL, reason).drop(*parsed)


def with_fields(bodies: DataFrame, schema: StructType) -> DataFrame:
    """`bodies` with the fields of its JSON objects instead of the column `value`."""
    others = [name for name in bodies.columns if name not in ("value", _REFUSAL)]
    row = F.from_json(F.col("value").cast("string"), schema.toNullable(), _OPTIONS).alias("value")
    return bodies.select(row, *others).select("value.*", *others)


@dataclass(frozen=True)
class PassBodies:
    """A function for KmqSpark.process: hands bodies on unchanged; rejects those that can't become rows."""

    def __call__(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the bodies of a frame of messages, with the reasons of with_refusals()."""
        found = frame[["value"]].copy()
        found[ERROR] = frame[_REFUSAL]
        found[REJECT] = frame[_REFUSAL].notna()
        return found


def _objects(text: Column, options: Mapping[str, str]) -> Column:
    """The JSON objects of a text, without their fields."""
    # from_json ignores text after an object, but not within brackets.
    bracketed = F.concat(F.lit("["), text, F.lit("]"))
    some = StructType([StructField(_CORRUPT, StringType())])
    return F.from_json(bracketed, ArrayType(some), options)


def _is_one(objects: Column) -> Column:
    return F.coalesce((F.size(objects) == 1) & objects[0].isNotNull(), F.lit(False))  # noqa: FBT003


def _listed(
    schema: StructType, word: Callable[[StructField], str], test: Callable[[StructField], Column]
) -> Column:
    """The words for the fields that pass the test, with commas; empty if none does."""
    return F.concat_ws(", ", *(F.when(test(field), word(field)) for field in schema))


def _name(field: StructField) -> str:
    return field.name


def _with(reason: str, columns: Column) -> Column:
    """The reason, and behind it the columns, if there are some."""
    return F.concat_ws(": ", F.lit(reason), F.when(columns != "", columns))


def _is_beyond(row: Column, texts: Column, field: StructField) -> Column:
    """True where the field has a number that JSON has not, or a time that is not of the years 1 to 9999."""

    def not_within(first: Column, last: Column) -> Test:
        return lambda time: (time < first) | (time > last)

    value, kind = row.getField(field.name), field.dataType
    found = somewhere(value, kind, (FloatType, DoubleType), is_infinite)
    begin, end = (F.timestamp_micros(F.lit(second * 10**6)) for second in (_SECONDS[0], _SECONDS[1] + 1))
    found = found | somewhere(value, kind, (TimestampType,), lambda time: (time < begin) | (time >= end))
    if holds(kind, (TimestampType,)):
        found = found | _is_beyond_number(texts, field)
    for times in (TimestampNTZType, DateType):
        first, last = (F.lit(text).cast("timestamp_ntz").cast(times()) for text in _YEARS)
        found = found | somewhere(value, kind, (times,), not_within(first, last))
    return found


def _is_beyond_number(texts: Column, field: StructField) -> Column:
    """True where the field has a number for a timestamp that is too large: Spark's result is any time."""
    return somewhere(
        texts.getField(field.name),
        field.dataType,
        (TimestampType,),
        lambda text: text.rlike("^-?[0-9]+$") & ~text.try_cast("long").between(*_SECONDS),
    )


def _with_texts(kind: DataType) -> DataType:
    """The type with texts for all values that are none of other values."""
    if isinstance(kind, ArrayType):
        return ArrayType(_with_texts(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(StringType(), _with_texts(kind.valueType))
    if isinstance(kind, StructType):
        return StructType([StructField(one.name, _with_texts(one.dataType)) for one in kind])
    return StringType()


def _differs(text: Column, field: StructField, pattern: str) -> Column:
    """True where the field's value depends on what stands in the text in place of the pattern."""
    # \u005c is a backslash, too: behind it no escape begins.
    plain = F.regexp_replace(F.make_valid_utf8(text), r"\\\\", r"\\u005c")
    one, other = (
        F.to_json(F.from_json(F.regexp_replace(plain, pattern, letter), StructType([field]).toNullable()))
        for letter in "AB"
    )
    return F.coalesce(one != other, F.lit(False))  # noqa: FBT003


def _parsed(text: Column, fields: Sequence[StructField]) -> Column:
    """The fields of a JSON object; _CORRUPT is null where each value has the type of its field."""
    wanted = StructType([*fields, StructField(_CORRUPT, StringType())]).toNullable()
    return F.from_json(text, wanted, {**_OPTIONS, "columnNameOfCorruptRecord": _CORRUPT})


def _mismatch(field: StructField) -> str:
    return f"{field.name} is not of type {field.dataType.simpleString()}"
