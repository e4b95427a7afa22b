"""Tests when messages are redelivered (end of a lease, nack, dead letter), and which receipts are valid."""

from __future__ import annotations

import pytest

from kmqpy.errors import ConfigError, ReceiptError
from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue, Storage
from kmqpy.testing.contract.target import (
    LEASE_S,
    PAST_LEASE_S,
    PATIENCE_S,
    MakeQueue,
    Target,
    assert_becomes,
    assert_dead,
    assert_sizes,
    at_once,
    drain,
    new_name,
    own_headers,
    skip_without,
    take,
    take_one,
)


def test_a_message_is_redelivered_when_its_lease_is_over(kmq_target: Target, queue: Queue) -> None:
    sent = queue.send("x", key="k", headers={"h": "1"})
    first = take_one(queue)
    assert queue.receive(wait=0) == []
    kmq_target.pass_time(PAST_LEASE_S)
    assert_sizes(queue, waiting=1, in_flight=0)
    again = take_one(queue)
    assert (again.body, again.key, own_headers(again)) == (b"x", b"k", (("h", b"1"),))
    assert again.id == sent
    assert again.attempts == 2
    assert again.receipt != first.receipt
    assert again.first_enqueued_ms == first.first_enqueued_ms
    assert again.enqueued_ms > first.enqueued_ms


def test_an_acknowledged_message_is_not_redelivered(kmq_target: Target, queue: Queue) -> None:
    queue.send_many(["a", "b", "c"])
    first, second, third = take(queue, 3)
    queue.ack(first, confirmed=True)
    second.ack(confirmed=True)
    queue.ack([third.receipt, third], confirmed=True)
    queue.ack(first, confirmed=True)  # a second ack of the same message does no harm
    queue.ack([], confirmed=True)  # nor does an ack of no message
    kmq_target.pass_time(PAST_LEASE_S)
    assert queue.receive(wait=0) == []
    assert_sizes(queue, waiting=0, in_flight=0)


def test_each_receive_has_a_lease_of_its_own(kmq_target: Target, queue: Queue) -> None:
    queue.send_many(["a", "b"])
    long = take_one(queue, lease=60)
    short = take_one(queue)
    assert queue.default_lease == LEASE_S
    kmq_target.pass_time(PAST_LEASE_S)
    again = take_one(queue, lease=60)
    assert (again.body, again.attempts) == (short.body, 2)
    assert_sizes(queue, waiting=0, in_flight=2)
    queue.ack(long, confirmed=True)


def test_an_extended_lease_ends_later(kmq_target: Target, queue: Queue) -> None:
    queue.send("x")
    message = take_one(queue)
    queue.extend(message, lease=60, confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)
    assert (queue.receive(wait=0), queue.size(), queue.in_flight()) == ([], 0, 1)
    queue.extend(message, lease=LEASE_S, confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)
    assert take_one(queue).attempts == 2
    for wrong in (0.05, 10**9, -1):
        with pytest.raises(ConfigError):
            queue.extend(message, lease=wrong)


def test_a_lease_can_be_shortened(kmq_target: Target, queue: Queue) -> None:
    queue.send("x")
    message = take_one(queue, lease=3600)
    queue.extend(message, lease=LEASE_S, confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)
    assert take_one(queue).attempts == 2


def test_what_is_finished_cannot_be_extended(kmq_target: Target, queue: Queue) -> None:
    queue.send_many(["acked", "given back"])
    messages = take(queue, 2)
    queue.ack(messages[0], confirmed=True)
    queue.nack(messages[1], confirmed=True)
    queue.extend(messages, lease=60, confirmed=True)
    assert_sizes(queue, waiting=1, in_flight=0)


