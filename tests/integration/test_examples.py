"""Every example runs as its text says, and says so by its exit code."""

import contextlib
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


@pytest.mark.breadth
def test_without_servers_each_says_so_in_one_line() -> None:
    """All at a time: each waits for the servers for some seconds."""
    environment = {**os.environ, "KMQ_BOOTSTRAP": "127.0.0.1:1", "KMQ_ZOOKEEPER": "127.0.0.1:1"}
    needing = [example for example in EXAMPLES if example.stem != "embedded"]
    with contextlib.ExitStack() as ends:
        started = [
            (
                example.stem,
                ends.enter_context(
                    subprocess.Popen(
                        [sys.executable, str(example)], env=environment, stderr=subprocess.PIPE, text=True
                    )
                ),
            )
            for example in needing
        ]
        for _, process in started:
            ends.callback(process.kill)
        said = {name: (process.communicate(timeout=120)[1], process.returncode) for name, process in started}
    for name, (error, code) in said.items():
        assert code == 1, name
        assert error.startswith("error: "), name
        assert "kmq dev up" in error, name
        assert error.count("\n") == 1, name
