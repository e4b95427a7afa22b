"""Checks and converts the values that a user's function returns, by the type of their column: table RULES.

Arrow and Spark silently convert some values: 1.9 or a time to a whole number, a text to a list of its
letters, 5 to True. Here such a value is an error, with which its message fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from numbers import Number
from typing import Any, Never

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    NullType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
)

from kmqpy.worker.outcome import described

_LARGEST_FLOAT = 3.4028235677973366e38
"""Larger numbers would become infinite as 32-bit floats."""
_INFERRED_ALL_NULL = "empty"
"""The type that pandas infers for a column of objects that are all null."""


class NotOfSchema(ValueError):
    """Raised when the values that a function returned can't be made into columns of its schema."""


Convert = Callable[[str, Any, Any], Any]
"""Makes of the value of a column, given its name and type, one that Arrow takes unchanged; or NotOfSchema."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that are accepted for columns of some types; None, NaN, NaT and NA are null in each.

    names    the names of the types, and `values` the accepted values, for the documentation
    columns  kinds of numpy types, and types that pandas infers for a column of objects: Arrow itself refuses
             every value of such a column that does not fit, so its values need not be converted one by one
    """

    types: tuple[type[DataType], ...]
    names: tuple[str, ...]
    values: str
    convert: Convert
    columns: tuple[str, ...] = ()


def _only(accepted: Any, make: Callable[[Any], Any]) -> Convert:
    return lambda name, value, kind: (
        make(value) if isinstance(value, accepted) else _refuse(name, value, kind)
    )


def _whole(name: str, value: Any, kind: DataType) -> Any:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, float | np.floating | Decimal) and math.isfinite(value) and not value % 1:
        return int(value)
    return _refuse(name, value, kind)


def _floating(name: str, value: Any, kind: DataType) -> Any:
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return _refuse(name, value, kind)
    found = float(value)
    if isinstance(kind, FloatType) and math.isfinite(found) and abs(found) > _LARGEST_FLOAT:
        return _refuse(name, value, kind)
    if isinstance(value, int | np.integer) and int(found) != value:
        return _refuse(name, value, kind)
    return found


def _decimal(name: str, value: Any, kind: DataType) -> Any:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return Decimal(int(value))
    return value if isinstance(value, Decimal) and value.is_finite() else _refuse(name, value, kind)


def _moment(name: str, value: Any, kind: DataType) -> datetime:
    """The value as a datetime; refuses times that are not in whole microseconds, as Spark's are."""
    if isinstance(value, np.datetime64):
        value = pd.Timestamp(value)
    if isinstance(value, pd.Timestamp) and not value.nanosecond:
        value = value.to_pydatetime()
    if not isinstance(value, datetime) or isinstance(value, pd.Timestamp):
        _refuse(name, value, kind)
    return value


def _timestamp(name: str, value: Any, kind: DataType) -> Any:
    moment = _moment(name, value, kind)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _timestamp_ntz(name: str, value: Any, kind: DataType) -> Any:
    moment = _moment(name, value, kind)
    return moment if moment.tzinfo is None else _refuse(name, value, kind)


def _date(name: str, value: Any, kind: DataType) -> Any:
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    moment = _moment(name, value, kind)
    is_midnight = moment.tzinfo is None and moment.time() == time()
    return moment.date() if is_midnight else _refuse(name, value, kind)


def _time_of_day(name: str, value: Any, kind: DataType) -> Any:
    return value if isinstance(value, time) and value.tzinfo is None else _refuse(name, value, kind)


def _interval(name: str, value: Any, kind: DataType) -> Any:
    if isinstance(value, np.timedelta64):
        value = pd.Timedelta(value)
    if isinstance(value, pd.Timedelta):
        return _refuse(name, value, kind) if value.nanoseconds else value.to_pytimedelta()
    return value if isinstance(value, timedelta) else _refuse(name, value, kind)


def _array(name: str, value: Any, kind: ArrayType) -> Any:
    if not isinstance(value, list | tuple | np.ndarray):
        return _refuse(name, value, kind)
    return [converted(f"{name}[]", one, kind.elementType) for one in value]


def _map(name: str, value: Any, kind: MapType) -> Any:
    pairs: Any = value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple | np.ndarray) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 or is_null(pair[0]) for pair in pairs
    ):
        return _refuse(name, value, kind)
    return [
        (converted(f"{name} key", key, kind.keyType), converted(f"{name}[]", one, kind.valueType))
        for key, one in pairs
    ]


def _struct(name: str, value: Any, kind: StructType) -> Any:
    fields = named_fields(value)
    if fields is None:
        if not isinstance(value, tuple) or len(value) != len(kind):
            return _refuse(name, value, kind)
        fields = dict(zip(kind.names, value, strict=True))
    if missing := [field for field in kind.names if field not in fields]:
        raise NotOfSchema(
            f"{name}: {value!r} is not of type {kind.simpleString()}: it has no field {missing[0]!r}"
        )
    return {
        field.name: converted(f"{name}.{field.name}", fields[field.name], field.dataType) for field in kind
    }


def _refuse(name: str, value: object, kind: DataType) -> Never:
    raise NotOfSchema(f"{name}: {value!r} is not of type {kind.simpleString()}")


