"""(e) Measures the memory and the CPU time that messages in flight cost a tracker.

The resident memory of the tracker process is measured before a client takes the messages, and after the
tracker has read all their markers; also the CPU time between. This memory includes the network buffers of
librdkafka, so the pure state is also measured alone (peers/inflight.py): by resident memory, and by
tracemalloc, which counts what Python asked for. Another case measures `kmq` commands that look at the same
number of messages in flight.
"""

import itertools
import time
from collections.abc import Callable, Iterator

from benchmarks import children, trackers
from benchmarks.children import until, usage
from benchmarks.lab import HOUR_MS, Lab, Record, starts
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes

PARTITIONS = 4
_NAMES = {"range": "range markers", "jvm": "JVM markers"}
_FILLED = (
    ("taken one after the other", "series", False),
    ("a random half of what was taken", "series", True),
    ("taken by a client with a name", "holder", False),
    ("taken in a random order", "random", False),
    ("one taken in each ms", "trickle", False),
)
_IDLE_S = 3.0
_MOST_TRACED = 200_000  # messages: tracemalloc makes everything slow


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """Cases of the tracker process, of commands, and of the state alone, filled in different orders."""
    count = sizes.in_flight
    yield Case(
        work="tracker memory",
        name=f"tracker process, {count:,} in flight in {PARTITIONS} partitions",
        metrics={
            "bytes_per_message": "bytes/msg",
            "cpu_us_per_message": "µs CPU/msg",
            "idle_cpu_percent": "% CPU idle",
        },
        peers={_NAMES[one]: _process(lab, one, count) for one in sizes.formats},
        repeats=sizes.few_repeats,
    )
    with lab.queue(1) as queue:
        lab.preload(queue, 1, count, 100)
        lab.fill(queue.markers_topic, 0, _taken_one_by_one(count))
        commands = (("in-flight", queue.name, "--limit", "5"), ("stats", queue.name))
        yield Case(
            work="commands",
            name=f"{count:,} in flight, taken one by one",
            metrics={"seconds": "s", "cpu_s": "s CPU", "peak_mb": "MB at most"},
            peers={f"kmq {one[0]}": _command(lab, *one) for one in commands},
            repeats=sizes.few_repeats,
        )
    for name, arrival, gaps in _FILLED:
        formats = sizes.formats if arrival == "series" else {"jvm"}.intersection(sizes.formats)
        if formats:
            yield Case(
                work="tracker memory",
                name=f"state alone, {count:,} in flight, {name}",
                metrics={"rss_per_message": "bytes/msg RSS", "traced_per_message": "bytes/msg traced"},
                peers={_NAMES[one]: _state(one, count, arrival, gaps=gaps) for one in formats},
                repeats=sizes.few_repeats,
            )


def _taken_one_by_one(count: int) -> Iterator[Record]:
    """Start markers of `count` messages, each with another lease, so that no two have the same value."""
    return itertools.chain.from_iterable(starts([offset], HOUR_MS + offset) for offset in range(count))


def _process(lab: Lab, marker_format: str, count: int) -> Callable[[], Figures]:
    def turn() -> Figures:
        with lab.queue(PARTITIONS, register=True, markers=marker_format) as queue:
            lab.preload(queue, PARTITIONS, count, 100)
            with (
                trackers.kmqpy(lab, queue, PARTITIONS) as tracker,
                children.peer(
                    "kmqpy",
                    "hold",
                    bootstrap=lab.connection.bootstrap,
                    queue=queue.to_json().decode(),
                    batch=5_000,
                    messages=count,
                ) as holder,
            ):
                before = usage(tracker.pid)
                holder.result()
                until(
                    lambda: tracker.metric("kmq_in_flight") == count,
                    "the tracker has read all markers",
                    300.0,
                    child=tracker,
                )
                after = usage(tracker.pid)
                time.sleep(_IDLE_S)
                idle = usage(tracker.pid)["cpu_s"] - after["cpu_s"]
        return {
            "bytes_per_message": (after["rss"] - before["rss"]) / count,
            "cpu_us_per_message": (after["cpu_s"] - before["cpu_s"]) / count * 1e6,
            "idle_cpu_percent": idle / _IDLE_S * 100,
            "rss": after["rss"],
        }

    return turn


def _command(lab: Lab, *arguments: str) -> Callable[[], Figures]:
    addresses = ("--bootstrap", lab.connection.bootstrap, "--zookeeper", lab.zookeeper.hosts)

    def turn() -> Figures:
        with children.peer("kmq", "run", arguments=[*addresses, *arguments]) as child:
            return {**child.result(), "seconds": time.time() - child.started}

    return turn


def _state(marker_format: str, count: int, arrival: str, *, gaps: bool) -> Callable[[], Figures]:
    def turn() -> Figures:
        figures: dict[str, float] = {}
        for traced in (False, True):
            messages = min(count, _MOST_TRACED) if traced else count
            with children.peer(
                "inflight",
                "fill",
                markers=marker_format,
                messages=messages,
                arrival=arrival,
                gaps=gaps,
                traced=traced,
            ) as child:
                figures |= child.result()
        return figures

    return turn
