"""What statistics, peek, orphans, traces and the doctor say of queues whose logs were cut back (rule R39).

Each queue had 20 messages: a client took all of them and acknowledged all but 8, 9 and from 15 on. Then its
log was cut back to offset 10, and new messages were sent.
"""

from collections.abc import Iterator

import pytest
from support import LiveQueue, bodies, collect

from kmqpy.dev import Cluster
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.findings import Finding, Kind
from kmqpy.kafka.admin.stats import QueueStats
from kmqpy.kafka.queue import KafkaQueue
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import cut_logs

CUT = 10
LEASE_S = 600
NEW = {"short": 3, "hidden": 15, "noticed": 15}
"""How many messages were sent behind the cut. A short log ends below the group's commit still. Of the last
queue, a client has taken the first five of them, and acknowledged two."""


@pytest.fixture(scope="module")
def queues() -> Iterator[dict[str, LiveQueue]]:
    with Cluster() as cluster:
        connection = KafkaConnection(bootstrap=cluster.bootstrap)
        zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
        made = {name: LiveQueue(connection, zookeeper, name) for name in NEW}
        made["noticed"].markers = "range"
        for queue in made.values():
            queue.send(*(f"old {number}" for number in range(CUT)))
            queue.send(*(f"old {number}" for number in range(CUT, 20)))
            with queue.client() as client:
                taken = collect(client, 20, lease=LEASE_S)
                client.ack(*(one for one in taken if one.offset < 8 or CUT <= one.offset < 15), wait=True)
            assert queue.committed() == 20
        cut_logs(cluster, {(name, 0): CUT for name in NEW})
        for name, count in NEW.items():
            made[name].send(*(f"new {number}" for number in range(count)))
        with made["noticed"].client() as client:
            taken = collect(client, 5, lease=LEASE_S, max_messages=5)
            client.ack(*taken[:2], wait=True)
        assert bodies(taken) == [f"new {number}" for number in range(5)]
        yield made
        for queue in made.values():
            queue.__exit__()


@pytest.fixture(params=NEW)
def queue(request, queues) -> LiveQueue:
    return queues[request.param]


def waiting(queue: LiveQueue) -> list[str]:
    """The bodies of the messages that nobody has taken."""
    return [f"new {number}" for number in range(5 if queue.name == "noticed" else 0, NEW[queue.name])]


def held(queue: LiveQueue) -> list[str]:
    """The bodies of the messages in flight."""
    return ["old 8", "old 9", *(["new 2", "new 3", "new 4"] if queue.name == "noticed" else [])]


def stats(queue: LiveQueue) -> QueueStats:
    with Admin(queue.connection, queue.zookeeper) as admin:
        return admin.stats(queue.name)


def log_cuts(queue: LiveQueue) -> list[Finding]:
    with Admin(queue.connection, queue.zookeeper) as admin:
        return [one for one in admin.doctor(queue.name) if one.kind is Kind.LOG_CUT]


def test_what_stands_behind_the_cut_waits(queue: LiveQueue) -> None:
    found = stats(queue)
    assert (found.depth, found.exact, found.in_flight) == (len(waiting(queue)), True, len(held(queue)))
    with KafkaQueue(queue.name, queue.connection) as looking:
        assert bodies(looking.peek(100)) == waiting(queue)
        assert bodies(looking.peek(2)) == waiting(queue)[:2]


def test_messages_in_flight_that_were_cut_away_show_no_other_message(queue: LiveQueue) -> None:
    with KafkaQueue(queue.name, queue.connection) as looking:
        orphans = looking.orphans()
    assert sorted(one.message.body.decode() for one in orphans if one.message) == sorted(held(queue))
    assert len(orphans) == len(held(queue))


def test_the_doctor_names_the_cut_and_whether_it_was_noticed(queue: LiveQueue) -> None:
    (found,) = log_cuts(queue)
    assert f"{queue.name}, partition 0: its log was cut back to offset 10;" in found.what
    assert ("has noticed that yet" in found.what) == (queue.name != "noticed")
