"""The one Spark session that all tests here share. A file of its own a session would cost a JVM each."""

import contextlib
import fcntl
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support import LiveQueue

from kmqpy.dev import class_archive
from kmqpy.kafka.settings import KafkaConnection
from tests.spark.sessions import CLASSES, DATABASES, INTERPRETED, small


def pytest_itemcollected(item: pytest.Item) -> None:
    """Again, if Spark gave up on a Python worker that was not there in ten seconds (nobody can set more)."""
    item.add_marker(pytest.mark.flaky(reruns=3, only_rerun=["Python worker failed to connect back"]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the archive of Spark's classes, once for this checkout: a dozen sessions use it in each run.

    Before all tests, as none has the time for it. If it takes too long, the tests go on without.
    """
    wanted = any(item.path.is_relative_to(Path(__file__).parent) for item in session.items)
    if CLASSES is None or CLASSES.exists() or not wanted or session.config.option.collectonly:
        return
    CLASSES.parent.mkdir(parents=True, exist_ok=True)
    with (
        CLASSES.with_suffix(".lock").open("w") as lock,
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(BlockingIOError, subprocess.TimeoutExpired),  # another worker makes it
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        recording = Path(folder, "spark.jsa")
        command = [sys.executable, "-m", "tests.spark.training", str(recording)]
        subprocess.run(command, cwd=session.config.rootpath, check=True, capture_output=True, timeout=90)
        class_archive.keep(recording, CLASSES)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Spark in this process; make no session of your own, tests of one that dies start a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sockets and deprecations of PySpark itself
        builder = SparkSession.builder.master("local[2]").config(map=INTERPRETED)
        session = small(builder, DATABASES).getOrCreate()
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