def test_an_extension_says_which_messages_are_no_longer_the_callers(kmq_target: Target, queue: Queue) -> None:
    skip_without(queue.capabilities, "tells_lost")
    queue.send_many([*"abcde"])
    messages = take(queue, 5)
    kept = [messages[0].receipt, messages[2].receipt, messages[4].receipt]
    assert queue.extend(messages[:3], lease=60, confirmed=True) == []
    queue.extend(kept, lease=60, confirmed=True)
    queue.ack(messages[1], confirmed=True)
    queue.nack(messages[3], confirmed=True)
    lost = [messages[1].receipt, messages[3].receipt]
    assert sorted(queue.extend(messages, lease=60, confirmed=True)) == sorted(lost)
    assert queue.extend(messages[1], lease=60, confirmed=True) == lost[:1]
    assert queue.extend(kept, lease=60, confirmed=True) == []
    assert queue.extend(lease=60, confirmed=True) == []
    assert queue.extend(kept, lease=LEASE_S, confirmed=True) == []
    kmq_target.pass_time(PAST_LEASE_S)
    again = {one.body for one in take(queue, 4)}
    assert sorted(queue.extend(kept, lease=60, confirmed=True)) == sorted(kept)
    assert again == {b"a", b"c", b"d", b"e"}


def test_a_counted_nack_is_an_attempt_and_enqueues_anew(kmq_target: Target, queue: Queue) -> None:
    queue.send("x")
    first = take_one(queue)
    kmq_target.pass_time(0.01)
    queue.nack(first, reason="why", confirmed=True)
    again = take_one(queue)
    assert again.attempts == 2
    assert again.id == first.id
    assert again.enqueued_ms > first.enqueued_ms
    assert again.first_enqueued_ms == first.first_enqueued_ms


def test_a_silent_nack_changes_neither_number_nor_time(kmq_target: Target, queue: Queue) -> None:
    queue.send("x")
    message = first = take_one(queue)
    for _ in range(10):
        kmq_target.pass_time(0.01)
        queue.nack(message, count=False, confirmed=True)
        message = take_one(queue)
        assert (message.attempts, message.first_enqueued_ms) == (1, first.enqueued_ms)
        assert message.id == first.id
        if queue.capabilities.immediate:
            assert message.enqueued_ms == first.enqueued_ms


def test_a_nack_with_a_delay_is_redelivered_after_it(kmq_target: Target, queue: Queue) -> None:
    skip_without(queue.capabilities, "delay")
    queue.send("x")
    queue.nack(take_one(queue), delay=LEASE_S, confirmed=True)
    assert queue.receive(wait=0) == []
    assert_sizes(queue, waiting=1, in_flight=0)
    kmq_target.pass_time(PAST_LEASE_S)
    assert take_one(queue, lease=60).attempts == 2
    with pytest.raises(ConfigError, match=r"^delay: "):
        queue.nack(queue.orphans()[0].receipt, delay=10**9)


def test_a_requeued_message_goes_to_the_back(kmq_target: Target, queue: Queue) -> None:
    skip_without(queue.capabilities, "fifo")
    queue.send_many(["a", "b", "c", "d"])
    first, _ = take(queue, 2)
    queue.nack(first, confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)
    assert drain(queue, 4) == [b"c", b"d", b"a", b"b"]


def test_a_requeued_message_goes_to_its_place_at_the_front(
    kmq_target: Target, make_queue: MakeQueue, kmq_storage: Storage
) -> None:
    skip_without(kmq_storage.capabilities, "fifo", "requeue_to_front")
    queue = make_queue(requeue_to="front")
    queue.send_many(["a", "b", "c", "d"])
    first, second = take(queue, 2)
    queue.nack(second, confirmed=True)
    queue.nack(first, count=False, confirmed=True)
    take(queue, 1)
    kmq_target.pass_time(PAST_LEASE_S)
    assert drain(queue, 4) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("how", ["lease", "nack"])
def test_what_fails_too_often_is_a_dead_letter(kmq_target: Target, make_queue: MakeQueue, how: str) -> None:
    queue = make_queue(max_redeliveries=2)
    queue.send("bad")
    for attempt in (1, 2, 3):
        message = take_one(queue)
        assert message.attempts == attempt
        if how == "nack":
            queue.nack(message, reason="no\x00good", confirmed=True)
        else:
            kmq_target.pass_time(PAST_LEASE_S)
    (letter,) = assert_dead(queue, 1)
    assert queue.receive(wait=0) == []
    assert_sizes(queue, waiting=0, in_flight=0)
    assert (letter.attempts, letter.size) == (3, 3)
    assert letter.reason == ("expired" if how == "lease" else "nack: no\N{REPLACEMENT CHARACTER}good")


