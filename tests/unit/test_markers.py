"""The codec against vectors of the JVM library's own serializers, and against arbitrary input."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import DecodeError, UnsupportedMarker
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op

GOLDEN = json.loads((Path(__file__).parent / "golden_markers.json").read_text("utf-8"))

KEY = codec.encode_key(3, 7)
START = codec.encode_start(30_000)
END = codec.encode_end()

int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), INT64_MAX)
# Text with lone surrogates too: a reason is often str(exception), and may hold anything.
any_text = st.text(st.characters(exclude_categories=()))
raw_headers = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(["kmq-op", "kmq-reason", "kmq-count", "kmq-holder", "kmq-by"]), st.text()),
        st.one_of(
            st.none(),
            st.binary(),
            any_text,
            st.sampled_from([b"extend", b"nack", "delay", b"dead-letter", b"take", b"end", b"0", "0"]),
        ),
    )
)


@st.composite
def any_marker(draw):
    op = draw(st.sampled_from(Op))
    if op is Op.END:
        return Marker(draw(int32), draw(int64), op, by_tracker=draw(st.booleans()))
    return Marker(
        draw(int32),
        draw(st.integers(0, INT64_MAX)),
        op,
        draw(int64),
        counts=draw(st.booleans()),
        reason=draw(st.none() | st.text()),
        holder=draw(st.none() | st.text()),
        by_tracker=draw(st.booleans()),
    )


class TestGoldenVectors:
    @pytest.mark.parametrize("vector", GOLDEN["keys"], ids=lambda v: v["hex"])
    def test_key(self, vector):
        encoded = bytes.fromhex(vector["hex"])
        assert codec.encode_key(vector["partition"], vector["offset"]) == encoded
        assert codec.decode_key(encoded) == (vector["partition"], vector["offset"])
        assert len(encoded) == vector["length"]

    @pytest.mark.parametrize("vector", GOLDEN["values"], ids=lambda v: f"{v['type']}-{v['hex']}")
    def test_value(self, vector):
        encoded = bytes.fromhex(vector["hex"])
        if vector["type"] == "null":
            with pytest.raises(DecodeError):
                codec.decode_value(encoded)
        elif vector["type"] == "end":
            assert codec.encode_end() == encoded
            assert codec.decode_value(encoded) is None
        else:
            assert codec.encode_start(vector["redeliver_after_ms"]) == encoded
            assert codec.decode_value(encoded) == vector["redeliver_after_ms"]

    @pytest.mark.parametrize("vector", GOLDEN["decode_only"], ids=lambda v: v["note"])
    def test_odd_input_is_refused_where_the_jvm_is_lax(self, vector):
        encoded = bytes.fromhex(vector["hex"])
        decode = codec.decode_key if vector["kind"] == "key" else codec.decode_value
        with pytest.raises(DecodeError) as caught:
            decode(encoded)
        assert caught.value.data == encoded

    @pytest.mark.parametrize("vector", GOLDEN["redelivery_count_header"], ids=lambda v: str(v["count"]))
    def test_redelivery_count(self, vector):
        encoded = bytes.fromhex(vector["hex"])
        assert codec.encode_count(vector["count"]) == encoded
        assert codec.decode_count(encoded) == vector["decodes_to"]


class TestRoundTrip:
    @given(any_marker())
    def test_every_marker(self, marker):
        assert codec.decode(*codec.encode(marker)) == marker

    @given(any_marker())
    def test_headers_that_arrive_as_text(self, marker):
        key, value, headers = codec.encode(marker)
        assert codec.decode(key, value, [(name, data.decode()) for name, data in headers]) == marker

    @given(any_text, any_text)
    def test_odd_unicode_is_replaced_never_refused(self, reason, holder):
        marker = codec.decode(*codec.encode(Marker(0, 0, Op.NACK, reason=reason, holder=holder)))
        assert marker.reason == reason.encode("utf-8", "replace").decode()
        assert marker.holder == holder.encode("utf-8", "replace").decode()

    @given(int32)
    def test_count(self, count):
        assert codec.decode_count(codec.encode_count(count)) == count

    def test_an_absent_count_is_zero(self):
        assert codec.decode_count(None) == 0

    @pytest.mark.parametrize("length", [0, 2, 3, 5, 8])
    def test_a_count_of_another_length(self, length):
        with pytest.raises(DecodeError) as caught:
            codec.decode_count(bytes(length))
        assert caught.value.data == bytes(length)


class TestWireFormat:
    """What stands in the record, byte for byte: a JVM tracker reads it too."""

    def test_a_plain_take_has_no_headers(self):
        assert codec.encode(Marker(3, 7, Op.TAKE, 30_000)) == (KEY, START, [])

    def test_an_end(self):
        assert codec.encode(Marker(3, 7, Op.END)) == (KEY, END, [])

    def test_everything_else_is_a_start_marker_with_headers(self):
        marker = Marker(3, 7, Op.NACK, 30_000, counts=False, reason="später", holder="w1", by_tracker=True)
        assert codec.encode(marker) == (
            KEY,
            START,
            [
                ("kmq-op", b"nack"),
                ("kmq-count", b"0"),
                ("kmq-reason", "später".encode()),
                ("kmq-holder", b"w1"),
                ("kmq-by", b"tracker"),
            ],
        )

    @pytest.mark.parametrize(
        ("op", "name"),
        [(Op.EXTEND, b"extend"), (Op.NACK, b"nack"), (Op.DEAD_LETTER, b"dead-letter"), (Op.DELAY, b"delay")],
    )
    def test_names_of_operations(self, op, name):
        assert codec.encode(Marker(0, 0, op))[2] == [("kmq-op", name)]

    def test_due_now_unless_said_otherwise(self):
        assert codec.encode(Marker(3, 7, Op.NACK))[1] == codec.encode_start(0)

    def test_a_tick_is_an_end_marker_for_offset_minus_one(self):
        assert codec.encode(codec.tick(5)) == (
            bytes.fromhex("00000005ffffffffffffffff"),
            b"\x00",
            [("kmq-by", b"tracker")],
        )
        assert codec.decode(*codec.encode(codec.tick(5))) == codec.tick(5)


class TestDecode:
    @given(st.none() | st.binary(max_size=16), st.none() | st.binary(max_size=16), st.none() | raw_headers)
    def test_any_input_gives_a_marker_or_a_decode_error(self, key, value, headers):
        try:
            marker = codec.decode(key, value, headers)
        except DecodeError:
            return
        assert isinstance(marker, Marker)

    @given(
        st.one_of(st.none(), st.just(KEY), st.just(codec.encode_key(0, -1))),
        st.one_of(st.none(), int64.map(codec.encode_start), st.just(END)),
        raw_headers,
    )
    def test_any_headers_beside_a_good_value(self, key, value, headers):
        try:
            marker = codec.decode(key, value, headers)
        except DecodeError:
            return
        assert (marker.partition, marker.offset) == codec.decode_key(key)
        assert (marker.op is Op.END) == (value == END)

    @pytest.mark.parametrize("kind", range(0x05, 0x10))
    @pytest.mark.parametrize("rest", [b"", bytes(8), b"anything else"])
    def test_reserved_type_bytes_are_of_a_newer_version(self, kind, rest):
        with pytest.raises(UnsupportedMarker) as caught:
            codec.decode(KEY, bytes([kind]) + rest)
        assert caught.value.data == bytes([kind]) + rest

    @pytest.mark.parametrize("kind", [*range(0x10, 0x20), 0x7F, 0x80, 0xFF])
    def test_other_type_bytes_are_garbage(self, kind):
        with pytest.raises(DecodeError) as caught:
            codec.decode(KEY, bytes([kind]) + bytes(8))
        assert not isinstance(caught.value, UnsupportedMarker)

    @pytest.mark.parametrize("headers", [None, [("kmq-op", b"nack")]])
    def test_a_reserved_type_byte_under_a_bad_key_is_garbage(self, headers):
        with pytest.raises(DecodeError) as caught:
            codec.decode(KEY[:-1], b"\x02", headers)
        assert not isinstance(caught.value, UnsupportedMarker)

    @pytest.mark.parametrize("op", [b"hold", b"", b"take", b"end", b"NACK", b"\xff"])
    def test_an_unknown_operation_is_of_a_newer_version(self, op):
        with pytest.raises(UnsupportedMarker):
            codec.decode(KEY, START, [("kmq-op", op)])

    def test_an_operation_without_content_is_absent(self):
        assert codec.decode(KEY, START, [("kmq-op", None)]).op is Op.TAKE

    def test_the_last_header_of_a_name_counts(self):
        headers = [("kmq-op", b"hold"), ("kmq-op", b"nack"), ("kmq-reason", b"a"), ("kmq-reason", b"b")]
        assert codec.decode(KEY, START, headers) == Marker(3, 7, Op.NACK, 30_000, reason="b")

    def test_headers_of_others_are_ignored(self):
        headers = [("traceparent", b"00-1-2-01"), ("kmq-new-in-2030", b"x"), ("", None)]
        assert codec.decode(KEY, START, headers) == Marker(3, 7, Op.TAKE, 30_000)
        assert codec.decode(KEY, END, headers) == Marker(3, 7, Op.END)

    @pytest.mark.parametrize("op", [Op.END, Op.NACK, Op.EXTEND, Op.DEAD_LETTER])
    def test_r24_a_marker_by_receipt_is_a_tick_where_the_topic_is_another(self, op):
        """Four bytes tell that, in the record: two lengths, no name, two bytes."""
        tag = codec.topic_tag("zRq0ZLLCQ4m5YG3qcQ6IBA")
        marker = codec.Marker(3, 7, op, topic=tag)
        key, value, headers = codec.encode(marker)
        assert headers[-1] == ("", tag)
        assert len(tag) == 2
        for topic in (None, tag):
            assert codec.decode(key, value, headers, topic=topic) == marker
        other = codec.topic_tag("zRq0ZLLCQ4m5YG3qcQ6IBB")
        assert codec.decode(key, value, headers, topic=other) == codec.tick(3)

    @pytest.mark.parametrize("data", [None, b"", b"x", b"xyz"])
    def test_what_is_no_tag_is_absent(self, data):
        assert codec.decode(KEY, END, [("", data)], topic=b"ab") == Marker(3, 7, Op.END)

    def test_an_end_marker_has_no_operation(self):
        headers = [("kmq-op", b"nack"), ("kmq-by", b"tracker"), ("kmq-count", b"0")]
        assert codec.decode(KEY, END, headers) == Marker(3, 7, Op.END, by_tracker=True)

    @pytest.mark.parametrize(
        ("data", "counts"), [(b"0", False), (b"1", True), (b"", True), (None, True), (b"00", True)]
    )
    def test_only_a_zero_does_not_count(self, data, counts):
        assert codec.decode(KEY, START, [("kmq-count", data)]).counts is counts

    def test_only_the_tracker_is_the_tracker(self):
        assert not codec.decode(KEY, START, [("kmq-by", b"client")]).by_tracker
        assert not codec.decode(KEY, END, [("kmq-by", b"client")]).by_tracker

    @pytest.mark.parametrize("headers", [None, [], [("kmq-op", b"nack")]])
    def test_a_start_for_a_negative_offset(self, headers):
        with pytest.raises(DecodeError):
            codec.decode(codec.encode_key(0, -1), START, headers)

    @pytest.mark.parametrize("headers", [None, [("kmq-by", b"tracker")]])
    def test_null_key_and_null_value(self, headers):
        with pytest.raises(DecodeError, match="key: null"):
            codec.decode(None, START, headers)
        with pytest.raises(DecodeError, match="value: null"):
            codec.decode(KEY, None, headers)

    def test_the_bytes_are_not_in_the_message(self):
        with pytest.raises(DecodeError) as caught:
            codec.decode(b"personal data", START)
        assert "personal" not in str(caught.value)
        assert caught.value.data == b"personal data"


def test_what_does_not_fit_the_wire_is_refused_when_writing():
    with pytest.raises(struct.error):
        codec.encode_start(INT64_MAX + 1)
    with pytest.raises(struct.error):
        codec.encode_key(2**31, 0)


class TestRanges:
    """Range markers: what is written is read again, and there is one way to write a range."""

    offsets = st.one_of(
        st.sets(st.integers(0, 300), min_size=1),
        st.sets(st.integers(2**40, 2**40 + 70_000), min_size=1, max_size=50),
        st.builds(
            lambda first, count: set(range(first, first + count)), st.integers(0, 10**6), st.integers(1, 3000)
        ),
    )

    @given(offsets, st.integers(-(2**63), 2**63 - 1), st.sampled_from([None, "me"]))
    def test_takes_round_trip(self, offsets, after, holder):
        found = codec.ranges(3, Op.TAKE, sorted(offsets), redeliver_after_ms=after, holder=holder)
        for marker in found:
            assert codec.decode(*codec.encode(marker)) == marker
        assert [offset for marker in found for offset in marker.offsets()] == sorted(offsets)
        assert sum(marker.count for marker in found) == len(offsets)

    @given(offsets)
    def test_ends_round_trip(self, offsets):
        found = codec.ranges(3, Op.END, sorted(offsets))
        for marker in found:
            assert codec.decode(*codec.encode(marker)) == marker
            assert sum(marker.runs[-1]) - marker.offset <= codec.MAX_SPAN
        assert [offset for marker in found for offset in marker.offsets()] == sorted(offsets)

    @given(st.sampled_from([2, 3, 4]), st.binary(max_size=60), st.integers(-2, 2**63 - 1))
    def test_any_bytes_are_a_marker_written_the_one_way_or_an_error(self, kind, rest, first):
        value = bytes([kind]) + rest
        try:
            marker = codec.decode(codec.encode_key(0, first), value)
        except DecodeError:
            return
        assert marker.offset == first == marker.runs[0][0]
        if kind == 2:
            assert codec.encode(marker)[1] == value
        else:  # runs or a bitmap, whichever is shorter; both mean the same
            again = codec.decode(codec.encode_key(0, first), codec.encode(marker)[1])
            assert again == marker

    @pytest.mark.parametrize(
        ("value", "why"),
        [
            ("02", "too short"),
            ("020000000000001388", "too short"),
            ("03", "ends in the middle"),
            ("0300", "a run of 0"),
            ("0381", "ends in the middle"),
            ("038100", "not in its shortest form"),
            ("030501", "ends in the middle"),
            ("03050005", "a gap of 0"),
            ("03ffffffff7f", "too large"),
            ("03818004", "spans more"),
            ("04", "empty"),
            ("0400", "zeros at an end"),
            ("0402", "zeros at an end"),
            ("040100", "zeros at an end"),
            ("04" + "ff" * 8193, "spans more"),
        ],
    )
    def test_what_is_no_range(self, value, why):
        with pytest.raises(DecodeError, match=r"range marker"):
            codec.decode(KEY, bytes.fromhex(value))

    def test_alternating_acks_become_a_short_bitmap_that_is_read_quickly(self):
        (marker,) = codec.ranges(0, Op.END, range(0, codec.MAX_SPAN, 2))
        key, value, headers = codec.encode(marker)
        assert value[0] == 4
        assert len(value) <= codec.MAX_SPAN // 8 + 1
        assert codec.decode(key, value, headers) == marker
