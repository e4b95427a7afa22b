"""The servers and processes of a run."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kmqpy.core.clock import wait_until
from kmqpy.dev.cluster import Cluster
from kmqpy.dev.ports import free_ports
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

from .children import ChildTask
from .clocks import restart_wrong, set_wrong
from .proxy import Gate, Proxy
from .schedule import BROKERS, CONSUMERS, TRACKERS, ZOOKEEPERS, Level
from .served_page import page_of

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = 6
SENDERS = 2
_STOP_S = 60.0


class Failed(Exception):
    """The run can't go on; its text says why."""


def until(is_so: Callable[[], bool], timeout_s: float, what: str, every_s: float = 0.05) -> None:
    """Poll; raises Failed when it is not so in time."""
    if not wait_until(is_so, timeout_s, every_s=every_s):
        raise Failed(f"not within {timeout_s:.0f} s: {what}")


class Slot:
    """A process that is replaced when it was killed; `command(n)` starts its n-th incarnation."""

    def __init__(self, name: str, command: Callable[[int], list[str]], log: Path) -> None:
        self.name = name
        self.starts = 0
        self.log = log
        self.environment: Mapping[str, str] = os.environ
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.starts += 1
        with self.log.open("ab") as log:
            log.write(f"--- start {self.starts}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                self._command(self.starts),
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def died(self) -> bool:
        """Whether it has ended without having been asked to."""
        return self._process is not None and self._process.poll() not in (None, 0)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; it cleans up nothing."""
        if (process := self._process) is not None:
            self._process = None  # first, so that nobody takes it for one that died by itself
            process.kill()
            process.wait()

    def stop(self) -> None:
        """SIGTERM, and wait for its end; raises Failed when that does not come."""
        if (process := self._process) is not None:
            self._process = None
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                code = process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise Failed(f"{self.name} did not end within {_STOP_S:.0f} s of SIGTERM") from None
            if code:
                raise Failed(f"{self.name} ended with exit code {code}: {self.last_words()}")

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:])


class TrackerSlot(Slot):
    """A tracker; `sabotage` names what is changed in it, see sabotage.py."""

    def __init__(
        self,
        name: str,
        connection: KafkaConnection,
        zookeeper: str,
        log: Path,
        *,
        session_ms: int,
        sabotage: str = "",
        **more: str,
    ) -> None:
        (self.port,) = free_ports(1)
        options = {
            "bootstrap": connection.bootstrap,
            "zookeeper": zookeeper,
            "root": connection.root,
            "session-timeout": f"{session_ms}ms",
            "offset-interval": "500ms",
            "http-port": self.port,
            "log-level": "INFO",
            **{key.replace("_", "-"): value for key, value in more.items()},
        }
        arguments = [sabotage, *(f"--{key}={value}" for key, value in options.items())]
        super().__init__(
            name, lambda _: [sys.executable, "-m", "tests.chaos.children", "tracker", *arguments], log
        )

    def stop(self) -> None:
        """As that of other processes, but not before it listens to SIGTERM."""
        self.wait_until_it_lives()
        super().stop()

    def wait_until_it_lives(self) -> None:
        until(lambda: not self.running or self.get("/livez")[0] > 0, 60, f"{self.name} answers")

    def has_taken_over(self) -> bool:
        """Whether it reads the markers of a partition."""
        return re.search(r"^kmq_takeovers_total{.*} [1-9]", self.get("/metrics")[1], re.MULTILINE) is not None

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of an answer; 0 while there is none."""
        return page_of(self.port, path)


def make_queue(
    connection: KafkaConnection,
    zookeeper: ZooKeeperConnection,
    settings: QueueSettings,
    partitions: int,
    replication: int | None = None,
) -> None:
    """A registered queue whose records carry the broker's time: the report needs it."""
    topics = Topics(connection)
    topics.create(settings, partitions, replication)
    for topic in (*(lane.name for lane in settings.lanes()), settings.dead_letter_topic):
        topics.configure(topic, {"message.timestamp.type": "LogAppendTime"})
    with connect(zookeeper) as zk:
        Registry(zk, connection.root).register(settings, partitions)


class Stage:
    """3 brokers, 3 ZooKeeper servers, 3 trackers, 4 consumers, 2 senders.

    Each tracker is behind gates of its own, and so is `more`, a fourth one that joins later. `second` is a
    small queue whose messages are deleted while they are in flight. With `clocks_s`, a third of all clocks is
    slow by so much, a third fast; those of brokers, too.
    """

    def __init__(
        self, level: Level, load_s: float, out: Path, settings: dict[str, Any], *, clocks_s: float = 0.0
    ) -> None:
        self.level = level
        self.clocks_s = clocks_s
        self.out = out
        self.queue = QueueSettings(name="chaos", lease_ms=level.lease_ms, **settings)
        self.second = QueueSettings(name="chaos-second", lease_ms=level.lease_ms)
        self._load_s = load_s
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()

    @property
    def slots(self) -> list[Slot]:
        return [*self.trackers, self.more, *self.consumers, *self.senders]

    def _start(self) -> None:
        proxy = self._ends.enter_context(Proxy())
        numbers = range(1, TRACKERS + 2)
        self.kafka_gates = {n: proxy.gate() for n in numbers}
        self.zookeeper_gates = {n: proxy.gate() for n in numbers}
        listeners = _Listeners(proxy, self.kafka_gates)
        fast = () if self.level.name in ("tiny", "quick") else ("-Xmx1g", "-XX:TieredStopAtLevel=4")
        self.cluster = cluster = self._ends.enter_context(
            Cluster(
                brokers=BROKERS, zookeepers=ZOOKEEPERS, broker_settings=listeners.settings, jvm_options=fast
            )
        )
        self.connection = KafkaConnection(bootstrap=cluster.bootstrap)
        self.zookeeper = ZooKeeperConnection(hosts=cluster.zookeeper)
        make_queue(self.connection, self.zookeeper, self.queue, PARTITIONS)
        make_queue(self.connection, self.zookeeper, self.second, 1)
        zookeepers = [int(address.rpartition(":")[2]) for address in cluster.zookeeper.split(",")]
        *self.trackers, self.more = (
            self._tracker(
                f"tracker-{n}",
                replace(self.connection, bootstrap=_addresses(listeners.ports[n])),
                _addresses(
                    proxy.listen(self.zookeeper_gates[n], lambda port=port: port) for port in zookeepers
                ),
            )
            for n in numbers
        )
        self.consumers = [self._child("consumer", n) for n in range(1, CONSUMERS + 1)]
        self.senders = [self._child("sender", n) for n in range(1, SENDERS + 1)]
        if self.clocks_s:
            self._make_clocks_wrong()
        self._ends.callback(self._kill_all)
        for slot in [*self.trackers, *self.consumers]:
            slot.start()
        self.wait_until_served()

    def _make_clocks_wrong(self) -> None:
        for slots in (self.trackers, self.consumers, self.senders):
            set_wrong(slots, self.clocks_s)
        restart_wrong([self.cluster.broker(n) for n in range(1, BROKERS + 1)], self.clocks_s)

    def wait_until_served(self) -> None:
        """Until a tracker is at work for each partition and all are ready."""
        with connect(self.zookeeper) as zookeeper:
            registry = Registry(zookeeper, self.connection.root)
            until(
                lambda: len(registry.owners(self.queue.name)) == PARTITIONS, 120, "every partition is owned"
            )
        until(lambda: not self.unready(), 120, "every tracker is ready")

    def unready(self) -> list[str]:
        """What the trackers that run say is wrong."""
        answers = {slot.name: slot.get("/readyz") for slot in [*self.trackers, self.more] if slot.running}
        return [f"{name}: {text or 'no answer'}" for name, (status, text) in answers.items() if status != 200]

    def _kill_all(self) -> None:
        for slot in self.slots:
            slot.kill()

    def _tracker(self, name: str, connection: KafkaConnection, zookeeper: str) -> TrackerSlot:
        log = self.out / f"{name}.log"
        # Some store snapshots often, and others take over from them.
        after = {"tracker-2": "1", "tracker-3": "50"}.get(name, "20000")
        return TrackerSlot(
            name, connection, zookeeper, log, session_ms=self.level.session_ms, snapshot_after_markers=after
        )

    def _child(self, kind: str, number: int) -> Slot:
        name, per_second = f"{kind}-{number}", self.level.messages / SENDERS / self._load_s
        settings = {"session.timeout.ms": str(self.level.group_ms)} if kind == "consumer" else {}

        # As before and after `kmq queue alter`; queues with lanes have ranges.
        markers = "range" if number % 2 or self.queue.has_lanes else "jvm"

        def command(incarnation: int) -> list[str]:
            return ChildTask(
                name=name,
                journal=str(self.out / f"{name}-{incarnation}.journal"),
                bootstrap=self.connection.bootstrap,
                queue=replace(self.queue, markers=markers).to_json().decode(),
                kafka=settings,
                first=number * 1_000_000_000,
                per_second=per_second,
                late=self.level.late,
                late_by_s=self.level.late_by_s,
            ).command(kind)

        return Slot(name, command, self.out / f"{name}.log")


class _Listeners:
    """A listener of each broker for each tracker, advertised at a port of the proxy."""

    def __init__(self, proxy: Proxy, gates: dict[int, Gate]) -> None:
        self._targets: dict[tuple[int, int], int] = {}
        self._advertised = {
            (broker, n): proxy.listen(gate, lambda key=(broker, n): self._targets[key])
            for broker in range(1, BROKERS + 1)
            for n, gate in gates.items()
        }
        self.ports = {n: [self._advertised[broker, n] for broker in range(1, BROKERS + 1)] for n in gates}

    def settings(self, broker: int, ports: Sequence[int]) -> dict[str, str]:
        """What a broker's configuration says; called again if its ports turn out to be taken."""
        names = {n: f"TRACKER{n}" for n in self.ports}
        for n, port in zip(names, free_ports(len(names)), strict=True):
            self._targets[broker, n] = port
        client, controller = ports
        plain = [f"PLAINTEXT://127.0.0.1:{client}"]
        own = [f"{name}://127.0.0.1:{self._targets[broker, n]}" for n, name in names.items()]
        told = [f"{name}://127.0.0.1:{self._advertised[broker, n]}" for n, name in names.items()]
        protocols = ",".join(f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "CONTROLLER", *names.values()))
        return {
            "listeners": ",".join([*plain, f"CONTROLLER://127.0.0.1:{controller}", *own]),
            "advertised.listeners": ",".join([*plain, *told]),
            "listener.security.protocol.map": protocols,
            "num.network.threads": "1",  # for each listener
        }


def _addresses(ports: Iterable[int]) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in ports)


def is_stopped(pid: int) -> bool:
    """Whether a process is halted by SIGSTOP."""
    state = subprocess.run(
        ["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return state.stdout.strip().startswith("T")


def resume(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
