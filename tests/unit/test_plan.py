from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy import message as m
from kmqpy.kafka.markers.codec import decode_count, encode_count
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.late_operations import PLANNED_AT
from kmqpy.kafka.markers.lineage import ANCESTORS
from kmqpy.kafka.message_headers import (
    DEAD_LETTER_ATTEMPTS,
    DEAD_LETTER_OFFSET,
    DEAD_LETTER_PARTITION,
    DEAD_LETTER_REASON,
    DEAD_LETTER_TOPIC,
    DELIVER_AT,
    ORIGINAL_OFFSET,
    ORIGINAL_PARTITION,
    ORIGINAL_TIMESTAMP,
    size_of,
)
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import MAX_MESSAGE_BYTES
from tracker.redelivery.redelivery_plan import Copy, Original, Refusal, batches, copy_of, halves, reason_of

COUNT = "kmq-redelivery-count"
QUEUE = QueueSettings(name="jobs")
PARTITION = 4
LIMIT = MAX_MESSAGE_BYTES + 64 * 1024
"""Of a queue's topic."""
ORIGIN = (
    (ORIGINAL_PARTITION, b"4"),
    (ORIGINAL_OFFSET, b"70"),
    (ORIGINAL_TIMESTAMP, b"1700000000000"),
)
FIRST = (*ORIGIN, (ANCESTORS, b"4:70"))
"""What the first copy says beside its count."""
headers = st.lists(
    st.tuples(
        st.one_of(st.text(max_size=3), st.sampled_from(["traceparent", COUNT, DELIVER_AT, ORIGINAL_OFFSET])),
        st.none() | st.binary(max_size=5),
    ),
    max_size=8,
).map(tuple)


def entry(state=EntryState.LEASED, *, counts=True, reason=None):
    return Entry(70, 9, 0, 0, state, counts, reason)


def original(*given_headers, key=b"k", value=b"v"):
    return Original(70, 1_700_000_000_000, key, value, given_headers)


def count_header(count):
    return (COUNT, encode_count(count))


def plan(an_entry, an_original, queue=QUEUE):
    return copy_of(an_entry, an_original, queue, PARTITION)


def count_of(copy):
    return decode_count(m.last_header(copy.headers, COUNT))


class TestHeldBack:
    QUEUE = QueueSettings(name="jobs", retry_delays=["1s", "10s"], max_redeliveries=2)

    def held_ms(self, count=0, state=EntryState.LEASED, *, counts=True, now_ms=300, **changes):
        """How long a message waits that was redelivered `count` times, and that was due at 0."""
        given = original(count_header(count)), replace(self.QUEUE, **changes), PARTITION
        return copy_of(entry(state, counts=counts), *given, now_ms=now_ms).held_ms

    @pytest.mark.parametrize("state", [EntryState.LEASED, EntryState.FAILED])
    def test_r44_for_what_is_left_of_the_delay_of_its_count(self, state):
        assert [self.held_ms(count, state) for count in (-1, 0, 1)] == [700, 700, 9_700]
        assert self.held_ms(state=state, now_ms=1_000) == 0
        assert self.held_ms(2, state) == 0  # a dead letter
        assert self.held_ms(2, state, max_redeliveries=None) == 9_700

    @pytest.mark.parametrize("state", [EntryState.RELEASED, EntryState.DELAYED, EntryState.DEAD])
    def test_r44_not_when_it_had_its_delay_or_does_not_count(self, state):
        assert self.held_ms(state=state) == self.held_ms(counts=False) == 0

    def test_r44_a_successor_finds_the_same_jitter(self):
        waits = [
            [self.held_ms(count, retry_jitter=0.5, now_ms=0, max_redeliveries=None) for count in range(9)]
            for _ in range(2)
        ]
        assert waits[0] == waits[1]
        assert len(set(waits[0][1:])) > 4
        assert all(5_000 <= one <= 10_000 for one in waits[0][1:])


