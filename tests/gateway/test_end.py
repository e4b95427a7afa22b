"""How a gateway ends, and one that can't start: nothing is cut off, nothing is done twice."""

import asyncio
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from gateway_support import JSON, QUEUE, Calls, fresh_memory, running

from kmqpy.core.clock import wait_until
from kmqpy.gateway.discovery.peers import Peers
from kmqpy.gateway.discovery.registration import Registration
from kmqpy.gateway.server import _Server, _stopped_by_signals
from kmqpy.gateway.service.moves import Moves
from kmqpy.gateway.service.served_queue import ServedQueue
from kmqpy.queue import storage_for
from kmqpy.zookeeper.settings import ZooKeeperConnection


@pytest.mark.parametrize("drain_s", [0.0, 0.5])
def test_the_batch_of_a_move_is_finished(tmp_path, monkeypatch, drain_s):
    send_all = ServedQueue._send_all

    def slow(queue, given):
        sent = send_all(queue, given)
        time.sleep(0.3)
        return sent

    url = f"sqlite:///{tmp_path / 'queues.db'}"
    with running(storage_for(url), drain_s=drain_s) as served:
        for _ in range(10):
            Calls(served, "a").send(*range(100))
        monkeypatch.setattr(ServedQueue, "_send_all", slow)
        assert served.ask("POST", "/queue/1/_move?from=a&to=b").status == 200
        assert wait_until(lambda: served.ask("GET", "/queue/1/b/size").json, 20)
    storage = storage_for(url)
    try:
        a, b, jobs = (storage.open(name) for name in ("a", "b", "KMQ.moves"))
        assert 0 < b.size() < 1_000
        assert (a.size() + b.size(), a.in_flight()) == (1_000, 0)
        assert (jobs.size(), jobs.in_flight()) == (1, 0), "another gateway goes on at once"
    finally:
        storage.close()


def test_moves_that_end_before_the_gateway_does_are_logged(monkeypatch, caplog):
    async def fail(_moves):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Moves, "run", fail)
    with running(fresh_memory()):
        assert wait_until(lambda: "can't start new thread" in caplog.text, 10)


def test_a_second_signal_cuts_off_no_request(tmp_path):
    command = [sys.executable, "-c", "from kmqpy.cli import main; main()", "gateway", "--no-access-log"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--admin-port", "0", "--drain", "30s"],
        env={**os.environ, "KMQ_QUEUE_URL": f"sqlite:///{tmp_path / 'queues.db'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    with process, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            b"POST /queue/1/jobs/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b'Content-Length: 7\r\n\r\n"he'
        )
        assert process.stderr is not None
        process.send_signal(signal.SIGTERM)
        assert any("draining" in line for line in process.stderr)
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.7)
        client.sendall(b'llo"')
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert process.wait(20) == 0, "long before the drain's end"


@pytest.mark.parametrize(("hangs", "signals"), [("Moves._jobs", 1), ("Moves.close", 2)])
def test_a_storage_that_does_not_answer_does_not_hold_up_the_end(hangs, signals):
    program = f"""
import time
from kmqpy.cli import main
from kmqpy.gateway.service.moves import Moves
from kmqpy.gateway.service.served_queue import ServedQueue
ServedQueue.close = {hangs} = lambda *_, **__: time.sleep(600)
main()"""
    options = ["gateway", "memory:", "--port", "0", "--admin-port", "0", "--drain", "0s", "--no-access-log"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    with process, closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
        client.request("POST", f"{QUEUE}/jobs/send", b"1", JSON)
        assert client.getresponse().status == 200
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert any("draining" in line for line in process.stderr)
        if signals == 2:
            process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(15) == 0
        finally:
            process.kill()


def test_a_server_that_can_t_start_ends_the_gateway(monkeypatch):
    async def fail(*_, **__):
        raise OSError("no more files")

    monkeypatch.setattr(_Server, "startup", fail)
    with pytest.raises(OSError, match="no more files"), running(fresh_memory()):
        pass


def test_signals_stop_a_gateway_where_the_loop_has_no_handlers(monkeypatch):
    def missing(*_):
        raise NotImplementedError

    async def main():
        stopped = asyncio.Event()
        monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", missing)
        with _stopped_by_signals(stopped.set):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(stopped.wait(), 20)

    before = signal.getsignal(signal.SIGTERM)
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # as on Windows
        runner.run(main())
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_gateway_withdraws_from_all_places_at_once(monkeypatch):
    both = threading.Barrier(2)
    for kind in (Registration, Peers):
        monkeypatch.setattr(kind, "close", lambda _: both.wait(20))
    nowhere = ZooKeeperConnection(hosts="127.0.0.1:1")
    monkeypatch.setattr(Registration, "_run", lambda _: None)
    with running(fresh_memory(), discovery=nowhere, peers=nowhere):
        pass
    assert not both.broken
