"""Rows as Redis sends them, without a server."""

import struct

import pytest

from kmqpy.storages.redis.rows import read_rows

STATE = struct.pack(">cBIIQQQQB", b"T", 5, 2, 1, 10, 11, 12, 13, 0)


def shown(row_id, row):
    return struct.pack(">QQII", row_id, 0, len(STATE), len(row)) + STATE + row


def row(key, body, *, key_length=None, headers_length=0):
    key_length = len(key) + 1 if key_length is None else key_length
    return struct.pack(">QII", 9, key_length, headers_length) + key + body


def test_a_row_is_read():
    (found,) = read_rows(shown(7, row(b"key", b"body")))
    assert (found.id, found.key, found.body, found.headers) == (7, b"key", b"body", ())


@pytest.mark.parametrize(
    "forged", [{"key_length": 1_000}, {"headers_length": 100}, {"key_length": 2**32 - 1}]
)
def test_forged_lengths_show_nothing_of_the_next_message(forged):
    first, second = row(b"key", b"body", **forged), row(b"other", b"secret")
    damaged, whole = read_rows(shown(7, first) + shown(8, second))
    assert (damaged.id, damaged.key, damaged.body, damaged.headers) == (7, None, b"", ())
    assert (whole.id, whole.key, whole.body) == (8, b"other", b"secret")
