"""Records of a markers partition: a series applied at once means what its records would one by one."""

import tracemalloc

import pytest
from confluent_kafka import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from kmqpy.errors import DecodeError, UnsupportedMarker
from kmqpy.kafka.markers import codec, entry_groups, packed
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.replay import Applied, QueueEnd, replay_markers

PARTITION = 3
T0 = 1_700_000_000_000


def Record(at, timestamp_ms, encoded):  # noqa: N802
    key, value, headers = encoded
    return Message(
        topic="markers",
        partition=PARTITION,
        offset=at,
        key=key,
        value=value,
        headers=headers or None,
        timestamp=(2, timestamp_ms),
    )


def one_by_one(state, records):
    """The oracle: every record decoded and applied by itself."""
    applied = Applied()
    for record in records:
        at, timestamp_ms = record.offset(), record.timestamp()[1]
        try:
            key = record.key()
            if key and len(key) == 12 and codec.decode_key(key)[0] != PARTITION:
                raise DecodeError("another's", key)
            marker = codec.decode(key, record.value(), record.headers())
        except UnsupportedMarker as error:
            state.observe(at, timestamp_ms)
            state.pin(at)
            applied.newer.append((at, error))
        except DecodeError as error:
            state.observe(at, timestamp_ms)
            applied.skipped.append((at, error))
        else:
            changed = state.apply(marker, at, timestamp_ms)
            if marker.op is Op.END and not marker.by_tracker:
                applied.late_acks += marker.count - changed
    return applied


def test_r24_old_receipts_end_nothing():
    state = InFlight(topic=b"ab")
    ends = [Marker(PARTITION, offset, Op.END, topic=topic) for offset, topic in ((1, b"xy"), (2, b"ab"))]
    ends += [Marker(PARTITION, 3, Op.END, runs=((3, 2),), topic=b"xy")]
    markers = [Marker(PARTITION, offset, Op.TAKE, 10) for offset in range(1, 5)] + ends
    touched = OffsetRuns()
    records = [Record(at, T0 + at, codec.encode(marker)) for at, marker in enumerate(markers)]
    applied = replay_markers(state, PARTITION, records, touched=touched)
    assert [entry.offset for entry in state.in_order()] == [1, 3, 4]
    assert (applied.late_acks, applied.skipped, state.now_ms) == (0, [], T0 + 6)


OFFSETS = st.integers(0, 30)
series = st.builds(
    lambda op, first, count, after, **fields: [
        codec.encode(Marker(PARTITION, first + i, op, 0 if op is Op.END else after, **fields))
        for i in range(count)
    ],
    st.sampled_from([Op.TAKE, Op.TAKE, Op.END, Op.END, *Op]),
    OFFSETS,
    st.integers(1, 12),
    st.integers(-1, 60),
    holder=st.sampled_from([None, None, "h", "i", ""]),
    by_tracker=st.booleans(),
)
odd = st.sampled_from(
    [
        [(None, None, [])],
        [(b"", b"", [])],
        [(codec.encode_key(PARTITION, 1), None, [])],
        [(codec.encode_key(PARTITION, 1), b"\x01", [])],
        [(codec.encode_key(PARTITION, 1), b"\x00" * 9, [])],
        [(codec.encode_key(PARTITION, 1), b"\x07", [])],
        [(codec.encode_key(PARTITION, -1), codec.encode_start(5), [])],
        [(codec.encode_key(PARTITION + 1, 1), codec.encode_start(5), [])],
        [(codec.encode_key(PARTITION + 1, 1), codec.encode_end(), [])],
        [(codec.encode_key(PARTITION, 1)[:-1], codec.encode_end(), [])],
        [codec.encode(codec.tick(PARTITION))],
        [codec.encode(codec.ranges(PARTITION, Op.TAKE, range(2, 30), redeliver_after_ms=9)[0])],
        [codec.encode(codec.ranges(PARTITION, Op.END, range(5, 25))[0])],
    ]
)
logs = st.lists(
    st.tuples(st.one_of(series, series, odd), st.sampled_from([0, 0, 0, 1, 2]), st.integers(-5, 40))
)


def records_of(log):
    records, at, now_ms = [], 0, T0
    for encoded, gap, step in log:
        at, now_ms = at + gap, now_ms + step
        for one in encoded:
            records.append(Record(at, now_ms, one))
            at += 1
    return records


