"""The state of each message of a queue, computed from its markers by Spark.

The result is that of kmqpy.kafka.markers.inflight, with which the tests compare it. What a marker does
depends on the earlier markers of its message, so the code uses window functions, then aggregates that Spark
can hash: lists of the markers of each message would be sorted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from types import MappingProxyType

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.message_headers import (
    DEAD_LETTER_ATTEMPTS,
    DEAD_LETTER_OFFSET,
    DEAD_LETTER_PARTITION,
    DEAD_LETTER_REASON,
    DEAD_LETTER_TOPIC,
    ORIGINAL_TIMESTAMP,
    is_dead_letter_of,
)
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import LANE_SUFFIXES, QueueSettings
from kmqpy.spark.decode import (
    decode_markers,
    each_message,
    header_bytes,
    header_text,
    number,
    redelivery_count,
)
from kmqpy.spark.log_cuts import Cuts, by_offset, offset_column, with_told


class State(StrEnum):
    """The state of a message, as KmqSpark.messages shows it."""

    PENDING = "pending"
    """Not taken yet, or delayed and not yet due."""
    IN_FLIGHT = "in_flight"
    """Taken, and neither acknowledged nor redelivered."""
    OVERDUE = "overdue"
    """In flight, and its lease or delay is over: a tracker is about to redeliver or dead-letter it."""
    PROCESSED = "processed"
    """Acknowledged, even by a consumer of an earlier delivery; or committed, with markers that are gone."""
    REDELIVERED = "redelivered"
    """A tracker appended a copy of it to the queue; that copy is a message of its own here."""
    DEAD = "dead"
    """A tracker appended a copy of it to the dead-letter topic."""


OUTCOME = (
    "partition int, offset bigint, enqueued timestamp, first_enqueued_ms bigint, count bigint, moved int, "
    "in_flight_state string, taken_ms bigint, only_delayed boolean, due_ms bigint, by int, ended_ms bigint"
)
"""The columns of an outcome: the state of a message as its markers leave it, at any time.

