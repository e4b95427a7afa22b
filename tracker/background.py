"""Background jobs: calls that may block run in pools of threads, their results return to the main loop."""

from __future__ import annotations

import itertools
import queue as queues
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from typing import Any

from tracker.health.problems import Problems


class Pool(StrEnum):
    """Pools of threads; jobs of one never wait for jobs of another. In the order in which they are closed."""

    REDELIVERY = "redelivery"
    """Takeovers, redeliveries and administration, which can be stuck while a broker does not answer."""
    ENDS = "ends"
    """Look-ups of the ends of queues; markers wait for the answers."""
    COUNTING = "counting"
    """Counts of messages for /metrics, and looks for consumers that are cut off; nothing waits for these."""
    HOUSEKEEPING = "housekeeping"
    """Offsets, releases and probes: they must get their turn also when all redeliveries are stuck."""


class BackgroundJobs:
    """Runs jobs in threads, and hands their results to the main loop, which owns all state."""

    def __init__(self, workers: int, problems: Problems) -> None:
        sizes = {Pool.REDELIVERY: workers, Pool.ENDS: 2, Pool.COUNTING: 1, Pool.HOUSEKEEPING: 1}
        self._pools = {
            pool: ThreadPoolExecutor(sizes[pool], thread_name_prefix=f"kmq-{pool}") for pool in Pool
        }
        self._results: queues.SimpleQueue[Callable[[], None]] = queues.SimpleQueue()
        self._problems = problems

    def run(self, pool: Pool, job: Callable[[], Any], finished: Callable[[Any], None]) -> None:
        """Run `job` in `pool`, then `finished` with its result, or its exception, in the main loop."""
        # submit() may raise and yet leave the job queued: whoever claims it first finishes it, once.
        claims = itertools.count()

        def work() -> None:
            if next(claims):
                return
            try:
                result: Any = job()
            except Exception as error:  # handed to the loop
                result = error
            self.hand_over(partial(finished, result))
            del result  # an exception's traceback leads here: it would wait for a garbage collection

        try:
            self._pools[pool].submit(work)
        except RuntimeError as error:
            if not next(claims):
                self.hand_over(partial(finished, error))

    def submit(self, pool: Pool, job: Callable[[], object]) -> None:
        """Run `job` in `pool`; nobody learns its result."""
        self._pools[pool].submit(job)

    def hand_over(self, call: Callable[[], None]) -> None:
        """Have the main loop make this call; for any thread."""
        self._results.put(call)

    def take_results(self) -> None:
        """Make the calls that were handed over; for the main loop."""
        while not self._results.empty():
            call = self._results.get()
            try:
                call()
            except Exception as error:  # those of one partition are handled by the supervisor
                self._problems.survived("result", error)

    def close(self) -> None:
        """Wait until all jobs have ended; counts that have not begun are cancelled."""
        for name, pool in self._pools.items():
            pool.shutdown(wait=True, cancel_futures=name is Pool.COUNTING)
