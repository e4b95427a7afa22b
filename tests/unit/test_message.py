import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy import message
from kmqpy.errors import DecodeError, MessageError, ReceiptError
from kmqpy.kafka.markers.codec import encode_count
from kmqpy.kafka.message_headers import int_header, redelivery_count
from kmqpy.kafka.receipt import Receipt
from kmqpy.message import Message

COUNT = "kmq-redelivery-count"


def receipt_text(fields: object) -> str:
    """A receipt's form around any JSON value, or around raw JSON."""
    raw = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return "1." + base64.urlsafe_b64encode(raw).decode().rstrip("=")


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


class TestReceipt:
    @given(st.text(), st.text(), st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1))
    def test_round_trip(self, queue, topic_id, partition, offset):
        receipt = Receipt(queue, topic_id, partition, offset)
        assert Receipt.parse(str(receipt)) == receipt

    def test_the_form_does_not_change_between_versions(self):
        text = "1.WyJqb2JzIiwiYWJjIiwzLDQyXQ"
        assert str(Receipt("jobs", "abc", 3, 42)) == text
        assert Receipt.parse(text) == Receipt("jobs", "abc", 3, 42)

    @given(st.text(max_size=80))
    def test_it_stands_in_a_url(self, queue):
        assert set(str(Receipt(queue, "", 0, 0))) <= set(
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."
        )

    @given(
        st.one_of(
            st.text(st.characters(exclude_categories=())).flatmap(lambda t: st.sampled_from([t, "1." + t])),
            st.binary().map(receipt_text),
            any_json.map(receipt_text),
        )
    )
    def test_any_text_gives_a_receipt_or_a_receipt_error(self, text):
        try:
            receipt = Receipt.parse(text)
        except ReceiptError:
            return
        assert Receipt.parse(str(receipt)) == receipt

    @pytest.mark.parametrize(
        "fields",
        [
            ["q", "id", True, 0],
            ["q", "id", 0, True],
            ["q", "id", -1, 0],
            ["q", "id", 2**31, 0],
            ["q", "id", 0, -1],
            ["q", "id", 0, 2**63],
            ["q", "id", 0, 10**4000],
            b'["q","id",0,' + b"9" * 10_000 + b"]",
            ["q", "id", 0.0, 0],
            ["q", "id", 0, float("nan")],
            ["q", "id", 0, float("inf")],
            ["q", "id", "0", 0],
            ["q", "id", None, 0],
            [None, "id", 0, 0],
            ["q", 5, 0, 0],
            ["q", "id", 0],
            ["q", "id", 0, 0, 0],
            [],
            {},
            {"queue": "q"},
            "q",
            7,
            None,
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"",
            b"\xff\xfe\xfd",
            b"not json",
        ],
        ids=lambda fields: repr(fields)[:40],
    )
    def test_other_content(self, fields):
        with pytest.raises(ReceiptError):
            Receipt.parse(receipt_text(fields))

    @pytest.mark.parametrize(
        "text", ["", "1", "1.", "2.WyJhIl0", "1.%%%", "1.a", "1.é", "1.WyJq b2Jz", "WyJqb2JzIl0", "1.\ud800"]
    )
    def test_other_text(self, text):
        with pytest.raises(ReceiptError):
            Receipt.parse(text)

    @pytest.mark.parametrize("prefix", ["2.", "x.", "1,", "11", " 1."])
    def test_a_good_body_after_another_prefix(self, prefix):
        with pytest.raises(ReceiptError):
            Receipt.parse(prefix + "WyJqb2JzIiwiYWJjIiwzLDQyXQ")

    @pytest.mark.parametrize("noise", [" ", "\n", "!", "=", "%20"])
    def test_noise_in_a_good_receipt(self, noise):
        with pytest.raises(ReceiptError):
            Receipt.parse("1.WyJq" + noise + "b2JzIiwiYWJjIiwzLDQyXQ")

    def test_other_objects(self):
        nested = []
        for _ in range(100_000):
            nested = [nested]
        for thing in (None, 5, True, b"1.WyJqb2JzIiwiYWJjIiwzLDQyXQ", 1.5, nested):
            with pytest.raises(ReceiptError):
                Receipt.parse(thing)
        while nested:  # or its deallocation would nest as deeply on older Pythons
            nested = nested[0]

    def test_the_error_shows_only_the_beginning(self):
        with pytest.raises(ReceiptError) as caught:
            Receipt.parse("1." + "%" * 100_000)
        assert len(str(caught.value)) < 150


