"""Processing with acknowledgement: kill -9 of its driver."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import Process, until

from tests.spark.sessions import SMALL


class Driver(Process):
    """driver.py, and the JVM that it starts."""

    def __init__(self, queue, folder: Path, how: str) -> None:
        connection = {"bootstrap": queue.connection.bootstrap}
        told = [
            json.dumps(connection),
            queue.settings.to_json().decode(),
            json.dumps(SMALL),
            str(folder),
            how,
        ]
        script = str(Path(__file__).parents[1] / "driver.py")
        self._process = subprocess.Popen([sys.executable, script, *told], start_new_session=True)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()


def bodies(partition):
    return [f"{partition}-{number}" for number in range(600)]


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("how", ["process", "take"])
def test_a_driver_killed_while_it_processes_loses_nothing(make_queue, tmp_path, record_property, how):
    queue = make_queue(2)
    queue.tracker()
    for partition in (0, 1):
        queue.send(*bodies(partition), partition=partition)
    seen = tmp_path / "seen"
    seen.mkdir()
    with Driver(queue, tmp_path, how) as driver:
        until(lambda: len(list(seen.iterdir())) >= 9, 600)
        assert driver.running
        driver.kill()
    with Driver(queue, tmp_path, how) as driver:
        assert driver.wait(600) == 0
    written = Counter(json.loads((tmp_path / "written.json").read_text()))
    assert written.keys() == {*bodies(0), *bodies(1)}
    called = Counter(line for one in seen.iterdir() for line in one.read_text().splitlines())
    record_property("processed more than once", sum(count - 1 for count in called.values()))
    twice = sum(count - 1 for count in written.values())
    record_property("written more than once", twice)
    assert twice <= 300  # at most the micro-batch that the kill met between sink and acknowledgement
