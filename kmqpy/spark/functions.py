"""Calls a user's function with the messages of an Arrow batch: as a pandas frame, or one row at a time.

See `KmqSpark.process` and `process_rows`. If a function of frames raises, or returns values that do not fit
the schema, it is called again with each half of the messages, so that only the messages that cause the error
fail. If it raises `Retry` or `Reject`, all messages that it was given have failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kmqpy.core.durations import Duration
from kmqpy.errors import ConfigError
from kmqpy.spark.failures import DELAY, Failure, FailurePolicy
from kmqpy.spark.values import NotOfSchema, array_of, as_column, converted, named_fields
from kmqpy.worker.outcome import Reject, Retry

ERROR = "kmq_error"
"""The column of a result with the reason why a message failed; null where it did not."""
REJECT = "kmq_reject"
"""The column of a result that is True where a message becomes a dead letter without another try."""
ROW = "kmq_row"
"""Name of the index of the frames that the user's function is given."""

_MAX_CALLS_TO_SPLIT = 160
"""When the function has been called this often for one Arrow batch, no more parts are halved: all messages of
a part for which the function raises have failed."""

FrameFunction = Callable[[pd.DataFrame], pd.DataFrame]
"""A user's function of many messages; see `process`."""


@dataclass(slots=True)
class FunctionOutcome:
    """The result of a function on one batch: its output, and failures by row number in the batch."""

    output: list[pa.RecordBatch] = field(default_factory=list)
    failed: dict[int, Failure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameCaller:
    """Calls `function` with the messages of a batch as frames, and checks what it returns."""

    function: FrameFunction
    schema: StructType
    failures: FailurePolicy

    def call(self, batch: pa.RecordBatch) -> FunctionOutcome:
        """Call the function until each message of the batch has succeeded or failed.

        Raises ConfigError for a result that is not a frame, lacks or repeats a column, or has another index.
        """
        attempts = batch.column("attempts")
        outcome = FunctionOutcome()
        parts, calls = [range(batch.num_rows)], 0
        while parts:
            rows = parts.pop()
            calls += 1
            try:
                result = self.function(_frame(batch, rows))
            except (Exception, SystemExit) as raised:
                error: BaseException = raised
            else:
                index = pd.RangeIndex(rows, name=ROW)
                self._check_frame(result, index)
                failed = self._failed_rows(result, index, attempts)
                good = result[~result.index.isin(list(failed))] if failed else result
                try:
                    output = self._as_arrow(good)
                except NotOfSchema as raised:
                    error = raised
                else:
                    outcome.failed |= failed
                    if output.num_rows:
                        outcome.output.append(output)
                    continue
            half = len(rows) // 2
            if half and calls < _MAX_CALLS_TO_SPLIT and not isinstance(error, Retry | Reject):
                parts += [rows[half:], rows[:half]]
            else:
                outcome.failed |= {row: self.failures.of_error(error, attempts[row].as_py()) for row in rows}
                self.failures.log(error, len(rows))
        return outcome

    def _as_arrow(self, result: pd.DataFrame) -> pa.RecordBatch:
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        columns = [
            as_column(column.name, result[column.name], column.dataType, one.type)
            for column, one in zip(self.schema, arrow, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, arrow.names)

    def _check_frame(self, result: Any, index: pd.Index) -> None:
        what = f"process: the function of queue {self.failures.queue.name!r}"
        if not isinstance(result, pd.DataFrame):
            raise ConfigError(f"{what} returned {type(result).__name__}, not a pandas DataFrame")
        columns, names = list(result.columns), self.schema.fieldNames()
        if missing := [name for name in names if name not in columns]:
            raise ConfigError(f"{what} returned no column {missing[0]!r}, which its schema names")
        if twice := [name for name in (*names, ERROR, DELAY, REJECT) if columns.count(name) > 1]:
            raise ConfigError(f"{what} returned the column {twice[0]!r} more than once")
        if len(result) and result.index.name != ROW:
            raise ConfigError(
                f"{what} returned rows without the index {ROW!r} of the frame it was given, so nobody can "
                "tell which messages they are; keep it: frame.assign(…), frame[…], or "
                "pd.DataFrame(…, index=frame.index)"
            )
        if not result.index.equals(index) and len(unknown := result.index.difference(index)):
            raise ConfigError(
                f"{what} returned rows that it was not given: {unknown[:3].tolist()} in the index {ROW!r}"
            )

    def _failed_rows(self, result: pd.DataFrame, index: pd.Index, attempts: pa.Array) -> dict[int, Failure]:
        """Return the rows that the function reported as failed, and those that it left out."""
        failed: dict[int, Failure] = {}
        if not result.index.equals(index):
            for row in map(int, index.difference(result.index)):
                count = attempts[row].as_py()
                failed[row] = self.failures.given_back("the function returned no row for it", count)
        if ERROR not in result.columns and REJECT not in result.columns:
            return failed
        nothing = pd.Series(None, index=result.index, dtype=object)
        errors, delays = result.get(ERROR, nothing), result.get(DELAY, nothing)
        rejected = _flags(result.get(REJECT, nothing))
        has_error = errors.notna()
        for at in np.flatnonzero(has_error | rejected):
            row, error = int(result.index[at]), errors.iloc[at]  # labels may be 1.0, too
            count = attempts[row].as_py()
            try:
                reason = _reason_of(error) if has_error.iloc[at] else None
                wait = _delay_of(delays.iloc[at])
            except ConfigError as problem:
                failed[row] = self.failures.given_back(str(problem), count)
                continue
            if rejected.iloc[at]:
                failed[row] = self.failures.of_error(Reject(reason) if reason else Reject(), count)
            else:
                failed[row] = self.failures.given_back(reason, count, wait)
        return failed


def _frame(batch: pa.RecordBatch, rows: range) -> pd.DataFrame:
    """Some rows as a frame of their own: the function may change what it is given."""
    # Spark runs a task for each core, so no threads; values are seldom alike, so no deduplication.
    part = batch.slice(rows.start, len(rows))
    frame = part.to_pandas(use_threads=False, deduplicate_objects=False)
    frame.index = pd.RangeIndex(rows, name=ROW)
    return frame


def _reason_of(error: Any) -> str:
    if not isinstance(error, str | BaseException):
        raise ConfigError(f"{ERROR}: must be text, or None for what has not failed: {type(error).__name__}")
    return str(error)


def _delay_of(delay: Any) -> Duration | None:
    if pd.api.types.is_scalar(delay) and pd.isna(delay):
        return None
    if isinstance(delay, timedelta):
        return delay
    try:
        return float(delay)
    except (TypeError, ValueError):
        raise ConfigError(f"{DELAY}: {delay!r} is neither seconds nor a timedelta") from None


def _flags(rejected: pd.Series) -> pd.Series:
    """True in each row where `rejected` is True; raises ConfigError for values but True, False and null."""
    true, false = (rejected.eq(one).fillna(value=False).astype(bool) for one in (True, False))
    if len(odd := rejected[~(true | false | rejected.isna())]):
        raise ConfigError(f"{REJECT}: {odd.iloc[0]!r} is neither True nor False")
    return true


RowFunction = Callable[[Row], Any]
"""A user's function of one message; see `process_rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCaller:
    """Calls `function` with each message of a batch, and checks what it returns."""

    function: RowFunction
    schema: StructType
    failures: FailurePolicy

    def call(self, batch: pa.RecordBatch) -> FunctionOutcome:
        """Call the function with each message. Those for which it raises or returns bad rows have failed."""
        make = partial(tuple.__new__, _row_class(tuple(batch.schema.names)))
        columns = [column.to_pylist() for column in batch.columns]
        attempts = columns[batch.schema.names.index("attempts")]
        outcome = FunctionOutcome()
        results: list[tuple[int, list[Any]]] = []
        for row, message in enumerate(map(make, zip(*columns, strict=True))):
            try:
                results.append((row, self._as_rows(self.function(message))))
            except (Exception, SystemExit) as error:
                outcome.failed[row] = self.failures.of_error(error, attempts[row])
                self.failures.log(error, 1)
        self._convert(results, attempts, outcome)
        return outcome

    def _as_rows(self, result: Any) -> list[Any]:
        if result is None:
            return []
        several = isinstance(result, Iterable) and not isinstance(result, dict | tuple | str | bytes)
        rows = list(result) if several else [result]
        return [self._as_row(row, several=several) for row in rows]

    def _as_row(self, row: Any, *, several: bool) -> list[Any]:
        if not isinstance(row, dict | tuple):
            what = f"a list with a {type(row).__name__}" if several else type(row).__name__
            raise NotOfSchema(f"the function returned {what}, not a dict, tuple, Row or list of these")
        names = self.schema.names
        if (fields := named_fields(row)) is not None:
            if missing := [name for name in names if name not in fields]:
                # Spark would take None for it, and a misspelt name would be lost.
                raise NotOfSchema(f"the function returned a row without its schema's {missing[0]!r}")
            row = tuple(fields[name] for name in names)
        if len(row) != len(names):
            raise NotOfSchema(f"the function returned {len(row)} values for {len(names)} columns")
        columns = zip(self.schema, row, strict=True)
        return [converted(column.name, value, column.dataType) for column, value in columns]

    def _convert(
        self, results: list[tuple[int, list[Any]]], attempts: list[int], outcome: FunctionOutcome
    ) -> None:
        """Add the rows of several messages to the output, in halves if some row does not fit the schema."""
        rows = [one for _, ones in results for one in ones]
        if not rows:
            return
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        try:
            columns = [
                array_of(column.name, list(values), column.dataType, one.type)
                for column, one, values in zip(self.schema, arrow, zip(*rows, strict=True), strict=True)
            ]
        except NotOfSchema as error:
            if len(results) == 1:
                row = results[0][0]
                outcome.failed[row] = self.failures.of_error(error, attempts[row])
                self.failures.log(error, 1)
            else:
                half = len(results) // 2
                self._convert(results[:half], attempts, outcome)
                self._convert(results[half:], attempts, outcome)
        else:
            outcome.output.append(pa.RecordBatch.from_arrays(columns, arrow.names))


@cache
def _row_class(names: tuple[str, ...]) -> type[Row]:
    """A subclass of Row with these fields, whose attributes are found several times as fast."""
    fields = {name: property(itemgetter(at)) for at, name in enumerate(names) if not hasattr(Row, name)}
    return type("Row", (Row,), {"__slots__": (), "__fields__": list(names), **fields})
