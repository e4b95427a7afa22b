"""The command line of the benchmarks; see the package's docstring."""

import itertools
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from benchmarks import (
    bulk,
    drain,
    failover,
    first_message,
    gateway_speed,
    late_acks,
    latency,
    lateness,
    memory,
    report,
    restart,
    retries,
    sends,
    spark_processing,
    spark_state,
    spark_tracker,
    storage_speed,
    urgent,
    waiting,
    workers,
    zookeeper_speed,
)
from benchmarks import scale as scale_work
from benchmarks.lab import Lab
from benchmarks.results import Case, Row, from_json, progress, run_case, to_json, write_json
from benchmarks.sizes import FULL, QUICK, Sizes
from kmqpy.dev.cluster import Cluster
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection

HERE = Path(__file__).resolve().parent
COMMITTED = {
    "Workers, sends and latency": HERE / "results-workers.json",
    "Queues on Kafka": HERE / "results.json",
    "Other storages": HERE / "results-storages.json",
    "Queues in ZooKeeper": HERE / "results-zookeeper.json",
}
NOT_ON_THE_PAGE = re.compile(
    r"^workers: (Kafka|PostgreSQL), 1 handlers|^drain: .* 1 partition,|^tracker memory: state"
    r"|^restart: .*long lease|^queues .*1 takers, batches|: kmqpy-statements$|, executor$"
    r"|^queues (?!on postgresql: depth 0,).*8 takers, one by one"
)
"""What stands in the committed results only, so that the page is short: conditions beside those it shows, and
figures for who changes kmqpy."""
README = HERE.parent / "README.md"
DOCS = HERE.parent / "docs"
IN_README = {
    "Kafka": (workers.WORKER, workers.BARE),
    "Redis": (workers.WORKER, "dramatiq", "celery"),
    "PostgreSQL": (workers.WORKER, "procrastinate"),
}
COLUMNS = {
    "trivial, msg/s": ("workers", workers.backlog_name, "handled_per_s"),
    "1 ms, msg/s": ("workers", partial(workers.backlog_name, ms=1), "handled_per_s"),
    "p50 ms": ("latency of workers", workers.latency_name, "p50_ms"),
    "p99 ms": ("latency of workers", workers.latency_name, "p99_ms"),
}
AS_BARS = ("drain", "100 bytes, 4 partitions, acks in order")

WORKS: dict[str, Callable[[Lab, Sizes], Iterator[Case]]] = {
    "drain": drain.cases,
    "latency": latency.cases,
    "sends": sends.cases,
    "first-message": first_message.cases,
    "workers": workers.cases,
    "worker-latency": workers.latency_cases,
    "retries": retries.cases,
    "urgent": urgent.cases,
    "waiting-acks": waiting.cases,
    "lateness": lateness.cases,
    "bulk": bulk.cases,
    "late-acks": late_acks.cases,
    "memory": memory.cases,
    "failover": failover.cases,
    "restart": restart.cases,
    "storages": storage_speed.cases,
    "zookeeper": zookeeper_speed.cases,
    "gateway": gateway_speed.cases,
    "gateway-native": gateway_speed.native_cases,
    "gateway-sqs": gateway_speed.sqs_cases,
    "spark-processing": spark_processing.cases,
    "spark-state": spark_state.cases,
    "spark-tracker": spark_tracker.cases,
}
TOO_LONG = {
    "storages",
    "zookeeper",
    "gateway",
    "gateway-native",
    "gateway-sqs",
    "spark-processing",
    "spark-state",
    "spark-tracker",
}
"""Works that --quick leaves out unless --only names them: they have many peers, or a Spark session for
each."""

# The embedded cluster is tuned for a quick start; with these options, a broker runs at its full speed.
BROKER_JVM = ("-Xmx1g", "-XX:TieredStopAtLevel=4")
# The pauses of the broker's default collectors would be the slowest messages of everybody.
LATENCY_JVM = (*BROKER_JVM, "-XX:-UseSerialGC", "-XX:+UseZGC")
LATENCIES = {"latency", "worker-latency", "retries", "urgent"}


@click.group()
def main() -> None:
    """Measure kmqpy beside its peers."""


