"""A user's function of one message is called: see `KmqSpark.process_rows`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.conversion import LocalDataToArrowConversion
from pyspark.sql.types import StructType

from kmqpy.spark.failures import FailurePolicy
from kmqpy.spark.frame_function import Outcome
from kmqpy.spark.values import NotOfSchema, check
from kmqpy.worker.outcome import described

Rows = Callable[[Row], Any]
"""A function of one message; see `process_rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFunction:
    """Calls `function` with each message of a batch, and checks what it returns."""

    function: Rows
    schema: StructType
    failures: FailurePolicy

    def call(self, batch: pa.RecordBatch) -> Outcome:
        """Messages for which it raises, or returns what is not of the schema, have failed."""
        make = partial(tuple.__new__, _row_class(tuple(batch.schema.names)))
        columns = [column.to_pylist() for column in batch.columns]
        attempts = columns[batch.schema.names.index("attempts")]
        outcome = Outcome()
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
        """The rows that a function returned for one message: none, one, or several."""
        if result is None:
            return []
        several = isinstance(result, Iterable) and not isinstance(result, dict | tuple | str | bytes)
        rows = list(result) if several else [result]
        return [self._as_row(row, several=several) for row in rows]

    def _as_row(self, row: Any, *, several: bool) -> tuple[Any, ...]:
        if not isinstance(row, dict | tuple):
            what = f"a list with a {type(row).__name__}" if several else type(row).__name__
            raise NotOfSchema(f"the function returned {what}, not a dict, tuple, Row or list of these")
        names = getattr(row, "__fields__", getattr(row, "_fields", None))  # of a Row, or a named tuple
        if names is not None:
            row = dict(zip(names, row, strict=True))
        if isinstance(row, dict):
            if missing := [name for name in self.schema.names if name not in row]:
                # Spark would take None for it, and a misspelt name would be lost.
                raise NotOfSchema(f"the function returned a row without its schema's {missing[0]!r}")
            row = tuple(row[name] for name in self.schema.names)
        for column, value in zip(self.schema, row, strict=False):  # Spark counts them
            check(column.name, value, column.dataType)
        return tuple(row)

    def _convert(self, results: list[tuple[int, list[Any]]], attempts: list[int], outcome: Outcome) -> None:
        """Add the rows to the output; those that are not of the schema have failed."""
        rows = [one for _, ones in results for one in ones]
        if not rows:
            return
        try:
            table = LocalDataToArrowConversion.convert(rows, self.schema, use_large_var_types=False)
        except Exception as error:
            if len(results) == 1:
                row = results[0][0]
                error = NotOfSchema(described(error))
                outcome.failed[row] = self.failures.of_error(error, attempts[row])
                self.failures.log(error, 1)
                return
            half = len(results) // 2
            self._convert(results[:half], attempts, outcome)
            self._convert(results[half:], attempts, outcome)
            return
        outcome.output += table.to_batches()


@cache
def _row_class(names: tuple[str, ...]) -> type[Row]:
    """A Row with these fields, whose attributes are found several times as fast."""
    fields = {name: property(itemgetter(at)) for at, name in enumerate(names) if not hasattr(Row, name)}
    return type("Row", (Row,), {"__slots__": (), "__fields__": list(names), **fields})
