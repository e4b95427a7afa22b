"""The command line of the chaos tests."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kmqpy.core import logs
from kmqpy.errors import ClusterError

from . import report
from .celery_tasks import run as kill_workers
from .cuts import run as cut_logs
from .gateways import LARGE, STORAGES
from .gateways import run as kill_gateways
from .groups import STORAGES as WITH_GROUPS
from .groups import run as kill_takers
from .run import run as run_it
from .schedule import LEVELS
from .sqs import run as kill_sqs
from .stage import Failed

RESULTS = Path(__file__).resolve().parent / "results"

_HELP = """Break things while messages are sent, and check that none is lost or doubled.

\b
On this machine: 3 Kafka brokers, 3 ZooKeeper servers, 3 trackers (each behind a TCP proxy of its
own), 4 consumers that drop and give back some messages, 2 senders. By a seeded schedule, processes
are killed (-9), paused and stopped, servers restarted, trackers cut off, their requests to Kafka held
back, messages in flight deleted, some of it two at a time.
In the end a checker compares what was acknowledged to senders with what consumers were given, and
reads the topics: nothing may be lost, unfinished, unexpected, or copied twice by trackers.

\b
  make chaos                               about 10 minutes
  make chaos ARGS="--quick"                one fault of each kind, less than 4 minutes
  make chaos ARGS="--full"                 1,000,000 messages, 140 faults, less than 60 minutes
  make chaos ARGS="--full --minutes 5"     the same in small
  make chaos ARGS="--lanes"                copies go to a retry lane, urgent messages to others
  make chaos ARGS="--late"                 100,000 acks up to 5 s after the lease, about 10 minutes
  make chaos ARGS="--clocks 180"           clocks, of brokers too, are wrong by 3 minutes to either side;
                                           with --gateways or --sqs those of gateways
  make chaos ARGS="--cuts 30"              logs are cut back instead, 30 times, about 15 minutes
  make chaos ARGS="--power 4"              the power of all brokers is cut instead, about 4 minutes
  make chaos ARGS="--gateways kafka"       gateways are killed: 100,000 messages, about 15 minutes
  make chaos ARGS="--sqs"                  clients of SQS, tasks of Celery with an ETA, about 2 minutes
  make chaos ARGS="--celery"               workers of Celery, about 3 minutes
  make chaos ARGS="--groups redis"         takers and the server are killed; order="group", about 5 minutes
  make chaos ARGS="--groups redis --unique" the same of unique jobs, whose dead letters hold their groups
  make chaos ARGS="--seed 7"               other targets, another order
  make chaos ARGS="--control two-sends"    a safeguard is taken out: the checker must find it
  make chaos ARGS="--scenario two-sends"   what that does to kmqpy as it is: nothing

