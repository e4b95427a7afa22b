"""Servers and names that tests share.

KMQ_TEST_CLUSTER chooses the servers: `docker` (testcontainers), `embedded` (kmqpy.dev), or addresses
of running ones, `host:port[;zookeeper host:port]`. Default: docker if a Docker engine answers.
KMQ_TEST_ZOOKEEPERS=3: the embedded ZooKeeper is an ensemble of so many servers. Default: 1.

KMQ_TEST_DATABASES chooses those of `database_url` in the same way, `docker` or `embedded`.
"""

import asyncio
import contextlib
import functools
import gc
import inspect
import logging
import os
import re
import uuid
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from kmqpy.dev import Cluster, Databases, ports
from kmqpy.dev.ports import free_ports
from kmqpy.kafka.client import collapsing
from kmqpy.zookeeper.settings import ZooKeeperConnection


class Servers(Protocol):
    """What `cluster` gives: addresses, `host:port[,…]`."""

    @property
    def bootstrap(self) -> str: ...

    @property
    def zookeeper(self) -> str: ...


@dataclass(frozen=True)
class Addresses:
    bootstrap: str
    zookeeper: str


_ALL = "KMQ_TEST_ALL" in os.environ
"""Whether tests with the mark `breadth` run, too."""

# Nothing is timed: how long an example takes says more of what else runs on the machine.
settings.register_profile("untimed", deadline=None, max_examples=100 if _ALL else 20)
settings.load_profile("untimed")

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    ports.PORTS = ports.PORTS[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]

_CHOICE = "KMQ_TEST_CLUSTER"
_SPARK = "tests/spark/test_"
"""Files that share Spark sessions; those beside them in processes/ start sessions of their own."""
_SESSIONS = (f"{_SPARK}[a-p]*", f"{_SPARK}[q-z]*") if _ALL else (f"{_SPARK}*",)
"""The files that share one; with breadth, two halves of about the same length, for two workers."""
_LONG = (
    _SPARK,
    "tests/docs/",
    "tests/spark/processes/",
    "tests/chaos/",
    "tests/integration/test_client.py",
    "tests/integration/test_contract",
    "tests/integration/test_outage",
    *(
        f"tests/integration/test_{one}"
        for one in ("redelivery", "security", "stopping_away", "takeover", "tracker")
    ),
    "tests/integration/zk_queue/",
    "tests/interop/",
)
_COMPUTING = tuple(f"tests/{one}/" for one in ("chaos", "docs", "packaging", "simulation", "spark", "unit"))
"""Tests that keep a core busy. Those of integration/ and others mostly wait for servers."""
_COMPUTE_AT_ONCE = 3
"""How many workers run tests that compute, as long as there are others: else these were left to the end, when
the cores would be idle half of the time."""
_shared = contextlib.ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """With several workers (pytest -n), start the servers here; the workers find them by the variable."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ.setdefault("KMQ_TEST_DATABASES", "docker" if _docker_answers() else "embedded")
        servers = _shared.enter_context(_servers())
        os.environ[_CHOICE] = f"{servers.bootstrap};{servers.zookeeper}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected here stays: the garbage collector need not look at it, now or later."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # collections took 4 % of the processor time of a run
    return result


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Files in which all is breadth are not even imported, unless they are named."""
    if _ALL or collection_path.suffix != ".py":
        return None
    return bool(re.search(r"^pytestmark = .*\bbreadth\b", collection_path.read_text(), re.MULTILINE)) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes minutes comes first, so that no worker begins it when the others are done."""
    if not _ALL:
        breadth = dict.fromkeys(item for item in items if item.get_closest_marker("breadth") is not None)
        config.hook.pytest_deselected(items=list(breadth))
        items[:] = [item for item in items if item not in breadth]

    def rank(item: pytest.Item) -> int:
        return next((rank for rank, one in enumerate(_LONG) if item.nodeid.startswith(one)), len(_LONG))

    items.sort(key=rank)


class _ByFile(LoadFileScheduling):
    """Gives each file to one worker, and those that share a session to one.

    Some workers run files that compute, the others those that wait; both in the order of the tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        sharing = (files for files in _SESSIONS if fnmatchcase(nodeid, files))
        return next(sharing, None) or super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        computing = sum(any(map(_computes, _unfinished(files))) for files in self.assigned_work.values())
        wanted = computing < _COMPUTE_AT_ONCE
        following = next((file for file in self.workqueue if _computes(file) is wanted), None)
        if following is not None:
            self.workqueue.move_to_end(following, last=False)
        super()._assign_work_unit(node)


