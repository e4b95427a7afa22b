"""What the contract says of kills, cuts, clocks and waits, through gateways in processes of their own."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from taps import Tap

from kmqpy.core.clock import Clock, wait_until
from kmqpy.dev.ports import free_ports
from kmqpy.errors import QueueNotFound, Unavailable, UnknownOutcome
from kmqpy.message import Message
from kmqpy.queue import OutgoingMessage, Queue, Storage, queue_for, storage_for
from kmqpy.testing.contract import Target
from kmqpy.testing.contract.administration import test_closing_ends_a_receive_that_waits  # noqa: F401
from kmqpy.testing.contract.outages import *  # noqa: F403
from kmqpy.testing.contract.sending import test_a_waiting_receive_returns_when_a_message_is_due  # noqa: F401
from kmqpy.testing.contract.target import *  # noqa: F403
from kmqpy.worker.asyncio import AsyncWorker
from kmqpy.worker.worker import Worker


class Child:
    """A gateway in a process of its own."""

    def __init__(self, storage: str) -> None:
        self.port, admin = free_ports(2)
        options = ["--port", str(self.port), "--admin-port", str(admin), "--no-access-log", "--drain", "0s"]
        program = "from kmqpy.cli import main; main()"
        self._command = [sys.executable, "-c", program, "gateway", storage, *options]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert "gateway at" in self._process.stdout.readline()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def restart(self) -> None:
        self.kill()
        self.start()


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    made = Child(f"sqlite:///{tmp_path_factory.mktemp('http')}/q.db")
    yield made
    made.kill()


@pytest.fixture
def kmq_target(child: Child) -> Iterator[Target]:
    def open_with_clock(clock: Clock) -> Storage:
        storage = storage_for(url)
        storage._clock = clock
        return storage

    with Tap(child.port) as tap:
        url = f"http://127.0.0.1:{tap.port}"
        yield Target(
            open=lambda: storage_for(url),
            url=url,
            open_with_clock=open_with_clock,
            kill_server=child.restart,
            cut_connections=tap.cut,
        )


@pytest.fixture
def tapped(child: Child) -> Iterator[tuple[Tap, Queue]]:
    with Tap(child.port) as tap, storage_for(f"http://127.0.0.1:{tap.port}?timeout_ms=5s") as storage:
        with suppress(QueueNotFound):
            storage.delete("lost")
        storage.create("lost")
        with storage.open("lost") as queue:
            yield tap, queue


def test_a_send_whose_answer_was_lost_is_repeated_only_with_dedup_ids(tapped: tuple[Tap, Queue]) -> None:
    tap, queue = tapped
    tap.lose_answers = True
    with pytest.raises(UnknownOutcome, match="not known"):
        queue.send("once")
    tap.lose_answers = True
    kept = queue.send("kept", dedup_id="d")
    tap.lose_answers = True
    queue.send_many([OutgoingMessage("kept", dedup_id="d")])
    tap.lose_answers = True
    assert queue.size() == 2
    assert [one.body for one in queue.peek()] == [b"once", b"kept"]
    assert queue.send("again", dedup_id="d") == kept


def test_another_gateway_answers_when_one_is_away(child: Child) -> None:
    (nobody,) = free_ports(1)
    hosts = f"127.0.0.1:{nobody},127.0.0.1:{child.port}"
    with queue_for(f"http://{hosts}?queue=two&create=true&lease_ms=5s") as queue:
        queue.send("x")
        (message,) = queue.receive()
        assert (message.body, queue.default_lease) == (b"x", 5)
        queue.ack(message)
    with pytest.raises(Unavailable, match=f":{nobody}: .*; check the address"):
        storage_for(f"http://127.0.0.1:{nobody}?timeout_ms=100")


@contextmanager
def in_threads(queue: Queue, handle: Callable[[Message], None]) -> Iterator[None]:
    with Worker(queue, handle, handle_signals=False):
        yield


@contextmanager
def in_tasks(queue: Queue, handle: Callable[[Message], None]) -> Iterator[None]:
    async def handler(message: Message) -> None:
        handle(message)

    worker = AsyncWorker(queue, handler, handle_signals=False)
    thread = threading.Thread(target=lambda: asyncio.run(worker.run()))
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()


@pytest.mark.parametrize("working", [in_threads, pytest.param(in_tasks, marks=pytest.mark.breadth)])
def test_a_worker_goes_on_when_its_gateway_was_killed(child: Child, working: Any) -> None:
    count = 2_000
    done: list[bytes] = []
    with queue_for(
        f"http://127.0.0.1:{child.port}?queue={working.__name__}&create=true&lease_ms=2s"
    ) as queue:
        queue.send_many([b"%d" % number for number in range(count)])
        with working(queue, lambda message: done.append(message.body)):
            assert wait_until(lambda: len(done) >= 50, 60)
            child.kill()
            assert len(set(done)) < count
            child.start()
            assert wait_until(lambda: len(set(done)) == count, 60, every_s=0.1)
            assert wait_until(lambda: not (queue.size() or queue.in_flight()), 60, every_s=0.1)


def test_commands_and_workers_use_a_gateway_as_any_storage(child: Child, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{child.port}"
    for command, told in (
        (["queue", "create", "cli", "--lease", "5s"], "queue cli"),
        (["send", "cli", "hello"], "\n"),
        (["receive", "cli", "--ack"], '"body": "hello"'),
        (["queue", "describe", "cli"], "lease"),
        (["queue", "delete", "cli", "--yes"], "deleted"),
    ):
        program = "from kmqpy.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program, *command, "--queue-url", url],
            capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)
        assert told in done.stdout.replace('":"', '": "'), (command, done.stdout)
