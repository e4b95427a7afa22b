"""Runs on executors: takes messages, calls the user's function, gives back messages that failed.

An Arrow batch at a time: its start markers are confirmed before the function sees it. What the function
returned goes on, followed by a report to the driver, which writes the end markers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.conversion import LocalDataToArrowConversion
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.errors import ConfigError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.places import Offsets, Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark.report import Report
from kmqpy.spark.taking import MAX_TAKES, MarkersFormat, TakenBefore, Taker, taker_of
from kmqpy.spark.values import NotOfSchema, as_column, check
from kmqpy.worker.outcome import Reject, Retry, described, shortened

_log = logging.getLogger(__name__)

ERROR = "kmq_error"
DELAY = "kmq_delay"
REJECT = "kmq_reject"
ROW = "kmq_row"
"""Name of the index of the frames that the user's function is given."""

OURS = "kmq_ours"
"""A column that says whether a row is of the queue; cheaper than its name in every row."""

REPORT = "kmq_report"
_DEADLY = f"the worker that processed it, or others with it, died {MAX_TAKES} times"
_MAX_CALLS = 64
"""How often a function that raises is called again with parts of one batch."""

Frames = Callable[[pd.DataFrame], pd.DataFrame]
"""A function of many messages; see `process`."""

Rows = Callable[[Row], Any]
"""A function of one message; see `process_rows`."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """How one message is given back."""

    op: Op
    delay_ms: int = 0
    counts: bool = True
    reason: str | None = None


@dataclass(slots=True)
class _Outcome:
    """The result of a function on one batch: its output, and failures by row number in the batch."""

    output: list[pa.RecordBatch] = field(default_factory=list)
    failed: dict[int, _Failure] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """The settings that executors are sent; Spark calls it there with Arrow batches (mapInArrow).

    function  of a frame, or with `by_row` of a row; see `KmqSpark.process` and `process_rows`
    schema    of what it returns
    """

    queue: QueueSettings
    connection: KafkaConnection
    markers: MarkersFormat
    lease_ms: int
    backoff: Backoff
    schema: StructType
    function: Frames | Rows
    by_row: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One task: takes and processes messages; each batch of output is followed by a report."""
        taker = taker_of(self.queue, self.connection, self.markers)
        known: dict[int, TakenBefore] = {}
        for batch in filter(len, batches):
            partitions, offsets = self._places(batch)
            for partition, ones in _by_partition(partitions, offsets).items():
                if partition not in known or known[partition].first > ones[0]:
                    known[partition] = taker.taken_before(partition, ones[0])
            for group in self._groups(batch, known, partitions, offsets):
                yield from self._process(taker, known, group)

    def _groups(
        self, batch: pa.RecordBatch, known: Mapping[int, TakenBefore], partitions: Any, offsets: Any
    ) -> Iterator[pa.RecordBatch]:
        """Split a batch into groups of messages that are taken together.

        A message on its last attempt, which was taken and did not survive, is taken alone: so one that
        kills the worker takes no others to the dead letters.
        """
        most = self.queue.max_redeliveries
        alone = np.zeros(len(batch), dtype=bool)
        if most is not None:
            last = batch.column("attempts").to_numpy(zero_copy_only=False) > most
            for row in np.flatnonzero(last):
                alone[row] = known[int(partitions[row])].takes(int(offsets[row])) > 0
        if not alone.all():
            yield batch.filter(pa.array(~alone)) if alone.any() else batch
        for row in np.flatnonzero(alone):
            yield batch.slice(row, 1)

    def _process(
        self, taker: Taker, known: Mapping[int, TakenBefore], batch: pa.RecordBatch
    ) -> Iterator[pa.RecordBatch]:
        partitions, offsets = self._places(batch)
        everything = _by_partition(partitions, offsets)
        mine = np.ones(batch.num_rows, dtype=bool)
        left: dict[int, set[int]] = {partition: set() for partition in everything}
        operations: list[Marker] = []
        for partition, ones in everything.items():
            out = known[partition].sort_out(ones)
            left[partition] = out.left | out.deadly
            operations += self._alike(partition, Op.NACK, sorted(out.deadly), reason=_DEADLY)
            if not_ours := out.finished | left[partition]:
                mine &= ~((partitions == partition) & np.isin(offsets, list(not_ours)))
        delays = self._delays(batch, mine, partitions, offsets)
        for partition, offset in delays:
            left[partition].add(offset)
        taken = everything if mine.all() else _by_partition(partitions[mine], offsets[mine])
        after = taker.take(taken, delays, self.lease_ms)
        # Messages behind these may have been taken before them: by a consumer, or a query that began later.
        next_ = {
            p: (everything[p][-1] + 1, at if known[p].highest <= everything[p][-1] else known[p].start)
            for p, at in after.items()
        }
        taker.remember(next_)
        outcome = _Outcome()
        if taken:
            given = batch.select([name for name in batch.schema.names if name != OURS]).filter(pa.array(mine))
            outcome = (self._call_rows if self.by_row else self._call_frame)(given)
        operations += self._survivors(known, taken)
        if outcome.failed:
            partitions, offsets = partitions[mine], offsets[mine]
            operations += self._nacks(partitions, offsets, outcome.failed)
            for row in outcome.failed:
                left[int(partitions[row])].add(int(offsets[row]))
        if operations:
            taker.write(operations)
        yield from outcome.output
        done = {p: [o for o in ones if o not in left[p]] if left[p] else ones for p, ones in taken.items()}
        yield self._report(
            Report(
                done={p: ones for p, ones in done.items() if len(ones)},
                left={p: sorted(ones) for p, ones in left.items() if ones},
                next=next_,
            )
        )

    def _places(self, batch: pa.RecordBatch) -> tuple[Any, Any]:
        """The partitions and offsets of a batch; raises ConfigError where they name no messages of ours."""
        columns = [batch.column(name) for name in ("partition", "offset")]
        ours = batch.column(OURS)
        if any(column.null_count for column in (*columns, ours)) or ours.false_count:
            raise ConfigError(
                f"process: rows that are not of queue {self.queue.name!r}; give it what read_stream() of the "
                "same queue returns"
            )
        partitions, offsets = (column.to_numpy() for column in columns)
        return partitions, offsets

    def _delays(self, batch: pa.RecordBatch, mine: Any, partitions: Any, offsets: Any) -> dict[Place, int]:
        """Messages that are not yet due, with the ms until they are; they are cleared in `mine`."""
        column = batch.column("deliver_at_ms")
        if column.null_count == len(column):
            return {}
        now_ms = SYSTEM_CLOCK.wall_ms()
        # What lies before 1970 is as good as 1970, and can't overflow.
        waits = np.maximum(column.fill_null(0).to_numpy(zero_copy_only=False), 0) - now_ms
        early = np.flatnonzero(mine & (waits > 0))
        mine[early] = False
        return {(int(partitions[i]), int(offsets[i])): min(int(waits[i]), 2**62) for i in early}

    # --- many messages at once ------------------------------------------------------------------------

    def _call_frame(self, batch: pa.RecordBatch) -> _Outcome:
        attempts = batch.column("attempts")
        outcome = _Outcome()
        parts, calls = [range(batch.num_rows)], 0
        while parts:
            rows = parts.pop()
            calls += 1
            may = calls < _MAX_CALLS
            try:
                result = self.function(_frame(batch, rows))
            except (Exception, SystemExit) as error:
                self._split(rows, attempts, error, parts, outcome, may=may)
                continue
            index = pd.RangeIndex(rows, name=ROW)
            self._check_frame(result, index)
            failed = self._failed_rows(result, index, attempts)
            good = result[~result.index.isin(list(failed))] if failed else result
            try:
                output = self._as_arrow(good)
            except NotOfSchema as error:
                self._split(rows, attempts, error, parts, outcome, may=may)
                continue
            outcome.failed |= failed
            if output.num_rows:
                outcome.output.append(output)
        return outcome

    def _split(
        self,
        rows: range,
        attempts: pa.Array,
        error: BaseException,
        parts: list[range],
        outcome: _Outcome,
        *,
        may: bool,
    ) -> None:
        """A row that makes the function raise should fail alone: its halves are tried, or it has failed."""
        half = len(rows) // 2
        if half and may and not isinstance(error, Retry | Reject):
            parts += [rows[half:], rows[:half]]
            return
        outcome.failed |= {row: self._failure(error, attempts[row].as_py()) for row in rows}
        self._complain(error, len(rows))

    def _as_arrow(self, result: pd.DataFrame) -> pa.RecordBatch:
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        columns = [
            as_column(column.name, result[column.name], column.dataType, one.type)
            for column, one in zip(self.schema, arrow, strict=True)
        ]
        return self._with_report(pa.RecordBatch.from_arrays(columns, arrow.names), None)

    def _check_frame(self, result: Any, index: pd.Index) -> None:
        what = f"process: the function of queue {self.queue.name!r}"
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

    def _failed_rows(self, result: pd.DataFrame, index: pd.Index, attempts: pa.Array) -> dict[int, _Failure]:
        """Those that the function says have failed, and those that it left out."""
        failed: dict[int, _Failure] = {}
        if not result.index.equals(index):
            for row in map(int, index.difference(result.index)):
                failed[row] = self._given_back("the function returned no row for it", attempts[row].as_py())
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
                reason = _reason(error) if has_error.iloc[at] else None
                wait = _wait(delays.iloc[at])
            except ConfigError as problem:
                failed[row] = self._given_back(str(problem), count)
                continue
            if rejected.iloc[at]:
                failed[row] = self._failure(Reject(reason) if reason else Reject(), count)
            else:
                failed[row] = self._given_back(reason, count, wait)
        return failed

    # --- row by row -----------------------------------------------------------------------------------

    def _call_rows(self, batch: pa.RecordBatch) -> _Outcome:
        make = partial(tuple.__new__, _row_class(tuple(batch.schema.names)))
        columns = [column.to_pylist() for column in batch.columns]
        attempts = columns[batch.schema.names.index("attempts")]
        outcome = _Outcome()
        results: list[tuple[int, list[Any]]] = []
        for row, message in enumerate(map(make, zip(*columns, strict=True))):
            try:
                results.append((row, self._as_rows(self.function(message))))
            except (Exception, SystemExit) as error:
                outcome.failed[row] = self._failure(error, attempts[row])
                self._complain(error, 1)
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

    def _convert(self, results: list[tuple[int, list[Any]]], attempts: list[int], outcome: _Outcome) -> None:
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
                outcome.failed[row] = self._failure(error, attempts[row])
                self._complain(error, 1)
                return
            half = len(results) // 2
            self._convert(results[:half], attempts, outcome)
            self._convert(results[half:], attempts, outcome)
            return
        outcome.output += [self._with_report(part, None) for part in table.to_batches()]

    # --- what failed ----------------------------------------------------------------------------------

    def _failure(self, error: BaseException, attempts: int) -> _Failure:
        if isinstance(error, Reject):
            return _Failure(Op.DEAD_LETTER, reason=shortened(error.reason))
        if isinstance(error, Retry):
            return self._given_back(error.reason, attempts, error.delay, counts=error.count)
        return self._given_back(described(error), attempts)

    def _given_back(
        self, reason: str | None, attempts: int, delay: Duration | None = None, *, counts: bool = True
    ) -> _Failure:
        usual = self.backoff.delay(int(attempts))
        try:
            delay_ms = duration_ms(usual if delay is None else delay, DELAY)
        except ConfigError as error:
            delay_ms, reason = duration_ms(usual, DELAY), str(error)
        delay_ms = min(delay_ms, self.queue.max_delay_ms)
        return _Failure(Op.NACK, delay_ms, counts, None if reason is None else shortened(reason))

    def _survivors(self, known: Mapping[int, TakenBefore], taken: Offsets) -> list[Marker]:
        """Extend the leases of what was taken before: so it is known not to kill the worker."""
        found: list[Marker] = []
        for partition, ones in taken.items():
            again = known[partition].taken(ones)
            found += self._alike(partition, Op.EXTEND, again, redeliver_after_ms=self.lease_ms)
        return found

    def _nacks(self, partitions: Any, offsets: Any, failed: Mapping[int, _Failure]) -> list[Marker]:
        alike: dict[tuple[int, _Failure], list[int]] = {}
        for row, failure in failed.items():
            alike.setdefault((int(partitions[row]), failure), []).append(int(offsets[row]))
        found: list[Marker] = []
        for (partition, failure), ones in alike.items():
            found += self._alike(
                partition,
                failure.op,
                sorted(ones),
                redeliver_after_ms=failure.delay_ms,
                counts=failure.counts,
                reason=failure.reason,
            )
        return found

    def _alike(self, partition: int, op: Op, offsets: Sequence[int], **fields: Any) -> list[Marker]:
        if self.markers == "range" and len(offsets) > 1:
            return codec.ranges(partition, op, offsets, **fields)
        return [Marker(partition, offset, op, **fields) for offset in offsets]

    def _complain(self, error: BaseException, count: int) -> None:
        about = {"queue": self.queue.name, "count": count}
        if isinstance(error, NotOfSchema):  # raised by nobody's function, and tells of the values
            _log.warning(
                "not of the schema, as the reason in the dead letter will say; redelivered", extra=about
            )
        else:
            _log.warning("processing failed; the messages will be redelivered", exc_info=error, extra=about)

    # --- reports --------------------------------------------------------------------------------------

    def _with_report(self, table: pa.RecordBatch, report: str | None) -> pa.RecordBatch:
        reports = pa.nulls(table.num_rows, pa.string()) if report is None else pa.array([report])
        names = [*self.schema.fieldNames(), REPORT]
        return pa.RecordBatch.from_arrays([*table.columns, reports], names)

    def _report(self, report: Report) -> pa.RecordBatch:
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        nothing = pa.RecordBatch.from_arrays([pa.nulls(1, one.type) for one in arrow], arrow.names)
        return self._with_report(nothing, str(report))


