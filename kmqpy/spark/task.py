"""Runs process() on executors: takes messages, calls the user's function, gives back messages that failed.

The function sees a message only after Kafka has confirmed its start marker. After the rows that the function
returned for a group of messages, the task yields a report to the driver, which writes the end markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from kmqpy.core.backoff import Backoff
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark.failures import Failure, FailurePolicy, nacks
from kmqpy.spark.functions import FrameCaller, FrameFunction, RowCaller, RowFunction
from kmqpy.spark.handout import Handout, Places
from kmqpy.spark.taker import MAX_TAKES, AnyTaker, taker_of

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
        """Split a batch into groups of messages that are taken, and given to the function, together.

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

    def _process(self, taker: AnyTaker, handout: Handout, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        places = self._places(batch)
        handed_out = handout.take(places, batch.column("deliver_at_ms"))
        failed: dict[Place, Failure] = {}
        output: list[pa.RecordBatch] = []
        markers = nacks(
            self.queue, dict.fromkeys(handed_out.deadly, Failure(op=Op.NACK, reason=_DEADLY_REASON))
        )
        if handed_out.taken:
            rows = batch if handed_out.rows.all() else batch.filter(pa.array(handed_out.rows))
            outcome = (RowCaller if self.by_row else FrameCaller)(
                function=self.function,
                schema=self.schema,
                failures=FailurePolicy(queue=self.queue, backoff=self.backoff),
            ).call(rows)
            output = outcome.output
            given = places.where(handed_out.rows) if outcome.failed else places
            failed = {given.place(row): failure for row, failure in outcome.failed.items()}
            # An extension says that the worker has survived a message that was taken before.
            again = handout.taken_again(handed_out.taken)
            extension = Failure(op=Op.EXTEND, delay_ms=self.lease_ms)
            markers += nacks(self.queue, dict.fromkeys(again, extension)) + nacks(self.queue, failed)
        if markers:
            taker.write(markers)
        names = [*self.schema.fieldNames(), REPORT]
        for one in output:
            columns = [*one.columns, pa.nulls(one.num_rows, pa.string())]
            yield pa.RecordBatch.from_arrays(columns, names)
        nothing = [pa.nulls(1, one.type) for one in to_arrow_schema(self.schema, timezone="UTC")]
        report = str(handed_out.report(failed))
        yield pa.RecordBatch.from_arrays([*nothing, pa.array([report])], names)

    def _places(self, batch: pa.RecordBatch) -> Places:
        return Places.of(batch.column("partition"), batch.column("offset"), self.queue.name)