def _computes(file: str) -> bool:
    return file.startswith(_COMPUTING)


def _unfinished(files: dict[str, dict[str, bool]]) -> Iterator[str]:
    """Those of a worker's files whose tests are not all done."""
    return (file for file, done in files.items() if not all(done.values()))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return _ByFile(config, log)


def pytest_unconfigure() -> None:
    _shared.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A coroutine function that is a test runs on an event loop of its own; its fixtures do not."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**given))
    return True


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, Kafka may tell late where logs end; then twins would come, which is no fault."""
    monkeypatch.setattr(collapsing, "_ENDS_TIMEOUT_S", 10.0)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """What a command in this process does to the logs of all ends with its test."""
    root, access = logging.getLogger(), logging.getLogger("kmqpy.gateway.access")
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    access.setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler and handler not in handlers:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Servers]:
    """Kafka and ZooKeeper, started once per test run; use names of your own (`queue_name`)."""
    with _servers() as servers:
        yield servers


@pytest.fixture(scope="session")
def zookeeper(cluster: Servers) -> ZooKeeperConnection:
    """Where that ZooKeeper is."""
    return ZooKeeperConnection(hosts=cluster.zookeeper)


@contextlib.contextmanager
def _servers() -> Iterator[Servers]:
    chosen = os.environ.get(_CHOICE) or ("docker" if _docker_answers() else "embedded")
    if chosen == "embedded":
        with Cluster(zookeepers=int(os.environ.get("KMQ_TEST_ZOOKEEPERS", "1"))) as embedded:
            yield embedded
    elif chosen == "docker":
        with _containers() as addresses:
            yield addresses
    else:
        bootstrap, _, zookeeper = chosen.partition(";")
        yield Addresses(bootstrap.strip(), zookeeper.strip())


@pytest.fixture(scope="session")
def database_url() -> Iterator[Callable[[str], str]]:
    """Return the URL of a database server by its name in kmqpy.dev.databases.KINDS.

    It is started at its first use, for this worker; use tables or keys of your own (`queue_name`).
    """
    chosen = os.environ.get("KMQ_TEST_DATABASES") or ("docker" if _docker_answers() else "embedded")
    with contextlib.ExitStack() as started:

        @functools.cache
        def url(name: str) -> str:
            if chosen == "docker":
                return started.enter_context(_database_container(name))
            assert chosen == "embedded", f"KMQ_TEST_DATABASES={chosen}: neither docker nor embedded"
            return started.enter_context(Databases(name)).urls[name]

        yield url


@pytest.fixture
def queue_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return a name for a queue, never used before, that tells the test it belongs to.

    When the test is over, topics of the shared cluster whose names begin with it are deleted: with those of a
    thousand tests the broker would spend a fifth of a core on doing nothing.
    """
    test = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    name = f"{test[:60]}-{uuid.uuid4().hex[:8]}"
    if "cluster" not in request.fixturenames:
        yield name
        return
    admin = request.getfixturevalue("cluster_admin")
    yield name
    with contextlib.suppress(KafkaException):
        topics = [topic for topic in admin.list_topics(timeout=30).topics if topic.startswith(name)]
        for deletion in admin.delete_topics(topics).values() if topics else ():
            with contextlib.suppress(KafkaException, TimeoutError):  # it is being deleted already
                deletion.result(30)


@pytest.fixture(scope="session")
def cluster_admin(cluster: Servers) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.bootstrap})


def _docker_answers() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without an engine the client forgets to close a socket
        try:
            import docker

            with contextlib.closing(docker.from_env(timeout=5)) as engine:
                return bool(engine.ping())
        except Exception:  # not installed, not running, not allowed: all mean "without Docker"
            return False
        finally:
            gc.collect()  # closes that socket while warnings are off