@pytest.mark.parametrize("most", [0, None])
def test_the_limit_of_redeliveries_can_be_none_or_nothing(make_queue: MakeQueue, most: int | None) -> None:
    queue = make_queue(max_redeliveries=most)
    queue.send("x")
    for _ in range(1 if most == 0 else 10):
        queue.nack(take_one(queue), confirmed=True)
    assert_dead(queue, 1 if most == 0 else 0)
    assert_sizes(queue, waiting=0 if most == 0 else 1, in_flight=0)
    if most == 0:
        assert queue.receive(wait=0) == []


def test_manual_redelivery_leaves_it_to_the_application(
    kmq_target: Target, make_queue: MakeQueue, kmq_storage: Storage
) -> None:
    skip_without(kmq_storage.capabilities, "manual_redelivery")
    queue = make_queue(redelivery="manual")
    queue.send_many(["a", "b"])
    take(queue, 2)
    kmq_target.pass_time(PAST_LEASE_S * 5)
    assert (queue.receive(wait=0), queue.in_flight()) == ([], 2)
    first, second = queue.orphans(older_than=LEASE_S)
    queue.ack(first.receipt, confirmed=True)
    queue.nack(second.receipt, confirmed=True)
    assert [one.attempts for one in take(queue, 1)] == [2]


def test_a_late_acknowledgement_counts_until_the_message_is_taken_anew(
    kmq_target: Target, queue: Queue
) -> None:
    skip_without(queue.capabilities, "late_ack")
    queue.send("x")
    message = take_one(queue)
    kmq_target.pass_time(PAST_LEASE_S)
    assert queue.size() == 1
    queue.ack(message, confirmed=True)
    assert (queue.size(), queue.in_flight(), queue.receive(wait=0)) == (0, 0, [])


def test_a_receipt_never_touches_the_take_of_another(kmq_target: Target, queue: Queue) -> None:
    queue.send("x")
    late = take_one(queue)
    kmq_target.pass_time(PAST_LEASE_S)
    current = take_one(queue, lease=60)
    queue.ack(late, confirmed=True)
    queue.nack(late, confirmed=True)
    queue.extend(late, lease=LEASE_S, confirmed=True)
    queue.dead_letter(late, confirmed=True)
    kmq_target.pass_time(PAST_LEASE_S)
    assert_sizes(queue, waiting=0, in_flight=1)
    assert len(queue.dead_letters.list()) == 0
    queue.nack(current, confirmed=True)
    assert take_one(queue, lease=60).attempts == 3
    queue.ack(current, confirmed=True)
    assert_sizes(queue, waiting=0, in_flight=1)


def test_a_nack_counts_once_however_often_it_is_given(make_queue: MakeQueue) -> None:
    queue = make_queue(max_redeliveries=None)
    queue.send("x")
    for attempt in range(1, 20):
        message = take_one(queue, lease=60)
        assert message.attempts == attempt
        at_once(4, lambda _, message=message: queue.nack(message, confirmed=True))  # type: ignore[misc]
    assert_sizes(queue, waiting=1, in_flight=0)


def test_of_many_who_finish_one_message_one_wins(queue: Queue) -> None:
    queue.send_many([b"%d" % number for number in range(40)])
    for message in take(queue, 40, lease=60):
        how = [queue.ack, queue.nack, queue.dead_letter, queue.ack]
        at_once(4, lambda number, how=how, message=message: how[number](message))  # type: ignore[misc]
    queue.flush()
    assert_becomes(queue, queue.in_flight, 0)

    def doubled() -> int:
        """The number of messages that are in the queue or the dead letters more than once."""
        dead, ready = queue.dead_letters.peek(), queue.peek(100)
        return len(dead) + queue.size() - len({one.body for one in dead} | {one.body for one in ready})

    assert_becomes(queue, doubled, 0)


def test_a_receipt_is_good_in_another_handle(kmq_target: Target, queue: Queue) -> None:
    queue.send_many(["a", "b"])
    first, second = (one.receipt for one in take(queue, 2, lease=60))
    with kmq_target.open() as elsewhere, elsewhere.open(queue.name) as other:
        other.ack(first, confirmed=True)
        other.nack(second, confirmed=True)
    assert_sizes(queue, waiting=1, in_flight=0)


