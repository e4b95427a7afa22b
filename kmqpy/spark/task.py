"""Runs process() on executors: takes messages, calls the user's function, gives back messages that failed.

For each Arrow batch, a Handout decides which messages the function may see. The Taker, which reads and writes
markers for all tasks of a Python worker, writes the start markers of these messages. The function sees a
message only after Kafka has confirmed its start marker. The task splits a batch into groups: it takes the
messages of a group together, and gives them to the function together. After the rows that the function
returned for a group, the task yields a report to the driver, which writes the end markers. `places` are the
partition and offset of each row.

A message is *deadly* if it was taken MAX_TAKES times in one delivery, and no marker says that the Python
worker survived it. The function does not see a deadly message; the task gives it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kmqpy.core.backoff import Backoff
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark.failures import FailurePolicy, alike_markers, nacks
from kmqpy.spark.frame_function import FrameCaller, FrameFunction
from kmqpy.spark.handout import HandedOut, Handout, Places
from kmqpy.spark.row_function import RowCaller, RowFunction
from kmqpy.spark.taker import MAX_TAKES, Taker, taker_of

REPORT = "kmq_report"
"""The column of a report; null in the rows that the function returned."""
_DEADLY_REASON = (
    f"the Python worker died {MAX_TAKES} times while it processed this message "
    "(perhaps because of another message of the same batch)"
)
"""The reason with which the task gives back a deadly message; shown to users."""


@dataclass(frozen=True, kw_only=True)
class ProcessTask:
    """The function that Spark sends to executors, with its settings, and calls there (mapInArrow).

    function  the user's function: of a frame (`KmqSpark.process`) or, if `by_row`, of a row (`process_rows`)
    schema    the schema of the rows that the user's function returns
    """

    queue: QueueSettings
    connection: KafkaConnection
    lease_ms: int
    backoff: Backoff
    schema: StructType
    function: FrameFunction | RowFunction
    by_row: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run one task: take and process messages. Yields the output for each group, then a report on it."""
        taker = taker_of(self.queue, self.connection)
        handout = Handout(taker, self.lease_ms, withholds_deadly=True)
        for batch in filter(len, batches):
            places = self._places(batch)
            handout.read_markers(places)
            for group in self._groups(batch, handout, places):
                yield from self._process(taker, handout, group)

    def _groups(self, batch: pa.RecordBatch, handout: Handout, places: Places) -> Iterator[pa.RecordBatch]:
        """Split a batch into groups of messages that are taken together.

        A message on its last attempt is a group of its own if it was taken before and no marker says that the
        worker survived it: if it kills the worker again, no other message becomes a dead letter with it.
        """
        most = self.queue.max_redeliveries
        alone = np.zeros(len(batch), dtype=bool)
        if most is not None:
            last = batch.column("attempts").to_numpy(zero_copy_only=False) > most
            for row in np.flatnonzero(last).tolist():
                alone[row] = handout.was_taken(places.place(row))
        if not alone.all():
            yield batch.filter(pa.array(~alone)) if alone.any() else batch
        for row in np.flatnonzero(alone).tolist():
            yield batch.slice(row, 1)

    def _process(self, taker: Taker, handout: Handout, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        places = self._places(batch)
        handed_out = handout.take(places, batch.column("deliver_at_ms"))
        operations: list[Marker] = []
        for partition, deadly in handed_out.deadly.items():
            operations += alike_markers(self.queue, partition, Op.NACK, sorted(deadly), reason=_DEADLY_REASON)
        failures = FailurePolicy(queue=self.queue, backoff=self.backoff)
        failed: dict[int, set[int]] = {}
        output: list[pa.RecordBatch] = []
        if handed_out.taken:
            caller = RowCaller if self.by_row else FrameCaller
            rows = batch if handed_out.rows.all() else batch.filter(pa.array(handed_out.rows))
            outcome = caller(function=self.function, schema=self.schema, failures=failures).call(rows)
            output = outcome.output
            given = places.where(handed_out.rows) if outcome.failed else places
            by_place = {given.place(row): failure for row, failure in outcome.failed.items()}
            for partition, offset in by_place:
                failed.setdefault(partition, set()).add(offset)
            operations += [
                *self._extensions_of_survivors(handout, handed_out),
                *nacks(self.queue, by_place),
            ]
        if operations:
            taker.write(operations)
        for one in output:
            yield self._with_report(one, None)
        yield self._report(str(handed_out.report(failed)))

    def _places(self, batch: pa.RecordBatch) -> Places:
        return Places.of(batch.column("partition"), batch.column("offset"), self.queue.name)

    def _extensions_of_survivors(self, handout: Handout, handed_out: HandedOut) -> list[Marker]:
        """Extensions for messages that were taken before: they say that the worker has survived these."""
        found: list[Marker] = []
        for partition, offsets in handout.taken_again(handed_out.taken).items():
            fields = {"redeliver_after_ms": self.lease_ms}
            found += alike_markers(self.queue, partition, Op.EXTEND, offsets, **fields)
        return found

    def _with_report(self, output: pa.RecordBatch, report: str | None) -> pa.RecordBatch:
        reports: Any = pa.nulls(output.num_rows, pa.string()) if report is None else pa.array([report])
        names = [*self.schema.fieldNames(), REPORT]
        return pa.RecordBatch.from_arrays([*output.columns, reports], names)

    def _report(self, report: str) -> pa.RecordBatch:
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        nothing = pa.RecordBatch.from_arrays([pa.nulls(1, one.type) for one in arrow], arrow.names)
        return self._with_report(nothing, report)
