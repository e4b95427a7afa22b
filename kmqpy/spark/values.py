"""Columns of what a user's function returned; refuses values that Arrow would change without a word.

Arrow takes 1.9 for a whole number (1), a number for a moment, a text for a list of its letters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Number, Real
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.types import (
    AnsiIntervalType,
    ArrayType,
    BinaryType,
    DataType,
    DatetimeType,
    FloatType,
    IntegralType,
    MapType,
    StructType,
)

from kmqpy.worker.outcome import described

_TIMES = (DatetimeType, AnsiIntervalType)
_LOOKED_AT = (IntegralType, FloatType, *_TIMES, ArrayType, MapType, StructType)
_LARGEST_FLOAT = 3.4028235677973366e38


class NotOfSchema(ValueError):
    """Raised when the values that a function returned can't be made into columns of its schema."""


def as_column(name: str, values: pd.Series, kind: DataType, arrow: pa.DataType) -> pa.Array:
    """A column of a frame; raises NotOfSchema."""
    try:
        # To pandas, a column of nothing may be one of floats; among objects Arrow finds nulls by itself.
        if values.dtype != object and values.isna().all():
            return pa.nulls(len(values), arrow)
        _check_column(name, values, kind)
        found = pa.Array.from_pandas(values, type=arrow)
    except NotOfSchema:
        raise
    except Exception as error:  # of many kinds: a number too large is an OverflowError
        raise NotOfSchema(f"{name}: {described(error)}") from error
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _check_column(name: str, values: pd.Series, kind: DataType) -> None:
    if values.dtype == object:
        if isinstance(kind, _LOOKED_AT):
            for value in values:
                check(name, value, kind)
    elif pd.api.types.is_numeric_dtype(values.dtype):  # Arrow looks at whole numbers by itself
        if isinstance(kind, (*_TIMES, BinaryType)):
            raise _refused(name, values.dropna().iloc[0], kind)
        if isinstance(kind, FloatType):
            for value in values[values.abs() > _LARGEST_FLOAT]:
                check(name, value, kind)


def check(name: str, value: Any, kind: DataType) -> None:
    """Raise NotOfSchema for a value that Arrow would change; others it refuses by itself."""
    if value is None or not isinstance(kind, _LOOKED_AT) or _is_null(value):
        return
    match kind:
        case IntegralType():
            if isinstance(value, Real | Decimal) and (not math.isfinite(value) or value % 1):
                raise _refused(name, value, kind)
        case FloatType():
            if isinstance(value, float) and math.isfinite(value) and abs(value) > _LARGEST_FLOAT:
                raise _refused(name, value, kind)
        case ArrayType():
            if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
                raise _refused(name, value, kind)
            for one in value:
                check(name, one, kind.elementType)
        case MapType():
            for key, one in value.items() if isinstance(value, Mapping) else _pairs(name, value, kind):
                check(name, key, kind.keyType)
                check(name, one, kind.valueType)
        case StructType():
            if isinstance(value, Mapping):
                for field in kind:
                    check(f"{name}.{field.name}", value.get(field.name), field.dataType)
            elif isinstance(value, tuple):
                for field, one in zip(kind, value, strict=False):
                    check(f"{name}.{field.name}", one, field.dataType)
        case _:
            if isinstance(value, Number):
                raise _refused(name, value, kind)


def _is_null(value: Any) -> bool:
    return value is pd.NA or value is pd.NaT or (isinstance(value, Number) and bool(value != value))


def _pairs(name: str, value: Any, kind: DataType) -> Iterable[tuple[Any, Any]]:
    try:
        return [(key, one) for key, one in value]
    except (TypeError, ValueError):
        raise _refused(name, value, kind) from None


def _refused(name: str, value: object, kind: DataType) -> NotOfSchema:
    return NotOfSchema(f"{name}: {value!r} is no {kind.simpleString()}")