Written into the folder of --out: events.jsonl (as it goes), report.json, timeline.png, a log and
journals of each process, and evidence-QUEUE.json with every record (markers and copies, without their
payload) of what the checker found. Exit code: 0 all promises kept, 1 the checker found something (it says
what), 2 it could not run. A seed fixes the schedule, not the scheduling of processes: what it found
need not happen again with it, and the logs are what to look at.
"""


@click.group()
def main() -> None:
    """Chaos tests of kmqpy."""


@main.command(help=_HELP)
@click.option(
    "--tiny", "level", flag_value="tiny", help="One fault of each kind, close together: of make test."
)
@click.option("--quick", "level", flag_value="quick", help="One fault of each kind, in less than 4 minutes.")
@click.option("--full", "level", flag_value="full", help="The acceptance run.")
@click.option(
    "--late",
    "level",
    flag_value="late",
    help="100,000 acks up to 5 s after the lease, in about 10 minutes.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(1),
    help="Scale faults and messages to so much load; with --groups: end then.",
)
@click.option("--seed", type=int, help="Of the schedule; default: from the clock.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, show_default=False)
@click.option(
    "--clocks",
    type=click.FloatRange(0),
    default=0.0,
    is_flag=False,
    flag_value=60.0,
    help="By how many seconds clocks are wrong (60); of brokers, it needs libfaketime.",
)
@click.option("--cuts", type=click.IntRange(1), help="Cut logs back so many times, and do nothing else.")
@click.option("--power", type=click.IntRange(1), help="Cut the power of all brokers so many times instead.")
@click.option(
    "--flush", type=click.IntRange(0), default=0, help="With --power: brokers flush after so many records."
)
@click.option("--gateways", type=click.Choice(STORAGES), help="Kill gateways over this storage instead.")
@click.option("--sqs", is_flag=True, help="Kill gateways of SQS's clients over PostgreSQL instead.")
@click.option("--celery", is_flag=True, help="Kill gateways, and a worker of Celery, instead.")
@click.option("--groups", type=click.Choice(WITH_GROUPS), help="Kill takers, and this server, instead.")
@click.option("--messages", type=click.IntRange(1), help="With the last four; each has a default of its own.")
@click.option("--unique", is_flag=True, help="With --groups: of unique jobs, whose dead letters hold groups.")
@click.option("--no-late-acks", is_flag=True, help="The queue has no late acks.")
@click.option("--lanes", is_flag=True, help="The queue has a retry lane and priorities.")
@click.option(
    "--control",
    metavar="NAME",
    help="no-start-wait, no-fencing, safe-offset, two-sends, no-late-look or late-end-txn.",
)
@click.option("--scenario", metavar="NAME", help="The same scenario with the safeguard in place.")
def run(
    *,
    level: str | None,
    minutes: float | None,
    seed: int | None,
    out: Path,
    clocks: float,
    cuts: int | None,
    power: int | None,
    flush: int,
    gateways: str | None,
    sqs: bool,
    celery: bool,
    groups: str | None,
    messages: int | None,
    unique: bool,
    no_late_acks: bool,
    lanes: bool,
    control: str | None,
    scenario: str | None,
) -> None:
    """Run."""
    out.mkdir(parents=True, exist_ok=True)
    logs.setup("CRITICAL", "text")  # of this process; the others have their own
    size = replace(LARGE, clocks_s=clocks)
    try:
        if control or scenario:
            problems = _scenario(control or scenario or "", sabotaged=bool(control), out=out)
        elif gateways:
            problems = kill_gateways(gateways, messages or 100_000, _seed(seed), out, _tell, size)
        elif sqs:
            problems = kill_sqs(messages or 20_000, _seed(seed), out, _tell, size)
        elif celery:
            problems = kill_workers(messages or 2_000, _seed(seed), out, _tell)
        elif groups:
            problems = kill_takers(
                groups,
                messages or 100_000,
                _seed(seed),
                out,
                _tell,
                is_unique=unique,
                seconds=minutes and minutes * 60,
            )
        elif cuts:
            problems = cut_logs(cuts, _seed(seed), out, _tell)
        elif power:
            problems = cut_logs(power, _seed(seed), out, _tell, flush)
        else:
            problems = _chaos(
                level or "medium",
                minutes,
                seed,
                out,
                late_acks=not no_late_acks,
                lanes=lanes,
                clocks_s=clocks,
            )
    except (Failed, ClusterError) as error:
        click.echo(f"could not run: {error}", err=True)
        sys.exit(2)
    if problems:
        click.echo("\nFOUND, and must not be:", err=True)
        for problem in problems:
            click.echo(f"  {problem}", err=True)
        click.echo(f"Logs and journals of every process are in {click.format_filename(out)}.", err=True)
        sys.exit(1)
    click.echo("every promise was kept")


def _chaos(name: str, minutes: float | None, seed: int | None, out: Path, **settings: Any) -> list[str]:
    level = LEVELS[name] if minutes is None else LEVELS[name].scaled(minutes)
    result = run_it(replace(level), _seed(seed), out, _tell, **settings)
    report.write(result, out)
    click.echo(report.table(result))
    return result.all_problems


def _seed(given: int | None) -> int:
    return int(time.time()) % 100_000 if given is None else given


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _scenario(name: str, *, sabotaged: bool, out: Path) -> list[str]:
    from .controls import run_with_cluster

    return run_with_cluster(name, out, sabotaged=sabotaged)


if __name__ == "__main__":
    main()
