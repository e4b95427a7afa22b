"""Checks by the settings of a Spark session whether the session can run trackers. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable

from kmqpy.errors import ConfigError

MAX_FAILURES = 1_000_000
"""After so many failures of one task, Spark fails the job, which ends the other trackers, too."""

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\d+)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]")


def with_retries(master: str) -> str:
    """Return `master`; a local one without a number of failures, which would retry no task, gets one."""
    found = _LOCAL.fullmatch(master)
    if found is None or "," in master:
        return master
    return f"local[{found[1] or 1},{MAX_FAILURES}]"


def check_session(trackers: int, conf: Callable[[str], str], cores: int) -> None:
    """Raise ConfigError unless Spark can run all trackers at the same time.

    trackers  how many trackers the job has
    conf      returns the setting of the session with the given name, or an empty text when it is not set
    cores     the number of cores of this machine, for a local master with `*`
    """
    if trackers < 1:
        raise ConfigError(f"trackers: {trackers} must be at least 1")
    if conf("spark.speculation").lower() == "true":
        raise ConfigError(
            "spark.speculation: must be false for trackers: they run until they are stopped, and Spark "
            "would start a second one for each that it takes for slow"
        )
    found = slots(conf, cores)
    if found is not None and found < trackers:
        raise ConfigError(
            f"trackers: {trackers}, but Spark ({conf('spark.master')}) runs {found} task"
            f"{'' if found == 1 else 's'} at a time; a tracker is a task that does not end: "
            "start fewer trackers, or Spark with more cores"
        )


def slots(conf: Callable[[str], str], cores: int) -> int | None:
    """Return how many tasks Spark runs at a time; None where the settings don't tell."""
    master, each = conf("spark.master"), int(conf("spark.task.cpus") or 1)
    if found := _LOCAL.fullmatch(master):
        return (cores if found[1] == "*" else int(found[1] or 1)) // each
    if found := _LOCAL_CLUSTER.fullmatch(master):
        return int(found[1]) * (int(found[2]) // each)
    executors, executor_cores = conf("spark.executor.instances"), conf("spark.executor.cores")
    if executors and executor_cores and conf("spark.dynamicAllocation.enabled").lower() != "true":
        return int(executors) * (int(executor_cores) // each)
    return None
