"""The one Spark session that all tests here share. A file of its own a session would cost a JVM each."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support import LiveQueue

from kmqpy.kafka.settings import KafkaConnection
from tests.spark.sessions import CHEAP_QUERIES, JARS, QUICK_WORKERS, SINKS, small


def pytest_itemcollected(item: pytest.Item) -> None:
    """Again, if Spark gave up on a Python worker that was not there in ten seconds (nobody can set more)."""
    item.add_marker(pytest.mark.flaky(reruns=3, only_rerun=["Python worker failed to connect back"]))


@pytest.fixture(scope="session", autouse=True)
def worker_python() -> None:
    """Give all sessions, those of child processes too, Python workers that start in a third of the time."""
    os.environ["PYSPARK_PYTHON"] = str(Path(__file__).with_name("worker_python"))
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Spark in this process; make no session of your own, tests of one that dies start a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sockets and deprecations of PySpark itself
        settings = {**CHEAP_QUERIES, **QUICK_WORKERS, **SINKS}
        builder = SparkSession.builder.master("local[2]").config(map=settings)
        session = small(builder, JARS).getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def make_queue(cluster, zookeeper, queue_name):
    """Make a queue of its own on the shared servers: `make_queue(partitions, **settings)`."""
    connection = KafkaConnection(bootstrap=cluster.bootstrap)
    with contextlib.ExitStack() as queues:

        def make(partitions: int = 1, name: str = queue_name, **settings) -> LiveQueue:
            return queues.enter_context(LiveQueue(connection, zookeeper, name, partitions, **settings))

        yield make
