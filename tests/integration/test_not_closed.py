"""A program that ends without close() ends at once, also after an error that nobody handles."""

import subprocess
import sys

import pytest

_ENDS_WITHIN_S = 8
"""Less than the 10 s for which a client of ZooKeeper waited for a thread that runs no more."""
_OF_A_URL = """
from kmqpy.queue import queue_for
queue = queue_for({url!r})
queue.send("x")
print(len(queue.receive(1, wait=10)))
"""
_SETTINGS = """
from kmqpy.zookeeper.settings import ZooKeeperConnection
zookeeper = ZooKeeperConnection(hosts={hosts!r})
"""
_UNIT_OF_WORK = (
    _SETTINGS
    + """
from kmqpy.zookeeper.queue import Listener, ZkQueue
import threading
queue, taken = ZkQueue(zookeeper), threading.Event()
queue.init({name!r})
listener = Listener(queue, {name!r}, lambda consumer, item: taken.set())
with queue.transaction() as work:
    work.put({name!r}, b"x")
    work.commit()
print(int(taken.wait(10)))
"""
)
_CURATOR = (
    _SETTINGS
    + """
from kmqpy.zookeeper.curator import QueueBuilder
from kmqpy.zookeeper.session import new_client
import threading
client, taken = new_client(zookeeper), threading.Event()
client.start()
queue = QueueBuilder(zk=client, path="/{name}", consumer=lambda item: taken.set()).build_queue()
queue.start()
queue.put(b"x")
print(int(taken.wait(10)))
"""
)


@pytest.fixture
def program(request, queue_name, tmp_path):
    """A program that uses a queue, prints 1, and closes nothing."""
    kind = request.param
    if kind == "sqlite":
        return _OF_A_URL.format(url=f"sqlite:///{tmp_path}/q.db?queue=q&create=true")
    if kind in ("postgresql", "mariadb", "redis"):
        url = request.getfixturevalue("database_url")(kind)
        return _OF_A_URL.format(url=f"{url}?queue={queue_name}&create=true")
    hosts = request.getfixturevalue("zookeeper").hosts
    if kind == "zookeeper":
        return _OF_A_URL.format(url=f"zookeeper://{hosts}/{queue_name}?queue=q&create=true")
    if kind == "kafka":
        bootstrap = request.getfixturevalue("cluster").bootstrap
        query = f"zookeeper={hosts}&queue={queue_name}&create=true"
        return _OF_A_URL.format(url=f"kafka://{bootstrap}?{query}")
    return {"unit of work": _UNIT_OF_WORK, "curator": _CURATOR}[kind].format(hosts=hosts, name=queue_name)


@pytest.mark.parametrize(
    "program",
    ["sqlite", "postgresql", "mariadb", "redis", "zookeeper", "kafka", "unit of work", "curator"],
    indirect=True,
)
def test_a_program_that_does_not_close_its_queue_ends_at_once(program):
    ends = (("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1))
    # On Kafka the next one would wait for the end of the former one's session.
    for end, code in ends if "zookeeper:" in program or "ZooKeeper" in program else ends[2:]:
        # Its last line, so that the time for the servers' answers does not count.
        running = subprocess.Popen(
            [sys.executable, "-u", "-c", program + end],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with running:
            assert running.stdout.readline() == "1\n", running.stderr.read()
            try:
                _, errors = running.communicate(timeout=_ENDS_WITHIN_S)
            finally:
                running.kill()
        assert running.returncode == code
        assert ("Traceback" in errors) == (code == 1), errors


@pytest.mark.parametrize(
    "busy",
    [
        _UNIT_OF_WORK.replace(
            "taken.set())", "(taken.set(), consumer.put_on_commit({name!r}, item.body)), workers=8)"
        ).replace('work.put({name!r}, b"x")', '[work.put({name!r}, b"x") for _ in range(100)]'),
        _CURATOR.replace("item: taken.set()", 'item: taken.set(), lock_path="/{name}l"').replace(
            'queue.put(b"x")', '[queue.put(b"x") for _ in range(300)]'
        ),
    ],
    ids=["unit of work", "curator"],
)
def test_threads_that_consume_end_with_their_process_without_a_word(zookeeper, queue_name, busy):
    program = busy.format(hosts=zookeeper.hosts, name=queue_name)
    for _ in range(5):
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
        )
        assert (ended.stdout, ended.stderr) == ("1\n", "")