@contextlib.contextmanager
def _containers() -> Iterator[Servers]:
    """Run the official images; testcontainers' own KafkaContainer knows only another image."""
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.docker_client import DockerClient
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    host = DockerClient().host()
    (port,) = free_ports(1)  # the broker must know beforehand how clients will reach it
    kafka = (
        DockerContainer("apache/kafka:4.4.0")
        .with_bind_ports(port, port)
        .with_envs(  # the image drops all its defaults as soon as one is given
            KAFKA_NODE_ID="1",
            KAFKA_PROCESS_ROLES="broker,controller",
            KAFKA_CONTROLLER_QUORUM_VOTERS="1@localhost:9093",
            KAFKA_CONTROLLER_LISTENER_NAMES="CONTROLLER",
            KAFKA_LISTENERS=f"PLAINTEXT://:{port},BROKER://:9092,CONTROLLER://:9093",
            KAFKA_ADVERTISED_LISTENERS=f"PLAINTEXT://{host}:{port},BROKER://localhost:9092",
            KAFKA_INTER_BROKER_LISTENER_NAME="BROKER",
            KAFKA_LISTENER_SECURITY_PROTOCOL_MAP=(
                "PLAINTEXT:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT"
            ),
            KAFKA_AUTO_CREATE_TOPICS_ENABLE="false",
            KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS="0",
            KAFKA_OFFSETS_TOPIC_NUM_PARTITIONS="4",
            KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR="1",
            KAFKA_TRANSACTION_STATE_LOG_NUM_PARTITIONS="4",
            KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR="1",
            KAFKA_TRANSACTION_STATE_LOG_MIN_ISR="1",
            KAFKA_SHARE_COORDINATOR_STATE_TOPIC_REPLICATION_FACTOR="1",
            KAFKA_SHARE_COORDINATOR_STATE_TOPIC_MIN_ISR="1",
        )
        .waiting_for(LogMessageWaitStrategy("Kafka Server started"))
    )
    zookeeper = (
        DockerContainer("zookeeper:3.9.4")
        .with_exposed_ports(2181)
        .with_envs(
            ZOO_TICK_TIME="500",
            ZOO_MAX_CLIENT_CNXNS="0",
            ZOO_ADMINSERVER_ENABLED="false",
            ZOO_4LW_COMMANDS_WHITELIST="ruok,srvr,mntr",
            ZOO_CFG_EXTRA="minSessionTimeout=1000 maxSessionTimeout=40000",
        )
        .waiting_for(LogMessageWaitStrategy("binding to port"))
    )
    with kafka, zookeeper:
        yield Addresses(f"{host}:{port}", f"{host}:{zookeeper.get_exposed_port(2181)}")


@contextlib.contextmanager
def _database_container(name: str) -> Iterator[str]:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    # Image, URL, port, environment, command, and what it logs when it serves clients (not when it is set up).
    append = "--appendonly yes --save ''"
    images: dict[str, tuple[str, str, int, dict[str, str], str, str]] = {
        "postgresql": (
            "postgres:18",
            "postgresql://postgres@{}:{}/postgres",
            5432,
            {"POSTGRES_HOST_AUTH_METHOD": "trust"},
            "postgres",
            r'listening on IPv4 address "0\.0\.0\.0"(.|\n)*ready to accept connections',
        ),
        "mariadb": (
            "mariadb:11.4",
            "mariadb://root@{}:{}/kmq",
            3306,
            {"MARIADB_ALLOW_EMPTY_ROOT_PASSWORD": "1", "MARIADB_DATABASE": "kmq"},
            "mariadbd",
            "port: 3306",
        ),
        "mysql": (
            "mysql:8.4",
            "mysql://root@{}:{}/kmq",
            3306,
            {"MYSQL_ALLOW_EMPTY_PASSWORD": "1", "MYSQL_DATABASE": "kmq"},
            "mysqld",
            "port: 3306 ",
        ),
        "redis": ("redis:7.4", "redis://{}:{}/0", 6379, {}, f"redis-server {append}", "Ready to accept"),
        "valkey": (
            "valkey/valkey:9.0",
            "redis://{}:{}/0",
            6379,
            {},
            f"valkey-server {append}",
            "Ready to accept",
        ),
    }
    image, url, port, environment, command, ready = images[name]
    container = DockerContainer(image).with_exposed_ports(port).with_envs(**environment)
    with container.with_command(command).waiting_for(LogMessageWaitStrategy(ready)):
        yield url.format(container.get_container_host_ip(), container.get_exposed_port(port))
