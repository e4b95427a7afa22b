"""Markers decoded by Spark's built-in expressions: no Python runs on executors.

The layout is that of kmqpy.kafka.markers.codec, and so is the judgement what can be decoded; its decode() is
the oracle that the tests compare with.
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
"""Reasons why a marker can't be decoded: garbage, or one of a newer kmqpy."""

RECORD = ("key", "value", "partition", "offset", "timestamp", "headers")
"""Columns of Spark's Kafka source (with includeHeaders) that markers are decoded from."""

_KEY_BYTES = 12
_START_BYTES = 9
_END, _START, _START_RUNS, _END_RUNS, _END_BITMAP = (bytes((kind,)) for kind in range(5))
_FIRST_RESERVED, _LAST_RESERVED = b"\x05", b"\x0f"
_ONE_BYTE = 128
"""A code point below this is one byte in UTF-8."""

_NUMBER = "((?:[89A-F][0-9A-F]){0,3}[0-7][0-9A-F])"
"""An unsigned LEB128 of at most four bytes, in hex."""

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


def decode_markers(records: DataFrame) -> DataFrame:
    """The markers in records of a markers topic, a row each, batch or stream.

    partition           of the queue
    at                  markers offset
    timestamp           of the record: the broker's time
    op                  as kmqpy.kafka.markers.codec.Op; null where `problem` is not
    offset              of the message; of the lowest for a range
    offsets             of all messages of a range; null for a single marker
    redeliver_after_ms  duration; null for an end
    by_tracker          whether a tracker wrote this end: the message was redelivered or dead-lettered
    taken_late          whether a tracker wrote this end because the message was taken after its end (rule
                        R30); no copy was made
    acknowledged        whether a tracker wrote this end because an earlier consumer has acknowledged the
                        message (rule R32); no copy was made
    problem             null, `undecodable`, or `newer`: written by a newer kmqpy

    Raises ConfigError when a column of Spark's Kafka source is missing.
    """
    check_columns(records, RECORD, "decode_markers")
    key, kind = F.col("key"), F.substring("value", 1, 1)
    reason = header_text("kmq-reason")
    size, first = F.length("value"), int64(F.substring("key", 5, 8))
    # Few projections, since each copies its rows: one that looks at bytes, one that judges.
    looked = records.select(
        "partition",
        F.col("offset").alias("at"),
        "timestamp",
        first.alias("first"),
        # The type byte, if the sizes fit it and the marker is in the partition that its key names; else null.
        F.when(
            (F.length(key) != _KEY_BYTES) | key.isNull() | _is_of_another_partition() | _unreadable(), None
        )
        .when((size == 1) & (kind == _binary(_END)), kind)
        .when((size == _START_BYTES) & (kind == _binary(_START)), kind)
        .when((size > _START_BYTES) & (kind == _binary(_START_RUNS)), kind)
        .when((size > 1) & kind.isin([_binary(_END_RUNS), _binary(_END_BITMAP)]), kind)
        .when(kind.between(_binary(_FIRST_RESERVED), _binary(_LAST_RESERVED)), kind)
        .alias("kind"),
        F.when((size > 1) & kind.between(_binary(_START_RUNS), _binary(_END_BITMAP)), _range()).alias(
            "offsets"
        ),
        F.when(
            (size >= _START_BYTES) & kind.isin([_binary(_START), _binary(_START_RUNS)]),
            int64(F.substring("value", 2, 8)),
        ).alias("after"),
        header_text("kmq-op").alias("asked"),
        header_text("kmq-by").alias("by"),
        # An end marker that names a copy was written for that copy, whatever reason it gives.
        F.when(reason.isNotNull() & header_bytes(COPY).isNull(), reason).alias("reason"),
    )
    kind, first, asked = F.col("kind"), F.col("first"), F.col("asked")
    is_end = kind.isin([_binary(end) for end in _ENDS])
    is_reserved = kind >= _binary(_FIRST_RESERVED)
    is_range = _is_range(kind)
    is_bad = (
        kind.isNull()
        | (is_range & F.col("offsets").isNull())
        | (~is_reserved & (~is_end | is_range) & (first < 0))
    )
    is_newer = is_reserved | (~is_end & asked.isNotNull() & ~asked.isin(_OPS_WITH_HEADER))
    good = ~is_bad & ~is_newer
    by_tracker = good & is_end & F.equal_null("by", F.lit("tracker"))
    return looked.select(
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
    )


