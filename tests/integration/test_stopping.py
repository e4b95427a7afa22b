"""Processes that take messages in loops of their own are stopped by SIGTERM, as the guide says."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import LiveQueue, bodies, collect, until

from kmqpy.errors import KmqError
from kmqpy.kafka.client.consumer import QueueConsumer
from tests.docs.pages import blocks

_GUIDE = (Path(__file__).parents[2] / "docs/guide.md").read_text()
_SECTION = _GUIDE.partition("### How to stop a consumer\n")[2].partition("\n## ")[0]
RAISING, FLAGGED = (block.code for block in blocks(_SECTION))
SLOWLY = textwrap.dedent(
    """
    import builtins, time

    def print(body):
        builtins.print(body, flush=True)
        time.sleep(0.5)
    """
)
CLOSING = RAISING.replace("sys.exit()", "client.close()")


@contextmanager
def program(code: str, queue: LiveQueue) -> Iterator["subprocess.Popen[str]"]:
    """The program in a process, when it handles its first message."""
    environment = {
        **os.environ,
        "KMQ_BOOTSTRAP": queue.connection.bootstrap,
        "KMQ_ROOT": queue.connection.root,
    }
    with subprocess.Popen(
        [sys.executable, "-c", code.replace('"jobs"', repr(queue.name))],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("b'")
            yield process
        finally:
            process.kill()


def stopped(process: "subprocess.Popen[str]") -> tuple[int, list[str], str]:
    """The exit code after SIGTERM, what the program printed since, and its errors."""
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    return process.returncode, output.splitlines(), errors


@pytest.mark.parametrize("code", [RAISING, FLAGGED])
def test_a_loop_ends_and_what_was_not_handed_out_is_given_back(make_queue, code):
    queue = make_queue(lease_ms=3_600_000)
    queue.tracker()
    queue.send(*(str(number) for number in range(20)))
    with program(SLOWLY + code, queue) as process:
        exit_code, handled, errors = stopped(process)
    assert (exit_code, errors) == (0, "")
    assert bool(handled) == (code is FLAGGED)  # beside the first message
    left = collect(queue.client(), 20 - len(handled), timeout=20)
    assert {f"b'{body}'" for body in bodies(left)}.isdisjoint(["b'0'", *handled])
    assert {message.attempts for message in left} == {1}


def test_a_signal_handler_is_told_that_it_can_not_close_the_client(queue):
    with program(CLOSING, queue) as process:
        until(lambda: queue.ended() == {0})  # from then on it does nothing but receive
        exit_code, _, errors = stopped(process)
    assert exit_code == 1
    assert "KmqError" in errors
    assert "a signal handler can't close the client that it has interrupted" in errors
    queue.send("another")
    assert collect(queue.client(), 1, timeout=5)  # `with` has closed it: it has left the group


def test_a_signal_handler_is_told_so_also_when_it_has_interrupted_an_acknowledgement(queue, monkeypatch):
    queue.send("a")
    client = queue.client()
    (message,) = collect(client, 1)
    monkeypatch.setattr(QueueConsumer, "ack", lambda *_, **_more: client.close())
    for call in (message.ack, lambda: client.ack(message)):
        with pytest.raises(KmqError, match="can't close the client that it has interrupted"):
            call()
