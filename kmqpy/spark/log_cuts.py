"""Finds the messages that markers name where the log of the queue was cut back (rule R39 of docs/rules.md).

Behind a cut, clients of kmqpy name messages by numbers (see kmqpy.kafka.markers.log_cuts), others and Spark
by offsets, as rows of the state do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.kafka.markers.log_cuts import Cut, LogCuts, offset_of

Cuts = Mapping[int, LogCuts]
"""The cuts of each partition's log that has some."""

_OFFSET_MASK = offset_of(2**63 - 1)


def offset_column(number: Column) -> Column:
    """The offset at which the message with this number stands, or stood; -1 stays."""
    return F.when(number < 0, number).otherwise(number.bitwiseAND(F.lit(_OFFSET_MASK)))


def with_told(markers: DataFrame, cuts: Cuts) -> DataFrame:
    """Add a column for each cut: the markers offset of the first tick that tells it, null without one.

    The markers need the column `cuts`; see decode_markers().
    """
    log = Window.partitionBy("partition")
    told = {}
    for partition, of_partition in cuts.items():
        for cut in of_partition.cuts:
            tells = (F.col("partition") == partition) & F.col("cuts").rlike(rf"<{cut.epoch}@")
            told[_told_name(partition, cut)] = F.min(F.when(tells, F.col("at"))).over(log)
    return markers.withColumns(told)


def by_offset(rows: DataFrame, cuts: Cuts) -> DataFrame:
    """Rows that name messages by the numbers in `offset`, as rows with their offsets.

    Leaves out messages that stood behind a cut in the former log. An offset instead of a number names the
    message of the former log up to the tick that tells of the cut, and a new one behind that. Rows without
    the columns of with_told() name messages by numbers only.
    """
    offset = offset_column(F.col("offset"))
    base = F.col("offset") - offset
    kept = base == _of_cut(cuts, offset, lambda _, cut: F.lit(cut.base))
    names = {_told_name(partition, cut) for partition, ones in cuts.items() for cut in ones.cuts}
    if names <= {*rows.columns}:
        told = _of_cut(cuts, offset, lambda partition, cut: F.col(_told_name(partition, cut)))
        kept = kept | ((base == 0) & (told.isNull() | (F.col("at") > told)))
    return rows.filter(kept).withColumn("offset", offset).drop(*names)


def _of_cut(cuts: Cuts, offset: Column, value: Callable[[int, Cut], Column]) -> Column:
    """The value for the last cut at or before this offset of the row's partition; 0 if there is none."""
    found = F.lit(0).cast("bigint")
    for partition, of_partition in cuts.items():
        for cut in of_partition.cuts:  # ascending: the last one that fits decides
            behind = (F.col("partition") == partition) & (offset >= cut.start)
            found = F.when(behind, value(partition, cut)).otherwise(found)
    return found


def _told_name(partition: int, cut: Cut) -> str:
    return f"told_{partition}_{cut.epoch}"
