"""An embedded Kafka and ZooKeeper, for demos, tests and a developer's desk.

    with Cluster() as cluster:
        print(cluster.bootstrap, cluster.zookeeper)

Needs the extra `kmqpy[dev]`. Unix only.
"""

from kmqpy.dev.cluster import Cluster
from kmqpy.dev.server import Server

__all__ = ["Cluster", "Server"]