def test_what_is_no_receipt_of_the_queue_is_refused_and_finishes_nothing(
    make_queue: MakeQueue, kmq_storage: Storage
) -> None:
    queue, other = make_queue(), make_queue()
    queue.send("mine")
    other.send("theirs")
    mine, theirs = take_one(queue, lease=60), take_one(other, lease=60)
    seen_only = other.peek()
    made_anew = new_name()
    for made in range(2):
        if made_anew in kmq_storage.list():
            kmq_storage.delete(made_anew)
        kmq_storage.create(made_anew)
        anew = kmq_storage.open(made_anew)
        anew.send("x")
        if made == 0:
            old = take_one(anew, lease=60)
    take_one(anew, lease=60)
    kafkas = "1.WyJxIiwiaWQiLDAsMF0"
    bad = [
        "",
        "x",
        kafkas,
        mine.receipt[:-4],
        mine.receipt + "x",
        mine.receipt + ".1",
        f"{mine.receipt}9" * 99,
    ]
    for wrong in (*bad, "2.é.1.1", None, 5, [5], theirs, old, *seen_only):
        for refuse in (queue, anew):
            with pytest.raises(ReceiptError):
                refuse.ack(wrong)  # type: ignore[arg-type]
            with pytest.raises(ReceiptError):
                refuse.nack(mine if refuse is queue else old, wrong)  # type: ignore[arg-type]
    for one in (queue, other, anew):
        assert_sizes(one, waiting=0, in_flight=1)


def test_a_seen_message_is_not_taken(queue: Queue) -> None:
    queue.send("x")
    for _ in range(2):
        assert_becomes(queue, lambda: [(one.body, one.attempts) for one in queue.peek()], [(b"x", 1)])
        (seen,) = queue.peek()
        with pytest.raises(ReceiptError):
            queue.ack(seen)
        queue.nack(take_one(queue), count=False, confirmed=True)
    assert_sizes(queue, waiting=1, in_flight=0)


def test_a_receipt_of_an_id_is_good_for_whoever_has_the_message(
    kmq_target: Target, make_queue: MakeQueue
) -> None:
    queue = make_queue(max_redeliveries=None)
    skip_without(queue.capabilities, "receipts_by_id")
    names = ("acked", "extended", "given back", "rejected", "kept")
    named = dict(zip(names, queue.send_many(names), strict=True))
    take(queue, 5)
    kmq_target.pass_time(PAST_LEASE_S)
    again = take(queue, 5, lease=60)
    assert sorted(one.id for one in again) == sorted(named.values())
    with kmq_target.open() as elsewhere, elsewhere.open(queue.name) as other:
        receipts = {name: other.receipt(message_id) for name, message_id in named.items()}
    queue.ack(receipts["acked"], confirmed=True)
    queue.extend(receipts["extended"], lease=120, confirmed=True)
    queue.nack(receipts["given back"], confirmed=True)
    queue.dead_letter(receipts["rejected"], confirmed=True)
    assert take_one(queue, lease=120).body == b"given back"
    if kmq_target.real_time:
        return  # the leases still run for a minute
    kmq_target.pass_time(65)
    assert [one.body for one in take(queue, 1)] == [b"kept"]
    assert_dead(queue, 1)


def by_id(make_queue: MakeQueue, **settings: object) -> Queue:
    """A queue whose receipts of ids count at once, in any state of the message."""
    queue = make_queue(max_redeliveries=None, **settings)
    skip_without(queue.capabilities, "receipts_by_id", "immediate", "delay")
    return queue


def in_each_state(kmq_target: Target, queue: Queue) -> list[str]:
    """Ids of messages: ready, given back, delayed, taken, expired; the last ready one is not among them."""
    _, given_back, expired, taken, delayed, _ = queue.send_many(
        ["ready", "given back", "expired", "taken", OutgoingMessage("delayed", delay=3600), "last"]
    )
    messages = {message.body: message for message in [*take(queue, 3), take_one(queue, lease=3600)]}
    queue.nack(messages[b"ready"], count=False, confirmed=True)
    assert messages[b"taken"].id == taken
    kmq_target.pass_time(PAST_LEASE_S)
    fresh = queue.send("never taken")
    return [fresh, messages[b"ready"].id, delayed, taken, expired, given_back]