class TestRedelivery:
    def test_the_first(self):
        copy = plan(entry(), original(("a", b"1"), ("b", None), ("a", b"2")))
        assert not copy.dead_letter
        assert (copy.entry, copy.key, copy.value) == (entry(), b"k", b"v")
        assert copy.headers == (("a", b"1"), ("b", None), ("a", b"2"), *FIRST, (COUNT, b"\x01"))

    def test_the_origin_is_set_once_and_kept(self):
        first = plan(entry(), original())
        later = Original(99, 1_800_000_000_000, b"k", b"v", first.headers)
        copy = copy_of(entry(), later, QUEUE, PARTITION)
        assert copy.headers == (*ORIGIN, (ANCESTORS, b"4:70,4:99"), (COUNT, b"\x02"))

    @pytest.mark.parametrize(
        ("partition", "offset"), [(b"4", b"70"), (b"4", b"999"), (b"x", b"1"), (b"4", None)]
    )
    def test_an_origin_that_can_not_be_true_is_replaced(self, partition, offset):
        """Clients do not believe it either: message and dead letter have one id."""
        forged = original(
            (ORIGINAL_PARTITION, partition), (ORIGINAL_OFFSET, offset), (ORIGINAL_TIMESTAMP, b"5")
        )
        assert plan(entry(), forged).headers == plan(entry(), original()).headers

    def test_where_the_queue_has_late_acks_it_says_from_where_to_look_for_them(self):
        queue = QueueSettings(name="jobs", late_acks=True, max_redeliveries=2)

        def copied(headers, position):
            record = Original(70, 0, None, None, headers)
            return copy_of(entry(), record, queue, PARTITION, position=position)

        first = copied((), 500)
        assert m.last_header(first.headers, PLANNED_AT) == b"jobs:4:500"
        second = copied(first.headers, 900)
        assert [one for one in second.headers if one[0] == PLANNED_AT] == [(PLANNED_AT, b"jobs:4:500")]
        for foreign in (b"others:4:5", b"jobs:3:5", b"?", b"jobs:4:901"):
            assert m.last_header(copied(((PLANNED_AT, foreign),), 900).headers, PLANNED_AT) == b"jobs:4:900"
        dead = copied(second.headers, 950)
        assert dead.dead_letter
        assert m.last_header(dead.headers, PLANNED_AT) is None
        assert m.last_header(plan(entry(), original((PLANNED_AT, b"jobs:4:5"))).headers, PLANNED_AT) is None

    @pytest.mark.parametrize("key", [None, b"", b"k"])
    @pytest.mark.parametrize("value", [None, b"", b"v"])
    def test_null_and_empty_are_two_things(self, key, value):
        copy = plan(entry(), original(key=key, value=value))
        assert (copy.key, copy.value) == (key, value)

    def test_the_count_appears_once(self):
        copy = plan(entry(), original(count_header(2), ("a", b"1"), count_header(1)))
        assert copy.headers == (("a", b"1"), *FIRST, (COUNT, b"\x02"))

    def test_another_count_header(self):
        queue = QueueSettings(name="jobs", redelivery_count_header="tries")
        copy = plan(entry(), original(("tries", b"\x01"), (COUNT, b"\x03")), queue)
        assert copy.headers == ((COUNT, b"\x03"), *FIRST, ("tries", b"\x02"))

    def test_what_does_not_count(self):
        copy = plan(entry(counts=False), original(count_header(2)))
        assert count_of(copy) == 2
        assert COUNT not in dict(plan(entry(counts=False), original()).headers)

    def test_what_does_not_count_comes_back_beyond_the_limit(self):
        copy = plan(entry(counts=False), original(count_header(3)))
        assert not copy.dead_letter
        assert count_of(copy) == 3

    def test_the_delay_is_over(self):
        delayed = entry(EntryState.DELAYED, counts=False)
        copy = plan(delayed, original((DELIVER_AT, b"1"), ("a", b"1"), (DELIVER_AT, b"2")))
        assert copy.headers == (("a", b"1"), *FIRST)

    @pytest.mark.parametrize("bad", [b"", b"12", b"\x00\x00\x01", b"many redeliveries"])
    def test_an_undecodable_count_is_zero_and_said(self, bad):
        copy = plan(entry(), original((COUNT, bad)))
        assert copy.undecodable_count
        assert not copy.dead_letter
        assert copy.headers == (*FIRST, (COUNT, b"\x01"))
        assert not plan(entry(), original(count_header(2))).undecodable_count

    @pytest.mark.parametrize("bad", [None, b"", b"4:71", b"4:70", b"4:8,4:7", b"x" * 70_000])
    def test_ancestors_that_can_not_be_are_left_out_and_said(self, bad):
        copy = plan(entry(), original((ANCESTORS, bad), ("a", b"1")))
        assert copy.undecodable_ancestors is (bad is not None)
        assert copy.headers == (("a", b"1"), *FIRST, (COUNT, b"\x01"))

    def test_a_negative_count_is_zero(self):
        assert count_of(plan(entry(), original(count_header(-5)))) == 1

    def test_the_count_saturates(self):
        endless = QueueSettings(name="jobs", max_redeliveries=None)
        assert count_of(plan(entry(), original(count_header(2**31 - 1)), endless)) == 2**31 - 1
        assert count_of(plan(entry(), original(count_header(127)), endless)) == 128

    @given(headers, st.booleans())
    def test_headers_of_others_stay_in_order(self, given_headers, dead):
        copy = plan(entry(EntryState.DEAD if dead else EntryState.LEASED), original(*given_headers))
        made_anew = (COUNT, DELIVER_AT, ORIGINAL_PARTITION, ORIGINAL_OFFSET, ORIGINAL_TIMESTAMP)
        kept = tuple((k, v) for k, v in given_headers if k not in made_anew)
        assert copy.headers[: len(kept)] == kept
        assert all(name.startswith("kmq-") for name, _ in copy.headers[len(kept) :])


