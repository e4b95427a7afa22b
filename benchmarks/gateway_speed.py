"""Measures the gateway over storages, beside ElasticMQ in memory, in EmoDB's dialect, in SQS's and its own.

Sends, and polls with acknowledgements, one by one and in batches, over several numbers of connections. The
server, the load and the storage share the machine's cores; `load_cores` and `server_cores` (in the JSON) say
who had what.
"""

import os
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.children import Child, peer
from benchmarks.lab import Lab
from benchmarks.results import Case, Figures
from benchmarks.sizes import Sizes
from kmqpy.core.clock import SYSTEM_CLOCK, wait_until
from kmqpy.dev import Databases
from kmqpy.dev.jars import jar_set
from kmqpy.dev.java import find_java
from kmqpy.dev.ports import free_ports
from kmqpy.gateway.keys.keyring import new_key
from kmqpy.gateway.keys.stores import FileKeys

ELASTICMQ = "ElasticMQ 1.7.1, memory"
_JARS = Path(__file__).resolve().parent / "peers" / "jars.json"
_BATCHES = (1, 10)
_RATE, _RATE_CONNECTIONS = 1_000, 64
_OPERATOR_KEY = b"k" * 32
_START_S = 60.0
_WARM_UP_S = 1.0
_WARM_UP_JVM_S = 12.0
"""Twice: with sends, and with receives. Until then the JVM has compiled what it runs."""
_ELASTICMQ_SETTINGS = """include classpath("application.conf")
node-address {{ protocol = http, host = localhost, port = {port}, context-path = "" }}
rest-sqs {{ enabled = true, bind-port = {port}, bind-hostname = "127.0.0.1", sqs-limits = strict }}
rest-stats {{ enabled = false }}
"""


def cases(lab: Lab, sizes: Sizes) -> Iterator[Case]:
    """The cases of `make bench`."""
    with tempfile.TemporaryDirectory() as folder, Databases("postgresql", "redis") as databases:
        kafka = f"kafka://{lab.connection.bootstrap}?zookeeper={lab.zookeeper.hosts}"
        urls = {
            "gateway, memory": "memory:",
            "gateway, sqlite": f"sqlite:///{folder}/queues.db",
            "gateway, postgresql": databases.urls["postgresql"],
            "gateway, redis": databases.urls["redis"],
            "gateway, kafka": kafka,
        }
        for connections in sizes.gateway_connections:
            for batch in _BATCHES:
                peers = {name: _turn(url, connections, batch, sizes.storage_s) for name, url in urls.items()}
                peers[ELASTICMQ] = _turn(None, connections, batch, sizes.storage_s)
                how = "one by one" if batch == 1 else f"in batches of {batch}"
                yield Case(
                    work="gateway",
                    name=f"{connections} connections, {how}",
                    metrics={
                        "send": "send/s",
                        "take": "poll+ack/s",
                        "p50_ms": "ms a send, median",
                        "p99_ms": "ms a send, p99",
                    },
                    peers=peers,
                    repeats=sizes.few_repeats,
                )


def sqs_cases(_: Lab, sizes: Sizes) -> Iterator[Case]:
    """The cases in which all speak SQS; signatures are checked where that is said."""
    with tempfile.TemporaryDirectory() as folder, Databases("postgresql") as databases:
        durable = {"sqlite": f"sqlite:///{folder}/queues.db", "postgresql": databases.urls["postgresql"]}
        yield Case(
            work="gateway, SQS",
            name=f"{_RATE:,} sends/s, one by one",
            metrics={"p50_ms": "ms a send, median", "p99_ms": "ms a send, p99"},
            peers={
                f"gateway, {name}": _turn(
                    url, _RATE_CONNECTIONS, 1, sizes.storage_s, dialect="sqs", rate=_RATE
                )
                for name, url in durable.items()
            },
            repeats=sizes.few_repeats,
        )
        urls = {"memory": "memory:", "postgresql": durable["postgresql"]}
        for connections in sizes.gateway_connections:
            for batch in _BATCHES:
                peers = {
                    f"gateway, {name}{', signed' if signed else ''}": _turn(
                        url, connections, batch, sizes.storage_s, dialect="sqs", signed=signed
                    )
                    for name, url in urls.items()
                    for signed in (False, True)
                }
                peers[ELASTICMQ] = _turn(None, connections, batch, sizes.storage_s)
                how = "one by one" if batch == 1 else f"in batches of {batch}"
                yield Case(
                    work="gateway, SQS",
                    name=f"{connections} connections, {how}",
                    metrics={
                        "send": "send/s",
                        "take": "receive+delete/s",
                        "p50_ms": "ms a send, median",
                        "p99_ms": "ms a send, p99",
                    },
                    peers=peers,
                    repeats=sizes.few_repeats,
                )