def test_what_is_finished_by_its_id_is_finished_in_any_state(
    kmq_target: Target, make_queue: MakeQueue
) -> None:
    queue = by_id(make_queue)
    ids = in_each_state(kmq_target, queue)
    assert (queue.size(), queue.in_flight()) == (6, 1)
    queue.ack([queue.receipt(one) for one in ids], confirmed=True)
    assert drain(queue, 1) == [b"last"]
    assert_sizes(queue, waiting=0, in_flight=0)
    queue.ack([queue.receipt(one) for one in ids], confirmed=True)


def test_what_is_rejected_by_its_id_is_a_dead_letter_in_any_state(
    kmq_target: Target, make_queue: MakeQueue
) -> None:
    queue = by_id(make_queue)
    ids = in_each_state(kmq_target, queue)
    queue.dead_letter([queue.receipt(one) for one in ids], reason="seen", confirmed=True)
    assert drain(queue, 1) == [b"last"]
    assert sorted(one.id for one in assert_dead(queue, 6)) == sorted(ids)
    receipts = [queue.receipt(one) for one in ids]
    queue.ack(receipts, confirmed=True)  # what is dead stays so
    queue.nack(receipts, confirmed=True)
    queue.dead_letter(receipts, reason="again", confirmed=True)
    assert sorted(queue.extend(receipts, lease=60, confirmed=True)) == sorted(receipts)
    assert {one.reason for one in assert_dead(queue, 6)} == {"rejected: seen"}
    assert queue.dead_letters.redrive(ids[:2]) == 2
    queue.ack(receipts[0], confirmed=True)
    assert [one.id for one in take(queue, 1)] == [ids[1]]


def test_what_is_given_back_by_its_id_has_to_be_taken(kmq_target: Target, make_queue: MakeQueue) -> None:
    queue = by_id(make_queue)
    ids = in_each_state(kmq_target, queue)
    queue.nack([queue.receipt(one) for one in ids], delay=3600, confirmed=True)
    assert_sizes(queue, waiting=7, in_flight=0)
    assert sorted(drain(queue, 5)) == sorted([b"ready", b"given back", b"expired", b"last", b"never taken"])
    assert_sizes(queue, waiting=2, in_flight=0)


def test_what_is_extended_by_its_id_is_taken_anew_if_nobody_has_it(
    kmq_target: Target, make_queue: MakeQueue
) -> None:
    queue = by_id(make_queue)
    ids = in_each_state(kmq_target, queue)
    receipts = [queue.receipt(one) for one in ids]
    assert queue.extend(receipts, lease=60, confirmed=True) == []
    assert drain(queue, 1) == [b"last"]
    assert_sizes(queue, waiting=0, in_flight=6)
    attempts = {one.message.id: one.message.attempts for one in queue.orphans() if one.message is not None}
    fresh, _, delayed, taken, expired, _ = ids
    assert [attempts[one] for one in (fresh, delayed, taken, expired)] == [1, 1, 1, 2]
    queue.nack(receipts, confirmed=True)
    assert_sizes(queue, waiting=6, in_flight=0)
    assert {one.id: one.attempts for one in take(queue, 6)} == {one: attempts[one] + 1 for one in ids}


def test_a_message_that_was_claimed_by_its_id_is_no_longer_its_former_takers(
    kmq_target: Target, make_queue: MakeQueue
) -> None:
    queue = by_id(make_queue)
    queue.send("x")
    former = take_one(queue)
    kmq_target.pass_time(PAST_LEASE_S)
    assert queue.extend(queue.receipt(former.id), lease=LEASE_S, confirmed=True) == []
    queue.ack(former, confirmed=True)
    queue.dead_letter(former, confirmed=True)
    assert_sizes(queue, waiting=0, in_flight=1)
    kmq_target.pass_time(PAST_LEASE_S)
    again = take_one(queue)
    assert (again.id, again.attempts) == (former.id, 3)


