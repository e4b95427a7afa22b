"""The pools of threads of a tracker."""

import threading
from types import SimpleNamespace

import pytest

from kmqpy.core.clock import wait_until
from tracker.background import BackgroundJobs, Pool


@pytest.mark.parametrize("pool", [Pool.LOGS, Pool.SEARCHES, Pool.COUNTING])
def test_a_tracker_that_stops_waits_for_no_job_that_has_not_begun(pool: Pool) -> None:
    jobs, go_on = BackgroundJobs(1, SimpleNamespace()), threading.Event()
    *_, last = [jobs._pools[pool].submit(go_on.wait) for _ in range(10)]
    closing = threading.Thread(target=jobs.close)
    closing.start()
    try:
        assert wait_until(last.cancelled, 20.0)
    finally:
        go_on.set()
        closing.join()


def test_looks_for_cuts_do_not_wait_for_searches() -> None:
    jobs, go_on, looked = BackgroundJobs(1, SimpleNamespace()), threading.Event(), threading.Event()
    for _ in range(10):
        jobs.submit(Pool.SEARCHES, go_on.wait)
    try:
        jobs.submit(Pool.LOGS, looked.set)
        assert looked.wait(20)
    finally:
        go_on.set()
        jobs.close()
