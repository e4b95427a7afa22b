"""Decodes markers with Spark's built-in expressions, so that no Python runs on executors.

kmqpy.kafka.markers.codec defines the byte layout, and which markers can be decoded. Tests compare the results
with those of codec.decode(). A *range marker* is of several messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError
from kmqpy.kafka.markers.codec import ACKNOWLEDGED, MAX_SPAN, TAKEN_LATE, Op
from kmqpy.kafka.markers.lineage import COPY

UNDECODABLE = "undecodable"
NEWER = "newer"
"""Reasons why a marker can't be decoded: it is invalid, or a newer kmqpy wrote it."""

RECORD = ("key", "value", "partition", "offset", "timestamp", "headers")
"""Columns of Spark's Kafka source (with includeHeaders) that markers are decoded from."""

_KEY_BYTES = 12
"""A marker's key: the partition (4 bytes) and the offset (8 bytes) of a message."""
_START_BYTES = 9
"""The value of a start marker for one message: the type byte, and the lease in ms (8 bytes)."""
_END, _START, _START_RUNS, _END_RUNS, _END_BITMAP = (bytes((kind,)) for kind in range(5))
"""The first byte of a marker's value: its type."""
_FIRST_RESERVED, _LAST_RESERVED = b"\x05", b"\x0f"
"""The first and the last of the types that are kept for newer versions of kmqpy."""
_UTF8_ONE_BYTE_LIMIT = 128

_LEB128_REGEX = "((?:[89A-F][0-9A-F]){0,3}[0-7][0-9A-F])"
"""Matches an unsigned LEB128 number of at most four bytes, as hex digits."""

_OPS_WITH_HEADER = [op.value for op in (Op.DELAY, Op.EXTEND, Op.NACK, Op.DEAD_LETTER)]
_ENDS = (_END, _END_RUNS, _END_BITMAP)


def check_columns(frame: DataFrame, needed: Iterable[str], what: str) -> None:
    """Raise ConfigError unless `frame` has these columns."""
    missing = [name for name in needed if name not in frame.columns]
    if missing:
        raise ConfigError(
            f"{what}: column {missing[0]!r} is missing, it has {', '.join(frame.columns) or 'none'}; "
            f"it needs {', '.join(needed)}"
        )


def decode_markers(records: DataFrame, *, with_cuts: bool = False) -> DataFrame:
    """Decode the records of a markers topic, a batch or a stream: a row for each record.

    partition           of the queue
    at                  markers offset
    timestamp           of the record: the broker's time
    op                  a value of kmqpy.kafka.markers.codec.Op; null if `problem` is not null
    offset              of the message; of the lowest one for a range marker
    offsets             of all messages of a range marker; null for a marker of one message
    redeliver_after_ms  the duration of the lease or delay; null for an end marker
    by_tracker          whether a tracker wrote this end marker: the message was redelivered or dead-lettered,
                        or one of the next two is true, and no copy was made
    taken_late          whether it did so because the message was taken when it was finished already (rule R30
                        of docs/rules.md)
    acknowledged        whether it did so because an earlier consumer has acknowledged the message (rule R32)
    problem             null, `undecodable`, or `newer`: a newer kmqpy wrote the marker
    cuts                only if `with_cuts`: the cuts of the queue's log that a tick names, as text

    Raises ConfigError when a column of Spark's Kafka source is missing.
    """
    check_columns(records, RECORD, "decode_markers")
    key, kind = F.col("key"), F.substring("value", 1, 1)
    reason = header_text("kmq-reason")
    size, first = F.length("value"), int64(F.substring("key", 5, 8))
    # Only two projections, because each copies its rows: the first reads bytes, the second judges them.
    parsed = records.select(
        "partition",
        F.col("offset").alias("at"),
        "timestamp",
        first.alias("first"),
        # The type byte, if the sizes fit it and the marker is in the partition that its key names; else null.
        F.when(
            (F.length(key) != _KEY_BYTES)
            | key.isNull()
            | _is_of_another_partition()
            | _has_unreadable_header(),
            None,
        )
        .when((size == 1) & (kind == F.lit(_END)), kind)
        .when((size == _START_BYTES) & (kind == F.lit(_START)), kind)
        .when((size > _START_BYTES) & (kind == F.lit(_START_RUNS)), kind)
        .when((size > 1) & kind.isin([F.lit(_END_RUNS), F.lit(_END_BITMAP)]), kind)
        .when(kind.between(F.lit(_FIRST_RESERVED), F.lit(_LAST_RESERVED)), kind)
        .alias("kind"),
        F.when((size > 1) & kind.between(F.lit(_START_RUNS), F.lit(_END_BITMAP)), _offsets_of_range()).alias(
            "offsets"
        ),
        F.when(
            (size >= _START_BYTES) & kind.isin([F.lit(_START), F.lit(_START_RUNS)]),
            int64(F.substring("value", 2, 8)),
        ).alias("after"),
        header_text("kmq-op").alias("asked"),
        header_text("kmq-by").alias("by"),
        # An end marker that names a copy was written for that copy, whatever reason it gives.
        F.when(reason.isNotNull() & header_bytes(COPY).isNull(), reason).alias("reason"),
        *([header_text("kmq-cuts").alias("cuts")] if with_cuts else []),
    )
    kind, first, asked = F.col("kind"), F.col("first"), F.col("asked")
    is_end = kind.isin([F.lit(end) for end in _ENDS])
    is_reserved = kind >= F.lit(_FIRST_RESERVED)
    is_range = _is_range(kind)
    is_bad = (
        kind.isNull()
        | (is_range & F.col("offsets").isNull())
        | (~is_reserved & (~is_end | is_range) & (first < 0))
    )
    is_newer = is_reserved | (~is_end & asked.isNotNull() & ~asked.isin(_OPS_WITH_HEADER))
    good = ~is_bad & ~is_newer
    by_tracker = good & is_end & F.equal_null("by", F.lit("tracker"))
    return parsed.select(
        "partition",
        "at",
        "timestamp",
        F.when(good & is_end, Op.END.value).when(good, F.coalesce(asked, F.lit(Op.TAKE.value))).alias("op"),
        F.when(good, first).alias("offset"),
        F.when(good, F.col("offsets")).alias("offsets"),
        F.when(good & ~is_end, F.col("after")).alias("redeliver_after_ms"),
        by_tracker.alias("by_tracker"),
        (by_tracker & F.equal_null("reason", F.lit(TAKEN_LATE))).alias("taken_late"),
        (by_tracker & F.equal_null("reason", F.lit(ACKNOWLEDGED))).alias("acknowledged"),
        F.when(is_bad, UNDECODABLE).when(is_newer, NEWER).alias("problem"),
        *(["cuts"] if with_cuts else []),
    )


