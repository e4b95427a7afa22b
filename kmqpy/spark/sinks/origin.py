"""Adds columns that identify each row across redeliveries; leaves out messages that a sink has already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BooleanType, DataType, IntegerType, LongType, StructField, StructType

from kmqpy.errors import ConfigError
from kmqpy.spark.functions import ERROR, REJECT, FrameFunction
from kmqpy.spark.sinks.limits import Limit, refusals

MESSAGE_COLUMNS = ("original_partition", "original_offset")
"""Columns that identify a message: the place of its first record, which all its copies name."""

ORIGIN = (*MESSAGE_COLUMNS, "original_row")
"""Columns that identify a row: its message, and its number among the rows of that message."""

COPY = "original_copied"
"""A column: True where the message is a copy: a sink may have its rows already. Sinks drop it."""

_TYPES: dict[str, DataType] = dict(
    zip((*ORIGIN, COPY), (IntegerType(), LongType(), LongType(), BooleanType()), strict=True)
)


@dataclass(frozen=True)
class WithOrigin:
    """A function for KmqSpark.process: adds the columns ORIGIN and COPY to the result of `function`.

    Messages with rows that break one of the limits are refused.
    """

    function: FrameFunction
    limits: tuple[Limit, ...] = ()

    def __call__(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Process a frame of messages."""
        partition, offset, row = ORIGIN
        origin = frame[[*MESSAGE_COLUMNS]].copy()
        origin[COPY] = (frame[partition] != frame["partition"]) | (frame[offset] != frame["offset"])
        found = self.function(frame)
        if not isinstance(found, pd.DataFrame) or (len(found) and found.index.name != frame.index.name):
            return found  # process() refuses it, with a clearer message
        if not len(found):  # every message failed
            return found.reindex(columns=[*found.columns, *ORIGIN, COPY])
        found = _refused(found, refusals(found, self.limits))
        origin = origin.reindex(found.index)
        return found.assign(
            **{name: origin[name] for name in (*MESSAGE_COLUMNS, COPY)},
            **{row: found.groupby(level=0).cumcount()},
        )


def _refused(frame: pd.DataFrame, reasons: Mapping[int, str]) -> pd.DataFrame:
    """The frame, with the reasons of rows that are refused, unless the function itself has failed them."""
    if not reasons:
        return frame
    nothing = pd.Series(None, index=frame.index, dtype=object)
    errors, rejected = (frame.get(name, nothing).astype(object).copy() for name in (ERROR, REJECT))
    for row, reason in reasons.items():
        if pd.isna(errors.iloc[row]):
            errors.iloc[row], rejected.iloc[row] = reason, True
    return frame.assign(**{ERROR: errors, REJECT: rejected})


def with_origin(schema: StructType) -> StructType:
    """`schema` with the columns ORIGIN, which sinks write; raises ConfigError if it has one of them."""
    if taken := {name.lower() for name in schema.names} & _TYPES.keys():
        raise ConfigError(f"schema: column {min(taken)!r} is added by the pipeline; rename yours")
    return StructType([*schema.fields, *_fields(*ORIGIN)])


def origin_schema() -> StructType:
    """The schema of the columns MESSAGE_COLUMNS alone."""
    return StructType(_fields(*MESSAGE_COLUMNS))


def with_copy(schema: StructType) -> StructType:
    """`schema` with the columns ORIGIN and COPY: the schema of the rows that a pipeline makes."""
    return StructType([*with_origin(schema).fields, *_fields(COPY)])


def _fields(*names: str) -> list[StructField]:
    return [StructField(name, _TYPES[name]) for name in names]


def without_known(
    batch: DataFrame, written: Callable[[int, int], DataFrame], *, again: bool = False
) -> DataFrame:
    """The rows of `batch`, which is persisted, whose messages the sink has not; without the column COPY.

    written  a function of two original offsets: returns the sink's rows between them, and maybe others
    again    whether the micro-batch may have been written before. If not, only copies can be in the sink
    """
    span = offsets_of(batch if again else batch.where(COPY))
    return batch.drop(COPY) if span is None else without_written(batch, written(*span), span)


def offsets_of(batch: DataFrame) -> tuple[int, int] | None:
    """The lowest and the highest original offset in `batch`; None if it has no rows."""
    found = batch.agg(F.min("original_offset"), F.max("original_offset")).first()
    assert found is not None
    low, high = found
    return None if low is None else (low, high)


def without_written(batch: DataFrame, written: DataFrame, span: tuple[int, int]) -> DataFrame:
    """The rows of `batch` whose messages are not in `written`, in a span of offsets; without COPY."""
    rows = batch.drop(COPY)
    near = written.where(F.col("original_offset").between(*span)).select(*MESSAGE_COLUMNS)
    return rows.join(near, [*MESSAGE_COLUMNS], "left_anti").select(*rows.columns)
