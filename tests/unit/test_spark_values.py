"""What a user's function returned as columns; Arrow would take some values for others without a word."""

from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    DayTimeIntervalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from kmqpy.spark.values import NotOfSchema, as_column, check

MOMENT = datetime(2026, 1, 2, 3, tzinfo=UTC)


LONGS = ArrayType(LongType())
TEXTS = ArrayType(StringType())
COUNTS = MapType(StringType(), LongType())


def column(values, kind, dtype=None):
    arrow = to_arrow_type(kind, timezone="UTC")
    return as_column("c", pd.Series(values, dtype=dtype), kind, arrow).to_pylist()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1.9, LongType()),
        (-0.5, IntegerType()),
        (Decimal("1.5"), LongType()),
        (float("inf"), LongType()),
        (np.float32(1.5), ShortType()),
        ([1, 1.5], LONGS),
        (np.array([1.5]), LONGS),
        ("abc", TEXTS),
        (b"abc", ArrayType(IntegerType())),
        ({"a": 1}, TEXTS),
        ({"a": 1.5}, COUNTS),
        ([("a", 1.5)], COUNTS),
        (["a"], COUNTS),
        ({"a": {"b": 1.5}}, StructType().add("a", StructType().add("b", "long"))),
        (Row(a=1.5), StructType().add("a", "long")),
        (1_700_000_000, TimestampType()),
        (1.5, DateType()),
        (5, DayTimeIntervalType()),
        (1e300, FloatType()),
    ],
)
def test_what_would_be_changed_is_refused(value, kind):
    with pytest.raises(NotOfSchema, match=r"^c[.:].* is no "):
        column([value, None], kind, dtype=object)
    with pytest.raises(NotOfSchema):
        check("c", value, kind)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1_700_000_000], TimestampType()),
        ([1.5, None], BinaryType()),
        ([1], BinaryType()),
        ([1e300], FloatType()),
    ],
)
def test_columns_of_numbers(values, kind):
    with pytest.raises(NotOfSchema, match=r"^c: .* is no "):
        column(values, kind)


@pytest.mark.parametrize(
    ("value", "kind", "made"),
    [
        (1.0, LongType(), 1),
        (Decimal(2), IntegerType(), 2),
        (np.int16(3), LongType(), 3),
        ([1, None], LONGS, [1, None]),
        (np.array([1, 2]), LONGS, [1, 2]),
        (("a",), TEXTS, ["a"]),
        ({"a": 1}, COUNTS, [("a", 1)]),
        ({"a": 1, "x": 2}, StructType().add("a", "long").add("b", "string"), {"a": 1, "b": None}),
        (MOMENT, TimestampType(), MOMENT),
        (date(2026, 1, 2), DateType(), date(2026, 1, 2)),
        (float("inf"), DoubleType(), float("inf")),
        (0.5, FloatType(), 0.5),
        ("a", StringType(), "a"),
        (b"a", BinaryType(), b"a"),
    ],
)
@pytest.mark.parametrize("nothing", [None, float("nan"), pd.NA, pd.NaT])
def test_what_fits_is_taken_beside_nothing(value, kind, made, nothing):
    if isinstance(value, np.ndarray) or nothing is None or kind not in (DateType(), TimestampType()):
        values = pd.Series([None, nothing], dtype=object)
        values[0] = value
        assert column(values, kind) == [made, None]


def test_what_arrow_refuses_is_refused_by_the_name_of_the_column():
    with pytest.raises(NotOfSchema, match=r"^c: Arrow"):
        column(["x"], LongType())
    with pytest.raises(NotOfSchema, match=r"^c: "):
        column([Decimal("sNaN")], LongType(), dtype=object)
