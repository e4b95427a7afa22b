"""A gateway over each storage, one for each module of tests."""

import uuid
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from gateway_support import DEDUP, Calls, Served, running
from wire import Wire

from kmqpy.gateway.tracker_process import TrackerProcess
from kmqpy.queue import storage_for

OTHERS = ("kafka", "postgresql", "sqlite", "mariadb", "redis")
ALL = ("memory", *(pytest.param(one, marks=pytest.mark.breadth) for one in OTHERS))


@pytest.fixture(scope="module", params=ALL)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway over the storage of this parameter."""
    url = _url(request.param, request, tmp_path_factory)
    with (
        TrackerProcess(url) if request.param == "kafka" else nullcontext(),
        running(storage_for(url), roots={"": root} if (root := url.partition("root=")[2]) else {}) as found,
    ):
        yield found


@pytest.fixture(
    scope="module",
    params=(
        "memory",
        "postgresql",
        *(pytest.param(one, marks=pytest.mark.breadth) for one in ("sqlite", "redis")),
    ),
)
def sqs_served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway for SQS's clients over the storage of this parameter."""
    storage = storage_for(_url(request.param, request, tmp_path_factory))
    with running(storage, sqs_fair=("fair-*",)) as found:
        yield found


@pytest.fixture
def wire(served: Served) -> Iterator[Wire]:
    """A connection to the gateway that speaks HTTP as it is."""
    with Wire(served.gateway.port) as found:
        yield found


@pytest.fixture
def name() -> str:
    """The name of a queue that has never been used."""
    return f"q-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def calls(served: Served, name: str) -> Calls:
    """Calls of a queue that has never been used."""
    return Calls(served, name)


@pytest.fixture
def dedup(served: Served) -> Calls:
    """Calls of a dedup queue that has never been used; skips the test where there are none."""
    if not served.storage.capabilities.collapse:
        pytest.skip("the storage says that it can't: collapse")
    return Calls(served, f"d-{uuid.uuid4().hex[:12]}", DEDUP)


def _url(kind: str, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> str:
    prefix = f"gw_{uuid.uuid4().hex[:8]}_"
    if kind == "memory":
        return "memory:"
    if kind == "sqlite":
        return f"sqlite:///{folders.mktemp('gateway') / 'queues.db'}"
    if kind == "kafka":
        cluster = request.getfixturevalue("cluster")
        return f"kafka://{cluster.bootstrap}?zookeeper={cluster.zookeeper}&root=/{prefix}"
    url = request.getfixturevalue("database_url")(kind)
    return f"{url}?prefix={prefix}"