def each_message(markers: DataFrame) -> DataFrame:
    """The markers with one row per message that they speak of; those with a problem are left out."""
    offsets = F.coalesce(F.col("offsets"), F.array("offset"))
    others = [name for name in markers.columns if name not in ("offset", "offsets", "problem")]
    return markers.filter(F.col("problem").isNull()).select(*others, F.explode(offsets).alias("offset"))


def header_text(name: str) -> Column:
    """The last header of that name as text, or null."""
    return header_bytes(name).cast("string")


def header_bytes(name: str) -> Column:
    """The last header of that name, or null; of the column `headers`."""
    found = F.filter("headers", lambda header: header["key"] == name)
    # Most records have none, and a lambda costs more than a look.
    return F.when(F.col("headers").isNotNull(), F.try_element_at(found, F.lit(-1))["value"])


def redelivery_count(data: Column) -> Column:
    """The redelivery count in a header: one byte or four, signed; anything else, and below 0, is 0."""
    value = F.conv(F.hex(data), 16, 10).cast("bigint")
    size = F.length(data)
    return (
        F.when((size == 1) & (value < 2**7), value)
        .when((size == 4) & (value < 2**31), value)
        .otherwise(F.lit(0).cast("bigint"))
    )


def number(text: Column) -> Column:
    """A decimal number in a header, or null."""
    return F.when(text.rlike(r"^-?[0-9]{1,19}\z"), text.try_cast("bigint"))


def int64(data: Column) -> Column:
    """A big-endian signed integer of 8 bytes (Spark casts no bytes to numbers)."""
    # Nearly all are below 2**32, and conv() takes twice as long for twice the digits.
    is_small = F.substring(data, 1, 4) == _binary(bytes(4))
    digits = F.when(is_small, F.hex(F.substring(data, 5, 4))).otherwise(F.hex(data))
    return F.conv(digits, 16, -10).cast("bigint")


def _is_of_another_partition() -> Column:
    """True where the key names a partition other than the one that the marker is in."""
    # By way of text for large ones alone: it took a quarter of the time of decoding.
    small = F.concat(_binary(bytes(3)), F.char("partition").cast("binary"))
    any_size = F.unhex(F.lpad(F.hex("partition"), 8, "0"))
    return ~F.startswith("key", F.when(F.col("partition") < _ONE_BYTE, small).otherwise(any_size))


def _unreadable() -> Column:
    """True where the name of a header is not UTF-8: Java replaces such bytes by replacement characters."""
    names = F.exists("headers", lambda header: header["key"].contains("\ufffd"))
    return F.when(F.col("headers").isNotNull(), names)


def _is_range(kind: Column) -> Column:
    return kind.between(_binary(_START_RUNS), _binary(_END_BITMAP))


def _range() -> Column:
    """The messages of the range marker in the columns `value` and `key`, null where the range is not valid.

    It is SQL text, since calls of Spark's functions would be 600 requests to the JVM for each expression.
    """
    return F.expr(_let("conv(hex(substring(key, 5, 8)), 16, -10)::bigint", "first", _RANGE))


def _let(value: str, name: str, body: str) -> str:
    """SQL for `body`, in which `name` stands for `value`, which is computed once.

    SQL has no other way to name a part of an expression.
    """
    return f"element_at(transform(array({value}), {name} -> {body}), 1)"


_LETTERS = "ghijklmnopqrstuv"

