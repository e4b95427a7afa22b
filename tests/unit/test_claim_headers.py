"""Claims: what they name, and which messages they leave alone."""

import pytest

from kmqpy.errors import ConfigError, DecodeError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM, DROPPED, MAX_CLAIMED_OFFSETS, named_offsets, naming_tick
from kmqpy.kafka.markers.codec import MAX_SPAN
from tracker.settings import TrackerSettings


@pytest.mark.parametrize(
    "offsets", [[7], [0, 1, 2], [5, 900, 901, 40_000], [1, MAX_SPAN + 1, 2**62], range(5_000)]
)
def test_what_is_written_is_read(offsets):
    _, _, headers = naming_tick(3, CLAIM, offsets)
    assert list(named_offsets(headers, CLAIM, 3)) == list(offsets)
    assert not named_offsets(headers, DROPPED, 3)


def test_readers_that_know_no_claims_see_a_tick():
    key, value, headers = naming_tick(3, CLAIM, [1, 2])
    assert codec.decode(key, value, headers, partition=3) == codec.tick(3)
    assert (key, value) == codec.encode(codec.tick(3))[:2]


def test_five_thousand_messages_in_a_row_are_few_bytes():
    _, _, headers = naming_tick(3, CLAIM, range(5_000))
    assert sum(len(data) for _, data in headers) < 50


@pytest.mark.parametrize("data", [None, b"", b"short", bytes(12), naming_tick(4, CLAIM, [1])[2][1][1]])
def test_what_cannot_be_read_is_refused(data):
    with pytest.raises(DecodeError):
        named_offsets([(CLAIM, data)], CLAIM, 3)


def test_few_bytes_cannot_name_more_than_a_reader_has_memory_for():
    data = [naming_tick(3, CLAIM, range(n * MAX_SPAN, (n + 1) * MAX_SPAN))[2][1] for n in range(17)]
    assert len(named_offsets(data[:16], CLAIM, 3)) == 16 * MAX_SPAN
    with pytest.raises(DecodeError, match="more than 1048576 offsets"):
        named_offsets(data, CLAIM, 3)


def test_a_tracker_puts_no_more_messages_into_a_transaction_than_a_claim_can_name():
    assert TrackerSettings(max_batch_messages=MAX_CLAIMED_OFFSETS).max_batch_messages == MAX_CLAIMED_OFFSETS
    with pytest.raises(ConfigError, match=f"max_batch_messages: {MAX_CLAIMED_OFFSETS + 1} must be at most"):
        TrackerSettings(max_batch_messages=MAX_CLAIMED_OFFSETS + 1)
