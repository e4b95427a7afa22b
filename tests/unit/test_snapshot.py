"""The text form of a snapshot: a round trip, and nothing but ValueError for anything else."""

import base64
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy import snapshot
from kmqpy.inflight import Entry, Hold, TakenTogether
from kmqpy.markers import INT64_MAX
from kmqpy.registry import StoredOffset, decode_offset

numbers = st.integers(0, INT64_MAX)
texts = st.one_of(st.none(), st.text(max_size=20))
entries = st.builds(
    Entry, numbers, numbers, numbers, numbers, st.sampled_from(Hold), st.booleans(), texts, texts
)
runs = st.builds(
    TakenTogether,
    st.integers(0, INT64_MAX - 1023),
    st.integers(0, 1 << 1023).map(lambda bits: bits | 1),
    numbers,
    numbers,
    numbers,
    numbers,
    texts,
)


@given(st.lists(st.one_of(entries, runs)))
def test_round_trip(rows):
    assert snapshot.unpack(snapshot.pack(rows)) == rows
    stored = StoredOffset(5, "id", 7, in_flight=tuple(rows))
    assert decode_offset("q", 0, stored.to_json()) == stored


def text(data):
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    "damaged",
    [
        "x",
        "????",
        text(b"{"),
        text(b"5"),
        text(b"[5]"),
        text(b"[[1, 2, 3]]"),
        text(b'[[1, "0", 0, 0, 0, 0, null]]'),
        text(b'[[1, "2", 0, 0, 0, 0, null]]'),
        text(b'[[1, "-1", 0, 0, 0, 0, null]]'),
        text(b'[[1, "zz", 0, 0, 0, 0, null]]'),
        text(b"[[1, null, 0, 0, 0, 0, null]]"),
        text(b'[[1, "' + b"f" * 20_000 + b'", 0, 0, 0, 0, null]]'),
        text(b'[[-1, 0, 0, 0, "held", true, null, null]]'),
        text(b'[[1.5, 0, 0, 0, "held", true, null, null]]'),
        text(b'[[9223372036854775808, 0, 0, 0, "held", true, null, null]]'),
        text(b'[[1, 0, 0, 0, "elsewhere", true, null, null]]'),
        text(b'[[1, 0, 0, 0, "held", 1, null, null]]'),
        text(b'[[1, 0, 0, 0, "held", true, 5, null]]'),
        text(b"[" * 100_000),
        text(b"[]" + b" " * 20_000_000),
        text(b"[]")[:-4],
        base64.b64encode(zlib.compress(b"[]") + b"more").decode(),
    ],
)
def test_what_is_damaged_is_refused_and_the_offset_counts_as_absent(damaged):
    with pytest.raises(ValueError, match=r"snapshot|Invalid|not a valid|Expecting|invalid literal"):
        snapshot.unpack(damaged)
    data = {"offset": 5, "topic_id": "id", "now_ms": 7, "in_flight": damaged}
    assert decode_offset("q", 0, json.dumps(data).encode()) is None
