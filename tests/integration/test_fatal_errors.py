"""What ends a producer for good, since a broker has lost what it had confirmed to it, ends nothing else.

Each case is a generator: it says which logs to cut, and goes on when they are. All cases share one cut.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaError
from support import LiveQueue, collect, until, value

from kmqpy.dev import Cluster
from kmqpy.errors import Fenced, Unavailable, Unfinished, UnknownOutcome
from kmqpy.kafka.client import unconfirmed_starts
from kmqpy.kafka.copies.copy_transaction import (
    CopyTransaction,
    NewRecord,
    ProducerUnusable,
    TransactionAborted,
    open_producer,
)
from kmqpy.kafka.dead_letters import KafkaDeadLetters, RedriveResult
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.message_headers import DEAD_LETTER_TOPIC
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import Batch, Keep, batches, cut_logs, log_folder, share
from tracker.redelivery.tick_writer import TickWriter

pytestmark = pytest.mark.slow

LEASE_S = 60.0
MANY = 250
"""Of so many messages, most start markers of the JVM format go to the producer that reports errors only."""
INTERNAL_PARTITIONS = 20
"""Of the broker's own topics: enough for each case to have one of its own."""

Case = Callable[[LiveQueue, Cluster], Iterator[Mapping[tuple[str, int], Keep]]]


def first_transaction(found: Sequence[Batch]) -> int:
    """Where to cut so that the log still knows the producer, which is ahead of it, and nothing stays open."""
    return 1 + next(index for index, batch in enumerate(found) if batch.control)


def log_of(cluster: Cluster, topic: str, name: str) -> tuple[str, int]:
    """The log of one of the broker's own topics in which this name stands, and none of another case."""
    logs = [(topic, partition) for partition in range(INTERNAL_PARTITIONS)]
    data = {
        log: b"".join(one.read_bytes() for one in log_folder(cluster, *log).glob("*.log")) for log in logs
    }
    (found,) = [log for log in logs if name.encode() in data[log]]
    others = data[found].replace(name.encode(), b"")
    assert b"kmq-" not in others
    assert b"test-" not in others
    return found


def a_client(queue: LiveQueue, _: Cluster) -> Iterator[Mapping[tuple[str, int], Keep]]:
    queue.fill(5 * MANY)
    client = queue.client()
    take = partial(collect, client, max_messages=MANY, lease=LEASE_S)
    acked = [message for _ in range(2) for message in take(MANY, ack=True)]
    client.flush()
    held = take(MANY)
    yield {(queue.settings.markers_topic, 0): share(0.5)}
    rest = take(2 * MANY)
    while {message.offset for message in acked + held + rest} < set(range(5 * MANY)):
        rest += take(1)  # messages whose start markers are cut away come again (rule R40)
    client.ack(*held, *rest, confirmed=True)
    assert queue.started() >= {message.offset for message in rest}
    assert queue.ended() >= {message.offset for message in held + rest}


def a_sender(queue: LiveQueue, _: Cluster) -> Iterator[Mapping[tuple[str, int], Keep]]:
    sender = queue.producer()
    for number in range(4):
        sender.send(f"{number}")
    yield {(queue.name, 0): share(0.5)}
    with pytest.raises(UnknownOutcome, match=r"lost records that it had confirmed.*try again"):
        sender.send("4")
    assert sender.send("5") == "0-2"


def a_writer_of_ticks(queue: LiveQueue, _: Cluster) -> Iterator[Mapping[tuple[str, int], Keep]]:
    writer, topic = TickWriter(queue.connection), queue.settings.markers_topic
    for _ in range(4):
        writer.send_tick(topic, 0, 10)
    yield {(topic, 0): share(0.5)}
    written: list[object] = []

    def one_is_written() -> bool:
        with suppress(Unavailable):
            writer.post_tick(topic, 0, written.append)
        writer.poll()
        return bool(written)

    until(one_is_written, every=0.1)
    assert writer.send_tick(topic, 0, 10).markers_offset >= 3