class TestDeadLetter:
    def deliveries(self, queue):
        """How often a message that is never acknowledged is delivered."""
        record, count = original(), 1
        while not (copy := plan(entry(), record, queue)).dead_letter:
            record, count = original(*copy.headers), count + 1
        return count, copy

    @pytest.mark.parametrize("limit", [0, 1, 3, 130])
    def test_one_delivery_more_than_redeliveries(self, limit):
        count, copy = self.deliveries(QueueSettings(name="jobs", max_redeliveries=limit))
        assert count == limit + 1
        assert dict(copy.headers)[DEAD_LETTER_ATTEMPTS] == str(limit + 1).encode()
        assert count_of(copy) == limit

    def test_no_limit(self):
        endless = QueueSettings(name="jobs", max_redeliveries=None)
        assert not plan(entry(), original(count_header(10**6)), endless).dead_letter
        assert plan(entry(EntryState.DEAD), original(), endless).dead_letter

    def test_its_headers(self):
        copy = plan(entry(), original(("a", b"1"), count_header(3), (DELIVER_AT, b"5")))
        assert copy.dead_letter
        assert copy.headers == (
            ("a", b"1"),
            *ORIGIN,
            (ANCESTORS, b"jobs:4:70"),
            (DEAD_LETTER_TOPIC, b"jobs"),
            (DEAD_LETTER_PARTITION, b"4"),
            (DEAD_LETTER_OFFSET, b"70"),
            (DEAD_LETTER_ATTEMPTS, b"4"),
            (DEAD_LETTER_REASON, b"expired"),
            (COUNT, b"\x03"),
        )
        assert (copy.key, copy.value) == (b"k", b"v")

    def test_the_origin_of_earlier_copies_is_kept(self):
        earlier = tuple((name, b"1") for name, _ in ORIGIN)
        copy = plan(entry(EntryState.DEAD), original(*earlier))
        assert copy.headers[:3] == earlier
        assert ORIGINAL_OFFSET not in dict(copy.headers[3:])

    def test_a_second_death_replaces_the_first(self):
        old = tuple(
            (name, b"old")
            for name in (
                DEAD_LETTER_TOPIC,
                DEAD_LETTER_PARTITION,
                DEAD_LETTER_OFFSET,
                DEAD_LETTER_ATTEMPTS,
                DEAD_LETTER_REASON,
            )
        )
        copy = plan(entry(EntryState.DEAD), original(*old, ("a", b"1")))
        assert len(copy.headers) == len(dict(copy.headers))
        assert b"old" not in dict(copy.headers).values()
        assert copy.headers[0] == ("a", b"1")

    def test_rejected_at_the_first_delivery(self):
        copy = plan(entry(EntryState.DEAD, reason="bad zip: é"), original())
        assert copy.dead_letter
        assert dict(copy.headers)[DEAD_LETTER_REASON] == "rejected: bad zip: é".encode()
        assert dict(copy.headers)[DEAD_LETTER_ATTEMPTS] == b"1"
        assert COUNT not in dict(copy.headers)

    def test_rejected_though_it_does_not_count(self):
        assert plan(entry(EntryState.DEAD, counts=False), original()).dead_letter

    @pytest.mark.parametrize(
        ("count", "limit", "times", "dead"),
        [
            (0, 3, 2, False),
            (0, 3, 3, True),
            (1, 3, 1, False),
            (1, 3, 2, True),
            (0, 1, 0, False),
            (0, 1, 1, True),
            (0, None, 99, False),
        ],
    )
    def test_refused_as_often_as_there_are_deliveries_left(self, count, limit, times, dead):
        queue = QueueSettings(name="jobs", max_redeliveries=limit)
        record = original(*([count_header(count)] if count else []))
        copy = copy_of(entry(), record, queue, PARTITION, Refusal(times, "too large"))
        assert copy.dead_letter is dead
        if dead:
            said = dict(copy.headers)
            assert said[DEAD_LETTER_REASON] == b"refused: too large; expired"
            assert said[DEAD_LETTER_ATTEMPTS] == str(count + 1).encode()

    def test_released_without_count_at_the_limit_it_is_tried_once(self):
        for times, dead in ((0, False), (1, True)):
            record = original(count_header(3))
            copy = copy_of(entry(counts=False), record, QUEUE, PARTITION, Refusal(times, "x"))
            assert copy.dead_letter is dead

    def test_a_refusal_is_not_the_reason_of_those_that_are_dead_anyway(self):
        refused = copy_of(entry(), original(count_header(3)), QUEUE, PARTITION, Refusal(9, "x"))
        assert dict(refused.headers)[DEAD_LETTER_REASON] == b"expired"

    def test_a_reason_that_no_client_writes_does_not_make_the_record_too_large(self):
        assert plan(entry(EntryState.DEAD, reason="r" * 1_000_000), original()).size < 2_000

    def test_a_reason_that_utf8_has_no_form_for(self):
        copy = plan(entry(EntryState.DEAD, reason="\ud800"), original())
        assert dict(copy.headers)[DEAD_LETTER_REASON] == b"rejected: ?"


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        (EntryState.LEASED, None, "expired"),
        (EntryState.LEASED, "ignored", "expired"),
        (EntryState.DELAYED, None, "expired"),
        (EntryState.RELEASED, None, "nack"),
        (EntryState.RELEASED, "", "nack"),
        (EntryState.RELEASED, "busy", "nack: busy"),
        (EntryState.DEAD, None, "rejected"),
        (EntryState.DEAD, "bad", "rejected: bad"),
    ],
)
def test_reason(state, reason, text):
    assert reason_of(entry(state, reason=reason)) == text


