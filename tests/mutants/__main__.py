"""The command line of the mutants."""

import argparse
import contextlib
import os
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from kmqpy.dev import Cluster

from .catalogue import Mutant, load, named
from .run import Result, Runner, Tree, Verdict

_CLUSTER = "KMQ_TEST_CLUSTER"
_HELP = """Break kmqpy in one line, and see that a test notices; once for each mutant.

A mutant is a fault that users would feel: an acknowledgement that is not written, a lease that ends too
early, a Ctrl-C that loses messages. tests/mutants/mutants.toml lists them: the text that each replaces,
by what, and the test that must fail then. Mutants are applied to a copy of the tree in a temporary folder,
never to your files. First the tests run without mutants and must pass. Tests that need Kafka and ZooKeeper
share servers that are started once; those of KMQ_TEST_CLUSTER, host:port;zookeeper-host:port, if it is set.

  make mutants                              all of them, about 40 minutes
  make mutants ARGS=--list                  all of them: what users would feel, change, and test
  make mutants ARGS="worker tracker"        the mutants of these areas
  make mutants ARGS=worker.leases-run-out   one mutant
"""
_MEANING = """Verdicts:
  caught    the test fails with the mutant
  SURVIVED  the test passes with the mutant: it checks less than it should; mend the test, or name another
  STALE     the text to replace no longer stands there exactly once, or the test is gone or fails without
            the mutant: bring mutants.toml up to date

Exit code: 0 all caught, 1 some were not, 2 bad use.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=_HELP,
        epilog=_MEANING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants or areas; all without")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    options = parser.parse_args(arguments)
    try:
        mutants = named(load(), options.names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        for mutant in mutants:
            print(mutant.name, _described(mutant), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    results: list[Result] = []
    try:
        with _environment(mutants) as environment, Tree() as tree:
            for result in _results(Runner(tree, environment), mutants):
                results.append(result)
                _print_result(len(results), len(mutants), result)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
    _print_summary(mutants, results, time.monotonic() - began)
    return int(len(results) < len(mutants) or any(result.verdict is not Verdict.CAUGHT for result in results))


def _results(runner: Runner, mutants: Sequence[Mutant]) -> Iterator[Result]:
    print(f"The tests that must catch {len(mutants)} mutants, without mutants:", flush=True)
    began = time.monotonic()
    failures = runner.unmutated_failures(mutants, _Progress())
    print(f"  {len(failures)} do not pass, {time.monotonic() - began:.0f} s", flush=True)
    for mutant in mutants:
        if mutant.caught_by in failures:
            yield Result(mutant, Verdict.STALE, failures[mutant.caught_by])
        else:
            yield runner.judge(mutant)


class _Progress:
    """Prints how many tests have ended, at most every five seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 5

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 5
            print(f"  {done} of {total}", flush=True)


@contextlib.contextmanager
def _environment(mutants: Sequence[Mutant]) -> Iterator[dict[str, str]]:
    """The environment of the tests, with servers of their own if one needs them and none are given."""
    chosen = os.environ.get(_CLUSTER, "")
    if ":" in chosen or not any(mutant.needs_cluster for mutant in mutants):
        yield dict(os.environ)
        return
    print("Starting Kafka and ZooKeeper ...", flush=True)
    with Cluster() as cluster:
        yield {**os.environ, _CLUSTER: f"{cluster.bootstrap};{cluster.zookeeper}"}


def _print_result(number: int, total: int, result: Result) -> None:
    print(
        f"[{number}/{total}] {result.verdict:8} {result.mutant.name}  ({result.took_s:.1f} s)\n"
        + textwrap.indent(textwrap.shorten(result.why, 160, placeholder=" ..."), "    "),
        flush=True,
    )


def _print_summary(mutants: Sequence[Mutant], results: Sequence[Result], took_s: float) -> None:
    counts = Counter(result.verdict for result in results)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict), end="")
    minutes, seconds = divmod(round(took_s), 60)
    print(f", {len(mutants) - len(results)} not run; {minutes} min {seconds} s")
    for result in results:
        if result.verdict is not Verdict.CAUGHT:
            print(f"\n{result.verdict} {result.mutant.name}: {result.why}")
            print(_described(result.mutant))


def _described(mutant: Mutant) -> str:
    change = f"{mutant.text}  ->  {mutant.becomes}"
    return textwrap.indent("\n".join((mutant.felt, change, mutant.caught_by)), "    ")


if __name__ == "__main__":
    sys.exit(main())
