"""The same frames through Spark Connect, of which a local server is started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kmqpy.kafka.markers.codec import Marker, Op


@pytest.mark.timeout(300)
def test_frames_by_way_of_connect(make_queue):
    queue = make_queue(1)
    producer = queue.producer()
    for _ in range(3):
        producer.send("any")
    queue.mark_all([Marker(0, 0, Op.TAKE, 10**9, runs=((0, 2),)), Marker(0, 0, Op.END)])
    job = Path(__file__).parents[1] / "connect_job.py"
    # SPARK_TESTING: a port of its own, rather than Connect's one for all.
    environment = {**os.environ, "SPARK_TESTING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(job), queue.connection.bootstrap, queue.name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "session": "pyspark.sql.connect.session",
        "states": [[0, 0, "processed"], [0, 1, "in_flight"], [0, 2, "pending"]],
        "depth": [
            {"partition": 0, "pending": 1, "in_flight": 1, "overdue": 0}
            | {"processed": 1, "redelivered": 0, "dead": 0}
        ],
        "undelivered": 0,
        "latency": 1,
        "markers": ["end", "take"],
    }
