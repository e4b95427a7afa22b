"""Kafka's own share-consumer-perf-test, in a JVM of its own: it acknowledges implicitly, reads no body."""

import os
import re
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.share_group import begin_with_the_oldest
from kmqpy.dev.jars import jar_set
from kmqpy.dev.java import find_java

_LOCK = Path(__file__).with_name("jars.json")
_CLASS = "org.apache.kafka.tools.ShareConsumerPerformance"
_REPORT = re.compile(
    r"^[^,]+, ([-0-9 :]+), [0-9.]+, [0-9.]+, [0-9.]+, (\d+), \d+ for share consumer", re.MULTILINE
)
"""A line for each interval: its end, and how many messages there were until then."""


def drain(options: dict[str, Any]) -> dict[str, float]:
    """As works.drain: the clock starts at the first report behind a tenth of the messages."""
    begin_with_the_oldest(options)
    class_path = os.pathsep.join(map(str, [*jar_set("kafka"), *jar_set("share-perf", _LOCK)]))
    command = [str(find_java()), "-Xmx2g", "-cp", class_path, _CLASS]
    command += ["--bootstrap-server", options["bootstrap"], "--topic", options["topic"]]
    command += ["--group", options["group"], "--num-records", str(options["messages"]), "--timeout", "60000"]
    command += ["--show-detailed-stats", "--reporting-interval", "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reports = [
        (datetime.strptime(at, "%Y-%m-%d %H:%M:%S:%f"), int(count))  # noqa: DTZ007  # both are local
        for at, count in _REPORT.findall(done.stdout)
    ]
    (began, before), (ended, taken) = (
        next(one for one in reports if one[1] >= options["messages"] // 10),
        reports[-1],
    )
    seconds = (ended - began).total_seconds()
    return {"messages": taken - before, "seconds": seconds, "messages_per_s": (taken - before) / seconds}