class TestBatches:
    def copies(self, *sizes):
        return [
            Copy(entry(), dead_letter=False, key=None, value=bytes(size - 64), headers=()) for size in sizes
        ]

    @pytest.mark.parametrize(
        ("sizes", "max_messages", "max_bytes", "expected"),
        [
            ([], 10, 1000, []),
            ([100, 100, 100], 10, 1000, [[100, 100, 100]]),
            ([100, 100, 100], 2, 1000, [[100, 100], [100]]),
            ([100, 100, 100], 10, 200, [[100, 100], [100]]),
            ([100, 100, 100], 10, 199, [[100], [100], [100]]),
            ([100, 900, 100, 100], 10, 300, [[100], [900], [100, 100]]),
            ([900], 10, 300, [[900]]),
        ],
    )
    def test_bounds(self, sizes, max_messages, max_bytes, expected):
        result = batches(self.copies(*sizes), max_messages, max_bytes)
        assert [[copy.size for copy in batch] for batch in result] == expected

    @given(st.lists(st.integers(64, 2_000), max_size=40), st.integers(1, 10), st.integers(1, 3_000))
    def test_any(self, sizes, max_messages, max_bytes):
        copies = self.copies(*sizes)
        result = batches(copies, max_messages, max_bytes)
        assert [copy for batch in result for copy in batch] == copies
        for batch in result:
            assert 1 <= len(batch) <= max_messages
            assert len(batch) == 1 or sum(copy.size for copy in batch) <= max_bytes
        for one, following in pairwise(result):
            size = sum(copy.size for copy in one) + following[0].size
            assert len(one) == max_messages or size > max_bytes, "it would have fitted"


