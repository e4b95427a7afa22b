"""kill -9 of trackers on Spark at every step of a redelivery, of their driver, and of Spark's JVM.

KMQ_KILLS=<rounds>: all of them in a random order, that many times each way, and the control. Otherwise, two
steps and the driver are those of test_connect.py.
"""

import contextlib
import os
import random
import sys

import pytest

from tests.spark.deaths import STEPS
from tests.spark.killed_trackers import Deaths, SparkTrackerProcess, connect_server, die, killed
from tests.spark.tracking import each_came_again_once

pytestmark = pytest.mark.breadth

ROUNDS = int(os.environ.get("KMQ_KILLS", "0"))


@pytest.mark.timeout(900)
def test_the_jvm_is_killed_within_a_transaction(make_queue, tmp_path):
    """Its driver says so and ends; then an ordinary tracker goes on."""
    queue = make_queue(2)
    deaths = Deaths(tmp_path, ["sent:executor"])
    with SparkTrackerProcess(queue, deaths, master="local[2]") as trackers:
        bodies = die(queue, deaths, trackers, 60)
        assert trackers.wait() == 2
    queue.tracker()
    each_came_again_once(queue, bodies)


@pytest.mark.skipif(not ROUNDS, reason="KMQ_KILLS is not set")
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("connect", [False, True])
@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_again_and_again(make_queue, tmp_path, number, connect):
    queue = make_queue(3)
    wanted = [*STEPS, *STEPS, *(f"{step}:driver" for step in STEPS)]
    wanted += [] if connect else [f"{step}:executor" for step in STEPS]
    random.Random(number).shuffle(wanted)
    deaths = Deaths(tmp_path, wanted)
    with connect_server(deaths) if connect else contextlib.nullcontext() as remote:
        where = {"remote": remote} if remote else {"master": "local[2]"}
        copies = killed(queue, deaths, each=100, **where)
    assert set(copies.values()) == {2}
    sys.stderr.write(f"round {number}: {deaths.died} deaths, {len(copies)} messages, each came again once\n")


@pytest.mark.skipif(not ROUNDS, reason="KMQ_KILLS is not set")
@pytest.mark.timeout(1_800)
def test_executors_of_a_cluster_are_killed(make_queue, tmp_path):
    """The driver lives on, and Spark starts another executor."""
    deaths = Deaths(tmp_path, [f"{step}:executor" for step in STEPS])
    copies = killed(make_queue(3), deaths, master="local-cluster[2,1,1024]")
    assert set(copies.values()) == {2}


@pytest.mark.skipif(not ROUNDS, reason="KMQ_KILLS is not set")
@pytest.mark.timeout(1_800)
def test_without_transactions_there_are_duplicates(make_queue, tmp_path):
    """The control: copies were sent, and their end markers not; the checker sees it."""
    deaths = Deaths(tmp_path, ["begun", "sent"], sabotage="two-sends")
    copies = killed(make_queue(2), deaths, master="local[2]")
    assert max(copies.values()) > 2