RULES = (
    Rule((BooleanType,), ("boolean",), "`bool`", _only(bool | np.bool_, bool), ("b", "boolean")),
    Rule(
        (IntegralType,),
        ("byte", "short", "int", "long"),
        "`int`; a `float` or `Decimal` without a fraction; all within the range of the type",
        _whole,
        ("i", "u", "f", "integer"),
    ),
    Rule(
        (FloatType, DoubleType),
        ("float", "double"),
        "`float`; an `int` that is the same number then",
        _floating,
        ("f",),
    ),
    Rule(
        (DecimalType,), ("decimal",), "`Decimal` and `int`, with no more digits than the type has", _decimal
    ),
    Rule((StringType,), ("string",), "`str`", _only(str, str), ("string",)),
    Rule(
        (BinaryType,),
        ("binary",),
        "`bytes`, `bytearray`, `memoryview`",
        _only(bytes | bytearray | memoryview, bytes),
        ("bytes",),
    ),
    Rule(
        (DateType,), ("date",), "`date`; a `datetime` or `Timestamp` at midnight, without a time zone", _date
    ),
    Rule(
        (TimestampType,),
        ("timestamp",),
        "`datetime`, `Timestamp`, `datetime64`, in whole µs; without a time zone it is taken for UTC",
        _timestamp,
        ("M", "with time zone"),
    ),
    Rule((TimestampNTZType,), ("timestamp_ntz",), "the same without a time zone", _timestamp_ntz, ("M",)),
    Rule((TimeType,), ("time",), "`time` without a time zone", _time_of_day),
    Rule(
        (DayTimeIntervalType,),
        ("interval day to second",),
        "`timedelta`, `Timedelta`, `timedelta64`, in whole µs",
        _interval,
        ("m",),
    ),
    Rule((ArrayType,), ("array",), "`list`, `tuple`, `ndarray`, of such values", _array),
    Rule((MapType,), ("map",), "`dict`, or pairs in a `list`; no key is null", _map),
    Rule(
        (StructType,),
        ("struct",),
        "`dict` or `Row` with every field by its name, or a `tuple` of all of them",
        _struct,
    ),
    Rule((NullType,), ("void",), "nothing but null", _refuse),
)


def rule_of(kind: DataType) -> Rule | None:
    """The rule for a type; None for a type that kmqpy does not know: then Arrow decides."""
    return next((rule for rule in RULES if isinstance(kind, rule.types)), None)


def converted(name: str, value: Any, kind: DataType) -> Any:
    """`value` as Arrow takes it for a column of `kind`; raises NotOfSchema."""
    if is_null(value):
        return None
    rule = rule_of(kind)
    try:
        return value if rule is None else rule.convert(name, value, kind)
    except NotOfSchema:
        raise
    except Exception as error:  # of many kinds: the year 1 has no UTC in some time zones
        raise _unfit(name, error, kind) from error


def as_column(name: str, values: pd.Series, kind: DataType, arrow: pa.DataType) -> pa.Array:
    """A column of a frame as an Arrow array of the type `arrow`; raises NotOfSchema."""
    try:
        if values.dtype != object and values.isna().all():  # to pandas, a column of nulls is one of floats
            return pa.nulls(len(values), arrow)
        rule, found_kind = rule_of(kind), _column_kind(values)
        if found_kind == _INFERRED_ALL_NULL:
            return pa.nulls(len(values), arrow)
        if rule is None or found_kind in rule.columns:
            if isinstance(kind, FloatType):
                for value in values[values.abs() > _LARGEST_FLOAT]:
                    converted(name, value, kind)
            found = pa.Array.from_pandas(values, type=arrow)
            return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
        objects = values.astype(object)
    except NotOfSchema:
        raise
    except Exception as error:  # of many kinds: a number too large is an OverflowError
        raise _unfit(name, error, kind) from error
    return array_of(name, [converted(name, value, kind) for value in objects], kind, arrow)


def array_of(name: str, values: list[Any], kind: DataType, arrow: pa.DataType) -> pa.Array:
    """An Arrow array of values that converted() has made; raises NotOfSchema."""
    try:
        return pa.array(values, arrow)
    except Exception as error:  # of many kinds, see above
        raise _unfit(name, error, kind) from error


def named_fields(value: Any) -> Mapping[str, Any] | None:
    """The fields of a dict, Row or named tuple by their names; None where there are no names."""
    if isinstance(value, Mapping):
        return value
    names = getattr(value, "__fields__", getattr(value, "_fields", None))
    return dict(zip(names, value, strict=True)) if names is not None and isinstance(value, tuple) else None


def is_null(value: Any) -> bool:
    """Return True for None, NaN, NaT and NA."""
    return bool(
        value is None
        or value is pd.NA
        or value is pd.NaT
        or (value.is_nan() if isinstance(value, Decimal) else isinstance(value, Number) and value != value)
        or (isinstance(value, np.datetime64 | np.timedelta64) and np.isnat(value))
    )


def _column_kind(values: pd.Series) -> str:
    """The kind of a column, as Rule.columns names kinds; empty if its values must be converted one by one."""
    if values.dtype == object:
        return str(pd.api.types.infer_dtype(values, skipna=True))
    if isinstance(values.dtype, pd.StringDtype):
        return "string"
    if isinstance(values.dtype, pd.DatetimeTZDtype):
        return "with time zone"
    if isinstance(values.dtype, pd.ArrowDtype | pd.CategoricalDtype):
        return ""
    return str(getattr(values.dtype, "kind", ""))


def _unfit(name: str, error: Exception, kind: DataType) -> NotOfSchema:
    return NotOfSchema(f"{name}: not of type {kind.simpleString()}: {described(error)}")
