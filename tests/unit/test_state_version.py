"""Versions of state tables, as their files have them."""

import json

import pytest

from kmqpy.errors import DecodeError
from kmqpy.spark.state_version import StateVersion, blocks_between

VERSION = StateVersion(
    number=7,
    queue="q",
    topic_ids={"queue": "a", "markers": "b"},
    read={"queue": {0: 5, 1: 2**62}, "markers": {}, "dead_letters": {0: 1}},
    now_ms={0: -1},
    low={0: 3},
    committed={},
    blocks={(0, 0): "1-a", (1, 2**40): "7-b"},
)


def test_a_version_is_read_as_it_was_written():
    assert StateVersion.from_json(VERSION.to_json()) == VERSION


@pytest.mark.parametrize(
    "changed",
    [{"number": "x"}, {"topic_ids": []}, {"read": {"queue": 5}}, {"blocks": [[1, 2]]}, {"low": None}],
)
def test_what_is_no_version(changed):
    with pytest.raises(DecodeError, match="not a version of a state table"):
        StateVersion.from_json(json.dumps({**json.loads(VERSION.to_json()), **changed}).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff"])
def test_bytes_that_are_no_version(data):
    with pytest.raises(DecodeError, match="not a version of a state table"):
        StateVersion.from_json(data)


def test_a_version_of_another_kmqpy():
    with pytest.raises(DecodeError, match="format 3, of another kmqpy"):
        StateVersion.from_json(VERSION.to_json().replace(b'"format":2', b'"format":3'))


def test_blocks_between_offsets():
    assert list(blocks_between(3, 0, 0)) == []
    assert list(blocks_between(3, 65_535, 65_536)) == [(3, 0)]
    assert list(blocks_between(3, 65_535, 65_537)) == [(3, 0), (3, 1)]
    assert list(blocks_between(3, 131_072, 131_073)) == [(3, 2)]