@settings(deadline=None, max_examples=300)
@given(logs, st.integers(1, 50), st.sampled_from([(8, 2), (1024, 16)]))
def test_the_same_as_one_by_one(log, batch, sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_groups, "BLOCK", sizes[0])
        patch.setattr(packed, "MIN_RUN", sizes[1])
        expected, state, records = InFlight(), InFlight(), records_of(log)
        wanted = one_by_one(expected, records)
        total = Applied()
        for first in range(0, len(records), batch):
            applied = replay_markers(state, PARTITION, records[first : first + batch])
            total.late_acks += applied.late_acks
            total.newer += applied.newer
            total.skipped += applied.skipped
        assert sorted(state) == sorted(expected)
        assert (state.now_ms, state.position) == (expected.now_ms, expected.position)
        assert (state.safe_offset(), state.pinned) == (expected.safe_offset(), expected.pinned)
        assert total.late_acks == wanted.late_acks
        assert [at for at, _ in total.newer] == [at for at, _ in wanted.newer]
        assert [at for at, _ in total.skipped] == [at for at, _ in wanted.skipped]


@settings(deadline=None)
@given(logs, st.data())
def test_records_that_were_read_before_change_nothing(log, data):
    records = records_of(log)
    state, expected = InFlight(), InFlight()
    replay_markers(expected, PARTITION, records)
    split = data.draw(st.integers(0, len(records)))
    back = data.draw(st.integers(0, split))
    replay_markers(state, PARTITION, records[:split])
    replay_markers(state, PARTITION, records[back:])
    assert sorted(state) == sorted(expected)
    assert state.position == expected.position


@pytest.mark.parametrize("holder", [None, "somebody"])
def test_a_series_takes_no_memory_for_each_message(holder):
    state = InFlight()
    takes = [Marker(PARTITION, i, Op.TAKE, 30_000, holder=holder) for i in range(5_000)]
    replay_markers(state, PARTITION, [Record(i, T0, codec.encode(take)) for i, take in enumerate(takes)])
    assert {entry.holder for entry in state} == {holder}
    assert len(state) == 5_000
    assert not state._entries._indexes


END_OF_QUEUE = 20
ENDS = [Marker(PARTITION, offset, Op.END) for offset in (18, 19, 20, 21, 10**6)]
RANGES = [codec.ranges(PARTITION, Op.END, range(first, first + 9))[0] for first in (11, 12, 500)]


@pytest.mark.parametrize("decides_markers_below", [100, 4, 0])
def test_ends_of_what_does_not_exist_touch_nothing(decides_markers_below):
    log = [codec.encode(marker) for marker in ENDS + RANGES]
    touched = OffsetRuns()
    records = [Record(at, T0, encoded) for at, encoded in enumerate(log)]
    applied = replay_markers(
        InFlight(), PARTITION, records, QueueEnd(END_OF_QUEUE, decides_markers_below), touched
    )
    assert (applied.records, applied.skipped) == (len(records), [])
    assert list(touched.runs()) == [(11, 9)]


def test_a_take_of_what_may_not_exist_yet_stops_the_reading():
    log = [Marker(PARTITION, offset, Op.TAKE, 5) for offset in (1, 20, 2, 21, 3)]
    records = [Record(at, T0, codec.encode(marker)) for at, marker in enumerate(log)]
    state = InFlight()
    assert replay_markers(state, PARTITION, records, QueueEnd(END_OF_QUEUE, 0)).records == 1
    applied = replay_markers(state, PARTITION, records[1:], QueueEnd(21, 3))
    assert (applied.records, applied.skipped) == (2, [])
    applied = replay_markers(state, PARTITION, records[3:], QueueEnd(21, 4))
    assert (applied.records, [at for at, _ in applied.skipped]) == (2, [3])
    assert sorted(entry.offset for entry in state) == [1, 2, 3, 20]


def test_what_a_marker_that_is_undecodable_had_come_to_is_not_kept():
    """900 kB that compress to some bytes: each became 450,000 runs, kept by the traceback of its error."""
    values = [b"\x03" + b"\x01" * 900_001, b"\x02" + bytes(8) + b"\x01" * 900_001]
    records = [
        Record(at, T0, (codec.encode_key(PARTITION, 0), value, None)) for at, value in enumerate(values)
    ]
    tracemalloc.start()
    applied = replay_markers(InFlight(), PARTITION, records)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [at for at, _ in applied.skipped] == [0, 1]
    assert all(error.__traceback__ is None for _, error in applied.skipped)
    assert peak < 5_000_000


def test_range_markers_leave_others_their_turn():
    runs = codec.ranges(PARTITION, Op.DELAY, range(1_000), redeliver_after_ms=9)[0]
    records = [Record(at, T0, codec.encode(runs)) for at in range(5)]
    assert replay_markers(InFlight(), PARTITION, records).records == 5
    assert replay_markers(InFlight(), PARTITION, records, most=1_500).records == 2
    assert replay_markers(InFlight(), PARTITION, records, most=0).records == 1