`enqueued` is null if the message's record was not read, `moved` if no dead letter is a copy of the message.
_outcome() describes the columns from `in_flight_state` on."""

_BY_CLIENT, _BY_TRACKER, _TAKEN_LATE = 1, 2, 3
"""Who finished a message. `_BY_CLIENT`: a client acknowledged it, even if only a tracker's end marker says
so. `_BY_TRACKER`: a tracker made a copy. `_TAKEN_LATE`: a tracker, whose end marker says that the message was
finished before (rule R30 of docs/rules.md); that marker counts only if retention has deleted the earlier
end marker."""
_BEFORE_ALL, _AT_FORMER, _AT_END, _AT_OPENED, _AT_CHANGED = -6, -5, -4, -3, -2
"""Markers offsets of no marker, and of those that _as_markers() makes of outcomes, below all real ones."""
_ENTRY_STATES = {
    Op.TAKE.value: EntryState.LEASED.value,
    Op.DELAY.value: EntryState.DELAYED.value,
    Op.EXTEND.value: EntryState.LEASED.value,
    Op.NACK.value: EntryState.RELEASED.value,
    Op.DEAD_LETTER.value: EntryState.DEAD.value,
}


def outcomes(
    records: DataFrame,
    markers: DataFrame,
    dead_letters: DataFrame | None,
    *,
    count_header: str,
    ends: Sequence[Place] = (),
    max_lease_ms: int = INT64_MAX,
    max_delay_ms: int = INT64_MAX,
    before: DataFrame | None = None,
    now_before: Sequence[Place] = (),
    cuts: Cuts = MappingProxyType({}),
) -> DataFrame:
    """The columns OUTCOME: a row for each message that any of these frames names.

    records       of the queue topic
    markers       as decode_markers() makes them; with the column `cuts` if there are cuts
    dead_letters  the records of the dead-letter topic
    ends          where the queue topic ended after the markers were read: no messages exist from there on
    max_lease_ms, max_delay_ms
                  limits of leases and delays; longer ones are cut to these
    before        outcomes of all earlier records, markers and dead letters; they must have each message that
                  these markers and dead letters name
    now_before    each partition's now (the largest timestamp of its markers), in ms, after those before
    cuts          where logs of the queue topic were cut back (rule R39 of docs/rules.md)
    """
    known = _messages(records, count_header).withColumn("moved", F.lit(None).cast("int"))
    told = events(markers, ends, max_lease_ms, max_delay_ms, now_before, cuts)
    known = known.unionByName(told, allowMissingColumns=True)
    if dead_letters is not None:
        known = known.unionByName(moved(dead_letters, cuts), allowMissingColumns=True)
    if before is not None:
        known = known.unionByName(_as_markers(before))
    message = ("enqueued", "first_enqueued_ms", "count", "moved")
    return (
        _judged(known)
        .groupBy("partition", "offset")
        .agg(*(F.max(name).alias(name) for name in message), *_outcome())
    )


def described(found: DataFrame, now_ms: int, committed: Sequence[Place]) -> DataFrame:
    """Outcomes as KmqSpark.messages shows them, without those of messages whose record was not read.

    now_ms     the time by which messages are overdue
    committed  the group's committed offsets. Messages below were taken; those without a marker were finished
               before retention deleted their markers
    """
    found = found.filter(F.col("enqueued").isNotNull())
    entry_state, due, by = F.col("in_flight_state"), F.col("due_ms"), F.col("by")
    in_flight = entry_state.isNotNull()
    below = F.col("offset") < of_partition(committed, 0)
    state = (
        F.when(in_flight & (due <= now_ms), State.OVERDUE.value)
        .when(entry_state == EntryState.DELAYED.value, State.PENDING.value)
        .when(in_flight, State.IN_FLIGHT.value)
        .when(F.col("moved").isNotNull() & (by >= _BY_TRACKER), State.DEAD.value)
        .when(by == _BY_TRACKER, State.REDELIVERED.value)
        .when(by.isNotNull() | below, State.PROCESSED.value)
        .otherwise(State.PENDING.value)
    )
    # A take after the end is not the take that the end belongs to, whose time is not known any more.
    taken, ended = F.col("taken_ms"), F.col("ended_ms")
    taken = F.when(in_flight | ended.isNull() | (taken <= ended), taken)
    not_delivered = F.col("only_delayed") | (F.col("state") == State.PENDING.value)
    return found.withColumn("state", state).select(
        "partition",
        "offset",
        F.col("enqueued").alias("timestamp"),
        F.coalesce(_moment(F.col("first_enqueued_ms")), F.col("enqueued")).alias("first_enqueued"),
        "state",
        (F.col("count") + F.when(not_delivered, 0).otherwise(1)).alias("attempts"),
        entry_state,
        _moment(taken).alias("taken_at"),
        _moment(due).alias("due_at"),
        F.when(~in_flight, _moment(F.col("ended_ms"))).alias("ended_at"),
    )


def depth(messages: DataFrame, partitions: DataFrame) -> DataFrame:
    """Count the messages of each partition in each state; see KmqSpark.depth."""
    counted = messages.groupBy("partition").agg(
        *(F.count_if(F.col("state") == state.value).alias(state.value) for state in State),
        F.min(F.when(F.col("state") == State.PENDING.value, F.col("timestamp"))).alias("oldest_pending"),
    )
    joined = partitions.join(counted, "partition", "left")
    zeros = (F.coalesce(state.value, F.lit(0)).alias(state.value) for state in State)
    return joined.select("partition", *zeros, "oldest_pending")


def latency(messages: DataFrame, quantiles: Iterable[float]) -> DataFrame:
    """Quantiles of how long processed messages waited and were in flight; see KmqSpark.latency."""
    wanted = [float(one) for one in quantiles]
    if not wanted or not all(0 <= one <= 1 for one in wanted):
        raise ConfigError(f"quantiles: {wanted!r} must be numbers from 0 to 1, at least one")
    times = {
        "waiting_ms": F.unix_millis("taken_at") - F.unix_millis("timestamp"),
        "processing_ms": F.unix_millis("ended_at") - F.unix_millis("taken_at"),
        "total_ms": F.unix_millis("ended_at") - F.unix_millis("first_enqueued"),
    }
    processed = messages.filter(F.col("state") == State.PROCESSED.value)
    ranks = F.array(*map(F.lit, wanted))
    # Without times the percentiles are null, and zipping arrays with a null would lose the others.
    unknown = F.array_repeat(F.lit(None).cast("bigint"), len(wanted))
    found = processed.agg(
        ranks.alias("quantile"),
        *(F.coalesce(F.percentile_approx(time, wanted), unknown).alias(name) for name, time in times.items()),
    )
    return (
        found.select(F.explode(F.arrays_zip("quantile", *times)).alias("row"))
        .select("row.*")
        .dropna(how="all", subset=list(times))
    )


def own_dead_letters(records: DataFrame, queue: QueueSettings, *, of_all_lanes: bool = False) -> DataFrame:
    """The records of a dead-letter topic that are of `queue`, as message_headers.is_dead_letter_of judges.

    of_all_lanes  also those of the lanes that the queue has, or had; their offsets are those of other topics
    """
    origin = header_text(DEAD_LETTER_TOPIC)
    without_origin = F.lit(is_dead_letter_of((), queue))
    named = origin.rlike(r"^[A-Za-z0-9._-]{1,249}$")
    suffixes = ("", *LANE_SUFFIXES) if of_all_lanes and queue.lane_of is None else ("",)
    ours = [f"{queue.name}{suffix}" for suffix in suffixes]
    return records.filter(F.when(named, origin.isin(ours)).otherwise(without_origin))


def dead_letters_of(records: DataFrame) -> DataFrame:
    """The records of dead letters, with the columns of KmqSpark.undelivered."""
    return records.select(
        "partition",
        "offset",
        "key",
        F.col("value").alias("body"),
        header_text(DEAD_LETTER_TOPIC).alias("origin_topic"),
        number(header_text(DEAD_LETTER_PARTITION)).try_cast("int").alias("origin_partition"),
        offset_column(number(header_text(DEAD_LETTER_OFFSET))).alias("origin_offset"),
        number(header_text(DEAD_LETTER_ATTEMPTS)).alias("attempts"),
        header_text(DEAD_LETTER_REASON).alias("reason"),
        _moment(number(header_text(ORIGINAL_TIMESTAMP))).alias("first_enqueued"),
        F.col("timestamp").alias("dead_since"),
        "headers",
    )


def finished(markers: DataFrame, ends: Sequence[Place]) -> DataFrame:
    """Partition and offset of the messages with an end marker, each once.

    ends  where the topic of these messages ended after the markers were read
    """
    found = each_message(decode_markers(markers).filter(F.col("op") == Op.END.value))
    existing = found.filter(F.col("offset") < of_partition(ends, INT64_MAX))
    return existing.select("partition", "offset").distinct()


def _messages(records: DataFrame, count_header: str) -> DataFrame:
    # First the headers alone: an expression that uses a header twice would look for it twice.
    named = records.select(
        "partition",
        "offset",
        F.col("timestamp").alias("enqueued"),
        header_text(ORIGINAL_TIMESTAMP).alias("first"),
        header_bytes(count_header).alias("counted"),
    )
    return named.select(
        "partition",
        "offset",
        "enqueued",
        number(F.col("first")).alias("first_enqueued_ms"),
        redelivery_count(F.col("counted")).alias("count"),
    )


def events(
    markers: DataFrame,
    ends: Sequence[Place] = (),
    max_lease_ms: int = INT64_MAX,
    max_delay_ms: int = INT64_MAX,
    now_before: Sequence[Place] = (),
    cuts: Cuts = MappingProxyType({}),
) -> DataFrame:
    """A row for each message that a marker names, with the partition's now and the message's deadline."""
    decoded = markers.withColumn("read_ms", F.unix_millis("timestamp"))
    # The partition's now never goes back, and every record of the markers topic moves it on.
    log = Window.partitionBy("partition").orderBy("at").rowsBetween(Window.unboundedPreceding, 0)
    now_ms = F.greatest(F.max("read_ms").over(log), of_partition(now_before, None))
    decoded = decoded.withColumn("now_ms", now_ms)
    op, end = F.col("op"), of_partition(ends, INT64_MAX)
    # A marker that names a message that does not exist is ignored as a whole (rule R22 of docs/rules.md).
    highest = F.when(F.col("offsets").isNull(), F.col("offset")).otherwise(F.element_at("offsets", -1))
    if cuts:
        decoded, highest = with_told(decoded, cuts), offset_column(highest)
    decoded = decoded.filter((op == Op.END.value) | (highest < end))
    limit_ms = F.when(op.isin(Op.TAKE.value, Op.EXTEND.value), max_lease_ms).otherwise(max_delay_ms)
    after = F.when(op == Op.DEAD_LETTER.value, F.lit(0).cast("bigint")).otherwise(
        F.least(F.greatest(F.col("redeliver_after_ms"), F.lit(0)), limit_ms)
    )
    due = F.when(after > INT64_MAX - F.col("now_ms"), INT64_MAX).otherwise(F.col("now_ms") + after)
    by = F.when(F.col("taken_late"), _TAKEN_LATE)
    by = by.when(F.col("by_tracker") & ~F.col("acknowledged"), _BY_TRACKER)
    told = decoded.withColumns({"due_ms": due, "by": by.otherwise(_BY_CLIENT)})
    without_ticks = each_message(told).filter(F.col("offset") >= 0)
    if cuts:
        without_ticks = by_offset(without_ticks, cuts)
    existing = without_ticks.filter(F.col("offset") < end)
    return existing.select("partition", "offset", "at", "op", "now_ms", "due_ms", "by")


def moved(dead_letters: DataFrame, cuts: Cuts = MappingProxyType({})) -> DataFrame:
    """Partition and offset of the messages of which dead letters are copies, with `moved` = 1."""
    found = dead_letters.select(
        number(header_text(DEAD_LETTER_PARTITION)).try_cast("int").alias("partition"),
        number(header_text(DEAD_LETTER_OFFSET)).alias("offset"),
        F.lit(1).alias("moved"),
    )
    found = found.filter(F.col("partition").isNotNull() & F.col("offset").isNotNull())
    return by_offset(found, cuts) if cuts else found


def _as_markers(outcomes: DataFrame) -> DataFrame:
    """A row for each of the few markers that lead to the same outcomes, even with later ones."""
    entry_state, taken_ms, due_ms = F.col("in_flight_state"), F.col("taken_ms"), F.col("due_ms")
    in_flight = entry_state.isNotNull()
    is_taken = in_flight & (entry_state != EntryState.DELAYED.value) & ~F.col("only_delayed")

    def marker(at: int, op: Op, now_ms: Column) -> Column:
        return F.struct(
            F.lit(at).cast("bigint").alias("at"),
            F.lit(op.value).alias("op"),
            now_ms.alias("now_ms"),
            due_ms.alias("due_ms"),
            F.col("by").alias("by"),
        )

    former = F.when(taken_ms.isNotNull() & ~is_taken, marker(_AT_FORMER, Op.TAKE, taken_ms))
    markers = F.array(
        former.when(F.col("only_delayed") & ~in_flight, marker(_AT_FORMER, Op.DELAY, taken_ms)),
        F.when(F.col("by").isNotNull(), marker(_AT_END, Op.END, F.col("ended_ms"))),
        F.when(is_taken, marker(_AT_OPENED, Op.TAKE, taken_ms)).when(
            in_flight, marker(_AT_OPENED, Op.DELAY, taken_ms)
        ),
        F.when(entry_state == EntryState.RELEASED.value, marker(_AT_CHANGED, Op.NACK, taken_ms)).when(
            entry_state == EntryState.DEAD.value, marker(_AT_CHANGED, Op.DEAD_LETTER, taken_ms)
        ),
    )
    message = ("partition", "offset", "enqueued", "first_enqueued_ms", "count", "moved")
    # A message without any marker keeps a row.
    told = outcomes.select(*message, F.explode_outer(F.array_compact(markers)).alias("marker"))
    return told.select(*message, "marker.*")


def _judged(known: DataFrame) -> DataFrame:
    """Add what each marker did: its `at` in the columns that apply to it, null in the others.

    applies  it changed the state of a message in flight, or made the message in flight
    opens    it made the message in flight, or took it once more: a take or a delay
    takes    the same, by a take
    ends     it finished the message

    The rules are those of InFlight, as conditions on the earlier markers of the message.
    """
    op, at = F.col("op"), F.col("at")
    is_end, opens = op == Op.END.value, op.isin(Op.TAKE.value, Op.DELAY.value)
    before = (
        Window.partitionBy("partition", "offset").orderBy("at").rowsBetween(Window.unboundedPreceding, -1)
    )

    def last(condition: Column) -> Column:
        """The markers offset of the last marker before this one for which the condition is true."""
        return F.coalesce(F.max(F.when(condition, at)).over(before), F.lit(_BEFORE_ALL))

    judged = known.withColumns(
        {"end": last(is_end), "opened": last(opens), "taken": last(op == Op.TAKE.value)}
    )
    alive = F.col("opened") > F.col("end")
    judged = judged.withColumns(
        {
            "rejected": last((op == Op.DEAD_LETTER.value) & alive),
            "released": last((op == Op.NACK.value) & alive),
        }
    )
    is_dead = F.col("rejected") > F.col("end")
    is_held = (F.col("taken") == F.col("opened")) & (F.col("released") < F.col("opened"))
    applies = ~is_end & ~is_dead & (opens | (alive & ((op != Op.EXTEND.value) | is_held)))
    # An end marker for a message that is not in flight any more came too late. One for a message that never
    # was in flight means that nobody shall get that message.
    ends = is_end & (alive | (F.col("end") == _BEFORE_ALL))
    return judged.withColumns(
        {
            "applies": F.when(applies, at),
            "opens": F.when(applies & opens, at),
            "takes": F.when(applies & (op == Op.TAKE.value), at),
            "ends": F.when(ends, at),
        }
    )


def _outcome() -> list[Column]:
    """Aggregates: the state in which the markers of a message leave the message.

    in_flight_state  a value of kmqpy.kafka.markers.entry.EntryState; null: not in flight
    taken_ms         when it was last taken; null: never
    only_delayed     whether it was delayed, and never taken
    due_ms           as in kmqpy.kafka.markers.entry.Entry; null: not in flight
    by               who finished it: _BY_CLIENT, …; null: nobody
    ended_ms         when it was finished
    """
    # A number, because Spark sorts rows to aggregate a text, but hashes them to aggregate a number.
    code = F.array_position(F.array(*map(F.lit, _ENTRY_STATES)), F.col("op"))
    last = F.max_by(code, "applies")
    in_flight = F.max("applies") > F.coalesce(F.max("ends"), F.lit(_BEFORE_ALL))
    names = F.array(*map(F.lit, _ENTRY_STATES.values()))
    first_end = F.when(F.col("by") != _TAKEN_LATE, F.col("ends"))
    return [
        F.when(in_flight, F.try_element_at(names, last.cast("int"))).alias("in_flight_state"),
        F.max_by("now_ms", "takes").alias("taken_ms"),
        (F.max("opens").isNotNull() & F.max("takes").isNull()).alias("only_delayed"),
        F.when(in_flight, F.max_by("due_ms", "applies")).alias("due_ms"),
        F.coalesce(F.max_by("by", first_end), F.max_by("by", "ends")).alias("by"),
        F.coalesce(F.max_by("now_ms", first_end), F.max_by("now_ms", "ends")).alias("ended_ms"),
    ]


def of_partition(places: Sequence[Place], other: int | None) -> Column:
    """The offset, or time, in `places` for a row's partition; `other` if there is none."""
    if not places:
        return F.lit(other).cast("bigint")
    known = F.create_map(*(F.lit(number).cast("bigint") for place in places for number in place))
    return F.coalesce(F.try_element_at(known, F.col("partition").cast("bigint")), F.lit(other).cast("bigint"))


def _moment(ms: Column) -> Column:
    """The timestamp of a time in ms; null, which means never, for times that a timestamp can't hold."""
    return F.when(ms.between(-(2**53), 2**53), F.timestamp_millis(ms))