def _frame(batch: pa.RecordBatch, rows: range) -> pd.DataFrame:
    """Some rows as a frame of their own: the function may change what it is given."""
    frame = batch.slice(rows.start, len(rows)).to_pandas(use_threads=False)  # Spark runs a task for each core
    frame.index = pd.RangeIndex(rows, name=ROW)
    return frame


def _by_partition(partitions: Any, offsets: Any) -> Offsets:
    """The offsets of each partition, ascending; raises ConfigError when one is there twice."""
    found: dict[int, Sequence[int]] = {}
    for partition in np.unique(partitions).tolist():
        ones = np.sort(offsets[partitions == partition])
        low, high = int(ones[0]), int(ones[-1])
        if (np.diff(ones) == 0).any():
            raise ConfigError(
                f"process: partition {partition} has a message more than once between the offsets {low} and "
                f"{high}; join, union or explode behind process(), not before it"
            )
        found[partition] = range(low, high + 1) if high - low + 1 == len(ones) else ones.tolist()
    return found


@cache
def _row_class(names: tuple[str, ...]) -> type[Row]:
    """A Row with these fields, whose attributes are found several times as fast."""
    fields = {name: property(itemgetter(at)) for at, name in enumerate(names) if not hasattr(Row, name)}
    return type("Row", (Row,), {"__slots__": (), "__fields__": list(names), **fields})


def _reason(error: Any) -> str:
    if not isinstance(error, str | BaseException):
        raise ConfigError(f"{ERROR}: {type(error).__name__} is no text; what has not failed has None there")
    return str(error)


def _wait(delay: Any) -> Duration | None:
    if isinstance(delay, timedelta):
        return delay
    if pd.api.types.is_scalar(delay) and pd.isna(delay):
        return None
    try:
        return float(delay)
    except (TypeError, ValueError):
        raise ConfigError(f"{DELAY}: {delay!r} is neither seconds nor a timedelta") from None


def _flags(rejected: pd.Series) -> pd.Series:
    """Where a column has True; raises ConfigError where it has anything but that, False and nothing."""
    true, false = (rejected.eq(one).fillna(value=False).astype(bool) for one in (True, False))
    if len(odd := rejected[~(true | false | rejected.isna())]):
        raise ConfigError(f"{REJECT}: {odd.iloc[0]!r} is neither True nor False")
    return true
