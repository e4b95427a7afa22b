"""What every storage of the Queue protocol must do; Kafka is the first."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from support import LiveQueue, until

from kmqpy.errors import Closed, ConfigError, MessageError, QueueNotFound, ReceiptError
from kmqpy.kafka.receipt import Receipt
from kmqpy.queue import Queue, queue_for
from kmqpy.worker.asyncio import AsyncQueue

LEASE_S = 0.5


@dataclass
class Storage:
    """One storage under test.

    url              an empty queue, leases of LEASE_S, two redeliveries; something redelivers
    missing_url      a queue that does not exist
    foreign_receipt  a receipt of a queue that had the same name and was deleted
    """

    url: str
    missing_url: str
    foreign_receipt: str

    def open(self) -> Queue:
        return queue_for(self.url)


@pytest.fixture
def kafka_storage(make_queue) -> Storage:
    live: LiveQueue = make_queue(2, lease_ms=int(LEASE_S * 1000), max_redeliveries=2)
    live.tracker()
    servers = f"zookeeper={live.zookeeper.hosts}&root={live.connection.root}"
    settings = f"lease_ms={int(LEASE_S * 1000)}&max_redeliveries=2&{servers}"
    bootstrap = live.connection.bootstrap
    return Storage(
        url=f"kafka://{bootstrap}?queue={live.name}&{settings}",
        missing_url=f"kafka://{bootstrap}?queue={live.name}-missing",
        foreign_receipt=str(Receipt(live.name, "AAAAAAAAAAAAAAAAAAAAAA", 0, 0)),
    )


@pytest.fixture(params=["kafka"])
def storage(request) -> Storage:
    return request.getfixturevalue(f"{request.param}_storage")


@pytest.fixture
def queue(storage: Storage) -> Iterator[Queue]:
    with storage.open() as opened:
        yield opened


def take(queue: Queue, count: int, timeout: float = 60, **arguments):
    found = []
    deadline = time.monotonic() + timeout
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages in {timeout} s"
        found += queue.receive(count - len(found), wait=0.2, **arguments)
    return found


def stays(condition: Callable[[], bool], for_s: float) -> None:
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        assert condition()
        time.sleep(0.02)


@pytest.mark.breadth
def test_a_message_comes_as_it_was_sent(queue):
    sent = queue.send(b"\x00body\xff", key="k", headers=[("a", "1"), ("a", b"\xff"), ("b", None)])
    (message,) = take(queue, 1)
    assert message.id == sent
    assert (message.queue, message.body, message.key) == (queue.name, b"\x00body\xff", b"k")
    assert message.headers == (("a", b"1"), ("a", b"\xff"), ("b", None))
    assert message.attempts == 1
    assert message.enqueued_ms == message.first_enqueued_ms
    assert abs(message.enqueued_ms - time.time() * 1000) < 60_000
    assert 0 < message.lease_until_ms - time.time() * 1000 <= LEASE_S * 1000


@pytest.mark.breadth
def test_ids_are_those_of_the_messages_in_order(queue):
    ids = queue.send_many([b"a", "b", b"c"])
    bodies = {message.id: message.body for message in take(queue, 3, lease=5)}
    assert [bodies[one] for one in ids] == [b"a", b"b", b"c"]


@pytest.mark.breadth
def test_receive_returns_what_is_there_or_nothing_after_the_wait(queue):
    assert queue.receive(wait=0) == []
    started = time.monotonic()
    assert queue.receive(wait=0.3) == []
    assert time.monotonic() - started >= 0.3
    queue.send_many([b"x"] * 5)
    until(lambda: queue.size() == 5)
    found = take(queue, 5, lease=5)
    assert len({message.receipt for message in found}) == 5


def test_receive_takes_no_more_than_asked(queue):
    queue.send_many([b"x"] * 10)
    while not (found := queue.receive(3, wait=1, lease=30)):
        pass
    assert len(found) <= 3
    assert queue.size() == 10 - len(found)


@pytest.mark.breadth
def test_an_acknowledged_message_does_not_come_again(queue):
    queue.send(b"x")
    queue.ack(*take(queue, 1, lease=2), confirmed=True)
    assert queue.receive(wait=2.5) == []
    assert (queue.size(), queue.in_flight()) == (0, 0)


def test_of_the_issue_a_list_is_taken_as_well_as_several_arguments(queue):
    queue.send_many(["a", "b", "c", "d", "e", "f"])
    taken = []
    until(lambda: taken.extend(queue.receive(wait=1, lease=60)) or len(taken) == 6)
    queue.nack([taken[0], taken[1].receipt], delay=3600)  # longer than until() waits
    queue.extend(taken[2:4], lease=60)
    queue.dead_letter((one for one in taken[4:5]), reason="no")
    queue.ack(taken[2:4], confirmed=True)
    taken[5].ack(confirmed=True)
    queue.ack([], confirmed=True)
    until(lambda: (queue.size(), queue.in_flight()) == (2, 0))
    for wrong in ([taken], 5, None, [taken[0], 5]):
        with pytest.raises(ReceiptError, match="is not a receipt"):
            queue.ack(wrong)
    with pytest.raises(ReceiptError, match="is not a receipt"):
        queue.ack(taken, taken)


def test_of_the_issue_asyncio_takes_a_list_too(queue):
    async def acknowledge(over_asyncio):
        return await over_asyncio.ack(over_asyncio.queue.receive(wait=10, lease=60), confirmed=True)

    queue.send("a")
    asyncio.run(acknowledge(AsyncQueue(queue)))
    assert queue.in_flight() == 0


@pytest.mark.breadth
def test_a_message_whose_lease_ends_comes_again_as_the_next_attempt(queue):
    queue.send(b"x", headers={"h": "1"})
    (first,) = take(queue, 1)
    (second,) = take(queue, 1)
    assert (second.body, second.attempts) == (b"x", 2)
    assert second.header("h") == b"1"
    assert second.first_enqueued_ms == first.first_enqueued_ms
    queue.ack(second)


def test_a_lease_is_the_takers_choice(queue):
    queue.send(b"x")
    take(queue, 1, lease=30)
    assert queue.receive(wait=LEASE_S * 3) == []


@pytest.mark.breadth
def test_an_extension_prolongs_and_shortens(queue):
    queue.send(b"x")
    (message,) = take(queue, 1, lease=2)
    queue.extend(message, lease=60, confirmed=True)
    assert queue.receive(wait=2.5) == []
    queue.extend(message, lease=0.1, confirmed=True)
    assert take(queue, 1)[0].attempts == 2


@pytest.mark.breadth
def test_an_extension_after_the_acknowledgement_does_nothing(queue):
    queue.send(b"x")
    (message,) = take(queue, 1, lease=30)
    queue.ack(message, confirmed=True)
    queue.extend(message, lease=0.1, confirmed=True)
    queue.nack(message, confirmed=True)
    assert queue.receive(wait=LEASE_S * 2) == []


@pytest.mark.breadth
def test_nack_gives_back_at_once_or_after_its_delay(queue):
    queue.send(b"x")
    queue.nack(*take(queue, 1, lease=30))
    (again,) = take(queue, 1, lease=30)
    assert again.attempts == 2
    delayed = time.monotonic()
    queue.nack(again, delay=0.7)
    assert take(queue, 1, lease=30)[0].attempts == 3
    assert time.monotonic() - delayed >= 0.7


def test_a_silent_nack_is_no_attempt(queue):
    queue.send(b"x")
    for _ in range(4):
        (message,) = take(queue, 1, lease=30)
        assert message.attempts == 1
        queue.nack(message, count=False)


@pytest.mark.breadth
def test_a_receipt_works_without_the_message_and_in_another_client(storage, queue):
    queue.send_many([b"a", b"b"])
    found = take(queue, 2, lease=30)
    with storage.open() as other:
        other.ack(found[0].receipt, confirmed=True)
        other.nack(found[1].receipt, confirmed=True)
    assert take(queue, 1, lease=30)[0].body == found[1].body
    until(lambda: queue.in_flight() == 1)


@pytest.mark.breadth
def test_a_bad_receipt_and_one_of_a_deleted_queue_are_refused(storage, queue):
    for junk in ("", "x", "1.x", "1.W10", storage.foreign_receipt):
        for operation in (queue.ack, queue.nack, queue.dead_letter):
            with pytest.raises(ReceiptError):
                operation(junk)
        with pytest.raises(ReceiptError):
            queue.extend(junk, lease=1)


def test_a_delayed_message_comes_in_its_time_and_that_is_no_attempt(queue):
    assert queue.receive(wait=0.2) == []  # a member of the group from now on
    queue.send(b"much later", delay=3600)
    queue.send(b"now")
    queue.ack(*take(queue, 1))
    assert queue.size() == 1
    sent = time.monotonic()
    queue.send(b"later", delay=1)
    (message,) = take(queue, 1)
    assert time.monotonic() - sent >= 0.95
    assert (message.body, message.attempts) == (b"later", 1)


@pytest.mark.breadth
def test_dead_letters_come_back_by_redrive(queue):
    queue.send_many([b"a", b"b", b"c"])
    queue.dead_letter(*take(queue, 3, lease=30), reason="bad")
    until(lambda: queue.in_flight() == 0)
    assert (queue.size(), queue.receive(wait=0.2)) == (0, [])
    until(lambda: queue.dead_letters.redrive(limit=1) == 1)  # it may take a moment until all are there
    redriven = [1]
    until(lambda: redriven.append(queue.dead_letters.redrive()) or sum(redriven) == 3, what=redriven)
    assert queue.dead_letters.redrive() == 0
    found = take(queue, 3, lease=30)
    assert sorted(message.body for message in found) == [b"a", b"b", b"c"]
    assert {message.attempts for message in found} == {1}


@pytest.mark.breadth
def test_after_the_last_attempt_it_is_a_dead_letter(queue):
    queue.send(b"poison")
    for attempt in (1, 2, 3):
        (message,) = take(queue, 1, lease=30)
        assert message.attempts == attempt
        queue.nack(message)
    assert queue.receive(wait=1) == []
    until(lambda: queue.dead_letters.redrive() == 1)


def test_peek_takes_nothing(queue):
    queue.send_many([b"a", b"b", b"c"])
    queue.send(b"later", delay=60)
    assert sorted(message.body for message in queue.peek()) == [b"a", b"b", b"c"]
    assert len(queue.peek(2)) == 2
    assert queue.in_flight() == 0
    taken = {message.id for message in take(queue, 1, lease=30)}
    assert {message.id for message in queue.peek()}.isdisjoint(taken)
    assert len(queue.peek()) == 2


@pytest.mark.breadth
def test_size_and_in_flight_are_counted(queue):
    assert (queue.size(), queue.in_flight()) == (0, 0)
    queue.send_many([b"x"] * 6)
    queue.send(b"later", delay=60)
    assert (queue.size(), queue.in_flight()) == (7, 0)
    found = take(queue, 4, lease=30)
    until(lambda: (queue.size(), queue.in_flight()) == (3, 4))
    queue.ack(*found, confirmed=True)
    assert queue.in_flight() == 0


@pytest.mark.breadth
def test_orphans_are_what_was_taken_long_ago(queue):
    queue.send(b"old")
    (old,) = take(queue, 1, lease=30)
    time.sleep(0.5)
    between = time.monotonic() - 0.25  # this long after the one, and before the other was even sent
    queue.send(b"new")
    take(queue, 1, lease=30)
    orphans = queue.orphans(time.monotonic() - between)
    assert [orphan.receipt for orphan in orphans] == [old.receipt]
    assert orphans[0].lease_until_ms - orphans[0].since_ms == 30_000
    queue.ack(orphans[0].receipt, confirmed=True)
    assert queue.orphans(time.monotonic() - between) == []


@pytest.mark.breadth
def test_purge_leaves_nothing_to_take_or_redeliver(queue):
    queue.send_many([b"x"] * 600)
    take(queue, 2, lease=3)
    assert queue.purge() == 600
    assert (queue.size(), queue.in_flight()) == (0, 0)
    time.sleep(0.5)  # clients that had fetched messages learn that these are gone
    assert queue.receive(wait=3) == []
    queue.send(b"after")
    assert take(queue, 1)[0].body == b"after"


def test_release_all_gives_back_what_others_hold(storage, queue):
    queue.send_many([b"x"] * 5)
    with storage.open() as other:
        found = take(other, 5, lease=60)
        assert {message.attempts for message in found} == {1}
        other.nack(found[0], delay=60, confirmed=True)  # goes on to wait
        assert queue.release_all() == 4
    again = take(queue, 4, lease=60)
    assert {message.attempts for message in again} == {1}


@pytest.mark.breadth
def test_competing_takers_share_the_messages(storage):
    with storage.open() as sender:
        sender.send_many([b"%d" % number for number in range(200)])
    found: list[bytes] = []
    lock = threading.Lock()

    def work() -> None:
        with storage.open() as taker:
            while len(found) < 200:
                messages = taker.receive(10, wait=0.2, lease=30)
                taker.ack(*messages)
                with lock:
                    found.extend(message.body for message in messages)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found, key=int) == [b"%d" % number for number in range(200)]


@pytest.mark.breadth
def test_bad_numbers_are_refused(queue):
    queue.send(b"x")
    (message,) = take(queue, 1, lease=30)
    for operation in (
        lambda: queue.receive(0),
        lambda: queue.receive(wait=-1),
        lambda: queue.receive(lease=-1),
        lambda: queue.receive(lease=0),
        lambda: queue.receive(lease=0.099),
        lambda: queue.receive(lease=10**9),
        lambda: queue.nack(message, delay=-1),
        lambda: queue.extend(message, lease=-1),
        lambda: queue.extend(message, lease=0.099),
        lambda: queue.send(b"x", delay=-1),
        lambda: queue.peek(0),
        lambda: queue.orphans(-1),
    ):
        with pytest.raises(ConfigError):
            operation()
    with pytest.raises(MessageError, match="body: object"):
        queue.send(object())
    with pytest.raises(MessageError):
        queue.send(b"x", delay=10**9)
    with pytest.raises(MessageError):
        queue.send(bytes(2 * 1024 * 1024))
    queue.ack(message)


@pytest.mark.breadth
def test_a_closed_queue_says_so(storage):
    queue = storage.open()
    queue.close()
    queue.close()
    for operation in (
        lambda: queue.send(b"x"),
        queue.receive,
        queue.peek,
        queue.size,
        queue.in_flight,
        queue.purge,
        queue.dead_letters.redrive,
        queue.release_all,
        lambda: queue.orphans(1),
    ):
        with pytest.raises(Closed):
            operation()


def test_a_queue_that_is_missing_is_one_clear_error(storage):
    with pytest.raises(QueueNotFound, match="missing"):
        queue_for(storage.missing_url)
