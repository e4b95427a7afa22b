"""Numbers in big-endian bytes, by Spark's built-in expressions.

Spark turns bytes into a number only by way of text, hex and then decimal, which takes longer than to read the
record from Kafka. But it has crc32(), and the checksum of four bytes can be undone: it is linear, so that XOR
joins what each of its hex digits stands for.
"""

from __future__ import annotations

import functools
import zlib

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

_BITS = 32
_DIGIT_BITS = 4


def int64(data: Column, first: int) -> Column:
    """The signed integer in the 8 bytes of `data` from the byte `first` on, which counts from 1."""
    upper, lower = F.substring(data, first, 4), F.substring(data, first + 4, 4)
    # Nearly all are below 2**32.
    any_number = F.conv(F.hex(F.substring(data, first, 8)), 16, -10).cast("bigint")
    return F.when(upper == F.lit(bytes(4)), uint32(lower)).otherwise(any_number)


def uint32(data: Column) -> Column:
    """The number in 4 bytes; of other bytes it is any number."""
    checksum = F.crc32(data).bitwiseXOR(zlib.crc32(bytes(4)))
    parts = []
    for shift in range(0, _BITS, _DIGIT_BITS):
        # An array in text becomes a constant of the plan; of numbers, each would be an expression.
        meanings = ",".join(str(_undone(digit << shift)) for digit in range(2**_DIGIT_BITS))
        table = F.split(F.lit(meanings), ",").cast("array<bigint>")
        parts.append(F.get(table, F.shiftright(checksum, shift).bitwiseAND(2**_DIGIT_BITS - 1)))
    return functools.reduce(Column.bitwiseXOR, parts)


def _undone(checksum: int) -> int:
    """The number whose checksum this is, but for the checksum of 0."""
    number = 0
    for bit, (changed, of_number) in _pivots().items():
        if checksum >> bit & 1:
            checksum ^= changed
            number ^= of_number
    return number


@functools.cache
def _pivots() -> dict[int, tuple[int, int]]:
    """By bit, highest first: a checksum whose highest bit this is, and its number (Gaussian elimination)."""
    found: dict[int, tuple[int, int]] = {}
    for place in range(_BITS):
        number = 1 << place
        checksum = zlib.crc32(number.to_bytes(4, "big")) ^ zlib.crc32(bytes(4))
        while (highest := checksum.bit_length() - 1) in found:
            other_checksum, other_number = found[highest]
            checksum, number = checksum ^ other_checksum, number ^ other_number
        found[highest] = checksum, number
    return dict(sorted(found.items(), reverse=True))
