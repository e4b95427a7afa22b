"""kill -9 of a driver in the midst of all that drivers do: nothing is lost, sinks have each row once."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import until

from kmqpy.spark.pipeline import written
from tests.spark.killed_driver import BATCH, FUNCTIONS, PIPELINES, SCHEMA, FunctionJob, pipeline, sink_of
from tests.spark.sessions import CHEAP_QUERIES, QUICK_WORKERS, SINKS, SMALL
from tests.spark.waiting import settled, until_ready

pytestmark = pytest.mark.breadth

DRIVER = Path(__file__).with_name("killed_driver.py")
BODIES = [str(number) for number in range(2 * BATCH + BATCH // 2)]
ROWS = range(8)


@pytest.fixture
def killed(make_queue, queue_name, tmp_path):
    """The queues of a driver that was killed, by the names of its queries."""
    queues = {name: make_queue(2, f"{queue_name}-{name}") for name in (*FUNCTIONS, *PIPELINES)}
    for name, queue in queues.items():
        bodies = BODIES if name in FUNCTIONS else [json.dumps({"id": row}) for row in ROWS]
        for partition in (0, 1):
            queue.send(*bodies[partition::2], partition=partition)
    connection = json.dumps({"bootstrap": queues["jdbc"].connection.bootstrap})
    settings = json.dumps({**SMALL, **CHEAP_QUERIES, **QUICK_WORKERS, **SINKS})
    line = [sys.executable, str(DRIVER), connection, settings, str(tmp_path)]
    line += [f"{name}={queue.settings.to_json().decode()}" for name, queue in queues.items()]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(line, stdout=log, stderr=log, start_new_session=True, timeout=400, check=False)
    assert done.returncode == -signal.SIGKILL, (tmp_path / "log").read_text()[-3000:]
    (tmp_path / "killed").touch()
    return queues


@pytest.mark.timeout(900)
def test_what_a_killed_driver_leaves_is_finished_by_the_next(spark, killed, tmp_path, record_property):
    for name in PIPELINES:
        queue, sink = killed[name], sink_of(name, tmp_path)
        pipeline(spark, queue.connection, queue.settings, sink)
        found = written(spark, sink, SCHEMA, queue.connection).collect()
        assert sorted(row["id"] for row in found) == [*ROWS], name
        assert settled(queue), name
    for how in FUNCTIONS:
        queue = killed[how]
        queue.tracker()
        with FunctionJob(spark, queue.connection, queue.settings, how, tmp_path) as job:
            until(lambda job=job, queue=queue: job.run() or until_ready(queue) or settled(queue), 200)
        got = Counter(row["body"] for row in spark.read.parquet(str(tmp_path / how)).collect())
        assert got.keys() == {*BODIES}, how
        twice = got.total() - len(got)
        record_property(f"{how}: written more than once", twice)
        assert twice <= BATCH, how  # the micro-batch that the kill met between sink and acknowledgement
