"""A client that nobody has closed and nobody can use any more gives its partitions up."""

import gc
import threading
import weakref

import pytest
from support import collect, until

from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.queue import queue_for

PARTITIONS = [0, 1, 2, 3]


@pytest.fixture(autouse=True)
def no_collector():
    """References alone must do: the collector of cycles may not run for long."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def url(make_queue):
    live = make_queue(len(PARTITIONS))
    servers = f"zookeeper={live.zookeeper.hosts}&root={live.connection.root}"
    return f"kafka://{live.connection.bootstrap}?queue={live.name}&{servers}&idle_timeout_ms=2000"


@pytest.fixture
def own_threads():
    """A function that tells which threads of clients run that did not run before, for other tests."""
    before = {one.ident for one in threading.enumerate()}

    def found() -> set[str]:
        names = {one.name for one in threading.enumerate() if one.ident not in before}
        return names & {"kmq-client", "kmq-markers", "kmq-storage"}

    return found


def has_all(queue: KmqClient) -> bool:
    queue.receive(wait=0.2)
    return sorted(queue.partitions) == PARTITIONS


def test_of_the_issue_a_queue_that_was_not_closed_leaves_its_partitions_to_the_next(url, own_threads, caplog):
    queue = queue_for(url)
    queue.send("a")
    until(lambda: queue.receive(wait=0.2))
    assert queue.size() == 0  # connects to ZooKeeper, too
    collected = weakref.ref(queue)
    queue = queue_for(url)
    until(lambda: collected() is None)  # one of its threads may just be using it
    until(lambda: has_all(queue))
    told = [record.getMessage() for record in caplog.records if "was collected" in record.getMessage()]
    assert len(told) == 1
    queue.close()
    until(lambda: not own_threads(), 20, own_threads)


def test_messages_of_a_collected_queue_can_be_acknowledged_and_keep_no_partition(url, own_threads):
    queue = queue_for(url)
    queue.send_many(["a", "b"])
    messages = collect(queue, 2)
    queue = queue_for(url)
    until(lambda: has_all(queue))
    for message in messages:
        message.ack(confirmed=True)
    assert queue.in_flight() == 0
    del message
    messages.clear()
    queue.close()
    until(lambda: not own_threads(), 20, own_threads)


def test_one_that_is_still_used_is_not_collected(url, own_threads):
    messages = iter(queue_for(url))
    with queue_for(url) as sender:
        sender.send_many(["a", "b"])
    assert {next(messages).body for _ in "ab"} == {b"a", b"b"}
    messages.close()
    until(lambda: not own_threads(), 20, own_threads)
