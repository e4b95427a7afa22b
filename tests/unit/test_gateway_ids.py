"""Ids of messages and names of queues as clients of the gateway see them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.gateway.service.ids import InvalidChecksum, InvalidId, WireIds
from kmqpy.gateway.service.names import stored_name

NUMBERS = st.integers(0, 2**63 - 1)
MESSAGE_IDS = st.one_of(
    NUMBERS.map(str),
    st.tuples(st.integers(0, 2**31 - 1), NUMBERS).map(lambda place: f"{place[0]}-{place[1]}"),
    st.text(st.characters(codec="utf-8")),
)
JOBS = WireIds("jobs", "storage/1")


@given(MESSAGE_IDS)
def test_an_id_is_read_as_it_was_made_and_nowhere_else(message_id):
    made = JOBS.make(message_id)
    assert JOBS.parse(made) == message_id
    assert JOBS.parse(made.upper()) == message_id
    assert WireIds("jobs", "storage/2").parse(made) is None  # the queue was made again
    assert WireIds("jobs", None).parse(made) is None
    with pytest.raises(InvalidChecksum):
        WireIds("mails", "storage/1").parse(made)


@pytest.mark.parametrize("message_id", ["1", str(2**63 - 1), "0-0", "3-17", f"{2**14 - 1}-{2**48 - 1}"])
def test_usual_ids_have_forty_digits_as_emodb_s(message_id):
    assert re.fullmatch("[0-9a-f]{40}", JOBS.make(message_id))


@given(st.data())
def test_a_damaged_id_is_refused(data):
    made = JOBS.make(data.draw(MESSAGE_IDS))
    at = data.draw(st.integers(0, len(made) - 1))
    other = data.draw(st.sampled_from("0123456789abcdef").filter(lambda digit: digit != made[at]))
    with pytest.raises(InvalidId):
        JOBS.parse(made[:at] + other + made[at + 1 :])
    with pytest.raises(InvalidId):
        JOBS.parse(made[:at])


@pytest.mark.parametrize(
    "text", ["", "0", "zz", "é" * 40, " " * 40, "0 " * 20, None, 7, [], "00" * 12, "0" * 39]
)
def test_what_is_no_id_is_refused(text):
    with pytest.raises(InvalidId):
        JOBS.parse(text)


@given(st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.text("0123456789abcdef", max_size=80)))
def test_anything_is_either_read_or_refused(text):
    try:
        JOBS.parse(text)
    except InvalidId:
        return


EMODB_NAMES = st.from_regex(r"[a-z0-9\-.:@_]{1,255}", fullmatch=True)
SQS_NAMES = st.from_regex(r"[A-Za-z0-9_\-]{1,80}(\.fifo)?", fullmatch=True)


@given(EMODB_NAMES, EMODB_NAMES, SQS_NAMES, st.booleans())
def test_no_two_queues_have_one_name_in_the_storage(one, other, of_sqs, any_name):
    names = {
        stored_name(one, any_name=any_name),
        stored_name(one, prefix="DEDUP.", any_name=any_name),
        stored_name(other, any_name=any_name),
    }
    assert len(names) == len({one, other}) + 1
    if not re.fullmatch(r"[a-z0-9\-._]+", of_sqs):
        assert stored_name(of_sqs, any_name=any_name) not in names
    assert all(len(name) <= 200 for name in names)
    if not any_name:
        assert all(re.fullmatch("[A-Za-z0-9._-]+", name) for name in names)


def test_a_name_that_the_storage_can_have_is_kept():
    assert stored_name("mails:eu", any_name=True) == "mails:eu"
    assert stored_name("mails", any_name=False) == "mails"
    assert stored_name("mails:eu@1", any_name=False) == "mails.C.eu.A.1"
