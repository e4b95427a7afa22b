"""Clients of a queue with lanes: order, shares, one assignment, acknowledgements."""

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import bodies, collect, delete_topic, nothing_comes, until

from kmqpy.errors import NotSupported, ReceiptError
from kmqpy.kafka import settings_mirror, topic_identity
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.client import group_member, lanes
from kmqpy.worker.asyncio import AsyncWorker
from kmqpy.worker.outcome import Retry
from kmqpy.worker.worker import Worker


@pytest.fixture
def laned(make_queue):
    return make_queue(retry_lane=True, priorities=3, lease_ms=30_000)


def send_each(queue, count, **more):
    """Send `count` messages with each priority: a0, a1, … to the main lane, b… and c… to the others."""
    with queue.producer() as producer:
        return [
            producer.send_many([f"{name}{i}" for i in range(count)], priority=priority, **more)
            for priority, name in enumerate("abc")
        ]


def ready(client, partitions=1):
    """Wait until it receives from all lanes; what it has taken meanwhile is given back."""

    def receives():
        client.nack(client.receive(1, wait=0), count=False)
        return all(len(one.consumer.partitions) == partitions for one in client._consumer.current._lanes)

    until(receives)


def read_ahead(client, *counts):
    """Wait until it has read so many messages of each lane ahead, in the order of precedence."""
    lanes_of = client._consumer.current._lanes
    fetchers = [one.consumer.receiver._member._fetcher for one in lanes_of[: len(counts)]]

    def is_read():
        for fetcher in fetchers:
            fetcher.fetch_ahead()
        return all(len(one._ahead) >= count for one, count in zip(fetchers, counts, strict=True))

    until(is_read, every=0.001)


def retried(queue, *texts, partition=0):
    """Write what a tracker would have appended to the retry lane."""
    for text in texts:
        queue.append(None, text.encode(), topic=f"{queue.name}__retry", partition=partition)


def test_lanes_are_taken_in_the_order_of_precedence(laned):
    (_, _, ids) = send_each(laned, 3)
    retried(laned, "r0")
    client = laned.client()
    found = []
    while len(found) < 10:
        found += client.receive(wait=5)
    assert Counter(bodies(found)) == Counter(f"{n}{i}" for n in "abc" for i in range(3)) + Counter(["r0"])
    assert {message.queue for message in found} == {laned.name}
    assert len({message.id for message in found}) == 10
    assert {message.id for message in found if message.body[:1] == b"c"} == set(ids)
    send_each(laned, 3)
    retried(laned, "r1")
    read_ahead(client, 1, 3, 3, 3)
    batch = bodies(client.receive(wait=5))
    assert batch == ["r1", *(f"{name}{i}" for name in "cba" for i in range(3))]
    client.ack(found)
    assert client.leased == 10


def test_the_first_message_of_a_new_client_is_of_the_highest_lane_that_has_one(laned):
    send_each(laned, 3)
    found = []
    for _ in range(9):
        client = laned.client()
        found += collect(client, 1, max_messages=1)
        client.ack(found[-1], confirmed=True)
        client.close()
    assert [text[0] for text in bodies(found)] == [*"cccbbbaaa"]


def test_after_long_work_the_highest_lane_is_first(laned, monkeypatch):
    """Also with a message that came meanwhile."""
    monkeypatch.setattr(group_member, "_IDLE_AFTER_S", 0.1)
    with laned.producer() as producer:
        producer.send_many([f"a{i}" for i in range(50)])
        producer.send_many([f"b{i}" for i in range(3)], priority=1)
    client = laned.client()
    found = collect(client, 1, max_messages=1)
    for priority in (0, 2, 0, 0, 1):
        if priority:
            laned.send(f"{priority}", priority=priority)
        time.sleep(0.7)
        found += collect(client, 1, max_messages=1)
    assert bodies(found) == ["b0", "b1", "2", "b2", "a0", "1"]


