"""The id of a message stays the same for its whole life, on a real Kafka; receipts can be made of it."""

import pytest
from support import collect, nothing_comes, until

from kmqpy.errors import NotSupported, ReceiptError
from kmqpy.kafka.markers.life import LifeState
from kmqpy.kafka.message_headers import ORIGINAL_OFFSET, ORIGINAL_PARTITION

SOON_S, LONG_S = 0.4, 60.0


@pytest.fixture
def queue(make_queue):
    return make_queue(2, lease_ms=400, max_redeliveries=1, late_acks=True, markers="range")


def test_an_id_lasts_through_redelivery_dead_letter_and_redrive(queue):
    queue.tracker()
    client = queue.client()
    sent = [client.send(body, partition=number % 2) for number, body in enumerate("abcd")]
    ids = {message.body.decode(): message.id for message in collect(client, 4, lease=SOON_S)}
    assert [ids[body] for body in "abcd"] == sent
    again = collect(client, 4, lease=SOON_S)
    assert {message.body.decode(): message.id for message in again} == ids
    assert all(message.id != f"{message.partition}-{message.offset}" for message in again)
    until(lambda: len(client.dead_letters.list()) == 4)
    assert sorted(letter.id for letter in client.dead_letters.list()) == sorted(sent)
    assert client.trace(sent[0]).state is LifeState.DEAD_LETTER
    assert client.dead_letters.redrive([sent[1], "0-999"]) == 1
    (redriven,) = collect(client, 1, lease=LONG_S)
    assert (redriven.id, redriven.body, redriven.attempts) == (sent[1], b"b", 1)
    client.ack(redriven, confirmed=True)
    assert client.trace(sent[1]).state is LifeState.ACKNOWLEDGED
    assert client.dead_letters.redrive(sent) == 3
    assert sorted(message.id for message in collect(client, 3, lease=LONG_S)) == sorted({*sent} - {sent[1]})


def test_a_receipt_of_an_id_counts_for_the_copy_that_waits(queue):
    queue.tracker()
    client, other = queue.client(), queue.producer()
    acked, rejected, kept = (client.send(body, partition=0) for body in "abc")
    collect(client, 3, lease=SOON_S)
    until(lambda: sum(queue.copies().values()) == 6)
    other.ack(other.receipt(acked), confirmed=True)
    other.dead_letter(other.receipt(rejected), confirmed=True)
    assert [message.id for message in collect(client, 1, lease=LONG_S)] == [kept]
    nothing_comes(client, 1.0)
    until(lambda: [letter.id for letter in client.dead_letters.list()] == [rejected])


def test_an_ack_by_id_of_a_copy_that_another_client_has_ends_the_message(queue):
    queue.tracker()
    client, other = queue.client(), queue.producer()
    sent = client.send("a", partition=0)
    collect(client, 1, lease=SOON_S)
    (copy,) = collect(client, 1, lease=3.0)
    assert copy.attempts == 2
    other.ack(other.receipt(sent), confirmed=True)
    nothing_comes(client, 4.0)  # it would be a dead letter
    assert client.dead_letters.list() == []


def test_what_is_no_id_is_refused(queue):
    client = queue.producer()
    for wrong in ("", "0", "0-", "a-b", "topic:0:1", None, 5, b"0-1"):
        with pytest.raises(ReceiptError, match="id: "):
            client.receipt(wrong)
    for large in ("2147483648-0", "0-9223372036854775808"):
        with pytest.raises(ReceiptError, match="id: "):
            client.receipt(large)
        with pytest.raises(ReceiptError, match="there is no"):
            client.trace(large)
    assert client.capabilities.receipts_by_id
    with pytest.raises(ReceiptError, match="no partition 7"):
        client.ack(client.receipt("7-0"))


def test_a_queue_without_late_acks_makes_no_receipts_of_ids(make_queue):
    plain = make_queue().producer()
    assert not plain.capabilities.receipts_by_id
    with pytest.raises(NotSupported, match=r"kmq queue alter .* --late-acks"):
        plain.receipt("0-0")


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("partition", "offset"), [(b"0", b"1"), (b"0", b"99"), (b"-1", b"0"), (b"x", b"0"), (b"1", b"-5")]
)
def test_headers_that_can_not_be_true_give_no_id(queue, partition, offset):
    """Whoever forwards records of another topic may forward its headers."""
    queue.send("first")
    queue.append(None, b"m", [(ORIGINAL_PARTITION, partition), (ORIGINAL_OFFSET, offset)], topic=queue.name)
    found = {message.body: message.id for message in collect(queue.client(), 2)}
    assert found == {b"first": "0-0", b"m": "0-1"}
