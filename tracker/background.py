"""Runs calls that may block in pools of threads, and hands their results back to the tracker's main loop."""

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
    """The pools of threads, in the order in which they are closed. No job waits for jobs of another pool."""

    REDELIVERY = "redelivery"
    """Takeovers, redeliveries and administration. These jobs can be stuck while a broker does not answer."""
    ENDS = "ends"
    """Look-ups of the ends of queues. Markers that were read wait for the answers."""
    LOGS = "logs"
    """Looks at logs that may have been cut back: after an election, redelivery of a partition waits for its
    look (rule R39 of docs/rules.md)."""
    COUNTING = "counting"
    """Counts of messages for /metrics, and the search for consumers that are cut off: nothing waits for
    these jobs."""
    HOUSEKEEPING = "housekeeping"
    """Writes of offsets, releases of partitions and probes of Kafka. They must run even while all
    redeliveries are stuck."""


class BackgroundJobs:
    """Runs jobs in threads. Queues their results for the main loop, the only thread that changes state."""

    def __init__(self, workers: int, problems: Problems) -> None:
        sizes = {Pool.REDELIVERY: workers, Pool.ENDS: 2, Pool.LOGS: 2, Pool.COUNTING: 1, Pool.HOUSEKEEPING: 1}
        self._pools = {
            pool: ThreadPoolExecutor(sizes[pool], thread_name_prefix=f"kmq-{pool}") for pool in Pool
        }
        self._results: queues.SimpleQueue[Callable[[], None]] = queues.SimpleQueue()
        self._problems = problems

    def run(self, pool: Pool, job: Callable[[], Any], finished: Callable[[Any], None]) -> None:
        """Run `job` in `pool`; then the main loop calls `finished` with the job's result or exception."""
        # submit() may raise and yet leave the job queued. The first next() returns 0: only its caller may
        # hand over a result, so that `finished` is called once.
        attempts = itertools.count()

        def work() -> None:
            if next(attempts):
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
            if not next(attempts):
                self.hand_over(partial(finished, error))

    def submit(self, pool: Pool, job: Callable[[], object]) -> None:
        """Run `job` in `pool`; its result, or its exception, is dropped."""
        self._pools[pool].submit(job)

    def hand_over(self, call: Callable[[], None]) -> None:
        """Have the main loop call `call`. For any thread."""
        self._results.put(call)

    def take_results(self) -> None:
        """Make the calls that were handed over. For the main loop."""
        while not self._results.empty():
            call = self._results.get()
            try:
                call()
            except Exception as error:  # calls about one partition catch theirs in the Supervisor
                self._problems.survived("result", error)

    def close(self) -> None:
        """Wait until all jobs have ended. Jobs of the COUNTING pool that have not begun are cancelled."""
        for name, pool in self._pools.items():
            pool.shutdown(wait=True, cancel_futures=name is Pool.COUNTING)
