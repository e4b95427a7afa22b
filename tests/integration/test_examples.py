"""Every example runs as its text says, and says so by its exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(cluster, example: Path) -> None:
    environment = {**os.environ, "KMQ_BOOTSTRAP": cluster.bootstrap, "KMQ_ZOOKEEPER": cluster.zookeeper}
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
