"""Spark Connect, of which a local server is started: the example as a user would run it, and the frames."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from support import stopped_after

from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.records import read_marker
from tests.spark.sessions import SMALL

JOB = Path(__file__).parents[1] / "connect_job.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "spark_pipeline.py"


@pytest.mark.timeout(600)
def test_the_example_and_frames_by_way_of_connect(make_queue, queue_name, tmp_path):
    orders, queue = make_queue(4), make_queue(1, f"{queue_name}-frames")
    queue.send("any", "any", "any", "odd")
    queue.mark_all([Marker(0, 0, Op.TAKE, 10**9, runs=((0, 2),)), Marker(0, 0, Op.END)])
    out, report = tmp_path / "orders", tmp_path / "report"
    defaults = [f"{name} {value}\n" for name, value in SMALL.items()]
    (tmp_path / "spark-defaults.conf").write_text("".join(defaults))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KMQ_BOOTSTRAP": orders.connection.bootstrap,
        "KMQ_ZOOKEEPER": "",
        "SPARK_TESTING": "1",  # a port of its own, rather than Connect's one for all
        "SPARK_CONF_DIR": str(tmp_path),
    }
    command = [sys.executable, str(JOB), queue.connection.bootstrap, queue.name, str(EXAMPLE)]
    command += ["--queue", orders.name, "--orders", "200", "--out", str(out)]
    command += ["--report", str(report), "--remote", "local[2]"]
    with stopped_after(orders.tracker()):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = pd.read_parquet(out)  # nothing was tried twice, so every file counts
    good = [number for number in range(200) if number % 100 != 99]
    assert sorted(zip(rows["id"], rows["attempts"], strict=True)) == [
        (number, 2 if number % 10 == 0 else 1) for number in good
    ]
    assert "no order: JSONDecodeError" in (report / "report.txt").read_text()
    assert pd.read_parquet(f"{out}-by-customer")["orders"].sum() == len(good)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "session": "pyspark.sql.connect.session",
        "states": [[0, 0, "processed"], [0, 1, "in_flight"], [0, 2, "pending"], [0, 3, "pending"]],
        "depth": [
            {"partition": 0, "pending": 2, "in_flight": 1, "overdue": 0}
            | {"processed": 1, "redelivered": 0, "dead": 0}
        ],
        "undelivered": 0,
        "latency": 1,
        "taken": ["any", "any"],
        "markers": ["end", "take"],
    }
    markers = map(read_marker, queue.records(queue.settings.markers_topic))
    (nack,) = [marker for marker in markers if marker.op is Op.NACK]
    assert (nack.offset, nack.reason) == (3, "odd")
    assert queue.ended() == {0, 1, 2}
