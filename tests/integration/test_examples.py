"""Every example runs as its text says, and says so by its exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kmqpy import KafkaConnection
from kmqpy.kafka.admin.admin import Admin

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted({*FOLDER.glob("*.py")} - {FOLDER / "spark_pipeline.py"})  # that one is run by tests/spark


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(cluster, zookeeper, queue_name, example: Path) -> None:
    connection = KafkaConnection(bootstrap=cluster.bootstrap, root=f"/kmq-{queue_name}")
    environment = {
        **os.environ,
        "KMQ_BOOTSTRAP": connection.bootstrap,
        "KMQ_ZOOKEEPER": zookeeper.hosts,
        "KMQ_ROOT": connection.root,
    }
    done = subprocess.run(
        [sys.executable, str(example)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout, "it says nothing"
    assert "Traceback" not in done.stderr
    with Admin(connection, zookeeper) as admin:
        assert admin.list_queues() == [], "it left its queue behind"


@pytest.mark.parametrize(
    "example", sorted({*EXAMPLES} - {FOLDER / "embedded.py"}), ids=lambda path: path.stem
)
def test_without_servers_it_says_so_in_one_line(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example)],
        env={**os.environ, "KMQ_BOOTSTRAP": "127.0.0.1:1", "KMQ_ZOOKEEPER": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "kmq dev up" in done.stderr
    assert done.stderr.count("\n") == 1