def native_cases(_: Lab, sizes: Sizes) -> Iterator[Case]:
    """The gateway's own calls beside EmoDB's, from the same load, and from threads of a client by url."""
    with Databases("postgresql") as databases:
        urls = {"memory": "memory:", "postgresql": databases.urls["postgresql"]}
        for batch in (1, 10, 100):
            yield Case(
                work="gateway, native",
                name=f"8 connections, {'one by one' if batch == 1 else f'in batches of {batch}'}",
                metrics={"send": "send/s", "take": "take+ack/s"},
                peers={
                    f"{name}, {dialect}": _turn(url, 8, batch, sizes.storage_s, dialect=dialect)
                    for name, url in urls.items()
                    for dialect in ("emodb", "native", "client")
                },
                repeats=sizes.few_repeats,
            )


def _turn(
    url: str | None,
    connections: int,
    batch: int,
    seconds: float,
    *,
    dialect: str = "emodb",
    signed: bool = False,
    rate: float = 0,
) -> Callable[[], Figures]:
    """A turn of the gateway over the storage of the url, or of ElasticMQ, which always speaks SQS.

    rate  sends per second; 0: as many as there can be
    """

    def turn() -> Figures:
        with ExitStack() as stack:
            key, given = stack.enter_context(_key()) if signed else (None, [])
            server = _elasticmq() if url is None else _gateway(url, *given)
            child, port = stack.enter_context(server)
            options = {
                "dialect": "sqs" if url is None else dialect,
                "key": key,
                "port": port,
                "queue": f"bench-{os.getpid()}-{SYSTEM_CLOCK.wall_ms()}",
                "connections": connections,
                "batch": batch,
                "seconds": seconds,
                "rate": rate,
            }
            if dialect == "client":
                own = {"url": f"http://127.0.0.1:{port}", "depth": 0, "takers": connections}
                with peer("storage", "speed", **own, batch=batch, seconds=seconds) as client:
                    found = client.result()
                return {"send": found["put"], "take": found["take"]}
            seconds_before = _WARM_UP_S if url else _WARM_UP_JVM_S
            warm_up = {**options, "queue": f"{options['queue']}-warm", "seconds": seconds_before}
            with peer("http", "speed", **warm_up) as warm:
                warm.result()
            began_s, cpu_s = SYSTEM_CLOCK.monotonic(), _cpu_s(child.pid)
            with peer("http", "speed", **options) as load:
                figures = load.result()
            passed_s = SYSTEM_CLOCK.monotonic() - began_s
            return {**figures, "server_cores": (_cpu_s(child.pid) - cpu_s) / passed_s}

    return turn


@contextmanager
def _key() -> Iterator[tuple[tuple[str, str], list[str]]]:
    """An access key with its secret, and the options of a gateway that knows it."""
    with tempfile.TemporaryDirectory() as folder:
        operator, keys = Path(folder, "operator"), Path(folder, "keys.json")
        operator.write_bytes(_OPERATOR_KEY)
        made, secret = new_key("bench", ["queue_admin"], [], operator_key=_OPERATOR_KEY)
        FileKeys(keys).put(made)
        yield (made.id, secret), ["--keys", str(keys), "--aws-key", str(operator)]


@contextmanager
def _gateway(url: str, *more: str) -> Iterator[tuple[Child, int]]:
    (port,) = free_ports(1)
    main = "import sys; from kmqpy.cli import main; main()"
    options = ["--port", str(port), "--admin-port", "0", "--no-access-log", "--log-level", "WARNING"]
    options += more
    with Child([sys.executable, "-c", main, "gateway", url, *options]) as child:
        _await_answer(f"http://127.0.0.1:{port}/queue/1/ping")
        yield child, port
        child.stop()


@contextmanager
def _elasticmq() -> Iterator[tuple[Child, int]]:
    (port,) = free_ports(1)
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as settings:
        settings.write(_ELASTICMQ_SETTINGS.format(port=port))
        settings.flush()
        class_path = ":".join(map(str, jar_set("elasticmq", _JARS)))
        command = [str(find_java()), "-Xmx1g", f"-Dconfig.file={settings.name}", "-cp", class_path]
        with Child([*command, "org.elasticmq.server.Main"]) as child:
            _await_answer(f"http://127.0.0.1:{port}/health")
            yield child, port


def _await_answer(url: str) -> None:
    def answers() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    if not wait_until(answers, _START_S, every_s=0.1):
        raise RuntimeError(f"no answer from {url}")


def _cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