def test_an_urgent_flood_leaves_room_for_the_others(laned):
    send_each(laned, 200)
    retried(laned, *(f"r{i}" for i in range(200)))
    client = laned.client()
    ready(client)
    read_ahead(client, 150, 150, 150, 150)
    batch = Counter(text[0] for text in bodies(client.receive(100, wait=5)))
    assert batch == {"r": 75, "c": 19, "b": 5, "a": 1}
    singles = Counter(text[0] for _ in range(64) for text in bodies(client.receive(1, wait=5)))
    assert singles["r"] == 48
    assert singles["a"] >= 1


def test_what_a_lane_leaves_over_goes_to_others(laned):
    client = laned.client()
    ready(client)
    retried(laned, *(f"r{i}" for i in range(30)))
    read_ahead(client, 30)
    assert len(client.receive(30, wait=5)) == 30
    assert client.leased == 30


def test_an_iteration_looks_at_higher_lanes_meanwhile(laned, monkeypatch):
    monkeypatch.setattr(lanes, "_LOOK_UP_EVERY_S", 0.0)
    with laned.producer() as producer:
        producer.send_many([f"a{i}" for i in range(100)], partition=0)
    taken = []
    client = laned.client()
    for message in client:
        taken.append(message.body.decode())
        message.ack()
        if len(taken) == 10:
            retried(laned, "r0")
            read_ahead(client, 1)
        if len(taken) > 10 and message.body == b"r0":
            break
    assert len(taken) < 15


def test_receipts_lead_to_the_lanes_in_another_process_too(laned):
    send_each(laned, 1, partition=0)
    client = laned.client()
    found = collect(client, 3)
    receipts = [one.receipt for one in sorted(found, key=lambda one: one.body, reverse=True)]
    with pytest.raises(ReceiptError):
        client.ack(receipts[0], receipts[1], "1.x")
    assert client.leased == 3
    with laned.producer() as other:
        other.ack(receipts[:2], confirmed=True)
        other.nack(receipts[2], confirmed=True)
    client.ack(found, confirmed=True)
    assert client.leased == 0
    for lane in laned.settings.lanes()[1:]:
        assert len(laned.records(lane.markers_topic)) >= 2, lane.name


@pytest.mark.breadth
def test_r48_lanes_of_a_partition_have_one_client_and_a_killed_one_loses_nothing(make_queue):
    queue = make_queue(2, retry_lane=True, lease_ms=30_000)
    queue.tracker()
    first = queue.client()
    ready(first, 2)
    taker = queue.taker_process("--lease", "2")
    until(lambda: first.receive(1, wait=0.1) or len(first.partitions) == 1)
    mine = set(first.partitions)
    for partition in range(2):
        retried(queue, *(f"{partition}-{i}" for i in range(20)), partition=partition)
    taken = {one["partition"] for one in taker.read(20)}
    taker.kill()
    assert taken == {0, 1} - mine
    got = []
    until(lambda: got.extend(first.receive(wait=0.5)) or len(set(bodies(got))) == 40)
    first.ack(got)
    assert Counter(bodies(got)).most_common(1)[0][1] == 1
    nothing_comes(first, 1.0)
    assert first.partitions == [0, 1]


def test_a_client_notices_lanes_that_are_added(make_queue, monkeypatch):
    queue = make_queue(lease_ms=30_000)
    monkeypatch.setattr(topic_identity, "_ASK_FOR_OTHERS_EVERY_S", 0.3)
    client, urgent = queue.client(), queue.producer()
    with pytest.raises(NotSupported, match="--priorities"):
        urgent.send(b"u", priority=9)
    assert not client.capabilities.priority
    queue.send("before")
    before = collect(client, 1)
    with Admin(queue.connection, queue.zookeeper) as admin:
        admin.alter_queue(queue.name, retry_lane=True, priorities=2)
    monkeypatch.setattr(settings_mirror, "_MAX_CACHE_AGE_S", 0)
    urgent.send(b"u", priority=9)
    retried(queue, "r")
    assert sorted(bodies(collect(client, 2, timeout=20))) == ["r", "u"]
    client.ack(before, confirmed=True)
    assert client.capabilities.priority
    assert client.settings.retry_lane


