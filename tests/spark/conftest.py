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
from tests.spark.sessions import (
    CHEAP_QUERIES,
    JARS,
    JAVA_OPTIONS,
    QUICK_WORKERS,
    SINKS,
    SMALL,
    recording,
    small,
)

_MANY_TESTS = 200
"""Fewer than nearly all of this folder would record an archive of too few classes."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Again, if Spark gave up on a Python worker that was not there in ten seconds (nobody can set more)."""
    item.add_marker(pytest.mark.flaky(reruns=3, only_rerun=["Python worker failed to connect back"]))


@pytest.fixture(scope="session", autouse=True)
def worker_python() -> None:
    """Give all sessions, those of child processes too, Python workers that start in a third of the time."""
    os.environ["PYSPARK_PYTHON"] = str(Path(__file__).with_name("worker_python"))
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """Spark in this process; make no session of your own, tests of one that dies start a process."""
    many = sum("tests/spark/" in item.nodeid for item in request.session.items) >= _MANY_TESTS
    with recording() if many else contextlib.nullcontext([]) as java_options:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sockets and deprecations of PySpark itself
            settings = {**CHEAP_QUERIES, **QUICK_WORKERS, **SINKS}
            builder = small(SparkSession.builder.master("local[2]").config(map=settings), JARS)
            builder.config(JAVA_OPTIONS, " ".join([SMALL[JAVA_OPTIONS], *java_options]))
            session = builder.getOrCreate()
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