class TestHeaders:
    def test_of_a_kafka_record(self):
        assert message.headers_of(None) == ()
        assert message.headers_of([]) == ()
        assert message.headers_of([("a", b"1"), ("a", None), ("b", "ü")]) == (
            ("a", b"1"),
            ("a", None),
            ("b", "ü".encode()),
        )

    def test_from_a_mapping_or_pairs(self):
        assert message.headers_from(None) == ()
        assert message.headers_from({"a": "ü", "b": b"\xff"}) == (("a", "ü".encode()), ("b", b"\xff"))
        assert message.headers_from([("a", "1"), ("a", None)]) == (("a", b"1"), ("a", None))
        assert message.headers_from(iter([("a", "1")])) == (("a", b"1"),)

    def test_kmq_names_are_stripped(self):
        given_by_user = {COUNT: "9", "kmq-deliver-at": "0", "kmq-": "", "kmqx": "kept", "x-kmq-op": "kept"}
        assert [name for name, _ in message.headers_from(given_by_user)] == ["kmqx", "x-kmq-op"]

    def test_text_without_a_form_in_utf8(self):
        with pytest.raises(MessageError, match="surrogates"):
            message.headers_from({"a": "\ud800"})

    @pytest.mark.parametrize(
        ("headers", "shown"),
        [
            ({"a": 1}, "headers: 'a': int 1 is neither bytes nor text"),
            ({"a": "ü", "b": 1.5}, "headers: 'b': float 1.5 is neither"),
            ({"a": ["secret"]}, "headers: 'a': list is neither"),
            ({5: "x"}, "headers: the name int 5 is not text"),
            ([("a", "1", "2")], "headers: list is neither a mapping nor pairs"),
            ("a=b", "headers: str is neither a mapping nor pairs"),
            (7, "headers: int 7 is neither a mapping nor pairs"),
        ],
    )
    def test_of_the_issue_headers_that_are_none_are_named(self, headers, shown):
        with pytest.raises(MessageError) as caught:
            message.headers_from(headers)
        assert str(caught.value).startswith(shown)

    @pytest.mark.parametrize(("key", "shown"), [(5, "int 5"), (True, "bool True"), ([], "list")])
    def test_of_the_issue_a_key_that_is_none_is_named(self, key, shown):
        with pytest.raises(MessageError, match=f"key: {shown} is neither bytes nor text"):
            message.as_bytes(key, "key")

    def test_the_last_of_a_name_counts(self):
        headers = (("a", b"1"), ("b", b"2"), ("a", b"3"))
        assert message.last_header(headers, "a") == b"3"
        assert message.last_header(headers, "b") == b"2"
        assert message.last_header(headers, "c") is None
        assert message.last_header((), "a") is None

    def test_without(self):
        headers = (("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", None))
        assert message.without(headers, "a", "x") == (("b", b"2"), ("c", None))
        assert message.without(headers) == headers

    @pytest.mark.parametrize(
        ("data", "number"),
        [
            (b"0", 0),
            (b"-7", -7),
            (b"1700000000000", 1_700_000_000_000),
            (b"9223372036854775807", 2**63 - 1),
            (b"-9223372036854775808", -(2**63)),
        ],
    )
    def test_int_header(self, data, number):
        assert int_header((("n", b"1"), ("n", data)), "n") == number

    @pytest.mark.parametrize("headers", [(), (("n", None),), (("m", b"1"),)])
    def test_int_header_absent(self, headers):
        assert int_header(headers, "n") is None

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"x",
            b"1.5",
            b"1_000",
            b" 1",
            b"1\n",
            b"+1",
            b"0x10",
            "٣".encode(),
            b"\xff",
            b"9223372036854775808",
            b"-9223372036854775809",
            b"9" * 10_000,
        ],
        ids=lambda data: repr(data[:20]),
    )
    def test_int_header_refuses(self, data):
        with pytest.raises(DecodeError) as caught:
            int_header((("n", data),), "n")
        assert caught.value.data == data


class TestRedeliveryCount:
    @pytest.mark.parametrize("count", [0, 1, 127, 128, 2**31 - 1])
    def test_reads_what_was_written(self, count):
        assert redelivery_count(((COUNT, encode_count(count)),), COUNT) == count

    def test_absent_or_null_is_zero(self):
        assert redelivery_count((), COUNT) == 0
        assert redelivery_count(((COUNT, None),), COUNT) == 0

    @pytest.mark.parametrize("count", [-1, -128, -129])
    def test_negative_is_zero(self, count):
        assert redelivery_count(((COUNT, encode_count(count)),), COUNT) == 0

    def test_another_header_name(self):
        assert redelivery_count((("tries", b"\x02"), (COUNT, b"\x05")), "tries") == 2

    def test_undecodable(self):
        with pytest.raises(DecodeError):
            redelivery_count(((COUNT, b"12"),), COUNT)


def test_message_header():
    delivery = Message(
        queue="q",
        id="1",
        body=b"",
        headers=(("a", b"1"), ("a", b"2")),
        attempts=1,
        enqueued_ms=0,
        first_enqueued_ms=0,
        lease_until_ms=0,
        receipt="1.x",
    )
    assert delivery.header("a") == b"2"
    assert delivery.header("b") is None
