"""The one Spark session that all tests here share. A file of its own a session would cost a JVM each."""

import contextlib
import warnings
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession
from support import LiveQueue

from kmqpy.config import Connection
from kmqpy.spark import configure_spark_with_kmq

SMALL = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # Half the start; what runs for seconds gains nothing from the second compiler.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def small(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Settings for little data and little time."""
    return configure_spark_with_kmq(builder.config(map=SMALL))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Spark in this process; make no session of your own, tests of one that dies start a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sockets and deprecations of PySpark itself
        session = small(SparkSession.builder.master("local[2]").appName("kmq tests")).getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def make_queue(cluster, queue_name):
    """Make a queue of its own on the shared servers: `make_queue(partitions, **settings)`."""
    connection = Connection(bootstrap=cluster.bootstrap, zookeeper=cluster.zookeeper)
    with contextlib.ExitStack() as queues:

        def make(partitions: int = 1, name: str = queue_name, **settings) -> LiveQueue:
            return queues.enter_context(LiveQueue(connection, name, partitions, **settings))

        yield make