_FITS = f"span <= {MAX_SPAN} and first <= {INT64_MAX} - (span - 1)"

_LISTED = """filter(
    transform(split(bits, ''), (bit, index) -> if(bit = '1', first + index, null)),
    one -> one is not null
)"""
"""The offsets whose bits are 1; `bits` is text, with the bit of the message `first` in front."""

_BYTES = [f"(shiftright(packed, {8 * place}) & 127)" for place in range(4)]
_LEB128 = f"""case length(digits)
    when 2 then {_BYTES[0]}
    when 4 then {_BYTES[1]} + {_BYTES[0]} * {2**7}
    when 6 then {_BYTES[2]} + {_BYTES[1]} * {2**7} + {_BYTES[0]} * {2**14}
    else {_BYTES[3]} + {_BYTES[2]} * {2**7} + {_BYTES[1]} * {2**14} + {_BYTES[0]} * {2**21}
end"""
"""The number that `digits` stand for, up to four bytes of unsigned LEB128, the lowest bits first."""

_BITS_OF_RUNS = """array_join(
    transform(numbers, (number, index) -> repeat(if(index % 2 = 0, '1', '0'), number::int)), ''
)"""
"""A 1 for each message of the runs and a 0 for each other."""


def _of_runs(data: str, size: str) -> str:
    """SQL for the messages of the runs in `data`, `size` bytes, from the message `first` on."""
    several = _let(_BITS_OF_RUNS, "bits", _LISTED)
    of_span = f"if({_FITS}, if(size(numbers) = 1, sequence(first, first + (span - 1)), {several}), null)"
    sum_ = "aggregate(numbers, 0L, (total, number) -> total + number)"
    numbers = f"transform(found, digits -> {_let('conv(digits, 16, 10)::bigint', 'packed', _LEB128)})"
    # Together they are all the bytes, they end with the count of a run, and none is 0 or longer than it
    # need be.
    whole = (
        f"length(array_join(found, '')) = 2 * ({size}) and size(found) % 2 = 1 "
        "and not exists(found, digits -> endswith(digits, '00'))"
    )
    of_found = f"if({whole}, {_let(numbers, 'numbers', _let(sum_, 'span', of_span))}, null)"
    return _let(f"regexp_extract_all(hex({data}), '{_NUMBER}', 1)", "found", of_found)


def _of_bitmap() -> str:
    """SQL for the messages of the bitmap in `value`, from the message `first` on."""
    bits = "regexp_replace(hex(substring(value, 2)), '(.)(.)', '$2$1')"  # the lowest bit of each byte first
    # By way of letters, so that no replacement meets the digits of another.
    bits = f"translate({bits}, '0123456789ABCDEF', '{_LETTERS}')"
    for nibble, letter in enumerate(_LETTERS):
        lowest_first = f"{nibble:04b}"[::-1]
        bits = f"replace({bits}, '{letter}', '{lowest_first}')"
    first, last = (f"conv(hex(substring(value, {place}, 1)), 16, 10)::int" for place in (2, -1))
    good = f"length(value) <= {MAX_SPAN // 8 + 1} and {last} > 0 and {first} % 2 = 1"
    span = f"((length(value) - 2) * 8 + length(bin({last})))::bigint"
    of_span = f"if({_FITS}, {_let(bits, 'bits', _LISTED)}, null)"
    return f"if({good}, {_let(span, 'span', of_span)}, null)"


_RANGE = f"""case hex(substring(value, 1, 1))
    when '{_END_BITMAP.hex()}' then {_of_bitmap()}
    when '{_END_RUNS.hex()}' then {_of_runs("substring(value, 2)", "length(value) - 1")}
    else {_of_runs(f"substring(value, {_START_BYTES + 1})", f"length(value) - {_START_BYTES}")}
end"""
"""SQL for the messages of the range marker in `value`, the lowest of which is `first`."""


def _binary(data: bytes) -> Column:
    return F.lit(data)
