"""The tracker on Spark in a process of its own, which says what its turns did and took."""

import contextlib
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.lab import Lab, ends
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import configure_spark_with_kmq
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.settings import TrackerSettings
from tracker.spark.tracker import SparkTracker

_TIMEOUT_S = 600.0
_HANDFUL = 0.01
_WARM_UP_TURNS = 8


def track(options: dict[str, Any]) -> dict[str, Any]:
    """Redeliver until SIGTERM; prints a line when all partitions are owned."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with _tracker(options) as tracker:
        _ready(tracker, options)
        stopping.wait()
    return {}


def read(options: dict[str, Any]) -> dict[str, float]:
    """Prints a line when all partitions are owned, and reads `records` markers that come then.

    Then a turn without news, and one with ends of a random 1 %.
    """
    state = Path(options["checkpoint"]) / "query" / "state"
    with _tracker(options) as tracker:
        seen: dict[int, dict[str, Any]] = {}
        _ready(tracker, options)

        def read_all() -> bool:
            _note(tracker, seen)
            return sum(_markers(turn) for turn in seen.values()) >= options["records"]

        _until(read_all, tracker)
        size = _size(state)
        reading = [turn for turn in seen.values() if _markers(turn) > 2 * options["partitions"]]
        read_s = sum(_seconds(turn) for turn in reading)
        last = max(seen)
        _until(lambda: _note(tracker, seen) or max(seen) >= last + 2, tracker)
        idle_s = min(_seconds(seen[number]) for number in range(last + 1, last + 3))
        result = {
            "markers_per_s": sum(_markers(turn) for turn in reading) / read_s,
            "read_s": read_s,
            "turns": len(reading),
            "state_bytes": size,
            "idle_s": idle_s,
        }
        if options["in_flight"]:
            ended = random.sample(range(options["in_flight"]), int(options["in_flight"] * _HANDFUL))
            last, size = max(seen), _size(state)
            records = _end(options, sorted(ended))
            _until(lambda: _note(tracker, seen) or sum(map(_markers, _after(seen, last))) >= records, tracker)
            changing = [turn for turn in _after(seen, last) if _markers(turn)]
            result["changed_s"] = max(map(_seconds, changing))
            result["changed_bytes"] = _size(state) - size
    return result


@contextmanager
def _tracker(options: dict[str, Any]) -> Iterator[SparkTracker]:
    builder = SparkSession.builder.master("local[*]").config(
        map={
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
        }
    )
    spark = configure_spark_with_kmq(builder).getOrCreate()
    try:
        with SparkTracker(
            spark,
            KafkaConnection(bootstrap=options["bootstrap"]),
            ZooKeeperConnection(hosts=options["zookeeper"]),
            QueueSettings.from_json(options["queue"].encode()).name,
            checkpoint=options["checkpoint"],
            trigger=options["trigger_s"],
            settings=TrackerSettings(http_port=-1),
        ) as tracker:
            yield tracker
    finally:
        spark.stop()


def _ready(tracker: SparkTracker, options: dict[str, Any]) -> None:
    """Everything is warm: the first turns of a JVM take several times as long."""
    _until(lambda: len(tracker.owned()) == options["partitions"], tracker)
    _until(lambda: (tracker.progress() or {"batchId": 0})["batchId"] >= _WARM_UP_TURNS, tracker)
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()


def _note(tracker: SparkTracker, seen: dict[int, dict[str, Any]]) -> None:
    query = tracker._query
    if query is not None:
        seen.update({turn["batchId"]: dict(turn) for turn in query.recentProgress})


def _after(seen: dict[int, dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return [turn for batch, turn in seen.items() if batch > number]


def _markers(turn: dict[str, Any]) -> int:
    return int(turn["observedMetrics"]["kmq"]["markers"] or 0) if turn["observedMetrics"] else 0


def _seconds(turn: dict[str, Any]) -> float:
    return float(turn["durationMs"]["triggerExecution"]) / 1000


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # Spark removes old ones
            total += file.stat().st_size if file.is_file() else 0
    return total


def _end(options: dict[str, Any], numbers: list[int]) -> int:
    """Write end markers of these messages, numbered over all partitions; how many records."""
    written = 0
    lab = Lab(
        KafkaConnection(bootstrap=options["bootstrap"]), ZooKeeperConnection(hosts=options["zookeeper"])
    )
    partitions, queue = options["partitions"], QueueSettings.from_json(options["queue"].encode())
    for partition in range(partitions):
        offsets = [number // partitions for number in numbers if number % partitions == partition]
        if options["markers"] == "jvm":
            records = list(ends(offsets, partition))
        else:
            found = codec.ranges(partition, Op.END, offsets)
            records = [codec.encode(one)[:2] for one in found]
        lab.fill(queue.markers_topic, partition, records)
        written += len(records)
    return written


def _until(is_so: Callable[[], Any], tracker: SparkTracker) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline or not (tracker._thread and tracker._thread.is_alive()):
            raise RuntimeError(f"not done: {tracker.problems()}")
        time.sleep(0.05)
