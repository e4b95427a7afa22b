"""Where the processes of kill tests die. Never in shipped code: its classes are patched here, by name.

KMQ_TEST_DEATHS is a list of steps with commas, one death each, in this order: the step that is next kills
whoever reaches it, with SIGKILL. `step:driver` kills the driver instead, and the executor goes on. What has
been is noted in files, KMQ_TEST_DEATHS_DONE.<number>, so that the next process goes on with the list.

As a module of Python workers (spark.python.daemon.module) it is pyspark.daemon, with the patches; as a
program it is `kmq spark-tracker`, with those of the driver.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from kmqpy.kafka import librdkafka
from kmqpy.kafka.copies.copy_transaction import CopyTransaction
from tracker.redelivery.redeliverer import Redeliverer
from tracker.spark.turn import _Turn

STEPS = ("planned", "begun", "sent", "uncommitted", "committed", "kept")
"""In an executor: before a transaction; with a copy in it; with all copies; with everything; after it; with
the state handed to Spark, which has not stored it."""


def die(step: str) -> None:
    steps = [name for name in os.environ.get("KMQ_TEST_DEATHS", "").split(",") if name]
    done = os.environ["KMQ_TEST_DEATHS_DONE"]
    number = next(n for n in range(len(steps) + 1) if not Path(f"{done}.{n}").exists())
    if number == len(steps):
        return
    name, _, whose = steps[number].partition(":")
    if name != step:
        return
    try:
        os.close(os.open(f"{done}.{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    sys.stderr.write(f"death {number}: {steps[number]}\n")
    sys.stderr.flush()
    os.kill(int(os.environ["KMQ_TEST_DRIVER"]) if whose else os.getpid(), signal.SIGKILL)


class Producer:
    """A transactional one that dies."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def commit_transaction(self, timeout_s: float) -> None:
        self._producer.flush(10)
        die("uncommitted")
        self._producer.commit_transaction(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)


def patch_executor() -> None:
    make, transact, produce, keep = (
        librdkafka.new_producer,
        Redeliverer._transact,
        CopyTransaction._produce_one,
        _Turn._keep,
    )

    def make_dying(connection: Any, settings: Any) -> Any:
        made = make(connection, settings)
        return Producer(made) if "transactional.id" in settings else made

    def dying_transact(self: Redeliverer, *arguments: Any) -> None:
        die("planned")
        transact(self, *arguments)
        die("committed")

    def dying_produce(self: CopyTransaction, topic: str, *arguments: Any) -> None:
        if topic == self.markers_topic:
            self._producer.flush(10)
            die("sent")
        produce(self, topic, *arguments)
        if topic != self.markers_topic:
            die("begun")

    def dying_keep(self: _Turn, *arguments: Any) -> None:
        keep(self, *arguments)
        die("kept")

    librdkafka.new_producer = make_dying
    Redeliverer._transact = dying_transact  # type: ignore[method-assign]
    CopyTransaction._produce_one = dying_produce  # type: ignore[method-assign]
    _Turn._keep = dying_keep  # type: ignore[method-assign]


def patch_driver() -> None:
    """It dies at `reported`: it knows what was redelivered, and the batch is not complete."""
    from tracker.spark.tracker import SparkTracker

    after = SparkTracker._after_batch

    def dying_after(self: SparkTracker, *arguments: Any) -> None:
        after(self, *arguments)
        if self.metrics.redelivered.labels(self._queue)._value.get():
            die("reported")

    SparkTracker._after_batch = dying_after  # type: ignore[method-assign]


def main() -> None:
    from kmqpy.cli import app
    from tracker.spark.command import spark_tracker

    os.environ["KMQ_TEST_DRIVER"] = str(os.getpid())
    patch_driver()
    app.kmq.add_command(spark_tracker)
    sys.exit(app.run(["spark-tracker", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
