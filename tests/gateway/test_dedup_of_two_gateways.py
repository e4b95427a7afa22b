"""A dedup queue on Kafka behind two gateways: whichever is asked, the one that has the partition answers."""

import uuid

from gateway_support import DEDUP, Calls, ids, payloads, running

from kmqpy.core.clock import wait_until
from kmqpy.gateway.tracker_process import TrackerProcess
from kmqpy.queue import storage_for


def test_equal_messages_collapse_whichever_gateway_is_asked(cluster, zookeeper):
    root = f"/two-{uuid.uuid4().hex[:8]}"
    url = f"kafka://{cluster.bootstrap}?zookeeper={cluster.zookeeper}&root={root}"
    name = f"d-{uuid.uuid4().hex[:12]}"
    with (
        TrackerProcess(url),
        running(storage_for(url), peers=zookeeper, roots={"": root}) as one,
        running(storage_for(url), peers=zookeeper, roots={"": root}) as other,
    ):
        for served in (one, other):
            assert wait_until(lambda peers=served.gateway._peers: len(peers.others) == 1, 20)
        first, second = Calls(one, name, DEDUP), Calls(other, name, DEDUP)
        found = []

        def poll_in_turns(count):
            for calls in (first, second):
                found.extend(calls.poll(count - len(found)) if len(found) < count else [])
            return len(found) >= count

        for number in range(5):  # the first polls are those in which the gateways join
            found.clear()
            first.send({"n": number, "m": "a"}, {"n": number})
            second.send({"m": "a", "n": number}, {"n": number})
            assert wait_until(lambda: poll_in_turns(2), 20, every_s=0.02), found
            assert sorted(map(len, payloads(found))) == [1, 2]
            (second if number % 2 else first).ack(*ids(found))
        # Passed over is what a poll has come past, and the commit after it.
        assert wait_until(lambda: (first.poll(), second.poll(), first.size()) == ([], [], 0), 20)
