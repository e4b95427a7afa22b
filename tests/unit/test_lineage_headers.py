"""The headers that say which record is a copy of which."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.errors import DecodeError
from kmqpy.kafka.copies.end_markers import end_markers
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.lineage import (
    ANCESTORS,
    COPY,
    MAX_ANCESTORS_BYTES,
    RecordPlace,
    ancestors_header,
    copy_header,
    read_ancestors,
    read_copies,
)
from kmqpy.kafka.markers.replay import ALL_EXIST, _grouped, replay_markers

DEAD = "jobs__undelivered"
offsets = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=30, unique=True).map(sorted)


class TestCopies:
    @pytest.mark.parametrize(
        ("topic", "copies", "text"),
        [
            ("jobs", [(3, 17)], b"3:17"),
            (DEAD, [(3, 17)], b"jobs__undelivered:3:17"),
            ("jobs", [(0, 1), (0, 2), (0, 3), (0, 7)], b"0:1-3,7"),
        ],
    )
    def test_the_text(self, topic, copies, text):
        assert copy_header("jobs", topic, copies) == [(COPY, text)]
        assert read_copies(text, "jobs", len(copies)) == [RecordPlace(topic, *copy) for copy in copies]

    @pytest.mark.parametrize("copies", [[], [None], [(0, 1), None], [(0, 1), (1, 2)]])
    def test_what_is_not_known_is_not_said(self, copies):
        assert copy_header("jobs", "jobs", copies) == []

    @given(st.integers(0, 2**31 - 1), offsets)
    def test_any(self, partition, some):
        (_, text), *_ = copy_header("jobs", "jobs", [(partition, offset) for offset in some])
        assert read_copies(text, "jobs", len(some)) == [RecordPlace("jobs", partition, one) for one in some]

    @pytest.mark.parametrize(
        "forged",
        [b"", b"7", b"0:", b"0:5-3", b"0:5,5", b"0:5,4", b"0:1-9223372036854775807", b"0:9223372036854775808",
         b"0:1,", b"a b:0:1", b"-1:0", b"0:\xff", b"0:1", b"0:1-3", b"0:" + b"1," * 10**6],
    )  # fmt: skip
    def test_what_was_forged_is_refused(self, forged):
        with pytest.raises(DecodeError, match="kmq-copy"):
            read_copies(forged, "jobs", 2)

    @given(st.binary(max_size=40), st.integers(1, 5))
    def test_whatever_it_holds(self, data, count):
        with suppress(DecodeError):
            assert len(read_copies(data, "jobs", count)) == count


class TestAncestors:
    @pytest.mark.parametrize(
        ("ancestors", "text"),
        [
            ([("jobs", 0, 5)], b"0:5"),
            ([("jobs", 0, 5), (DEAD, 0, 3), ("jobs", 1, 9)], b"0:5,jobs__undelivered:0:3,1:9"),
        ],
    )
    def test_the_text(self, ancestors, text):
        places = [RecordPlace(*one) for one in ancestors]
        assert ancestors_header("jobs", places[:-1], places[-1]) == (ANCESTORS, text)
        assert read_ancestors(text, RecordPlace("jobs", 1, 10)) == tuple(places)

    def test_without_the_header_nobody_knows(self):
        assert read_ancestors(None, RecordPlace("jobs", 0, 1)) == ()

    def test_beyond_the_bound_the_oldest_and_the_newest_stay(self):
        places = [RecordPlace("jobs", 0, 10**9 + offset) for offset in range(1_000)]
        _, text = ancestors_header("jobs", places[:-1], places[-1])
        assert MAX_ANCESTORS_BYTES - 13 < len(text) <= MAX_ANCESTORS_BYTES
        found = read_ancestors(text, RecordPlace("jobs", 0, 10**10))
        assert found == (places[0], *places[1 - len(found) :])

    def test_names_so_long_that_only_the_newest_has_room(self):
        places = [RecordPlace("t" * 249, 2**31 - 1, offset) for offset in range(10**18, 10**18 + 9)]
        found = read_ancestors(
            ancestors_header("jobs", places[:-1], places[-1])[1], RecordPlace("jobs", 0, 1)
        )
        assert found == (places[0], *places[-2:])

    @pytest.mark.parametrize(
        "forged",
        [b"", b"7", b"0:8", b"0:9", b"0:1,0:1", b"0:2,0:1", b"0:1,1:5,1:4", b"0:1,,", b"a b:0:1", b"-1:0",
         b"0:1:x", b"1:9223372036854775808", b"\xff\x00", b"0:1," * 10**5],
    )  # fmt: skip
    def test_what_was_forged_is_refused(self, forged):
        with pytest.raises(DecodeError, match="kmq-ancestors"):
            read_ancestors(forged, RecordPlace("jobs", 0, 8))

    @given(st.binary(max_size=40))
    def test_whatever_it_holds(self, data):
        try:
            found = read_ancestors(data, RecordPlace("jobs", 0, 8))
        except DecodeError:
            return
        assert len(set(found)) == len(found)


class Record:
    """A record of a markers topic."""

    def __init__(self, at, key, value, headers):
        self.at, self.raw = at, (key, value, headers)

    def key(self):
        return self.raw[0]

    def value(self):
        return self.raw[1]

    def headers(self):
        return self.raw[2] or None

    def offset(self):
        return self.at

    def partition(self):
        return 0

    def timestamp(self):
        return 1, 1_000


@pytest.mark.parametrize("ranges", [False, True])
class TestEndMarkers:
    def ends(self, copies, *, ranges, topic="jobs"):
        return list(end_markers("jobs", 0, copies, copy_topic=topic, ranges=ranges))

    def test_each_names_its_copy(self, ranges):
        made = self.ends({1: (0, 100), 2: (0, 101), 5: (0, 102)}, ranges=ranges)
        named = [dict(record.headers)[COPY] for record in made]
        assert named == ([b"0:100-102"] if ranges else [b"0:100", b"0:101", b"0:102"])

    def test_what_has_no_copy_names_none(self, ranges):
        for record in self.ends({1: None, 2: None}, ranges=ranges):
            assert record.headers == [("kmq-by", b"tracker")]

    def test_key_and_value_are_those_of_markers_that_name_nothing(self, ranges):
        """So JVM readers see the same as before."""
        named = self.ends({1: (0, 7), 2: (0, 8)}, ranges=ranges, topic=DEAD)
        without = self.ends({1: None, 2: None}, ranges=ranges)
        assert [one[:3] for one in named] == [one[:3] for one in without]

    def test_a_range_beyond_the_longest_span_is_split_with_its_copies(self, ranges):
        copies = {offset: (0, 10**6 + offset) for offset in (0, 1, codec.MAX_SPAN, codec.MAX_SPAN + 1)}
        made = self.ends(copies, ranges=ranges)
        assert len(made) == (2 if ranges else 4)
        found = {}
        for key, value, headers in (one[1:] for one in made):
            marker = codec.decode(key, value, headers)
            places = read_copies(dict(headers)[COPY], "jobs", marker.count)
            found |= dict(zip(marker.offsets(), (place[1:] for place in places), strict=True))
        assert found == copies

    def test_trackers_read_them_in_one_go(self, ranges):
        made = self.ends({offset: (0, 500 + offset) for offset in range(100)}, ranges=ranges)
        records = [Record(at, *one[1:]) for at, one in enumerate(made)]
        assert len(list(_grouped(0, records, ALL_EXIST, InFlight()))) == 1
        state = InFlight()
        for offset in range(101):
            state.apply(codec.Marker(0, offset, Op.TAKE, 10), 0, 0)
            state._position = 0
        applied = replay_markers(state, 0, records)
        assert (len(state), applied.late_acks, applied.records) == (1, 0, len(records))

    def test_what_else_the_headers_hold_changes_nothing(self, ranges):
        (one, *_) = self.ends({1: None, 2: None}, ranges=ranges)
        for more in ([(COPY, None)], [(COPY, b"\xff" * 10)], [("x", b"1"), (COPY, b"0:1")]):
            state = InFlight()
            state.apply(codec.Marker(0, 1, Op.TAKE, 10), 0, 0)
            replay_markers(state, 0, [Record(1, *one[1:3], [*one[3], *more])])
            assert not len(state)
