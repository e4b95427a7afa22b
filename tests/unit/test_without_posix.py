"""kmqpy where Python lacks what only POSIX systems have, as on Windows."""

import subprocess
import sys
from textwrap import dedent

import pytest

from kmqpy.dev import Cluster, Databases
from kmqpy.errors import ClusterError

AS_ON_WINDOWS = dedent(
    """
    import asyncio, multiprocessing, os, signal, socketserver, subprocess, sys

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name in ("fcntl", "grp", "pwd", "resource", "termios"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Refuse())
    for name in ("fcntl", "grp", "pwd", "resource", "termios"):
        sys.modules.pop(name, None)
    for name in ("SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP"):
        delattr(signal, name)
    for name in ("fork", "geteuid", "getpgrp", "killpg", "register_at_fork", "setpgid"):
        delattr(os, name)
    """
)
"""Takes away modules, signals and functions that Python on Windows lacks; its own modules may keep theirs."""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", f"{AS_ON_WINDOWS}\n{dedent(code)}", *arguments]
    return subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)


def test_each_module_can_be_imported():
    done = run(
        """
        import importlib, pkgutil, kmqpy, tracker
        for package in (kmqpy, tracker):
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                if not module.name.endswith(".__main__"):
                    importlib.import_module(module.name)
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [(), ("tracker",)], ids=" ".join)
def test_the_command_shows_its_help(arguments):
    done = run("from kmqpy.cli import main; main()", *arguments, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: kmq")


def test_a_client_and_a_worker_handle_messages():
    done = run(
        """
        import kmqpy
        with kmqpy.queue_for("memory:?queue=jobs") as queue:
            queue.send(b"to the client")
            (message,) = queue.receive(wait=5)
            queue.ack(message)
            queue.send(b"to the worker")
            worker = kmqpy.Worker(queue, lambda message: (print(message.body), worker.stop()))
            worker.run()
        """
    )
    assert done.stdout == "b'to the worker'\n", done.stderr


@pytest.mark.parametrize("servers", [Cluster, lambda: Databases("redis")], ids=["Cluster", "Databases"])
def test_embedded_servers_say_that_they_need_another_system(monkeypatch, servers):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ClusterError, match="need Linux or macOS; on Windows, run this in WSL"):
        servers().start()
