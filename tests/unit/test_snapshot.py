"""The text form of a snapshot: a round trip, and nothing but ValueError for anything else."""

import base64
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.admin.registry_entries import StoredOffset, decode_offset
from kmqpy.kafka.markers import snapshot
from kmqpy.kafka.markers.entry import Entry, EntryState, TakenRun

numbers = st.integers(0, INT64_MAX)
texts = st.one_of(st.none(), st.text(max_size=20))
entries = st.builds(
    Entry, numbers, numbers, numbers, numbers, st.sampled_from(EntryState), st.booleans(), texts, texts
)
runs = st.builds(
    TakenRun,
    st.integers(0, INT64_MAX - 1023),
    st.integers(0, 1 << 1023).map(lambda bits: bits | 1),
    st.integers(0, INT64_MAX - (1 << 20)),
    st.integers(0, 1 << 10),
    numbers,
    numbers,
    texts,
)


def each_once(rows):
    """Those of the rows that name no message which one before them names."""
    found, seen = [], set()
    for row in rows:
        bits = row.bits if isinstance(row, TakenRun) else 1
        named = {row[0] + bit for bit in range(bits.bit_length()) if bits >> bit & 1}
        if not named & seen:
            seen |= named
            found.append(row)
    return found


@given(st.lists(st.one_of(entries, runs)).map(each_once))
def test_round_trip(rows):
    assert snapshot.unpack(snapshot.pack(rows)) == rows
    stored = StoredOffset(5, "id", 7, in_flight=tuple(rows))
    assert decode_offset("q", stored.to_json()) == stored


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
        text(b'[[-1, 0, 0, 0, "leased", true, null, null]]'),
        text(b'[[1.5, 0, 0, 0, "leased", true, null, null]]'),
        text(b'[[9223372036854775808, 0, 0, 0, "leased", true, null, null]]'),
        text(b'[[1, 0, 0, 0, "elsewhere", true, null, null]]'),
        text(b'[[1, 0, 0, 0, "leased", 1, null, null]]'),
        text(b'[[1, 0, 0, 0, "leased", true, 5, null]]'),
        text(b'[[1, "3", 9223372036854775807, 1, 0, 0, null]]'),
        text(b'[[7, 0, 0, 0, "leased", true, null, null], [7, 1, 0, 0, "leased", true, null, null]]'),
        text(b'[[1000, "%s", 0, 0, 0, 0, null], [1024, "1", 9, 0, 0, 0, null]]' % (b"f" * 20)),
        text(b'[[1030, 0, 0, 0, "leased", true, null, null], [1000, "%s", 9, 0, 0, 0, null]]' % (b"f" * 20)),
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
    assert decode_offset("q", json.dumps(data).encode()) is None


def test_interleaved_runs_name_each_message_once():
    rows = [TakenRun(1000, int("55" * 20, 16), 0, 1, 5, 9, None)]
    rows.append(TakenRun(1001, int("55" * 20, 16), 1, 1, 5, 9, None))
    assert snapshot.unpack(snapshot.pack(rows)) == rows


@pytest.mark.parametrize("key", ["offset", "now_ms"])
@pytest.mark.parametrize("number", ["-1", f"{2**63}", f"{2**64}", "1" * 5_000, "1.0", "true", '"1"', "null"])
def test_numbers_out_of_range_make_an_offset_unreadable(key, number, caplog):
    data = '{"topic_id": "id", "offset": 5, "now_ms": 7}'.replace(f'"{key}": ', f'"{key}": {number}, "_": ')
    assert decode_offset("/kmq/queues/q/partitions/0/offset", data.encode()) is None
    assert "/kmq/queues/q/partitions/0/offset can't be read" in caplog.text
    assert len(caplog.text) < 500