def transact(queue: LiveQueue, producer: Producer) -> None:
    """Write 100 copies and an end marker, as trackers and redrives do."""
    copies = [NewRecord(0, None, b"copy", ())] * 100
    CopyTransaction(producer, queue.name, queue.settings.markers_topic, 10).execute(
        copies, lambda _: [NewRecord(0, b"", b"", ())]
    )


def transactions(queue: LiveQueue, _: Cluster) -> Iterator[Mapping[tuple[str, int], Keep]]:
    opened = partial(open_producer, queue.connection, f"test-{queue.name}", 10_000, "test", 30)
    producer = opened()
    for _ in range(3):
        transact(queue, producer)
    assert queue.copies() == {"copy": 300}  # it is committed where readers read
    yield {(topic, 0): first_transaction for topic in (queue.name, queue.settings.markers_topic)}
    with pytest.raises(ProducerUnusable) as unusable:
        transact(queue, producer)
    assert unusable.value.errors[0].code() == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
    transact(queue, opened())
    assert queue.copies() == {"copy": 200}


def transactions_that_are_forgotten(
    queue: LiveQueue, cluster: Cluster
) -> Iterator[Mapping[tuple[str, int], Keep]]:
    producer = open_producer(queue.connection, f"test-{queue.name}", 10_000, "test", 30)
    transact(queue, producer)
    assert queue.copies() == {"copy": 100}
    yield {log_of(cluster, "__transaction_state", f"test-{queue.name}"): 0}
    with pytest.raises(TransactionAborted):
        transact(queue, producer)
    transact(queue, producer)
    assert queue.copies() == {"copy": 200}


def a_tracker(queue: LiveQueue, _: Cluster) -> Iterator[Mapping[tuple[str, int], Keep]]:
    tracker, client = queue.tracker(), queue.client()

    def dead_letter() -> None:
        before = value(tracker, queue.name, "dead_lettered")
        queue.fill(20)
        client.dead_letter(*collect(client, 20, lease=LEASE_S))
        until(
            lambda: value(tracker, queue.name, "dead_lettered") == before + 20,
            what=tracker.problems,
        )

    for _ in range(3):
        dead_letter()
    assert len(queue.dead_letters()) == 60
    yield {(queue.settings.dead_letter_topic, 0): first_transaction}
    kept = len(queue.dead_letters())
    assert 0 < kept <= 20  # a busy tracker moves them in several transactions
    dead_letter()
    assert len(queue.dead_letters()) == kept + 20
    until(lambda: tracker.problems() == [], what=tracker.problems)


def a_redrive(queue: LiveQueue, _: Cluster) -> Iterator[Mapping[tuple[str, int], Keep]]:
    for number in range(300):
        queue._append(
            None,
            b"%d" % number,
            [(DEAD_LETTER_TOPIC, queue.name.encode())],
            partition=0,
            topic=queue.settings.dead_letter_topic,
        )
    until(lambda: queue._producer().flush(0.05) == 0)
    stands, goes_on = threading.Event(), threading.Event()
    errors: list[Unfinished] = []

    def progress(done: int, _of: int) -> None:
        if done == 200:
            stands.set()
            goes_on.wait(120)

    def redrive() -> None:
        try:
            letters.run_redrive(rate=400, progress=progress)  # so, a transaction moves a hundred
        except Unfinished as error:
            errors.append(error)

    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        thread = threading.Thread(target=redrive, daemon=True)
        thread.start()
        stands.wait(60)
        assert queue.copies().total() == 200
        yield {(queue.name, 0): first_transaction}
        goes_on.set()
        thread.join()
        (error,) = errors
        assert error.done == 200
        assert "the producer has ended" in str(error)
        assert "running it again goes on with them" in str(error)
        assert letters.run_redrive() == RedriveResult(100)
        assert queue.copies().total() == 200