def each_message(markers: DataFrame) -> DataFrame:
    """One row for each message that a marker names; markers with a problem are left out."""
    offsets = F.coalesce(F.col("offsets"), F.array("offset"))
    others = [name for name in markers.columns if name not in ("offset", "offsets", "problem")]
    return markers.filter(F.col("problem").isNull()).select(*others, F.explode(offsets).alias("offset"))


def header_text(name: str) -> Column:
    """The last header of that name as text, or null."""
    return header_bytes(name).cast("string")


def header_bytes(name: str) -> Column:
    """The last header of that name, or null; of the column `headers`."""
    found = F.filter("headers", lambda header: header["key"] == name)
    # Most records have no headers, and the test for null costs less than the lambda.
    return F.when(F.col("headers").isNotNull(), F.try_element_at(found, F.lit(-1))["value"])


def redelivery_count(data: Column) -> Column:
    """The redelivery count in a header: a signed integer of 1 or 4 bytes; 0 for other sizes and below 0."""
    value = F.conv(F.hex(data), 16, 10).cast("bigint")
    size = F.length(data)
    return (
        F.when((size == 1) & (value < 2**7), value)
        .when((size == 4) & (value < 2**31), value)
        .otherwise(F.lit(0).cast("bigint"))
    )


def number(text: Column) -> Column:
    """The decimal number that is the text of a header; null for any other text."""
    return F.when(text.rlike(r"^-?[0-9]{1,19}\z"), text.try_cast("bigint"))


def int64(data: Column) -> Column:
    """A big-endian signed integer of 8 bytes (Spark casts no bytes to numbers)."""
    # Nearly all numbers are below 2**32, and conv() takes twice as long for twice the digits.
    is_small = F.substring(data, 1, 4) == F.lit(bytes(4))
    digits = F.when(is_small, F.hex(F.substring(data, 5, 4))).otherwise(F.hex(data))
    return F.conv(digits, 16, -10).cast("bigint")


def _is_of_another_partition() -> Column:
    """True where the key names a partition other than the one that the marker is in."""
    # Hex text only for partitions from 128 on: for all, it took a quarter of the time of decoding.
    small = F.concat(F.lit(bytes(3)), F.char("partition").cast("binary"))
    any_size = F.unhex(F.lpad(F.hex("partition"), 8, "0"))
    return ~F.startswith("key", F.when(F.col("partition") < _UTF8_ONE_BYTE_LIMIT, small).otherwise(any_size))


def _has_unreadable_header() -> Column:
    """True where the name of a header is not UTF-8: Java replaces such bytes by replacement characters."""
    names = F.exists("headers", lambda header: header["key"].contains("\ufffd"))
    return F.when(F.col("headers").isNotNull(), names)


def _is_range(kind: Column) -> Column:
    return kind.between(F.lit(_START_RUNS), F.lit(_END_BITMAP))


def _offsets_of_range() -> Column:
    """The offsets of a range marker's messages, from its `value` and `key`; null if it is not valid."""
    # SQL text, because the functions of pyspark would need 600 requests to the JVM.
    return F.expr(_let("conv(hex(substring(key, 5, 8)), 16, -10)::bigint", "first", _RANGE_SQL))


