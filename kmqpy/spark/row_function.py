"""Calls a user's function with one message at a time: see `KmqSpark.process_rows`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kmqpy.spark.failures import FailurePolicy
from kmqpy.spark.frame_function import FunctionOutcome
from kmqpy.spark.values import NotOfSchema, array_of, converted, named_fields

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
        try:
            output = self._as_arrow(rows)
        except NotOfSchema as error:
            if len(results) == 1:
                row = results[0][0]
                outcome.failed[row] = self.failures.of_error(error, attempts[row])
                self.failures.log(error, 1)
                return
            half = len(results) // 2
            self._convert(results[:half], attempts, outcome)
            self._convert(results[half:], attempts, outcome)
            return
        outcome.output.append(output)

    def _as_arrow(self, rows: list[list[Any]]) -> pa.RecordBatch:
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        columns = [
            array_of(column.name, list(values), column.dataType, one.type)
            for column, one, values in zip(self.schema, arrow, zip(*rows, strict=True), strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, arrow.names)


@cache
def _row_class(names: tuple[str, ...]) -> type[Row]:
    """A subclass of Row with these fields, whose attributes are found several times as fast."""
    fields = {name: property(itemgetter(at)) for at, name in enumerate(names) if not hasattr(Row, name)}
    return type("Row", (Row,), {"__slots__": (), "__fields__": list(names), **fields})
