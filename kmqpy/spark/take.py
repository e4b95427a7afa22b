"""Takes messages for KmqSpark.take(): payloads stay in the JVM, and any expressions of Spark may follow.

Only partitions and offsets of messages go through Python, which writes the start markers. An observed metric
reports to the driver which messages were handed out. Another one, at the end of the plan, reports the rows
that are not ok (write_stream()'s argument `ok`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import BooleanType, StringType

from kmqpy.errors import ConfigError, DecodeError
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark.checkpoint import error_line
from kmqpy.spark.handout import Handout, Places
from kmqpy.spark.lanes import Lanes, numbered_partition
from kmqpy.spark.report import REPORTS
from kmqpy.spark.taker import taker_of
from kmqpy.worker.outcome import REASON_CHARS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MESSAGE = "kmq_message"
"""The column with the message of a row: numbered partition (see kmqpy.spark.lanes), offset, attempts.

write_stream() uses and removes it."""

FAILURES = "failures"
"""The field of the observed metric with the rows that are not ok."""

_TAKEN = "kmq_taken"
"""The column that TakeTask returns: null where a message is handed out, else _NOT_HANDED_OUT.

The last row of a batch has _HANDED_OUT or _NOT_HANDED_OUT, followed by the report of the batch."""
_HANDED_OUT, _NOT_HANDED_OUT = "+", "-"
_OK, _REASON = "kmq_ok", "kmq_reason"


@dataclass(frozen=True, kw_only=True)
class TakeTask:
    """The function that Spark sends to executors, with its settings, and calls there (arrow_udf)."""

    queue: QueueSettings
    connection: KafkaConnection
    lease_ms: int

    def __call__(self, batches: Iterable[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Run one task: take the messages of each batch, and return which of them are handed out.

        A batch is three arrays: partitions (as by numbered_partition()), offsets, deliver_at_ms.
        """
        handout = Handout(taker_of(self.queue, self.connection), self.lease_ms, withholds_deadly=False)
        for partitions, offsets, deliver_at_ms in batches:
            if not len(partitions):
                yield pa.array([], pa.string())
                continue
            places = Places.of(partitions, offsets, self.queue.name)
            handout.read_markers(places)
            handed_out = handout.take(places, deliver_at_ms)
            yield _column(handed_out.rows, str(handed_out.report()))


def _column(rows: Any, report: str) -> pa.Array:
    """Return the result column, with the report in its last row.

    Spark may stop reading before that row (a LIMIT): then no report says that the batch was handed on.
    """
    last = pa.array([(_HANDED_OUT if rows[-1] else _NOT_HANDED_OUT) + report])
    others = pa.nulls(len(rows) - 1, pa.string())
    if not rows.all():
        others = pc.if_else(pa.array(rows[:-1]), others, _NOT_HANDED_OUT)
    return pa.concat_arrays([others, last])


def with_taken(df: DataFrame, task: TakeTask, metric: str) -> DataFrame:
    """The rows of `df` whose messages are handed out, with the column MESSAGE; `metric` gets the reports."""

    # By these types, Spark calls the function once for a task, with an iterator over batches.
    def take(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        yield from task(batches)

    # Not deterministic: otherwise Spark would evaluate later expressions of the plan before this one.
    function = arrow_udf(take, StringType()).asNondeterministic()  # type: ignore[call-overload]
    taken, place = F.col(_TAKEN), (numbered_partition(task.queue), F.col("offset"))
    number = F.col("partition") if len(Lanes(task.queue)) == 1 else place[0]
    report = F.when(F.length(taken) > 1, F.substring(taken, 2, 2**31 - 1))
    return (
        df.withColumn(_TAKEN, function(*place, F.col("deliver_at_ms")))
        .observe(metric, F.collect_list(report).alias(REPORTS))
        .where(taken.isNull() | taken.startswith(_HANDED_OUT))
        .drop(_TAKEN)
        .withColumn(MESSAGE, F.struct(number.alias("partition"), "offset", "attempts"))
    )


def only_ok(out: DataFrame, ok: Column | str, reason: Column | str | None, metric: str) -> DataFrame:
    """The rows of `out` for which `ok` is true; `metric` gets the others, with their `reason`.

    Raises ConfigError if Spark can't evaluate `ok` and `reason`, or if `out` lacks the column MESSAGE.
    """
    if MESSAGE not in out.columns:
        raise ConfigError(
            f"write_stream: ok: column {MESSAGE!r} of take() is missing, it has {', '.join(out.columns)}; "
            "keep it where you select columns"
        )
    is_ok = _expression(ok, "ok")
    why = F.lit(None) if reason is None else _expression(reason, "reason")
    try:
        kind = out.select(is_ok.alias(_OK), why.cast("string").alias(_REASON)).schema[_OK].dataType
    except PySparkException as error:
        raise ConfigError(f"write_stream: ok, reason: {error_line(error)}") from None
    if not isinstance(kind, BooleanType):
        raise ConfigError(f"write_stream: ok: {kind.simpleString()}, not boolean")
    judged = out.withColumns({_OK: F.coalesce(is_ok, F.lit(False)), _REASON: why.cast("string")})  # noqa: FBT003
    failure = F.to_json(
        F.struct(
            *(F.col(f"{MESSAGE}.{name}").alias(name) for name in ("partition", "offset", "attempts")),
            F.substring(_REASON, 1, REASON_CHARS + 1).alias("reason"),
        )
    )
    judged = judged.observe(metric, F.collect_list(F.when(~F.col(_OK), failure)).alias(FAILURES))
    return without_own_columns(judged.where(_OK))


def without_own_columns(out: DataFrame) -> DataFrame:
    """`out` without the columns whose names begin with kmq_."""
    return out.drop(*(name for name in out.columns if name.lower().startswith("kmq_")))


def _expression(given: Column | str, name: str) -> Column:
    if isinstance(given, str):
        return F.col(given)
    if not isinstance(given, Column):
        raise ConfigError(
            f"write_stream: {name}: {given!r} is neither an expression nor the name of a column"
        )
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMessage:
    """A message of which a row was not ok."""

    attempts: int
    reason: str | None


def failed_messages(texts: Iterable[str]) -> Mapping[Place, FailedMessage]:
    """Decode the field FAILURES: the first row of each message counts. Raises DecodeError."""
    found: dict[Place, FailedMessage] = {}
    for text in texts:
        try:
            row = json.loads(text)
            place = int(row["partition"]), int(row["offset"])
            found.setdefault(place, FailedMessage(attempts=int(row["attempts"]), reason=row.get("reason")))
        except (ValueError, TypeError, KeyError) as error:
            raise DecodeError(f"a row that is not ok does not say of which message it is: {error}") from None
    return found
