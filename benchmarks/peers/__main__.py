"""Runs one peer; started by benchmarks.children.peer."""

import json
import sys
from importlib import import_module

from benchmarks.peers import works

MODULES = {
    "consume": "benchmarks.peers.consume",
    "kmqpy": "benchmarks.peers.kmqpy_client",
    "share": "benchmarks.peers.share_group",
    "share-implicit": "benchmarks.peers.share_implicit",
    "share-perf": "benchmarks.peers.share_perf",
    "jvm": "benchmarks.peers.jvm_kmq",
    "sender": "benchmarks.peers.sender",
    "inflight": "benchmarks.peers.inflight",
    "kmq": "benchmarks.peers.kmq_command",
    "spark": "benchmarks.peers.spark_processing",
    "spark-state": "benchmarks.peers.spark_state",
    "storage": "benchmarks.peers.storage_queues",
    "http": "benchmarks.peers.http_load",
    "worker": "benchmarks.peers.worker",
    "zookeeper": "benchmarks.peers.zookeeper_queues",
}


def main() -> None:
    name, work, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    module = import_module(MODULES[name])
    own = getattr(module, work, None)
    result = own(options) if own else getattr(works, work)(module.connect(options), options)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    if hasattr(module, "leave"):  # a JVM runs in this process
        module.leave()


if __name__ == "__main__":
    main()