@main.command()
@click.option(
    "--quick",
    is_flag=True,
    help="Smaller numbers, one turn each, without storages, ZooKeeper and Spark: 3 minutes.",
)
@click.option("--only", default="", help=f"Some of the works, with commas: {','.join(WORKS)}.")
@click.option("--turns", type=click.IntRange(1), help="Turns of each peer, in place of 3 (quick: 1).")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=HERE / "results")
def run(*, quick: bool, only: str, turns: int | None, out: Path) -> None:
    """Run the works, print the table, write results.json and results.png into a folder.

    Exit code 1 when a peer failed in one.
    """
    chosen = [name.strip() for name in only.split(",") if name.strip()]
    chosen = chosen or [name for name in WORKS if not (quick and name in TOO_LONG)]
    if unknown := set(chosen) - set(WORKS):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: choose from {', '.join(WORKS)}")
    out.mkdir(parents=True, exist_ok=True)
    sizes = QUICK if quick else FULL
    if turns is not None:
        sizes = replace(sizes, repeats=turns, few_repeats=turns)
    began = time.monotonic()
    rows: list[Row] = []
    # A cluster for each work: none pays for what another left behind. With --quick, works share them.
    by_jvm = itertools.groupby(sorted(chosen, key=LATENCIES.__contains__), key=LATENCIES.__contains__)
    for works in [list(names) for _, names in by_jvm] if quick else [[name] for name in chosen]:
        with Cluster(jvm_options=LATENCY_JVM if works[0] in LATENCIES else BROKER_JVM) as cluster:
            lab = Lab(
                KafkaConnection(bootstrap=cluster.bootstrap), ZooKeeperConnection(hosts=cluster.zookeeper)
            )
            for case in itertools.chain.from_iterable(WORKS[name](lab, sizes) for name in works):
                rows += run_case(case)
                meta = _meta(quick=quick, seconds=time.monotonic() - began)
                write_json(out / "results.json", to_json(meta, rows))
    click.echo(report.table(rows))
    report.plot(rows, out / "results.png")
    progress(f"written: results.json and results.png into {click.format_filename(out)}")
    if failed := sorted({f"{row.work}: {row.case}: {row.peer}" for row in rows if row.problem}):
        raise click.ClickException("failed: " + "; ".join(failed))


@main.command()
@click.option("--partitions", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--trackers", type=click.IntRange(4), default=1_000, show_default=True)
@click.option("--queues", type=click.IntRange(1), default=100, show_default=True)
@click.option("--simulate-only", is_flag=True, help="No servers: without times, memory and the check.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=HERE / "results")
def scale(*, partitions: int, trackers: int, queues: int, simulate_only: bool, out: Path) -> None:
    """Simulate many trackers: ZooKeeper's work, what moves, time and memory (docs/scale.md)."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    results: dict[str, Any] = {"simulation": scale_work.simulate(partitions, trackers, queues)}
    if not simulate_only:
        with Cluster(jvm_options=BROKER_JVM) as cluster:
            results["check"] = scale_work.check(cluster.zookeeper, 400, 8)
            results["zookeeper"] = scale_work.zookeeper_speed(cluster.zookeeper)
            lab = Lab(
                KafkaConnection(bootstrap=cluster.bootstrap), ZooKeeperConnection(hosts=cluster.zookeeper)
            )
            results["tracker"] = scale_work.tracker_costs(lab, 10, 110)
        results["conclusions"] = scale_work.conclude(
            results["simulation"], results["zookeeper"], results["tracker"]
        )
    meta = _meta(quick=False, seconds=time.monotonic() - began)
    (out / "scale.json").write_text(json.dumps({"meta": meta, **results}, indent=1) + "\n")
    click.echo(scale_work.table(results))


@main.command()
def table() -> None:
    """Put the figures of the committed results into README.md, and into docs/ with a chart."""
    found = report.newest({title: json.loads(file.read_text()) for title, file in COMMITTED.items()})
    report.put_between_markers(README, report.summary(next(iter(found.values())), IN_README, COLUMNS))
    shown = [report.without(data, NOT_ON_THE_PAGE) for data in found.values()]
    texts = [
        f"## {title}\n\n{report.markdown(data, above)}"
        for title, data, above in zip(found, shown, [None, *shown], strict=False)
    ]
    report.put_between_markers(DOCS / "benchmarks.md", "\n\n".join(texts))
    rows = [row for data in found.values() for row in from_json(data)[1]]
    report.plot(report.of_case(rows, *AS_BARS), DOCS / "benchmarks.svg")


def _meta(*, quick: bool, seconds: float) -> dict[str, Any]:
    return {
        "quick": quick,
        "minutes": round(seconds / 60, 1),
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kmqpy": version("kmqpy"),
        "confluent-kafka": version("confluent-kafka"),
        "kafka": "4.4.0, one broker, on the same machine",
    }


if __name__ == "__main__":
    sys.exit(main())
