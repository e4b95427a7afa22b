"""`kmq pipeline --follow` when its JVM dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import until

from tests.spark.sessions import CHEAP_QUERIES, QUICK_WORKERS, SMALL

pytestmark = pytest.mark.breadth


def jvm_of(pid):
    """The JVM that this process has started."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return next(
        child for child in children if b"org.apache.spark" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


def test_a_jvm_that_dies_gives_one_line(make_queue, tmp_path):
    queue = make_queue(1)
    queue.send('{"id": 1}')
    where = ["--bootstrap", queue.connection.bootstrap, "--zookeeper", queue.zookeeper.hosts]
    line = [str(Path(sys.executable).with_name("kmq")), "pipeline", queue.name, *where]
    line += ["--root", queue.connection.root, "--schema", "id int", "--out", str(tmp_path / "rows")]
    line += ["--follow", "--master", "local[1]"]
    settings = {**SMALL, **CHEAP_QUERIES, **QUICK_WORKERS}
    line += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        try:
            until(lambda: command.poll() is not None or list(tmp_path.glob("rows/*.parquet")), 300)
            os.kill(jvm_of(command.pid), signal.SIGKILL)
            output, errors = command.communicate(timeout=120)
        finally:
            command.kill()
    said = errors.decode().splitlines()
    assert command.returncode == 2, said
    assert output == b""
    assert "Spark: its JVM has gone" in said[-1]
    assert [one for one in said if "Traceback" in one or "Exception" in one or "kmqpy.spark" in one] == []
