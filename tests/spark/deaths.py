"""Where the processes of kill tests die. Never in shipped code: its classes are patched here, by name.

KMQ_TEST_DEATHS is a list of steps with commas, one death each, in this order: the step that is next kills the
Python worker that reaches it, with SIGKILL. `step:driver` kills the driver instead, whose pid stands in the
file `driver`, and `step:executor` the JVM that the worker belongs to. What has been is noted in files,
`death.<number>`, so that the next process goes on with the list. The files are in the folder KMQ_TEST_FOLDER.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from kmqpy.kafka import librdkafka
from kmqpy.kafka.copies.copy_transaction import CopyTransaction
from tracker.redelivery.redeliverer import Redeliverer

STEPS = ("planned", "begun", "sent", "uncommitted", "committed")
"""Before a transaction; with a copy in it; with all copies; with everything; after it."""


def die(step: str) -> None:
    steps = [name for name in os.environ.get("KMQ_TEST_DEATHS", "").split(",") if name]
    folder = Path(os.environ["KMQ_TEST_FOLDER"])
    number = next(n for n in range(len(steps) + 1) if not (folder / f"death.{n}").exists())
    if number == len(steps):
        return
    name, _, whose = steps[number].partition(":")
    if name != step:
        return
    try:
        (folder / f"death.{number}").touch(exist_ok=False)
    except FileExistsError:
        return
    sys.stderr.write(f"death {number}: {steps[number]}\n")
    sys.stderr.flush()
    os.kill(_victim(whose, folder), signal.SIGKILL)


def _victim(whose: str, folder: Path) -> int:
    if whose == "driver":
        return int((folder / "driver").read_text())
    if whose == "executor":  # the worker's parent is PySpark's daemon, and its parent the JVM
        return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    return os.getpid()


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


def patch_worker() -> None:
    make, transact, produce = librdkafka.new_producer, Redeliverer._transact, CopyTransaction._produce_one

    def make_dying(connection: Any, settings: Any) -> Any:
        made = make(connection, settings)
        return Producer(made) if "transactional.id" in settings else made

    def dying_transact(self: Redeliverer, *arguments: Any) -> Any:
        die("planned")
        dropped = transact(self, *arguments)
        die("committed")
        return dropped

    def dying_produce(self: CopyTransaction, topic: str, *arguments: Any) -> None:
        if topic == self.markers_topic and self._places:  # not the claim, which comes first
            self._producer.flush(10)
            die("sent")
        produce(self, topic, *arguments)
        if topic != self.markers_topic:
            die("begun")

    librdkafka.new_producer = make_dying
    Redeliverer._transact = dying_transact  # type: ignore[method-assign]
    CopyTransaction._produce_one = dying_produce  # type: ignore[method-assign]
