"""A retry lane whose log is cut back, as by a power cut. On a Kafka of this file's own."""

from support import LiveQueue, bodies, collect, until

from kmqpy.dev import Cluster
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.cut_logs import cut_logs


def test_r46_copies_that_a_cut_took_out_of_the_retry_lane_come_again() -> None:
    """Nobody had taken them, so the retry lane's own markers say nothing of them."""
    sent = ["a", "b", "c"]
    with Cluster() as cluster:
        connection = KafkaConnection(bootstrap=cluster.bootstrap)
        zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
        with LiveQueue(connection, zookeeper, "q", lease_ms=600_000, retry_lane=True) as queue:
            queue.send(*sent)
            with queue.client() as client:
                client.nack(collect(client, len(sent)), confirmed=True)
            tracker = queue.tracker(wait=False)
            until(lambda: len(queue.records("q__retry")) == len(sent), what=tracker.problems)
            cut_logs(cluster, {("q__retry", 0): 0})
            with queue.client() as client:
                found = collect(client, len(sent))
                client.ack(found, confirmed=True)
            assert sorted(bodies(found)) == sent
