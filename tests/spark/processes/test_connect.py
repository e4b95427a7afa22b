"""Spark Connect, of which a local server is started: the example as a user would run it, frames, trackers."""

import contextlib
import json
import subprocess
import sys
import uuid
from pathlib import Path

import pandas as pd
import pytest

from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.records import read_marker
from tests.spark.killed_trackers import DYING_WORKERS, Deaths, killed
from tests.spark.sessions import SMALL

pytestmark = pytest.mark.breadth

JOB = Path(__file__).parents[1] / "connect_job.py"
EXAMPLE = Path(__file__).parents[3] / "examples" / "spark_pipeline.py"
ORDERS = 200


@contextlib.contextmanager
def connect_job(queue, orders, deaths):
    """What the job has found, while the server that it has started goes on; `deaths` are of its workers."""
    folder = deaths.folder
    defaults = [f"{name} {value}\n" for name, value in {**SMALL, **DYING_WORKERS}.items()]
    (folder / "spark-defaults.conf").write_text("".join(defaults))
    # For Python alone, which asks it for the port: with it, the JVM would check each step of its planning.
    (folder / "spark-env.sh").write_text("unset SPARK_TESTING\n")
    deaths.environment |= {
        "KMQ_BOOTSTRAP": orders.connection.bootstrap,
        "KMQ_ZOOKEEPER": "",
        "SPARK_TESTING": "1",  # a port of its own, rather than Connect's one for all
        "SPARK_CONF_DIR": str(folder),
        "SPARK_CONNECT_AUTHENTICATE_TOKEN": uuid.uuid4().hex,
    }
    command = [sys.executable, str(JOB), queue.connection.bootstrap, queue.name, str(EXAMPLE)]
    command += ["--queue", orders.name, "--orders", str(ORDERS), "--out", str(folder / "orders")]
    command += ["--report", str(folder / "report"), "--remote", "local[4,99]"]
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            command, env=deaths.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as job,
    ):
        lines = iter(job.stdout.readline, b"")
        found = next((line for line in lines if line.startswith(b'{"session"')), None)
        assert found, (folder / "errors").read_text()[-3000:]
        yield json.loads(found)
        job.stdin.close()
        assert job.wait() == 0


@pytest.mark.timeout(900)
def test_the_example_frames_and_killed_trackers_by_way_of_connect(make_queue, queue_name, tmp_path):
    """Trackers die within a redelivery, and their driver, beside an ordinary tracker.

    The server starts them again; those of a driver that is gone stop by themselves, the next one's go on. At
    every step they die in test_spark_tracker_killed.py.
    """
    orders, queue = make_queue(4), make_queue(1, f"{queue_name}-frames")
    queue.send("any", "any", "any", "odd")
    queue.mark_all([Marker(0, 0, Op.TAKE, 10**9, runs=((0, 2),)), Marker(0, 0, Op.END)])
    deaths = Deaths(tmp_path, ["begun", "sent:driver", "uncommitted"])
    tracker = orders.tracker()
    with connect_job(queue, orders, deaths) as found:
        tracker.stop()
        of_the_example(tmp_path)
        port = found.pop("port")
        of_the_frames(found, queue)
        redelivered = make_queue(4, f"{queue_name}-redelivered")
        redelivered.tracker(wait=False)
        assert set(killed(redelivered, deaths, remote=f"sc://localhost:{port}").values()) == {2}


def of_the_example(folder):
    rows = pd.read_parquet(folder / "orders")  # nothing was tried twice, so every file counts
    good = [number for number in range(ORDERS) if number % 100 != 99]
    assert sorted(zip(rows["id"], rows["attempts"], strict=True)) == [
        (number, 2 if number % 10 == 0 else 1) for number in good
    ]
    assert "no order: JSONDecodeError" in (folder / "report" / "report.txt").read_text()
    assert pd.read_parquet(folder / "orders-by-customer")["orders"].sum() == len(good)


def of_the_frames(found, queue):
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
