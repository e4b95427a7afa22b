"""Markers decoded by Spark's built-in expressions: no Python runs on executors.

The layout is that of kmqpy.markers, and so is the judgement what can be decoded; kmqpy.markers.decode is
the oracle that the tests compare with.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.errors import ConfigError
from kmqpy.markers import INT64_MAX, MAX_SPAN, Op

UNDECODABLE = "undecodable"
NEWER = "newer"
"""What may be wrong with a marker: garbage, or one of a newer kmqpy."""

RECORD = ("key", "value", "partition", "offset", "timestamp", "headers")
"""Columns of Spark's Kafka source (with includeHeaders) that markers are decoded from."""

_KEY_BYTES = 12
_START_BYTES = 9
_END, _START, _START_RUNS, _END_RUNS, _END_BITMAP = (bytes((kind,)) for kind in range(5))
_FIRST_RESERVED, _LAST_RESERVED = b"\x05", b"\x0f"
_REST = 2**31 - 1

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
    op                  as kmqpy.markers.Op; null where `problem` is not
    offset              of the message; of the lowest for a range
    offsets             of all messages of a range; null for a single marker
    redeliver_after_ms  duration; null for an end
    by_tracker          whether a tracker wrote this end: the message was redelivered or dead-lettered
    problem             null, `undecodable`, or `newer`: written by a newer kmqpy

    Raises ConfigError when a column of Spark's Kafka source is missing.
    """
    check_columns(records, RECORD, "decode_markers")
    kind = F.substring("value", 1, 1)
    size = F.length("value")
    named = records.select(
        "partition",
        F.col("offset").alias("at"),
        "timestamp",
        "value",
        header_text("kmq-op").alias("asked"),
        header_text("kmq-by").alias("by"),
        F.length("key").alias("key_size"),
        int64(F.substring("key", 5, 8)).alias("first"),
        # One of the type bytes where the size fits, too.
        F.when((size == 1) & (kind == _binary(_END)), kind)
        .when((size == _START_BYTES) & (kind == _binary(_START)), kind)
        .when((size > _START_BYTES) & (kind == _binary(_START_RUNS)), kind)
        .when((size > 1) & kind.isin([_binary(_END_RUNS), _binary(_END_BITMAP)]), kind)
        .when(kind.between(_binary(_FIRST_RESERVED), _binary(_LAST_RESERVED)), kind)
        .alias("kind"),
    )
    ranged = _with_range(named)
    kind, span = F.col("kind"), F.col("span")
    is_end = kind.isin([_binary(end) for end in _ENDS])
    is_reserved = kind >= _binary(_FIRST_RESERVED)
    is_range = kind.between(_binary(_START_RUNS), _binary(_END_BITMAP))
    asked = F.col("asked")
    is_bad = (
        ~F.equal_null("key_size", F.lit(_KEY_BYTES))
        | kind.isNull()
        | (is_range & (span.isNull() | (F.col("first") > INT64_MAX - (span - 1))))
        | (~is_reserved & (~is_end | is_range) & (F.col("first") < 0))
    )
    is_newer = is_reserved | (~is_end & asked.isNotNull() & ~asked.isin(_OPS_WITH_HEADER))
    problem = F.when(is_bad, UNDECODABLE).when(is_newer, NEWER)
    judged = ranged.withColumns({"problem": problem, "is_end": is_end})
    good = F.col("problem").isNull()
    op = F.when(F.col("is_end"), Op.END.value).otherwise(F.coalesce("asked", F.lit(Op.TAKE.value)))
    return judged.select(
        "partition",
        "at",
        "timestamp",
        F.when(good, op).alias("op"),
        F.when(good, F.col("first")).alias("offset"),
        F.when(good, _offsets()).alias("offsets"),
        F.when(good & ~F.col("is_end"), int64(F.substring("value", 2, 8))).alias("redeliver_after_ms"),
        (good & F.col("is_end") & F.equal_null("by", F.lit("tracker"))).alias("by_tracker"),
        "problem",
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
    return F.when(text.rlike("^-?[0-9]{1,19}$"), text.try_cast("bigint"))


def int64(data: Column) -> Column:
    """A big-endian signed integer of 8 bytes (Spark casts no bytes to numbers)."""
    # Nearly all are below 2**32, and conv() takes twice as long for twice the digits.
    is_small = F.substring(data, 1, 4) == _binary(bytes(4))
    digits = F.when(is_small, F.hex(F.substring(data, 5, 4))).otherwise(F.hex(data))
    return F.conv(digits, 16, -10).cast("bigint")


def _with_range(named: DataFrame) -> DataFrame:
    """Adds what is needed of range markers: `numbers`, and `span`, null where the range is not valid.

    Each step is a projection of its own because an expression can't name its parts.
    """
    kind = F.col("kind")
    runs = F.when(kind == _binary(_START_RUNS), F.substring("value", _START_BYTES + 1, _REST)).when(
        kind == _binary(_END_RUNS), F.substring("value", 2, _REST)
    )
    stepped = named.withColumn("digits", F.hex(runs))
    found = F.regexp_extract_all("digits", F.lit(_NUMBER), F.lit(1))
    stepped = stepped.withColumn("found", found)
    # Together they are all the digits, they end with the count of a run, and none is 0 or longer than
    # it need be.
    whole = (
        (F.length(F.array_join("found", "")) == F.length("digits"))
        & (F.size("found") % 2 == 1)
        & ~F.exists("found", lambda number: number.endswith("00"))
    )
    stepped = stepped.withColumn("numbers", F.when(whole, F.transform("found", _leb128)))
    total = F.aggregate("numbers", F.lit(0).cast("bigint"), lambda sum_, number: sum_ + number)
    size = F.length("value")
    last = _byte(F.substring("value", -1, 1))
    good_bitmap = (
        (kind == _binary(_END_BITMAP))
        & (size <= MAX_SPAN // 8 + 1)
        & (last > 0)
        & (_byte(F.substring("value", 2, 1)) % 2 == 1)
    )
    span = F.when(good_bitmap, ((size - 2) * 8 + F.length(F.bin(last))).cast("bigint")).when(
        total <= MAX_SPAN, total
    )
    return stepped.withColumn("span", span)


def _offsets() -> Column:
    """The messages of a valid range, null for a single marker; of the columns of `_with_range`."""
    first, numbers = F.col("first"), F.col("numbers")
    bits = F.when(numbers.isNotNull(), _bits_of_runs(numbers)).otherwise(
        _bits_of_bitmap(F.hex(F.substring("value", 2, _REST)))
    )
    listed = F.filter(
        F.transform(F.split(bits, ""), lambda bit, index: F.when(bit == "1", first + index)),
        lambda offset: offset.isNotNull(),
    )
    return F.when(
        F.col("span").isNotNull(),
        F.when(F.size(numbers) == 1, F.sequence(first, first + (F.col("span") - 1))).otherwise(listed),
    )


def _bits_of_runs(numbers: Column) -> Column:
    """A 1 for each message of the runs and a 0 for each other, as text."""
    parts = F.transform(
        numbers,
        lambda number, index: F.repeat(F.when(index % 2 == 0, "1").otherwise("0"), number.cast("int")),
    )
    return F.array_join(parts, "")


def _bits_of_bitmap(digits: Column) -> Column:
    """The same of a bitmap in hex: each byte its lowest bit first."""
    bits = F.regexp_replace(digits, "(.)(.)", "$2$1")
    # By way of letters, so that no replacement meets the digits of another.
    bits = F.translate(bits, "0123456789ABCDEF", "ghijklmnopqrstuv")
    for nibble, letter in enumerate("ghijklmnopqrstuv"):
        bits = F.replace(bits, F.lit(letter), F.lit(f"{nibble:04b}"[::-1]))
    return bits


def _leb128(digits: Column) -> Column:
    """The number that up to four bytes of unsigned LEB128, in hex, stand for."""
    value = F.conv(digits, 16, 10).cast("bigint")
    size = F.length(digits)

    def byte(place: int) -> Column:
        return F.shiftright(value, 8 * place).bitwiseAND(0x7F)

    # The first byte has the lowest bits.
    return (
        F.when(size == 2, byte(0))
        .when(size == 4, byte(1) + byte(0) * 2**7)
        .when(size == 6, byte(2) + byte(1) * 2**7 + byte(0) * 2**14)
        .otherwise(byte(3) + byte(2) * 2**7 + byte(1) * 2**14 + byte(0) * 2**21)
    )


def _byte(data: Column) -> Column:
    return F.conv(F.hex(data), 16, 10).cast("int")


def _binary(data: bytes) -> Column:
    return F.lit(data)