def test_of_leases_extended_by_an_id_the_later_end_counts(kmq_target: Target, make_queue: MakeQueue) -> None:
    queue = by_id(make_queue)
    queue.send_many(["long", "short"])
    long = take_one(queue, lease=3600)
    short = take_one(queue)
    receipts = [queue.receipt(one.id) for one in (long, short)]
    assert queue.extend(receipts, lease=2 * LEASE_S, confirmed=True) == []
    kmq_target.pass_time(PAST_LEASE_S)
    assert_sizes(queue, waiting=0, in_flight=2)
    kmq_target.pass_time(PAST_LEASE_S)
    assert_sizes(queue, waiting=1, in_flight=1)
    queue.ack(long, confirmed=True)  # it is still this taker's
    assert [one.body for one in take(queue, 1)] == [b"short"]
    assert queue.extend(receipts[1], lease=3600, confirmed=True) == []
    assert [one.lease_until_ms - one.since_ms > 3_000_000 for one in queue.orphans()] == [True]


def test_a_claim_by_an_id_wakes_who_waits_when_it_ends(kmq_target: Target, make_queue: MakeQueue) -> None:
    queue = by_id(make_queue)
    if not kmq_target.real_time:
        pytest.skip("the clock of the storage stands still")
    sent = queue.send("x")
    queue.extend(queue.receipt(sent), lease=LEASE_S, confirmed=True)
    assert queue.receive(wait=0) == []
    assert [one.id for one in queue.receive(wait=PATIENCE_S)] == [sent]


def test_an_id_that_names_no_message_does_nothing(make_queue: MakeQueue) -> None:
    queue = by_id(make_queue)
    other = make_queue()
    finished, purged, kept = queue.send_many(["finished", "purged", "kept"])
    queue.ack(take(queue, 1), confirmed=True)
    queue.ack(queue.receipt(purged), confirmed=True)
    theirs = other.send("theirs")
    unknown = str(2**62)
    receipts = [queue.receipt(one) for one in (finished, purged, theirs, unknown)]
    for call in (queue.ack, queue.nack, queue.dead_letter):
        call(receipts, confirmed=True)
    assert sorted(queue.extend(receipts, lease=60, confirmed=True)) == sorted(receipts)
    assert_sizes(queue, waiting=1, in_flight=0)
    assert_sizes(other, waiting=1, in_flight=0)
    queue.purge()
    assert queue.extend(queue.receipt(kept), lease=60, confirmed=True) == [queue.receipt(kept)]
    assert_sizes(queue, waiting=0, in_flight=0)
    assert_dead(queue, 0)
    for refuse in (other.ack, other.nack, other.dead_letter):
        with pytest.raises(ReceiptError):
            refuse(receipts[0])


def test_what_can_be_no_id_makes_no_receipt(make_queue: MakeQueue) -> None:
    queue = make_queue()
    skip_without(queue.capabilities, "receipts_by_id")
    for wrong in ("", "x", "-1", "99999999999999999999", "\u0661", None, 5, queue.receipt(queue.send("x"))):
        with pytest.raises(ReceiptError, match="id: "):
            queue.receipt(wrong)  # type: ignore[arg-type]


def test_an_id_in_place_of_a_receipt_is_refused_with_a_hint(queue: Queue) -> None:
    sent = queue.send("x")
    with pytest.raises(ReceiptError, match=r"make one of it with queue\.receipt\(id\)"):
        queue.ack(sent)
    assert_sizes(queue, waiting=1, in_flight=0)


def test_of_many_who_claim_and_finish_by_id_each_message_ends_once(
    kmq_target: Target, make_queue: MakeQueue
) -> None:
    queue = by_id(make_queue)
    ids = queue.send_many([b"%d" % number for number in range(60)])
    seen: list[str] = []

    def work(number: int) -> None:
        with kmq_target.open() as storage, storage.open(queue.name) as own:
            if number % 2:
                while messages := own.receive(7, wait=0, lease=60):
                    seen.extend(one.id for one in messages)
            else:
                for at in range(0, len(ids), 5):
                    own.ack([own.receipt(one) for one in ids[at : at + 5]], confirmed=True)

    at_once(4, work)
    assert len(seen) == len({*seen})
    assert_sizes(queue, waiting=0, in_flight=0)
