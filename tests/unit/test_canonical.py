"""Which bodies a queue that collapses takes for equal."""

import json
import sys
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.queue.canonical import (
    DIGEST_BYTES,
    MAX_DEPTH,
    MAX_EXPONENT_DIGITS,
    body_digest,
    canonical_json,
)

WHOLE = st.integers(-(10**30), 10**30)
SCALARS = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


def equal(*bodies):
    return len({body_digest(one if isinstance(one, bytes) else one.encode()) for one in bodies}) == 1


@pytest.mark.parametrize(
    "bodies",
    [
        ('{"a":1,"b":[true,null]}', ' { "b" : [ true ,\n null ], "a" : 1 } '),
        ('{"a":1,"a":2}', '{"a":2}'),
        ('{"a":{"b":1},"a":{"c":2}}', '{"a":{"c":2}}'),
        (r'"\u00e4\u0041\/\n"', '"\u00e4A/\\u000a"'),
        (r'"\ud83d\ude00"', '"\U0001f600"'),
        ("1.0", "1.00", "10e-1", "0.1E+1", "1e0", "1E-0", "100e-2"),
        ("0.0", "-0.0", "0e5", "0E-9", "0.0e99999999999999999999", f"0e{'9' * 9_999}"),
        ("-0", "0"),
        ("1e400", "10e399", "0.1e401", "1" + "0" * 400 + "e0"),
        (f"1e{'9' * 100}", f"10e{'9' * 99}8"),
        ("1.5e-10000", "15e-10001"),
        (f"1.{'3' * 5000}", f"0.1{'3' * 5000}e1"),
        ("1e" + "0" * 9_999 + "7", "1e7"),
        (b'"\xef\xbf\xbd"', r'"\ufffd"'),
    ],
)
def test_what_means_the_same_is_equal(bodies):
    assert equal(*bodies)


@pytest.mark.parametrize(
    "bodies",
    [
        ("1", "1.0"),
        ("1", '"1"'),
        ("1.0", '"1e0"', '"1.0"'),
        ("100", "1e2"),
        ("true", "1", '"true"'),
        ("null", '"null"', ""),
        ("[1,2]", "[2,1]", "[[1,2]]", "[12]"),
        ('{"a":1}', '{"A":1}', '["a",1]', '{"a":"1"}'),
        ("{}", "[]", '""', '{"":null}'),
        ("0.1", "0.10000000000000000555111512312578270211815834045410156250"),
        (f"1{'0' * 5000}", f"1{'0' * 5001}"),
        (f"1.{'0' * 5000}1", "1.0", f"1.{'0' * 5001}1"),
        ("1e400", "1e401", "2e400", "-1e400"),
        ("9007199254740993", "9007199254740992"),
        ("18446744073709551616", "18446744073709551617"),
        (r'"\ud800"', r'"\ud801"', r'"\ufffd"', '"?"'),
        ('"\u00e4"', '"a\u0308"'),
        ("NaN", "Infinity", "-Infinity", "null"),
        ('{"a":1', '{"a":1 ', '{"a" :1'),
        (b"\xff", b"\xfe", b"", b" "),
        ('"a"', '"a"'.encode("utf-16"), b"\xef\xbb\xbf" + b'"a"'),
        (f"1e{'9' * 501}", f"1e{'9' * 502}", f"10e{'9' * 500}8"),
    ],
)
def test_what_means_something_else_is_not(bodies):
    assert len({body_digest(one if isinstance(one, bytes) else one.encode()) for one in bodies}) == len(
        bodies
    )


def test_the_canonical_form_of_one_body_may_be_another_body_without_being_equal_to_it():
    """10.0 becomes 1e1; [1e1] is JSON as well, so they are equal. Bytes are of another kind."""
    assert canonical_json(b"[10.0]") == "[1e1]"
    assert equal("[10.0]", "[1e1]")
    no_json = b'{"a":1'
    assert canonical_json(no_json) is None
    assert not equal(no_json, json.dumps(no_json.decode()))


def test_what_is_nested_too_deep_is_compared_byte_by_byte():
    for opened, closed in (("[", "]"), ('{"a":', "}")):
        inner = "[]" if opened == "[" else "{}"

        def nested(depth, space="", opened=opened, closed=closed, inner=inner):
            return opened * (depth - 1) + space + inner + closed * (depth - 1)

        assert equal(nested(MAX_DEPTH), nested(MAX_DEPTH, " "))
        assert not equal(nested(MAX_DEPTH + 1), nested(MAX_DEPTH + 1, " "))
        assert equal(nested(100_000), nested(100_000))
        assert not equal(nested(100_000), nested(100_000, " "))


def test_the_limits_of_the_interpreter_change_nothing():
    body = f"[{'7' * 10_000}, 1.5e{'7' * MAX_EXPONENT_DIGITS}]".encode()
    before, digits = body_digest(body), sys.get_int_max_str_digits()
    try:
        for limit in (0, 640):
            sys.set_int_max_str_digits(limit)
            assert body_digest(body) == before
    finally:
        sys.set_int_max_str_digits(digits)
    assert canonical_json(body) is not None


@given(VALUES, st.randoms())
def test_other_spellings_of_a_value_are_equal(value, chance):
    def shuffled(one):
        if isinstance(one, dict):
            pairs = [*one.items()]
            chance.shuffle(pairs)
            return {key: shuffled(inner) for key, inner in pairs}
        return [*map(shuffled, one)] if isinstance(one, list) else one

    assert equal(
        json.dumps(value),
        json.dumps(shuffled(value), ensure_ascii=False),
        json.dumps(shuffled(value), indent=1),
    )


@given(VALUES, VALUES)
def test_different_values_differ(one, other):
    """Python takes 1 and 1.0 and True for equal; the text that it writes for them differs."""
    texts = [json.dumps(value, sort_keys=True) for value in (one, other)]
    same = [text.replace("-0.0", "0.0") for text in texts]
    assert equal(*texts) == (same[0] == same[1])


NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,5})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)


@given(NUMBERS, NUMBERS)
def test_numbers_are_equal_by_their_exact_value(one, other):
    def meant(text):
        is_whole = text.lstrip("-").isdigit()
        return is_whole, Fraction(Decimal(text))

    assert equal(one, other) == (meant(one) == meant(other))


@given(st.binary(max_size=40))
def test_any_bytes_have_a_digest(body):
    assert len(body_digest(body)) == DIGEST_BYTES
    assert equal(body, body)
