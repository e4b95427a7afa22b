"""`make test-room ROOM=kmqpy/storages/sql`: the tests of one room, in about a minute.

These are the unit tests that import from it, and those on real servers that IN_USE names for it, or for the
room around it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IN_USE = {
    "kmqpy": ["tests/integration/test_queue_kafka.py"],
    "kmqpy/cli": ["tests/integration/kmq/test_kmq.py"],
    "kmqpy/contrib": ["tests/integration/sql_storage/test_django_tasks.py"],
    "kmqpy/dev": ["tests/integration/test_database_addresses.py"],
    "kmqpy/gateway": ["tests/gateway/test_native.py", "tests/gateway/test_sqs_answers.py"],
    "kmqpy/gateway/console": ["tests/gateway/test_console.py"],
    "kmqpy/gateway/dialects": ["tests/gateway/test_emodb_calls.py", "tests/gateway/test_native.py"],
    "kmqpy/gateway/dialects/sqs": ["tests/gateway/test_sqs_wire.py", "tests/gateway/test_sqs_signatures.py"],
    "kmqpy/gateway/discovery": ["tests/gateway/test_registration.py"],
    "kmqpy/kafka": ["tests/integration/test_queue_kafka.py", "tests/integration/test_kafka_storage.py"],
    "kmqpy/kafka/admin": ["tests/integration/admin/test_admin.py"],
    "kmqpy/kafka/client": [
        "tests/integration/test_lanes_client.py",
        "tests/integration/test_message_ids.py",
        "tests/integration/test_late_takes.py",
    ],
    "kmqpy/kafka/copies": ["tests/integration/test_lineage.py", "tests/integration/test_late_acks.py"],
    "kmqpy/kafka/markers": ["tests/integration/test_marker_format.py"],
    "kmqpy/queue": ["tests/unit/test_contract_memory.py"],
    "kmqpy/spark": ["tests/spark/test_reading.py"],
    "kmqpy/spark/sinks": ["tests/spark/test_sinks.py"],
    "kmqpy/storages": ["tests/unit/test_contract_memory.py", "tests/unit/test_contract_sqlite.py"],
    "kmqpy/storages/http": ["tests/gateway/test_http_users.py"],
    "kmqpy/storages/redis": ["tests/integration/test_contract_redis.py"],
    "kmqpy/storages/sql": ["tests/integration/sql_storage/test_sql.py", "tests/unit/test_contract_sqlite.py"],
    "kmqpy/storages/zookeeper": ["tests/integration/zookeeper_storage"],
    "kmqpy/testing": ["tests/unit/test_contract_memory.py"],
    "kmqpy/worker": ["tests/integration/test_worker_kafka.py"],
    "kmqpy/zookeeper": [
        "tests/integration/test_contract_zookeeper.py",
        "tests/integration/zk_queue/test_zk_queue.py",
    ],
    "kmqpy/zookeeper/curator": ["tests/integration/zk_curator"],
    "kmqpy/zookeeper/queue": ["tests/integration/zk_queue/test_zk_queue.py"],
    "tracker": ["tests/integration/test_tracker.py"],
    "tracker/leadership": ["tests/integration/leadership/test_leadership.py"],
    "tracker/redelivery": ["tests/integration/test_claims.py", "tests/integration/test_lineage.py"],
    "tracker/spark": ["tests/unit/test_tracker_tasks.py"],
}


def tests_of(room: str) -> list[str]:
    """The files, and folders, of tests for a room of kmqpy or tracker."""
    importing = re.compile(rf"\b{re.escape(room.replace('/', '.'))}\b")
    units = [file for file in (ROOT / "tests/unit").rglob("test_*.py") if importing.search(file.read_text())]
    around = max((one for one in IN_USE if f"{room}/".startswith(f"{one}/")), key=len)
    return sorted({*IN_USE[around], *(str(file.relative_to(ROOT)) for file in units)})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rooms", description=__doc__)
    parser.add_argument("room", nargs="?", default="", help="a folder of kmqpy or tracker")
    room = parser.parse_known_args()[0].room.strip("/")
    if not room.startswith(("kmqpy", "tracker")) or not (ROOT / room).is_dir():
        parser.error(
            f"ROOM: {room!r} is not a folder of kmqpy or tracker: use for example kmqpy/storages/sql"
        )
    command = [sys.executable, "-m", "pytest", "-n", "3", "--dist", "worksteal", *tests_of(room)]
    return subprocess.run([*command, *parser.parse_known_args()[1]], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
