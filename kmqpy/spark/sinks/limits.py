"""Limits: values that a sink can't hold, or that it would turn into others without an error.

Spark judges the values of JSON bodies, before their messages are processed, and Python those that a user's
function returns. So each limit is there twice: as an expression, and as a function of one value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, MapType, StringType, StructType

from kmqpy.spark.values import is_null, named_fields

Test = Callable[[Column], Column]
Types = tuple[type[DataType], ...]

MAX_FOLDER_BYTES = 255
"""The longest name of a folder that file systems take."""
_NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
"""Spark gives the folder of null this value."""
_ESCAPED = r"""[\x01-\x1F\x7F"#%'*/:=?\\{\[\]^]"""
"""Characters that Spark writes as %XX in the names of folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Values of a column that are refused.

    why     what the sink can't hold, for the reason of the message
    broken  makes of the column an expression that is true where its value is refused
    breaks  returns True for a value that is refused
    """

    column: str
    why: str
    broken: Test
    breaks: Callable[[Any], bool]

    @property
    def reason(self) -> str:
        """The reason of a message with such a value."""
        return f"{self.column}: {self.why}"


def no_infinity(schema: StructType) -> tuple[Limit, ...]:
    """Limits of sinks that write JSON, which has no such numbers."""

    def breaks(value: Any) -> bool:
        return isinstance(value, float | np.floating) and math.isinf(value)

    return _limits(schema, (FloatType, DoubleType), "JSON has no infinite numbers", is_infinite, breaks)


def no_nul(schema: StructType) -> tuple[Limit, ...]:
    """Limits of PostgreSQL, whose texts have no character U+0000."""
    why = "PostgreSQL's texts have no U+0000"
    return _limits(
        schema,
        (StringType,),
        why,
        lambda column: F.instr(column, "\0") > 0,
        lambda value: isinstance(value, str) and "\0" in value,
    )


def folder_limits(schema: StructType, partition_by: Sequence[str], *, prefix: str = "") -> tuple[Limit, ...]:
    """Limits of columns by whose values rows are sorted into folders, named `<prefix><column>=<value>`."""
    limits: list[Limit] = []
    for name in partition_by:
        if isinstance(schema[name].dataType, StringType):
            limits += _of_folder(name, MAX_FOLDER_BYTES - _folder_bytes(prefix + name) - len("="))
    return tuple(limits)


def refusals(frame: pd.DataFrame, limits: Iterable[Limit]) -> dict[int, str]:
    """The reasons of rows, by their position in the frame, with values that a sink can't hold."""
    found: dict[int, str] = {}
    for limit in limits:
        if limit.column not in frame.columns:
            continue  # process() refuses it, with a clearer message
        for at, value in enumerate(frame[limit.column]):
            if not is_null(value) and limit.breaks(value):
                found.setdefault(at, limit.reason)
    return found


def somewhere(column: Column, kind: DataType, types: Types, test: Test) -> Column:
    """An expression: true where a value of these types, in a column of this type, passes the test."""
    found = F.lit(False)  # noqa: FBT003
    if isinstance(kind, types):
        found = test(column)
    elif isinstance(kind, ArrayType) and holds(kind, types):
        found = F.exists(column, lambda one: somewhere(one, kind.elementType, types, test))
    elif isinstance(kind, MapType):
        for part, array in ((kind.keyType, F.map_keys), (kind.valueType, F.map_values)):
            found = found | somewhere(array(column), ArrayType(part), types, test)
    elif isinstance(kind, StructType):
        for field in kind:
            if holds(field.dataType, types):
                found = found | somewhere(column.getField(field.name), field.dataType, types, test)
    return F.coalesce(found, F.lit(False))  # noqa: FBT003


def holds(kind: DataType, types: Types) -> bool:
    """Return True if values of this type are of one of these types, or have such values in them."""
    if isinstance(kind, ArrayType):
        return holds(kind.elementType, types)
    if isinstance(kind, MapType):
        return holds(kind.keyType, types) or holds(kind.valueType, types)
    if isinstance(kind, StructType):
        return any(holds(field.dataType, types) for field in kind)
    return isinstance(kind, types)


def is_infinite(column: Column) -> Column:
    """True for the floating-point numbers that JSON has not."""
    return F.isnan(column) | (F.abs(column) == math.inf)


def _of_folder(name: str, room: int) -> tuple[Limit, Limit]:
    """The limits of a column whose values may have `room` bytes in the names of folders."""
    null = Limit(
        column=name,
        why=f"{_NULL_FOLDER!r} names the folder of null",
        broken=lambda column: column == _NULL_FOLDER,
        breaks=lambda value: isinstance(value, str) and value == _NULL_FOLDER,
    )
    long = Limit(
        column=name,
        why=f"names a folder by more than {MAX_FOLDER_BYTES} bytes",
        broken=lambda column: F.octet_length(column) + 2 * F.regexp_count(column, F.lit(_ESCAPED)) > room,
        breaks=lambda value: isinstance(value, str) and _folder_bytes(value) > room,
    )
    return null, long


def _limits(
    schema: StructType, types: Types, why: str, test: Test, breaks: Callable[[Any], bool]
) -> tuple[Limit, ...]:
    """A limit for each column that holds values of these types, however deep."""
    return tuple(
        Limit(
            column=field.name,
            why=why,
            broken=partial(somewhere, kind=field.dataType, types=types, test=test),
            breaks=partial(_any, breaks=breaks),
        )
        for field in schema
        if holds(field.dataType, types)
    )


def _any(value: Any, breaks: Callable[[Any], bool]) -> bool:
    """Return True if the value, or one within it, breaks a limit."""
    fields = named_fields(value)
    if fields is not None:
        return any(_any(one, breaks) for pair in fields.items() for one in pair)
    if isinstance(value, list | tuple | np.ndarray):
        return any(_any(one, breaks) for one in value)
    return breaks(value)


def _folder_bytes(name: str) -> int:
    """The length of a value, or of a column's name, in the name of a folder."""
    return len(name.encode(errors="surrogatepass")) + 2 * len(re.findall(_ESCAPED, name))
