"""Tests that an argument of a wrong type or size raises an error that names it, and changes nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kmqpy.errors import ConfigError, KmqError, MessageError, ReceiptError
from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue, Storage
from kmqpy.testing.contract.target import new_name, take_one

_UNPRINTABLE_NUMBER = 10**5_000
"""A number that Python refuses to print: errors and names of pytest parameters must not print it."""
_ABOVE_INT64 = 2**63
"""The smallest number that is too large for 64 bits."""


def test_what_is_no_list_of_bodies_is_refused(queue: Queue) -> None:
    wrong: list[Any] = [None, 5, OutgoingMessage("x"), {"a": 1}, b"x", _UNPRINTABLE_NUMBER]
    for bodies in wrong:
        with pytest.raises(MessageError, match=r"^bodies: "):
            queue.send_many(bodies)
    assert queue.size() == 0


def test_a_wrong_argument_of_send_is_named(queue: Queue) -> None:
    wrong: list[tuple[str, Any]] = [
        ("headers", ["ab"]),
        ("headers", [b"ab"]),
        ("headers", "ab"),
        ("priority", _UNPRINTABLE_NUMBER),
        ("delay", _UNPRINTABLE_NUMBER),
        ("key", _UNPRINTABLE_NUMBER),
    ]
    for field, value in wrong:
        with pytest.raises(KmqError, match=rf"^{field}: "):
            queue.send("x", **{field: value})
    assert queue.size() == 0


def test_a_wrong_argument_of_the_other_calls_is_named(queue: Queue) -> None:
    queue.send("x")
    message = take_one(queue, lease=60)
    wrong: list[tuple[str, Any]] = [
        ("count", lambda: queue.nack(message, count="no")),  # type: ignore[arg-type]
        ("delay", lambda: queue.nack(message, delay=_UNPRINTABLE_NUMBER)),
        ("lease", lambda: queue.extend(message, lease=_UNPRINTABLE_NUMBER)),
        ("max_messages", lambda: queue.receive(_UNPRINTABLE_NUMBER)),
        ("wait", lambda: queue.receive(wait=_UNPRINTABLE_NUMBER)),
        ("limit", lambda: queue.peek(_UNPRINTABLE_NUMBER)),
        ("limit", lambda: queue.size(_UNPRINTABLE_NUMBER)),
        ("queued_before_ms", lambda: queue.orphans(queued_before_ms="now")),  # type: ignore[arg-type]
        ("queued_before_ms", lambda: queue.orphans(queued_before_ms=1.5)),  # type: ignore[arg-type]
        ("queued_before_ms", lambda: queue.orphans(queued_before_ms=_UNPRINTABLE_NUMBER)),
        ("older_than", lambda: queue.orphans(_UNPRINTABLE_NUMBER)),
        ("ids", lambda: queue.dead_letters.redrive(5)),  # type: ignore[arg-type]
        ("ids", lambda: queue.dead_letters.redrive(b"12")),  # type: ignore[arg-type]
        ("ids", lambda: queue.dead_letters.redrive("12")),
        ("limit", lambda: queue.dead_letters.redrive(limit=_UNPRINTABLE_NUMBER)),
    ]
    for field, call in wrong:
        with pytest.raises(ConfigError, match=rf"^{field}: "):
            call()
    assert queue.in_flight() == 1


def test_numbers_beyond_64_bits_are_no_receipts_and_no_ids(queue: Queue) -> None:
    queue.send("x")
    message = take_one(queue, lease=60)
    queue.dead_letter(message, confirmed=True)
    assert queue.dead_letters.redrive([str(_ABOVE_INT64), "9" * 5_000]) == 0
    prefix = message.receipt.rsplit(".", 2)[0]
    for number in (str(_ABOVE_INT64), "9" * 19, "9" * 5_000):
        with pytest.raises(ReceiptError):
            queue.ack(f"{prefix}.{number}.1", confirmed=True)
        with pytest.raises(ReceiptError):
            queue.ack(f"{prefix}.1.{number}", confirmed=True)


def test_a_setting_that_is_no_number_of_64_bits_is_named(kmq_storage: Storage) -> None:
    wrong: list[tuple[str, Any]] = [
        ("max_redeliveries", _UNPRINTABLE_NUMBER),
        ("max_redeliveries", "\N{ARABIC-INDIC DIGIT ONE}"),
        ("lease_ms", "\N{ARABIC-INDIC DIGIT ONE}" * 4),
        ("order", _UNPRINTABLE_NUMBER),
    ]
    for field, value in wrong:
        with pytest.raises(ConfigError, match=rf"^{field}: "):
            kmq_storage.create(new_name(), **{field: value})


def test_a_codec_that_makes_no_bytes_is_refused(queue: Queue, kmq_storage: Storage) -> None:
    class Text:
        def encode(self, value: Any) -> bytes:
            return str(value)  # type: ignore[return-value]

        def decode(self, body: bytes) -> Any:
            return body.decode()

    with pytest.raises(MessageError, match=r"^body: the codec made str"):
        kmq_storage.open(queue.name, codec=Text()).send("x")
    assert queue.size() == 0


def test_a_wait_may_be_longer_than_timers_can(queue: Queue) -> None:
    """The storage shortens the wait: no timer overflows, and receive() returns a message that arrives."""
    found: list[object] = []

    def receive() -> None:
        try:
            while not found:  # a storage whose clock stands still returns without messages
                found.extend(queue.receive(1, wait=1e12, lease=60))
        except BaseException as error:
            found.append(error)

    waiting = threading.Thread(target=receive, daemon=True)
    waiting.start()
    waiting.join(0.1)  # receive() waits by now; if not, the test proves less, and passes
    queue.send("x")
    waiting.join(60)
    assert [getattr(one, "body", one) for one in found] == [b"x"]