@given(st.none() | st.binary(), st.none() | st.binary(), headers)
def test_size_is_an_upper_estimate(key, value, given_headers):
    copy = Copy(entry(), dead_letter=False, key=key, value=value, headers=given_headers)
    content = len(key or b"") + len(value or b"")
    content += sum(len(name.encode()) + len(data or b"") for name, data in given_headers)
    # By the record format, varints of 5 bytes: length, key, value, header count, offset delta,
    # timestamp delta (10), attributes (1); two for each header.
    assert copy.size >= content + 5 * 5 + 10 + 1 + 10 * len(given_headers)


def test_size_counts_every_part():
    copy = Copy(
        entry(), dead_letter=False, key=bytes(1_000), value=bytes(20_000), headers=(("é" * 100, bytes(300)),)
    )
    assert 21_500 <= copy.size <= 21_600


def test_halves_are_by_size_and_in_order():
    sizes = [500, 100, 900, 300, 700]
    smaller, larger = halves(TestBatches().copies(*sizes))
    assert [[copy.size for copy in half] for half in (smaller, larger)] == [[100, 300], [500, 900, 700]]


def varint(number):
    return max(1, -(-(2 * number).bit_length() // 7))


def record_bytes(copy):
    """What a batch of this record alone takes, uncompressed."""
    size = 61 + 9 + 4 + len(copy.key or b"") + len(copy.value or b"") + varint(len(copy.headers))
    for name, data in copy.headers:
        name, data = name.encode(), data or b""
        size += varint(len(name)) + len(name) + varint(len(data)) + len(data)
    return size


@pytest.mark.parametrize(
    "header", [("h", b""), ("é" * 40, b"v" * 99), ("n", b"v" * 10_000), ("k" * 100_000, None)]
)
@pytest.mark.parametrize("reason", [None, "🐇" * 1_000])
def test_what_send_takes_is_copied_until_it_is_a_dead_letter_and_back(header, reason):
    """However many headers it is made of, and without compression."""
    queue = QueueSettings(
        name="q" * 230,
        redelivery_count_header="c" * 200,
        max_redeliveries=300,
        late_acks=True,
    )
    many = MAX_MESSAGE_BYTES // size_of(None, None, (header,))
    rest = MAX_MESSAGE_BYTES - size_of(None, None, (header,) * many)
    record = Original(2**63 - 1, 2**63 - 1, None, b"v" * rest, (header,) * many)
    assert size_of(record.key, record.value, record.headers) == MAX_MESSAGE_BYTES
    assert record_bytes(copy_of(entry(), record, queue, 2**31 - 1)) <= LIMIT
    for count in (127, 128, 299, 300):
        counted = record._replace(
            headers=(*record.headers, (queue.redelivery_count_header, encode_count(count)))
        )
        copy = copy_of(entry(EntryState.RELEASED, reason=reason), counted, queue, 2**31 - 1)
        assert copy.dead_letter is (count == 300)
        assert record_bytes(copy) <= LIMIT
