"""`make test-brokers`: the core suite against each Kafka that docs/versions.md names, the oldest first."""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from kmqpy.dev import Cluster
from tests.brokers.broker import VERSIONS, running

NEWEST = "newest"
"""The one that kmqpy.dev pins, and that all other tests run on."""
CORE = tuple(
    f"tests/integration/{one}"
    for one in (
        "test_contract_kafka.py",
        "test_queue_kafka.py",
        "test_tracker.py",
        "test_takeover.py",
        "test_redelivery.py",
        "test_late_acks.py",
        "test_late_requests.py",
        "test_identity.py",
        "test_trace.py",
        "dead_letters",
        "admin/test_admin_stats.py",
    )
)
"""Send, receive, ack, nack, extend; dead letters, redrive; takeover; late acks and requests; stats, trace."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.brokers", description=__doc__)
    known = (*VERSIONS, NEWEST)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: all of {', '.join(known)}")
    parser.add_argument(
        "--pytest", default="-n 6", metavar="ARGS", help="arguments of pytest, default: %(default)s"
    )
    args = parser.parse_args()
    if unknown := set(args.versions) - set(known):
        parser.error(f"unknown version {', '.join(sorted(unknown))}: use {', '.join(known)}")
    results: dict[str, tuple[int, float]] = {}
    for version in args.versions or known:
        print(f"\n== Kafka {version}", flush=True)
        began = time.monotonic()
        with _servers(version) as (bootstrap, zookeeper):
            run = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--dist", "worksteal", *args.pytest.split(), *CORE],
                env={**os.environ, "KMQ_TEST_CLUSTER": f"{bootstrap};{zookeeper}", "KMQ_TEST_ALL": "1"},
                check=False,
            )
        results[version] = (run.returncode, time.monotonic() - began)
    print()
    for version, (code, seconds) in results.items():
        print(f"Kafka {version:8}{f'failed, exit code {code}' if code else 'passed'}, {seconds:.0f} s")
    return int(any(code for code, _ in results.values()))


@contextlib.contextmanager
def _servers(version: str) -> Iterator[tuple[str, str]]:
    if version != NEWEST:
        with running(version) as addresses:
            yield addresses
        return
    with Cluster() as cluster:
        yield cluster.bootstrap, cluster.zookeeper


if __name__ == "__main__":
    sys.exit(main())
