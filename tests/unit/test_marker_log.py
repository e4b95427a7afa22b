"""Records of a markers partition: a series applied at once means what its records would one by one."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmqpy import entries, markers
from kmqpy.errors import DecodeError, UnsupportedMarker
from kmqpy.inflight import InFlight
from kmqpy.marker_log import Applied, apply_records
from kmqpy.markers import Marker, Op

PARTITION = 3
T0 = 1_700_000_000_000


@dataclass
class Record:
    """What apply_records asks of a confluent_kafka.Message."""

    at: int
    timestamp_ms: int
    encoded: tuple[bytes | None, bytes | None, list] = field(default=(None, None, []))

    def key(self):
        return self.encoded[0]

    def value(self):
        return self.encoded[1]

    def headers(self):
        return self.encoded[2] or None

    def offset(self):
        return self.at

    def timestamp(self):
        return (1, self.timestamp_ms)


def one_by_one(state, records):
    """The oracle: every record decoded and applied by itself."""
    applied = Applied()
    for record in records:
        at, timestamp_ms = record.offset(), record.timestamp()[1]
        try:
            marker = markers.decode(*record.encoded)
            if marker.partition != PARTITION:
                raise DecodeError("another's", record.key())
        except UnsupportedMarker as error:
            state.observe(at, timestamp_ms)
            state.pin(at)
            applied.newer.append((at, error))
        except DecodeError as error:
            state.observe(at, timestamp_ms)
            applied.undecodable.append((at, error))
        else:
            changed = state.apply(marker, at, timestamp_ms)
            if marker.op is Op.END and not marker.by_tracker:
                applied.late_acks += marker.count - changed
    return applied


OFFSETS = st.integers(0, 30)
series = st.builds(
    lambda op, first, count, after, **fields: [
        markers.encode(Marker(PARTITION, first + i, op, 0 if op is Op.END else after, **fields))
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
        [(markers.encode_key(PARTITION, 1), None, [])],
        [(markers.encode_key(PARTITION, 1), b"\x01", [])],
        [(markers.encode_key(PARTITION, 1), b"\x00" * 9, [])],
        [(markers.encode_key(PARTITION, 1), b"\x07", [])],
        [(markers.encode_key(PARTITION, -1), markers.encode_start(5), [])],
        [(markers.encode_key(PARTITION + 1, 1), markers.encode_start(5), [])],
        [(markers.encode_key(PARTITION + 1, 1), markers.encode_end(), [])],
        [(markers.encode_key(PARTITION, 1)[:-1], markers.encode_end(), [])],
        [markers.encode(markers.tick(PARTITION))],
        [markers.encode(markers.ranges(PARTITION, Op.TAKE, range(2, 30), redeliver_after_ms=9)[0])],
        [markers.encode(markers.ranges(PARTITION, Op.END, range(5, 25))[0])],
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
        patch.setattr(entries, "_BLOCK", sizes[0])
        patch.setattr(entries, "_MIN_RUN", sizes[1])
        expected, state, records = InFlight(), InFlight(), records_of(log)
        wanted = one_by_one(expected, records)
        total = Applied()
        for first in range(0, len(records), batch):
            applied = apply_records(state, PARTITION, records[first : first + batch])
            total.late_acks += applied.late_acks
            total.newer += applied.newer
            total.undecodable += applied.undecodable
        assert sorted(state) == sorted(expected)
        assert (state.now_ms, state.position) == (expected.now_ms, expected.position)
        assert (state.safe_offset(), state.pinned) == (expected.safe_offset(), expected.pinned)
        assert total.late_acks == wanted.late_acks
        assert [at for at, _ in total.newer] == [at for at, _ in wanted.newer]
        assert [at for at, _ in total.undecodable] == [at for at, _ in wanted.undecodable]


@settings(deadline=None)
@given(logs, st.data())
def test_records_that_were_read_before_change_nothing(log, data):
    records = records_of(log)
    state, expected = InFlight(), InFlight()
    apply_records(expected, PARTITION, records)
    split = data.draw(st.integers(0, len(records)))
    back = data.draw(st.integers(0, split))
    apply_records(state, PARTITION, records[:split])
    apply_records(state, PARTITION, records[back:])
    assert sorted(state) == sorted(expected)
    assert state.position == expected.position


@pytest.mark.parametrize("holder", [None, "somebody"])
def test_a_series_takes_no_memory_for_each_message(holder):
    state = InFlight()
    takes = [Marker(PARTITION, i, Op.TAKE, 30_000, holder=holder) for i in range(5_000)]
    apply_records(state, PARTITION, [Record(i, T0, markers.encode(take)) for i, take in enumerate(takes)])
    assert {entry.holder for entry in state} == {holder}
    assert len(state) == 5_000
    assert not state._entries._slots
