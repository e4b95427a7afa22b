"""Tests how a storage makes, opens, deletes and closes queues, and its capabilities, codecs and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import Closed, ConfigError, DecodeError, MessageError, NotSupported, QueueNotFound
from kmqpy.message import Message
from kmqpy.queue import Queue, Storage
from kmqpy.queue.codecs import JsonCodec
from kmqpy.testing.contract.target import (
    PATIENCE_S,
    MakeQueue,
    Target,
    assert_dead,
    assert_sizes,
    drain,
    new_name,
    skip_without,
    take,
    take_one,
)

MAX_THREADS = MAX_CONNECTIONS = 20
"""The most threads and connections that a storage may use in test_many_queues_…, for all queues together."""
_WAITING_TAKERS = 50
"""In test_many_queues_…, a receive() waits on each of this many queues, in a thread of the test."""
_QUEUES = 1_000
"""The number of queues of test_many_queues_… in a storage whose clock the test moves (in memory)."""
_QUEUES_IN_REAL_TIME = 100
"""The number of queues of test_many_queues_… in other storages, where each queue costs requests."""


def test_a_queue_is_made_described_and_deleted(kmq_storage: Storage) -> None:
    name = new_name() + (" häß/%?#" if kmq_storage.capabilities.any_name else "")
    kmq_storage.create(name, max_redeliveries=None, lease_ms="5s")
    assert name in kmq_storage.list()
    queue = kmq_storage.open(name)
    queue.send_many(["x"] * 4)
    queue.dead_letter(take_one(queue, lease=60), confirmed=True)
    take_one(queue, lease=60)
    assert_dead(queue, 1)
    assert_sizes(queue, waiting=2, in_flight=1)
    found = kmq_storage.describe(name)
    assert (found.name, found.settings["lease_ms"]) == (name, 5000)
    assert (found.settings["max_redeliveries"], found.settings["requeue_to"]) == (None, "back")
    assert (found.ready, found.delayed, found.in_flight, found.dead) == (2, 0, 1, 1)
    kmq_storage.delete(name)
    assert name not in kmq_storage.list()


def test_what_is_wrong_with_a_queue_is_said(kmq_storage: Storage) -> None:
    name = new_name()
    kmq_storage.create(name)
    with pytest.raises(ConfigError, match="already"):
        kmq_storage.create(name)
    for missing in (kmq_storage.open, kmq_storage.describe, kmq_storage.delete):
        with pytest.raises(QueueNotFound, match=f"did you mean {name}"):
            missing(name + "x")
    other = new_name()
    with pytest.raises(ConfigError, match="did you mean lease_ms"):
        kmq_storage.create(other, lease=5)
    bad: list[dict[str, Any]] = [
        {"lease_ms": 50},
        {"max_redeliveries": -1},
        {"max_delay_ms": "soon"},
        {"requeue_to": "middle"},
        {"order": "lifo"},
        {"redelivery": "never"},
        {"collapse": "perhaps"},
        {"collapse": 1},
        {"delivery": "perhaps"},
    ]
    for settings in bad:
        with pytest.raises(ConfigError, match=next(iter(settings))):
            kmq_storage.create(other, **settings)
    for wrong in ("", " x", "x\n", "x\0", "x" * 201, None, 5):
        with pytest.raises(ConfigError, match=r"^queue: "):
            kmq_storage.create(wrong)  # type: ignore[arg-type]
    assert other not in kmq_storage.list()


def test_the_limits_of_a_queue_can_be_changed(kmq_storage: Storage) -> None:
    name = new_name()
    kmq_storage.create(name, max_redeliveries=1, lease_ms=2_000)
    before = kmq_storage.open(name)
    before.send("kept")
    kmq_storage.alter(name, max_redeliveries=None, lease_ms="5s", max_lease_ms=60_000)
    kmq_storage.alter(name)
    found = kmq_storage.describe(name).settings
    assert (found["max_redeliveries"], found["lease_ms"], found["max_lease_ms"]) == (None, 5_000, 60_000)
    with kmq_storage.open(name) as after:
        assert (after.default_lease, after.max_lease) == (5, 60)
        for _ in range(3):
            message = take_one(after, lease=60)
            after.nack(message, confirmed=True)
        assert (message.body, message.attempts) == (b"kept", 3)
    with pytest.raises(QueueNotFound, match=f"did you mean {name}"):
        kmq_storage.alter(name + "x", lease_ms=2_000)
    for wrong in ({"lease_ms": 50}, {"max_redeliveries": -1}, {"requeue_to": "front"}, {"lease": 5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            kmq_storage.alter(name, **wrong)
    assert kmq_storage.describe(name).settings == found


def test_notes_are_kept_and_changes_of_several_programs_all_count(kmq_storage: Storage) -> None:
    name = new_name()
    kmq_storage.create(name)
    if "notes" not in kmq_storage.describe(name).settings:
        pytest.skip("the storage keeps no notes")
    kmq_storage.alter(name, notes="é")
    with ThreadPoolExecutor(4) as threads:
        adding = [threads.submit(kmq_storage.alter, name, notes=lambda notes: notes + "x") for _ in range(8)]
        for done in adding:
            done.result(60)
    assert kmq_storage.describe(name).settings["notes"] == "é" + "x" * 8
    for wrong in (5, "a" * 100_001, "\0"):
        with pytest.raises(ConfigError, match="notes"):
            kmq_storage.alter(name, notes=wrong)


def test_changes_of_several_settings_at_a_time_all_count(kmq_storage: Storage) -> None:
    name = new_name()
    kmq_storage.create(name)
    changes = [
        ("lease_ms", 2_000),
        ("max_redeliveries", 7),
        ("max_lease_ms", 50_000),
        ("max_delay_ms", 3_000),
    ]
    with ThreadPoolExecutor(len(changes)) as threads:
        for more in range(3):
            wanted = {key: value + more for key, value in changes}
            for done in [threads.submit(kmq_storage.alter, name, **{key: wanted[key]}) for key in wanted]:
                done.result(60)
            assert wanted.items() <= kmq_storage.describe(name).settings.items()


def test_a_queue_keeps_its_messages_and_settings_when_it_is_opened_again(
    kmq_target: Target, make_queue: MakeQueue
) -> None:
    queue = make_queue(max_redeliveries=1)
    queue.send_many(["dead", "taken", "ready"])
    messages = {one.body: one for one in take(queue, 3, lease=60)}
    queue.dead_letter(messages[b"dead"], reason="no", confirmed=True)
    queue.nack(messages[b"ready"], confirmed=True)
    queue.close()
    with kmq_target.open() as storage, storage.open(queue.name) as again:
        assert_sizes(again, waiting=1, in_flight=1)
        assert [one.reason for one in assert_dead(again, 1)] == ["rejected: no"]
        again.ack(messages[b"taken"].receipt, confirmed=True)
        assert (take_one(again, lease=60).attempts, again.in_flight()) == (2, 1)
        assert storage.describe(queue.name).settings["max_redeliveries"] == 1


OPERATIONS: dict[str, Callable[[Queue, Message], object]] = {
    "send": lambda queue, _: queue.send("x"),
    "send_many": lambda queue, _: queue.send_many(["x"]),
    "receive": lambda queue, _: queue.receive(wait=0),
    "ack": lambda queue, message: queue.ack(message),
    "message.ack": lambda _, message: message.ack(),
    "nack": lambda queue, message: queue.nack(message),
    "extend": lambda queue, message: queue.extend(message, lease=1),
    "dead_letter": lambda queue, message: queue.dead_letter(message),
    "peek": lambda queue, _: queue.peek(),
    "size": lambda queue, _: queue.size(),
    "in_flight": lambda queue, _: queue.in_flight(),
    "orphans": lambda queue, _: queue.orphans(),
    "purge": lambda queue, _: queue.purge(),
    "dead_letters.redrive": lambda queue, _: queue.dead_letters.redrive(),
    "release_all": lambda queue, _: queue.release_all(),
    "dead_letters.list": lambda queue, _: queue.dead_letters.list(),
    "dead_letters.purge": lambda queue, _: queue.dead_letters.purge(),
}


def test_a_closed_queue_refuses_every_call(queue: Queue) -> None:
    queue.send("x")
    message = take_one(queue, lease=60)
    queue.close()
    queue.close()
    for name, operation in OPERATIONS.items():
        with pytest.raises(Closed):
            raise AssertionError(f"{name}: {operation(queue, message)}")


def test_a_deleted_queue_refuses_every_call(kmq_target: Target, queue: Queue) -> None:
    skip_without(queue.capabilities, "bound_handles")
    queue.send("x")
    message = take_one(queue, lease=60)
    with kmq_target.open() as elsewhere:
        elsewhere.delete(queue.name)
        elsewhere.create(queue.name)
        for name, operation in OPERATIONS.items():
            with pytest.raises(QueueNotFound):
                raise AssertionError(f"{name}: {operation(queue, message)}")
        with elsewhere.open(queue.name) as anew:
            assert (anew.size(), anew.in_flight()) == (0, 0)


def test_a_recreated_queue_has_nothing_of_the_former_one(kmq_target: Target, queue: Queue) -> None:
    queue.send_many(["x", "y"])
    take_one(queue, lease=60)
    with kmq_target.open() as elsewhere:
        elsewhere.delete(queue.name)
        elsewhere.create(queue.name)
        with elsewhere.open(queue.name) as anew:
            assert_sizes(anew, waiting=0, in_flight=0)


def test_closing_ends_a_receive_that_waits(queue: Queue) -> None:
    ended: list[BaseException | None] = []
    began = threading.Event()

    def receive() -> None:
        began.set()
        try:
            while True:
                queue.receive(wait=30)
        except Closed as error:
            ended.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    began.wait(PATIENCE_S)
    SYSTEM_CLOCK.sleep(0.1)
    queue.close()
    thread.join(PATIENCE_S)
    assert len(ended) == 1


def test_a_closed_storage_closes_its_queues(kmq_target: Target, queue: Queue) -> None:
    storage = kmq_target.open()
    opened = storage.open(queue.name)
    storage.close()
    storage.close()
    for refused in (opened.size, storage.list, lambda: storage.open(queue.name)):
        with pytest.raises(Closed):
            refused()
    assert queue.size() == 0


def test_what_the_storage_can_not_do_is_refused(queue: Queue, kmq_storage: Storage) -> None:
    can = queue.capabilities
    assert can == kmq_storage.capabilities
    refused: list[tuple[bool, Callable[[], object]]] = [
        (can.delay, lambda: queue.send("x", delay=1)),
        (can.priority, lambda: queue.send("x", priority=1)),
        (can.transactions, lambda: queue.send("x", transaction=object())),
        (can.transactions, lambda: queue.ack(transaction=object())),
        (can.requeue_to_front, lambda: kmq_storage.create(new_name(), requeue_to="front")),
        (can.manual_redelivery, lambda: kmq_storage.create(new_name(), redelivery="manual")),
        (can.at_most_once, lambda: kmq_storage.create(new_name(), delivery="at-most-once")),
    ]
    for is_possible, call in refused:
        if not is_possible:
            with pytest.raises(NotSupported):
                call()
    if can.max_body_bytes is not None:
        with pytest.raises(MessageError, match="bytes"):
            queue.send(bytes(can.max_body_bytes + 1))
    assert queue.size() == 0


def test_a_codec_turns_objects_into_bodies_and_back(queue: Queue, kmq_storage: Storage) -> None:
    typed = kmq_storage.open(queue.name, codec=JsonCodec())
    values = [{"a": [1, None, "ß\0"]}, "text", 5]
    ids = typed.send_many(values)
    assert {one.id: typed.decode(one) for one in take(typed, 3)} == dict(zip(ids, values, strict=True))
    for bad in (object(), b"bytes", float("nan")):
        with pytest.raises(MessageError):
            typed.send(bad)
    queue.send(b"\xff{")
    with pytest.raises(DecodeError) as caught:
        typed.decode(take_one(typed))
    assert caught.value.data == b"\xff{"
    queue.flush()


def test_any_order_delivers_each_message_once(make_queue: MakeQueue) -> None:
    queue = make_queue(order="any")
    queue.send_many([b"%d" % number for number in range(100)])
    assert sorted(map(int, drain(queue, 100))) == [*range(100)]


def test_many_queues_share_the_threads_and_connections_of_their_storage(
    kmq_target: Target, kmq_storage: Storage
) -> None:
    skip_without(kmq_storage.capabilities, "many_queues")
    before = kmq_target.threads()
    queues = []
    for _ in range(_QUEUES_IN_REAL_TIME if kmq_target.real_time else _QUEUES):
        name = new_name()
        kmq_storage.create(name)
        queues.append(kmq_storage.open(name))
    with ThreadPoolExecutor(_WAITING_TAKERS) as takers:
        found = [takers.submit(take_one, queue, wait=1) for queue in queues[:_WAITING_TAKERS]]
        SYSTEM_CLOCK.sleep(0.3)  # the takers wait by now; if not, the test proves less, and passes
        assert kmq_target.threads() - before - _WAITING_TAKERS <= MAX_THREADS
        if kmq_target.connections is not None:
            assert kmq_target.connections() <= MAX_CONNECTIONS
        for queue in queues[:_WAITING_TAKERS]:
            queue.send("x")
        for queue, taken in zip(queues, found, strict=False):
            queue.ack(taken.result(PATIENCE_S), confirmed=True)
