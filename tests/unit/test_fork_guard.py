"""What a forked child knows of what its parent made."""

import subprocess
import sys

SCRIPT = """
import os, sys
from kmqpy.kafka import librdkafka
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.errors import Forked
from kmqpy.core.forks import ForkGuard

connection = KafkaConnection(bootstrap="127.0.0.1:1")
handles = [
    librdkafka.new_producer(connection, {}),
    librdkafka.new_consumer(connection, {}),
    librdkafka.new_admin(connection),
]
before = [sys.getrefcount(one) for one in handles]
guard = ForkGuard("the thing")
guard.raise_if_inherited()
if not os.fork():
    try:
        guard.raise_if_inherited()
    except Forked as error:
        text = str(error)
    ForkGuard("a new thing").raise_if_inherited()
    kept = [sys.getrefcount(one) for one in handles] == [count + 1 for count in before]
    os.write(1, f"{guard.inherited} {kept} {text}".encode())
    os._exit(0)
os.wait()
guard.raise_if_inherited()
assert [sys.getrefcount(one) for one in handles] == before
"""


def test_a_child_is_told_and_frees_no_client_of_librdkafka():
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("True True the thing was made before this process was forked")
