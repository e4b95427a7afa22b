"""Pipelines killed around the commit of their sink: each row stands there once."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kmqpy.kafka.admin import stats
from tests.spark.sessions import INTERPRETED, SMALL

DRIVER = Path(__file__).with_name("pipeline_driver.py")
DEATHS = ["delta committing", "delta written", "jdbc committing", ""]


@pytest.mark.timeout(600)
def test_each_row_is_in_the_sink_once(make_queue, queue_name, tmp_path):
    queues = {name: make_queue(2, f"{queue_name}-{name}") for name in ("delta", "jdbc")}
    for queue in queues.values():
        producer = queue.producer()
        for number in range(20):
            producer.send(json.dumps({"id": number}), partition=number % 2)
    connection = next(iter(queues.values())).connection
    where = {"bootstrap": connection.bootstrap, "kafka": dict(connection.kafka)}
    given = [f"{name}={queue.settings.to_json().decode()}" for name, queue in queues.items()]
    settings = json.dumps({**SMALL, **INTERPRETED})
    for death in DEATHS:
        line = [sys.executable, str(DRIVER), json.dumps(where), settings, str(tmp_path), death, *given]
        with (tmp_path / "log").open("w") as log:
            done = subprocess.run(
                line, stdout=log, stderr=log, start_new_session=True, timeout=180, check=False
            )
        assert done.returncode == (-signal.SIGKILL if death else 0), (tmp_path / "log").read_text()[-3000:]
    assert json.loads((tmp_path / "found.json").read_text()) == {name: list(range(20)) for name in queues}
    for queue in queues.values():
        left = stats.queue_stats(queue.connection, queue.settings)
        assert (left.depth, left.in_flight) == (0, 0)
