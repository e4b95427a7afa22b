"""The bytes and names of Curator's queues; tests/interop/test_curator.py checks them with Curator."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.errors import ConfigError, DecodeError
from kmqpy.zookeeper.curator import item_names
from kmqpy.zookeeper.curator.item_format import decode_items, encode_items


@pytest.mark.parametrize(
    ("items", "data"),
    [
        ([], "00010001 02"),
        ([b""], "00010001 01 00000000 02"),
        ([b"ab"], "00010001 01 00000002 6162 02"),
        ([b"a", b"bc"], "00010001 01 00000001 61 01 00000002 6263 02"),
    ],
)
def test_the_bytes_are_curators(items, data):
    assert encode_items(items) == bytes.fromhex(data)
    assert decode_items(bytes.fromhex(data)) == items


@given(st.lists(st.binary(max_size=50), max_size=5), st.binary(max_size=9))
def test_items_come_back_and_what_follows_the_end_is_ignored(items, rest):
    assert decode_items(encode_items(items) + rest) == items


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("", "only 0 bytes"),
        ("000100", "only 3 bytes"),
        ("00010002 02", "version 0x00010002"),
        ("00010001", "cut off"),
        ("00010001 03", "operation 3"),
        ("00010001 01 0000", "cut off"),
        ("00010001 01 ffffffff 02", "length -1"),
        ("00010001 01 00000005 61 02", "length 5"),
    ],
)
def test_what_is_no_item_is_refused(data, problem):
    with pytest.raises(DecodeError, match=problem) as caught:
        decode_items(bytes.fromhex(data))
    assert caught.value.data == bytes.fromhex(data)


@given(st.binary(max_size=30))
def test_no_bytes_raise_anything_else(data):
    with contextlib.suppress(DecodeError):
        decode_items(bytes.fromhex("00010001") + data)


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        (item_names.priority_prefix(5), "queue-100000005"),
        (item_names.priority_prefix(-1), "queue-0FFFFFFFF"),
        (item_names.id_prefix("a/b|c"), "queue-|a_b_c|"),
        (item_names.delay_prefix(255), "queue-|000000FF|"),
    ],
)
def test_names(prefix, name):
    assert prefix == name


def test_lower_priorities_sort_first():
    prefixes = [item_names.priority_prefix(n) for n in (-(2**31), -2, -1, 0, 1, 2**31 - 1)]
    assert sorted(prefixes) == prefixes


def test_ids_do_not_disturb_the_order_of_puts():
    names = [item_names.id_prefix(one) + f"{n:010d}" for n, one in enumerate("zay")]
    assert item_names.BY_ID.order(reversed(names)) == names
    assert item_names.id_of(names[0]) == "z"
    assert item_names.id_of("queue-0000000001") is None


def test_delayed_items_sort_by_their_time():
    late = item_names.delay_prefix(2**40) + "0000000001"
    soon = item_names.delay_prefix(2**36) + "0000000002"
    assert item_names.DELAYED.order([late, soon]) == [soon, late]
    assert item_names.due_ms_of(late) == 2**40
    assert item_names.due_ms_of("queue-|zz|0000000003") == 0
    assert item_names.due_ms_of(f"queue-|{2**63:X}|0000000003") == 0


@pytest.mark.parametrize(
    "name", ["queue-0000000001", "queue-1000000050000000001", "queue-|id|0000000001", "queue-|0FF|0000000001"]
)
def test_a_requeued_item_keeps_what_its_name_says(name):
    assert item_names.PLAIN.requeue_prefix(name) + "0000000001" == name


def test_wrong_ids_priorities_and_times():
    with pytest.raises(ConfigError, match="item_id"):
        item_names.id_prefix("")
    with pytest.raises(ConfigError, match=str(2**31)):
        item_names.priority_prefix(2**31)
    with pytest.raises(ConfigError, match="-1"):
        item_names.delay_prefix(-1)