def _let(value: str, name: str, body: str) -> str:
    """SQL for `body`, in which `name` stands for `value`, which is computed once."""
    return f"element_at(transform(array({value}), {name} -> {body}), 1)"


_DIGIT_LETTERS = "ghijklmnopqrstuv"
"""The letters that stand for the 16 hex digits in _sql_of_bitmap()."""

_SPAN_FITS = f"span <= {MAX_SPAN} and first <= {INT64_MAX} - (span - 1)"
"""SQL: `span` offsets from `first` on are no more than a marker may name, and all of them are valid."""

_OFFSETS_OF_BITS = """filter(
    transform(split(bits, ''), (bit, index) -> if(bit = '1', first + index, null)),
    one -> one is not null
)"""
"""SQL for the offsets whose bits are 1; `bits` is a text of 0 and 1, that of the offset `first` in front."""

_LOW_BITS = [f"(shiftright(packed, {8 * place}) & 127)" for place in range(4)]
"""SQL for the lower seven bits of each byte in `packed`, from the last byte to the first."""
_LEB128 = f"""case length(digits)
    when 2 then {_LOW_BITS[0]}
    when 4 then {_LOW_BITS[1]} + {_LOW_BITS[0]} * {2**7}
    when 6 then {_LOW_BITS[2]} + {_LOW_BITS[1]} * {2**7} + {_LOW_BITS[0]} * {2**14}
    else {_LOW_BITS[3]} + {_LOW_BITS[2]} * {2**7} + {_LOW_BITS[1]} * {2**14} + {_LOW_BITS[0]} * {2**21}
end"""
"""SQL for the unsigned LEB128 number of one to four bytes in `digits` (hex) and `packed` (an integer)."""

_BITS_OF_RUNS = """array_join(
    transform(numbers, (number, index) -> repeat(if(index % 2 = 0, '1', '0'), number::int)), ''
)"""
"""SQL for a text with a 1 for each message of the runs, and a 0 for each message between two runs."""


def _sql_of_runs(data: str, size: str) -> str:
    """SQL for the offsets of the runs in `data`, which has `size` bytes, from the offset `first` on."""
    several = _let(_BITS_OF_RUNS, "bits", _OFFSETS_OF_BITS)
    of_span = f"if({_SPAN_FITS}, if(size(numbers) = 1, sequence(first, first + (span - 1)), {several}), null)"
    sum_ = "aggregate(numbers, 0L, (total, number) -> total + number)"
    numbers = f"transform(found, digits -> {_let('conv(digits, 16, 10)::bigint', 'packed', _LEB128)})"
    # The numbers found cover all bytes, the last one is the length of a run, and none is 0 or has more bytes
    # than it needs.
    whole = (
        f"length(array_join(found, '')) = 2 * ({size}) and size(found) % 2 = 1 "
        "and not exists(found, digits -> endswith(digits, '00'))"
    )
    of_found = f"if({whole}, {_let(numbers, 'numbers', _let(sum_, 'span', of_span))}, null)"
    return _let(f"regexp_extract_all(hex({data}), '{_LEB128_REGEX}', 1)", "found", of_found)


def _sql_of_bitmap() -> str:
    """SQL for the offsets of the bitmap in `value`, from the offset `first` on."""
    bits = "regexp_replace(hex(substring(value, 2)), '(.)(.)', '$2$1')"  # the lowest bit of each byte first
    # Letters first, so that no replacement changes the digits that another has written.
    bits = f"translate({bits}, '0123456789ABCDEF', '{_DIGIT_LETTERS}')"
    for nibble, letter in enumerate(_DIGIT_LETTERS):
        lowest_first = f"{nibble:04b}"[::-1]
        bits = f"replace({bits}, '{letter}', '{lowest_first}')"
    first, last = (f"conv(hex(substring(value, {place}, 1)), 16, 10)::int" for place in (2, -1))
    good = f"length(value) <= {MAX_SPAN // 8 + 1} and {last} > 0 and {first} % 2 = 1"
    span = f"((length(value) - 2) * 8 + length(bin({last})))::bigint"
    of_span = f"if({_SPAN_FITS}, {_let(bits, 'bits', _OFFSETS_OF_BITS)}, null)"
    return f"if({good}, {_let(span, 'span', of_span)}, null)"


_RANGE_SQL = f"""case hex(substring(value, 1, 1))
    when '{_END_BITMAP.hex()}' then {_sql_of_bitmap()}
    when '{_END_RUNS.hex()}' then {_sql_of_runs("substring(value, 2)", "length(value) - 1")}
    else {_sql_of_runs(f"substring(value, {_START_BYTES + 1})", f"length(value) - {_START_BYTES}")}
end"""
"""SQL for the offsets of the range marker in `value`, the lowest of which is `first`."""
