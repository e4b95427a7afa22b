"""Refuses queries whose plans have stateful operators: aggregations, joins of streams, deduplication, limits.

Such an operator keeps rows in Spark's state when the sink commits a micro-batch. The messages of these rows
can't be acknowledged, because Spark does not report when their results are in the sink.
"""

from __future__ import annotations

from pyspark.sql.streaming.listener import StreamingQueryProgress

from kmqpy.errors import ConfigError


def refusal(progress: StreamingQueryProgress) -> ConfigError | None:
    """The error for a query whose plan has stateful operators; None for one whose plan has none."""
    names = sorted({operator.operatorName for operator in progress.stateOperators})
    if not names:
        return None
    return ConfigError(
        f"query {progress.name or progress.id}: its plan has stateful operators ({', '.join(names)}: an "
        "aggregation, a join of streams, a deduplication, a limit). Their rows are in Spark's state, not in "
        "the sink, so nothing was acknowledged and the query was stopped; its messages will be redelivered. "
        "Write the result of process() to a table and aggregate that, or aggregate each micro-batch in "
        "foreachBatch"
    )
