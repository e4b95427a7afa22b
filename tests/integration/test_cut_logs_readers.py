"""What statistics, peek, orphans, traces and the doctor say of queues whose logs were cut back (rule R39).

Each queue had 20 messages: a client took all of them and acknowledged all but 8, 9 and from 15 on. Then its
log was cut back to offset 10, and new messages were sent.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support import LiveQueue, bodies, collect, stopped_after, until

from kmqpy.dev import Cluster
from kmqpy.errors import ReceiptError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Finding, Kind
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.admin.stats import QueueStats
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers.life import LifeState
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import cut_logs

CUT_AT = 10
LEASE_S = 600
NEW = {"short": 3, "hidden": 15, "noticed": 15}
pytestmark = pytest.mark.breadth
"""How many messages were sent behind the cut. A short log ends below the group's commit still. Of the last
queue, a client has taken the first five of them, and acknowledged two."""


@dataclass(frozen=True)
class Cut:
    """The queues, the receipts of their old messages, and those of the new ones that were taken."""

    queues: dict[str, LiveQueue]
    receipts: dict[str, list[str]]
    new: list[str]


@pytest.fixture(scope="module")
def after_cut() -> Iterator[Cut]:
    with Cluster() as cluster:
        connection = KafkaConnection(bootstrap=cluster.bootstrap)
        zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
        made = {
            name: LiveQueue(connection, zookeeper, name, markers="range" if name == "noticed" else "jvm")
            for name in NEW
        }
        receipts: dict[str, list[str]] = {}
        for queue in made.values():
            queue.send(*(f"old {number}" for number in range(CUT_AT)))
            queue.send(*(f"old {number}" for number in range(CUT_AT, 20)))
            with queue.client() as client:
                taken = collect(client, 20, lease=LEASE_S)
                receipts[queue.name] = [one.receipt for one in taken]
                client.ack(
                    *(one for one in taken if one.offset < 8 or CUT_AT <= one.offset < 15), confirmed=True
                )
            assert queue.committed() == 20
        cut_logs(cluster, {(name, 0): CUT_AT for name in NEW})
        for name, count in NEW.items():
            with made[name].producer() as producer:  # the cut ends those that have sent before
                producer.send_many([f"new {number}" for number in range(count)], partition=0)
        with made["noticed"].client() as client:
            taken = collect(client, 5, lease=LEASE_S, max_messages=5)
            client.ack(*taken[:2], confirmed=True)
        assert bodies(taken) == [f"new {number}" for number in range(5)]
        yield Cut(made, receipts, [one.receipt for one in taken])
        for queue in made.values():
            queue.__exit__()


@pytest.fixture(params=NEW)
def queue(request, after_cut) -> LiveQueue:
    return after_cut.queues[request.param]


def waiting(queue: LiveQueue) -> list[str]:
    """The bodies of the messages that nobody has taken."""
    return [f"new {number}" for number in range(5 if queue.name == "noticed" else 0, NEW[queue.name])]


def held(queue: LiveQueue) -> list[str]:
    """The bodies of the messages in flight."""
    return ["old 8", "old 9", *(["new 2", "new 3", "new 4"] if queue.name == "noticed" else [])]


def stats(queue: LiveQueue) -> QueueStats:
    with Admin(queue.connection, queue.zookeeper) as admin:
        return admin.stats(queue.name)


def stored_cuts(registry: Registry, queue: LiveQueue) -> list[int] | None:
    """The places of the cuts in the stored offset; None while there is no stored offset."""
    stored = registry.offsets(queue.name).get(0)
    return None if stored is None else [cut.start for cut in stored.cuts.cuts]


def log_cuts(queue: LiveQueue) -> list[Finding]:
    with Admin(queue.connection, queue.zookeeper) as admin:
        return [one for one in admin.doctor(queue.name) if one.kind is Kind.LOG_CUT]


def test_r39_what_stands_behind_the_cut_waits(queue: LiveQueue) -> None:
    found = stats(queue)
    assert (found.depth, found.exact, found.in_flight) == (len(waiting(queue)), True, len(held(queue)))
    with KmqClient(queue.name, queue.connection) as looking:
        assert bodies(looking.peek(100)) == waiting(queue)
        assert bodies(looking.peek(2)) == waiting(queue)[:2]


def test_r39_messages_in_flight_that_were_cut_away_show_no_other_message(queue: LiveQueue) -> None:
    with KmqClient(queue.name, queue.connection) as looking:
        orphans = looking.orphans()
    assert sorted(one.message.body.decode() for one in orphans if one.message) == sorted(held(queue))
    assert len(orphans) == len(held(queue))
    assert [one.receipt for one in orphans] == [one.message.receipt for one in orphans if one.message]


def test_r39_the_doctor_names_the_cut_and_whether_it_was_noticed(queue: LiveQueue) -> None:
    (found,) = log_cuts(queue)
    assert f"{queue.name}, partition 0: its log was cut back to offset 10;" in found.what
    assert ("has noticed that yet" in found.what) == (queue.name != "noticed")


def test_r39_a_receipt_names_the_message_that_was_taken_and_an_id_the_one_that_is_there(
    after_cut: Cut, queue: LiveQueue
) -> None:
    """Message 12 was acknowledged, 17 was not; 9 stands below the cut."""
    old = after_cut.receipts[queue.name]
    last = CUT_AT + NEW[queue.name] - 1
    with KmqClient(queue.name, queue.connection) as looking:
        acknowledged, lost, kept = (looking.trace(old[at]) for at in (12, 17, 9))
        there = looking.trace(f"0-{last}")
        with pytest.raises(ReceiptError, match=f"there is no 0:{last + 1}"):
            looking.trace(f"0-{last + 1}")
    assert (acknowledged.state, acknowledged.lost) == (LifeState.ACKNOWLEDGED, ("0:12 (lost)",))
    assert [event.what.value for event in acknowledged.events] == ["taken", "acknowledged"]
    assert (lost.state, lost.records, lost.deleted) == (LifeState.LOST, ("0:17 (lost)",), ())
    assert (kept.state, kept.lost) == (LifeState.IN_FLIGHT, ())
    assert (there.state, there.records, len(there.events)) == (LifeState.WAITING, (f"0:{last}",), 1)


def test_r39_new_messages_are_traced_by_receipt_and_by_id(after_cut: Cut) -> None:
    queue = after_cut.queues["noticed"]
    with KmqClient(queue.name, queue.connection) as looking:
        for at, events in ((0, ["sent", "taken", "acknowledged"]), (4, ["sent", "taken"])):
            by_receipt, by_id = looking.trace(after_cut.new[at]), looking.trace(f"0-{CUT_AT + at}")
            assert by_receipt == by_id
            assert [event.what.value for event in by_id.events] == events
            assert by_id.records == (f"0:{CUT_AT + at}",)


@pytest.mark.parametrize("snapshot_after_markers", [1_000, 1])
def test_r39_a_tracker_counts_the_same_and_stores_what_others_read_on_from(
    after_cut: Cut, snapshot_after_markers: int
) -> None:
    """Without a snapshot, they read on from the take of message 8, which stands before the first tick that
    tells of the cut."""
    queue = after_cut.queues["noticed"]
    labels = {"queue": queue.name, "partition": "0"}
    settings = {"http_port": 0, "count_interval_ms": 100, "snapshot_after_markers": snapshot_after_markers}
    with stopped_after(queue.tracker(**settings)) as tracker:

        def shown(metric: str) -> float | None:
            return tracker.metrics.registry.get_sample_value(f"kmq_{metric}", labels)

        until(lambda: shown("depth") == len(waiting(queue)), what=lambda: shown("depth"))
        until(lambda: shown("in_flight") == len(held(queue)), what=lambda: shown("in_flight"))
        with queue.registry() as registry:
            told = [CUT_AT] if snapshot_after_markers == 1 else []
            until(lambda: stored_cuts(registry, queue) == told)
    test_r39_what_stands_behind_the_cut_waits(queue)
    test_r39_messages_in_flight_that_were_cut_away_show_no_other_message(queue)


def test_r39_release_all_and_purge_name_messages_in_flight_by_their_numbers(after_cut: Cut) -> None:
    """Last of all: this changes the queue."""
    queue = after_cut.queues["noticed"]
    with KmqClient(queue.name, queue.connection) as releasing:
        assert releasing.release_all() == len(held(queue))
        until(lambda: stats(queue).released == len(held(queue)))
        assert releasing.purge() >= len(held(queue))
    found = stats(queue)
    assert (found.depth, found.in_flight) == (0, 0)
