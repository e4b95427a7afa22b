"""Tests that messages are received as they were sent: complete, in order, on time, and once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, MessageError
from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue
from kmqpy.testing.contract.target import (
    LEASE_S,
    PAST_LEASE_S,
    PATIENCE_S,
    Target,
    assert_becomes,
    assert_sizes,
    at_once,
    drain,
    skip_without,
    take,
    take_one,
)

BODIES = {
    "empty": b"",
    "nul": b"a\x00b\x00",
    "binary": bytes(range(256)),
    "unicode": "häß \N{SNOWMAN} \N{GRINNING FACE} \u0000".encode(),
    "1 MiB": b"\x00\xff" * 2**19,
}

_SERIES_LENGTH = 8
"""The number of messages that are sent one by one to measure how late a waiting receive() returns them."""


def test_bodies_come_as_they_were_sent(queue: Queue) -> None:
    bodies = {name: body[: queue.capabilities.max_body_bytes] for name, body in BODIES.items()}
    sent = dict(zip(queue.send_many(bodies.values()), bodies, strict=True))
    assert {sent[one.id]: one.body for one in take(queue, len(bodies), lease=60)} == bodies
    orphans = [one.message for one in queue.orphans() if one.message is not None]
    assert {sent[one.id]: one.body for one in orphans} == bodies


def test_a_message_has_all_that_was_sent(queue: Queue) -> None:
    headers: list[tuple[str, str | bytes | None]] = [
        ("a", "1"),
        ("a", b"\xff\x00"),
        ("none", None),
        ("kmq-reserved", "x"),
    ]
    sent = queue.send("text", key="k\x00", headers=headers)
    message = take_one(queue)
    assert (message.id, message.queue, message.body, message.key) == (sent, queue.name, b"text", b"k\x00")
    assert message.headers == (("a", b"1"), ("a", b"\xff\x00"), ("none", None))
    assert message.attempts == 1
    assert message.enqueued_ms == message.first_enqueued_ms > 0


def test_messages_of_a_batch_have_their_own_key_headers_and_default(queue: Queue) -> None:
    ids = queue.send_many(["a", OutgoingMessage("b", key="own", headers={"h": "1"}), b"c"], key="common")
    found = take(queue, 3)
    assert {one.id: one.body for one in found} == dict(zip(ids, [b"a", b"b", b"c"], strict=True))
    assert sorted((one.body, one.key) for one in found) == [
        (b"a", b"common"),
        (b"b", b"own"),
        (b"c", b"common"),
    ]
    assert [one.headers for one in found if one.body == b"b"] == [(("h", b"1"),)]
    assert queue.send_many([]) == []


BAD_MESSAGES = [
    OutgoingMessage(5),
    OutgoingMessage("x", key=5),  # type: ignore[arg-type]
    OutgoingMessage("x", headers={"a": 5}),  # type: ignore[arg-type]
    OutgoingMessage("x", delay=10**9),
    OutgoingMessage("x", priority=-1),
    OutgoingMessage("x", priority=10),
    OutgoingMessage("x", priority=True),
    OutgoingMessage("\ud800"),
]


def test_a_message_that_cannot_be_sent_is_refused_before_any_is(queue: Queue) -> None:
    for bad in BAD_MESSAGES:
        with pytest.raises(MessageError):
            raise AssertionError(f"{bad}: {queue.send_many(['good', bad])}")
    assert queue.size() == 0


def test_a_body_is_not_taken_for_a_list_of_them(queue: Queue) -> None:
    for bodies in ("text", b"bytes"):
        with pytest.raises(MessageError, match="one body"):
            queue.send_many(bodies)
    with pytest.raises(ConfigError, match="delay"):
        queue.send("x", delay=-1)


def test_receive_takes_no_more_than_asked_and_returns_nothing_where_nothing_is(queue: Queue) -> None:
    assert queue.receive(wait=0) == []
    queue.send_many(["x"] * 10)
    take(queue, 3, lease=60)
    assert_sizes(queue, waiting=7, in_flight=3)


BAD_NUMBERS: list[dict[str, Any]] = [
    {"max_messages": 0},
    {"max_messages": True},
    {"wait": -1},
    {"lease": 0},
    {"lease": 0.05},
    {"lease": 10**9},
    {"lease": "5s"},
]


def test_receive_refuses_bad_numbers_and_takes_nothing(queue: Queue) -> None:
    queue.send("x")
    for arguments in BAD_NUMBERS:
        with pytest.raises(ConfigError):
            raise AssertionError(f"{arguments}: {queue.receive(**arguments)}")
    assert queue.size() == 1


def test_messages_are_taken_in_the_order_they_were_sent(queue: Queue) -> None:
    skip_without(queue.capabilities, "fifo")
    queue.send_many([b"%d" % number for number in range(20)])
    for number in range(20, 40):
        queue.send(b"%d" % number)
    assert [one.body for one in queue.peek(3)] == [b"0", b"1", b"2"]
    found = [take_one(queue, lease=60).body for _ in range(10)]
    while len(found) < 40:
        found += [one.body for one in take(queue, 6, lease=60)]
    assert found == [b"%d" % number for number in range(40)]


def test_a_higher_priority_is_taken_first(queue: Queue) -> None:
    skip_without(queue.capabilities, "priority", "fifo")
    queue.send_many([OutgoingMessage("a"), OutgoingMessage("b", priority=9), OutgoingMessage("c")])
    queue.send_many(["d", "e"], priority=3)
    assert [one.body for one in queue.peek()] == [b"b", b"d", b"e", b"a", b"c"]
    assert drain(queue, 5) == [b"b", b"d", b"e", b"a", b"c"]


def test_a_delayed_message_comes_when_it_is_due(kmq_target: Target, queue: Queue) -> None:
    skip_without(queue.capabilities, "delay")
    queue.send_many([OutgoingMessage("in an hour", delay=3600), "now"])
    assert queue.size() == 2
    assert [one.body for one in queue.peek()] == [b"now"]
    assert take_one(queue, lease=60).body == b"now"
    began = SYSTEM_CLOCK.monotonic()
    queue.send("soon", delay=LEASE_S)
    if not kmq_target.real_time:
        assert queue.receive(wait=0) == []
        kmq_target.pass_time(PAST_LEASE_S)
    message = take_one(queue)
    assert (message.body, message.attempts) == (b"soon", 1)
    if kmq_target.real_time:
        assert SYSTEM_CLOCK.monotonic() - began > LEASE_S - 0.05


def test_messages_far_in_the_future_do_not_hide_those_of_now(queue: Queue) -> None:
    skip_without(queue.capabilities, "delay")
    queue.send_many(["later"] * 300, delay=3600)
    queue.send("now")
    assert drain(queue, 1) == [b"now"]
    assert_becomes(queue, queue.size, 300)


def test_a_waiting_receive_returns_as_soon_as_a_message_is_sent(kmq_target: Target, queue: Queue) -> None:
    if not kmq_target.real_time:
        pytest.skip("the clock of the storage stands still")
    # One of three series must be in time: a busy machine is slow at times.
    soon_s = 0.25 if queue.capabilities.blocking_take else 2
    assert any(_series_is_in_time(queue, _SERIES_LENGTH * soon_s) for _ in range(3))


def _series_is_in_time(queue: Queue, limit_s: float) -> bool:
    """Return True if the messages of a series are less than `limit_s` late, added up.

    A storage that looks for messages once a second may be in time for one message, but not for a series.
    """
    late_s = 0.0
    for _ in range(_SERIES_LENGTH):
        late_s += _late_s(queue)
        if late_s >= limit_s:
            return False
    return True


def _late_s(queue: Queue) -> float:
    """Seconds from a send until a receive() that waits has returned the message."""
    sent_at: list[float] = []

    def send() -> None:
        sent_at.append(SYSTEM_CLOCK.monotonic())
        queue.send("x")

    timer = threading.Timer(0.1, send)
    timer.start()
    try:
        queue.ack(queue.receive(wait=10))
        return SYSTEM_CLOCK.monotonic() - sent_at[0]
    finally:
        timer.join()


def test_a_waiting_receive_returns_when_a_message_is_due(kmq_target: Target, queue: Queue) -> None:
    skip_without(queue.capabilities, "delay")
    if not kmq_target.real_time:
        pytest.skip("the clock of the storage stands still")
    queue.send("delayed", delay=0.3)
    queue.ack(queue.receive(wait=10), confirmed=True)
    queue.send("leased")
    first = take_one(queue)
    (message,) = queue.receive(wait=10, lease=60)  # a busy machine may stand still for a short lease
    assert message.attempts == first.attempts + 1


def test_receive_waits_as_long_as_asked(kmq_target: Target, queue: Queue) -> None:
    if not kmq_target.real_time:
        pytest.skip("the clock of the storage stands still")
    before = SYSTEM_CLOCK.monotonic()
    assert queue.receive(wait=0.5) == []
    assert 0.5 <= SYSTEM_CLOCK.monotonic() - before < 5


def test_eight_takers_get_nothing_twice_within_its_lease(queue: Queue) -> None:
    ids = queue.send_many([b"%d" % number for number in range(2000)])

    found: list[str] = []
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S

    def taker(_: int) -> None:
        while len(found) < len(ids) and SYSTEM_CLOCK.monotonic() < deadline:
            found.extend(one.id for one in queue.receive(7, wait=0.2, lease=600))

    at_once(8, taker)
    assert sorted(found) == sorted(ids)
    assert_sizes(queue, waiting=0, in_flight=2000)


def test_takers_do_not_wait_for_one_row(queue: Queue) -> None:
    skip_without(queue.capabilities, "immediate")
    for _ in range(20):
        queue.send_many(["x"] * 8)
        # No taker may get nothing because another taker was just taking the first message.
        found = at_once(8, lambda _: queue.receive(1, wait=0, lease=600))
        assert [len(part) for part in found] == [1] * 8
        assert len({one.id for part in found for one in part}) == 8
