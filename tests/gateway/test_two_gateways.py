"""Two gateways over one Kafka, each with some of the partitions."""

from contextlib import ExitStack

import pytest
from gateway_support import QUEUE, Calls, ids, payloads, running

from kmqpy.core.clock import wait_until
from kmqpy.gateway.tracker_process import TrackerProcess
from kmqpy.queue import storage_for


@pytest.fixture
def two(cluster, zookeeper, queue_name):
    """Calls of one queue at two gateways that know each other."""
    root = f"/{queue_name}"
    url = f"kafka://{cluster.bootstrap}?zookeeper={cluster.zookeeper}&root={root}"
    options = {"peers": zookeeper, "roots": {"": root}}
    with (
        TrackerProcess(url),
        running(storage_for(url), **options) as first,
        running(storage_for(url), **options) as second,
    ):
        gateways = first.gateway, second.gateway
        assert wait_until(lambda: all(len(one._peers.others) == 1 for one in gateways), 20)
        yield Calls(first, queue_name), Calls(second, queue_name)


def test_each_gets_messages_of_the_other_and_renewals_count_once(two):
    first, second = two
    first.send(*range(40))
    both = []
    # Both join, and each has some of the partitions.
    assert wait_until(lambda: both.extend((*first.poll(1), *second.poll(1))) or len(both) >= 8, 60)
    rest = []
    assert wait_until(lambda: rest.extend(second.poll(10)) or len(both) + len(rest) == 40, 60)
    assert sorted(payloads([*both, *rest])) == [*range(40)]
    for calls in two:
        assert wait_until(lambda calls=calls: calls.claims() == 40, 20)
    for calls in two:
        calls.renew(*ids([*both, *rest]), ttl=600)
    for calls in two:
        assert wait_until(lambda calls=calls: calls.claims() == 40, 20), calls.claims()
    second.ack(*ids([*both, *rest]))
    for calls in two:
        assert wait_until(lambda calls=calls: calls.claims() == 0, 20), calls.claims()


def test_roots_on_one_kafka_have_moves_of_their_own(cluster, zookeeper, queue_name):
    with ExitStack() as both:
        for number in range(2):
            root, origin, target = (f"{before}{queue_name}-{number}" for before in ("/", "a-", "b-"))
            url = f"kafka://{cluster.bootstrap}?zookeeper={cluster.zookeeper}&root={root}"
            served = both.enter_context(running(storage_for(url), peers=zookeeper, roots={"": root}))
            Calls(served, origin).send(number)
            started = served.ask("POST", f"{QUEUE}/_move?from={origin}&to={target}")
            assert started.status == 200, started
            moved = Calls(served, target)
            assert wait_until(lambda calls=moved, number=number: payloads(calls.peek()) == [number], 30)
