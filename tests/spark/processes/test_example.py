"""The example, as a user would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from support import stopped_after

from tests.spark.sessions import SMALL

EXAMPLE = Path(__file__).parents[3] / "examples" / "spark_pipeline.py"


@pytest.mark.timeout(300)
def test_the_example_by_way_of_connect(make_queue, tmp_path):
    queue = make_queue(4)
    out, report = tmp_path / "orders", tmp_path / "report"
    defaults = [f"{name} {value}\n" for name, value in SMALL.items()]
    (tmp_path / "spark-defaults.conf").write_text("".join(defaults))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KMQ_BOOTSTRAP": queue.connection.bootstrap,
        "KMQ_ZOOKEEPER": "",
        "SPARK_TESTING": "1",
        "SPARK_CONF_DIR": str(tmp_path),
    }
    command = [sys.executable, str(EXAMPLE), "--queue", queue.name, "--orders", "200", "--out", str(out)]
    command += ["--report", str(report), "--remote", "local[2]"]
    with stopped_after(queue.tracker()):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = pd.read_parquet(out)  # nothing was tried twice, so every file counts
    good = [number for number in range(200) if number % 100 != 99]
    assert sorted(zip(rows["id"], rows["attempts"], strict=True)) == [
        (number, 2 if number % 10 == 0 else 1) for number in good
    ]
    assert "no order: JSONDecodeError" in (report / "report.txt").read_text()
    assert pd.read_parquet(f"{out}-by-customer")["orders"].sum() == len(good)
