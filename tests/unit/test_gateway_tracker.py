"""The tracker beside the gateway: one that can't be started is tried again, also where there is no prctl."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from kmqpy.core.clock import wait_until
from kmqpy.gateway import tracker_process
from kmqpy.gateway.tracker_process import TrackerProcess


def test_a_tracker_that_can_t_be_started_is_tried_again(monkeypatch):
    tries = []

    def popen(command, **options):
        tries.append(command)
        if len(tries) < 3:
            raise BlockingIOError("no more processes")
        return real([sys.executable, "-c", "import time; time.sleep(60)"])

    real = subprocess.Popen
    monkeypatch.setattr(
        tracker_process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    )
    with TrackerProcess("kafka://h:1") as tracker:
        assert wait_until(lambda: tracker.running, 20)
        assert (len(tries), tracker.deaths) == (3, 0)


def test_the_program_runs_on_other_systems(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.platform = 'darwin'\n")
    program = tracker_process._PROGRAM.replace("ctypes.CDLL(None)", "None")
    process = subprocess.run(
        [sys.executable, "-c", program, str(os.getpid()), "tracker", "--help"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Usage" in process.stdout