def a_static_member(queue: LiveQueue, cluster: Cluster) -> Iterator[Mapping[tuple[str, int], Keep]]:
    queue.fill(30)
    # One that is gone may hold up a rebalance for the time of its session.
    with KmqClient(queue.settings, replace(queue.connection, kafka={}), instance_id="one") as former:
        collect(former, 10, max_messages=10, ack=True)
    log = log_of(cluster, "__consumer_offsets", f"kmq-{queue.name}")
    end = batches(log_folder(cluster, *log))[-1].last + 1
    client = queue.client(instance_id="one")
    collect(client, 10, max_messages=10, ack=True)
    yield {log: end}
    # For the group that is left, it is the former that has the instance_id.
    with pytest.raises(Fenced, match=r"Kafka has lost the group's last state.*make a new client"):
        collect(client, 100)
    queue.fill(5)
    assert {message.offset for message in collect(queue.client(instance_id="one"), 5)} >= {34}


CASES: Mapping[str, Case] = {
    "client-jvm": a_client,
    "client-range": a_client,
    "sender": a_sender,
    "ticks": a_writer_of_ticks,
    "transactions": transactions,
    "forgotten": transactions_that_are_forgotten,
    "tracker": a_tracker,
    "redrive": a_redrive,
    "static": a_static_member,
}


MAKERS = {
    "kmqpy/kafka/client/group_member.py": {"static"},
    "kmqpy/kafka/client/marker_writer.py": {"client-jvm", "client-range"},
    "kmqpy/kafka/client/sender.py": {"sender"},
    "kmqpy/kafka/copies/copy_transaction.py": {"transactions", "forgotten", "tracker", "redrive"},
    "kmqpy/kafka/settings_mirror.py": set(),  # not idempotent: only such producers meet fatal errors
    "tracker/redelivery/tick_writer.py": {"ticks"},
}
"""Who makes producers, or consumers that are members of a group, and the cases for their fatal errors."""


def test_nobody_else_makes_what_a_fatal_error_can_end():
    root = Path(__file__).parents[2]
    sources = [path for room in ("kmqpy", "tracker") for path in (root / room).rglob("*.py")]
    makes = re.compile(r"librdkafka\.new_producer\b|_?consumer\.subscribe\(")
    found = {str(path.relative_to(root)) for path in sources if makes.search(path.read_text())}
    assert found == MAKERS.keys()
    assert set().union(*MAKERS.values()) == CASES.keys()


@pytest.fixture(scope="module")
def cut(request):
    """The cases that are asked for, each where the logs that it named are cut."""
    prepared = [item.callspec.params["name"] for item in request.session.items if _takes_part(item)]
    topics = "transaction.state.log", "offsets.topic"
    settings = {f"{topic}.num.partitions": f"{INTERNAL_PARTITIONS}" for topic in topics}
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(unconfirmed_starts, "_LATE_REQUEST_S", 0.5)
        cluster = stack.enter_context(Cluster(broker_settings=settings))
        # No member of a group joins anew because the broker was away.
        kafka = {"session.timeout.ms": 60_000}
        connection = KafkaConnection(bootstrap=cluster.bootstrap, kafka=kafka)
        zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
        formats = {name: "jvm" if name == "client-jvm" else "range" for name in prepared}
        queues = {
            name: stack.enter_context(LiveQueue(connection, zookeeper, name, markers=markers))
            for name, markers in formats.items()
        }
        begun = {name: CASES[name](queue, cluster) for name, queue in queues.items()}
        logs = {place: keep for case in begun.values() for place, keep in next(case).items()}
        for place, done in cut_logs(cluster, logs).items():
            assert done.end < done.former_end, place
        yield begun


def _takes_part(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and "cut" in item.fixturenames


BREADTH = {"client-jvm": pytest.mark.breadth}


@pytest.mark.parametrize("name", [pytest.param(name, marks=BREADTH.get(name, ())) for name in CASES])
def test_who_lives_through_a_log_that_was_cut_goes_on(cut, name):
    next(cut[name], None)