def test_a_client_by_which_two_threads_wait_for_messages_notices_lanes_that_are_added(
    make_queue, monkeypatch
):
    queue = make_queue(lease_ms=30_000)
    monkeypatch.setattr(topic_identity, "_ASK_FOR_OTHERS_EVERY_S", 0.3)
    client = queue.client()
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(client.receive, 1, wait=60) for _ in range(2)]
        until(lambda: client.partitions)
        with Admin(queue.connection, queue.zookeeper) as admin:
            admin.alter_queue(queue.name, retry_lane=True)
        until(lambda: client.settings.retry_lane)
        retried(queue, "r")
        retried(queue, "s")
        assert sorted(bodies(one.result()[0] for one in waiting)) == ["r", "s"]


def test_an_id_leads_to_the_lane(make_queue):
    queue = make_queue(priorities=2, late_acks=True, lease_ms=30_000)
    with queue.producer() as producer:
        sent = producer.send(b"u", priority=1)
        assert sent == "priority1:0-0"
        client = queue.client()
        (message,) = collect(client, 1)
        assert (message.id, message.receipt) == (sent, producer.receipt(sent))
        producer.ack(producer.receipt(sent), confirmed=True)
        with pytest.raises(ReceiptError, match="not that of a message"):
            producer.receipt("priority2:0-0")


def test_a_retry_overtakes_a_backlog(make_queue):
    queue = make_queue(2, retry_lane=True, lease_ms=30_000)
    queue.tracker()
    for partition in range(2):
        queue.fill(10_000, partition)
    client = queue.client()
    given_back = collect(client, 40, max_messages=40)
    client.nack(given_back, delay=1.0)
    until(lambda: len(queue.records(f"{queue.name}__retry")) == 40)
    retries, others = set(), 0
    while len(retries) < 40 and others < 5_000:
        for message in client.receive(50, wait=5):
            if message.attempts > 1:
                retries.add(message.id)
            else:
                others += 1
    assert retries == {one.id for one in given_back}


def test_a_lane_that_is_removed_is_noticed_without_an_error(make_queue, monkeypatch):
    queue = make_queue(retry_lane=True, priorities=2, lease_ms=30_000)
    monkeypatch.setattr(topic_identity, "_ASK_FOR_OTHERS_EVERY_S", 0.3)
    client = queue.client()
    ready(client)
    with Admin(queue.connection, queue.zookeeper) as admin:
        admin.alter_queue(queue.name, priorities=1)
        delete_topic(queue.topics, f"{queue.name}__priority1")
        until(lambda: client.receive(wait=0.1) or not client.capabilities.priority)
    retried(queue, "r")
    client.send(b"a")
    assert sorted(bodies(collect(client, 2))) == ["a", "r"]


@pytest.mark.parametrize("of_coroutines", [False, pytest.param(True, marks=pytest.mark.breadth)])
def test_workers_handle_all_lanes(make_queue, of_coroutines):
    queue = make_queue(retry_lane=True, priorities=2)
    queue.tracker()
    seen = []

    def handle(message):
        seen.append((message.body, message.attempts))
        if message.attempts == 1:
            raise Retry(0)

    async def handle_soon(message):
        handle(message)

    with queue.producer() as opened:
        opened.send(b"a")
        opened.send(b"u", priority=1)
        expected = sorted((body, attempt) for body in (b"a", b"u") for attempt in (1, 2))
        if of_coroutines:

            async def work():
                worker = AsyncWorker(opened, handle_soon)
                running = asyncio.create_task(worker.run())
                await asyncio.to_thread(until, lambda: sorted(seen) == expected)
                worker.stop()
                await running

            asyncio.run(work())
        else:
            with Worker(opened, handle, handle_signals=False):
                until(lambda: sorted(seen) == expected)
