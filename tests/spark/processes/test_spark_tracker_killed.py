"""kill -9 of the tracker on Spark: of its executors at every step, and of its driver.

KMQ_KILLS=<rounds>: all of them in a random order, that many times, and the control.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support import SESSION_MS

from tests.spark.deaths import STEPS
from tests.spark.sessions import INTERPRETED, SMALL
from tests.spark.tracking import LONG_S, stored, take

ROOT = Path(__file__).parents[3]


class SparkTrackerProcess:
    """`kmq spark-tracker`, started again whenever it dies; executors and driver die as told."""

    def __init__(self, queue, folder: Path, deaths: list[str], sabotage: str = "") -> None:
        self._deaths = folder / "deaths"
        conf = {
            **SMALL,
            **INTERPRETED,
            "spark.python.daemon.module": "tests.spark.executor_daemon",
            "spark.sql.shuffle.partitions": "2",
        }
        options = {
            "bootstrap": queue.connection.bootstrap,
            "zookeeper": queue.zookeeper.hosts,
            "root": queue.connection.root,
            "queue": queue.name,
            "checkpoint": str(folder / "checkpoint"),
            "trigger": "200ms",
            "session-timeout": f"{SESSION_MS}ms",
            "offset-interval": "200ms",
            "max-batch-messages": "20",
            "http-port": "-1",
            "log-level": "WARNING",
            # A task is tried three times, then the query fails and is started again.
            "master": "local[2,3]",
        }
        self._command = [sys.executable, "-m", "tests.spark.deaths"]
        self._command += [f"--{name}={value}" for name, value in options.items()]
        self._command += [f"--conf={name}={value}" for name, value in conf.items()]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "KMQ_TEST_DEATHS": ",".join(deaths),
            "KMQ_TEST_DEATHS_DONE": str(self._deaths),
            "KMQ_TEST_SABOTAGE": sabotage,
        }
        self.starts = 0
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._environment)
        self.starts += 1

    def keep_running(self) -> None:
        code = self._process.poll()
        if code is not None:
            assert code == -signal.SIGKILL, f"it ended by itself: {code}"
            self._start()

    def died(self) -> int:
        return len(list(self._deaths.parent.glob(f"{self._deaths.name}.*")))

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()


def killed(queue, folder, deaths, each=60, sabotage="") -> Counter[str]:
    """How often each message stands in the topic when all these deaths have been died and it is quiet."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = len(deaths)
    with SparkTrackerProcess(queue, folder, deaths, sabotage) as tracker:
        # Something is due all the time, so that there is a transaction to die in.
        bodies = take(queue, each, "one", lambda number: 20 * number)
        rounds, deadline = 0, time.monotonic() + LONG_S + 90 * wanted
        while True:
            died, copies = tracker.died(), stored(queue)
            again = all(copies[body] >= 2 for body in bodies)
            if again and died >= wanted:
                break
            assert time.monotonic() < deadline, f"{died} deaths of {deaths}, {tracker.starts} starts"
            tracker.keep_running()
            time.sleep(0.2)
            if again:
                rounds += 1
                bodies += take(queue, each, f"more{rounds}", lambda number: 20 * number)
        time.sleep(1.0)
        assert tracker.stop() == 0
    copies = stored(queue)
    assert copies.keys() == {*bodies}
    return copies


@pytest.mark.timeout(1_500)
def test_executors_are_killed_at_every_step_and_the_driver(make_queue, tmp_path):
    """Spark tries the task again, then the driver the query.

    The driver dies within a transaction, which an executor then commits or not.
    It dies again before a batch is complete.
    """
    queue = make_queue(2)
    assert set(killed(queue, tmp_path, [*STEPS, "sent:driver", "reported"]).values()) == {2}


ROUNDS = int(os.environ.get("KMQ_KILLS", "0"))


@pytest.mark.skipif(not ROUNDS, reason="KMQ_KILLS is not set")
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_again_and_again(make_queue, tmp_path, number):
    queue = make_queue(3)
    dice = random.Random(number)
    deaths = [*STEPS, *(f"{step}:driver" for step in STEPS), "reported"]
    dice.shuffle(deaths)
    copies = killed(queue, tmp_path, deaths, each=100)
    assert set(copies.values()) == {2}
    sys.stderr.write(f"round {number}: {len(deaths)} deaths, {len(copies)} messages, each came again once\n")


@pytest.mark.skipif(not ROUNDS, reason="KMQ_KILLS is not set")
@pytest.mark.timeout(1_800)
def test_without_transactions_there_are_duplicates(make_queue, tmp_path):
    """The control: copies were sent, and their end markers not; the checker sees it."""
    copies = killed(make_queue(2), tmp_path, ["begun", "sent"], sabotage="two-sends")
    assert max(copies.values()) > 2
