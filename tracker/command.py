"""`kmq tracker`: runs a tracker until SIGTERM or Ctrl-C."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from typing import Any

import click

from kmqpy import logs
from kmqpy.cli.options import Cli, connected
from kmqpy.config import Connection, QueueSettings, build, from_environment
from kmqpy.errors import QueueNotFound
from kmqpy.registry import Registry
from kmqpy.topics import Topics
from kmqpy.zookeeper import connect
from tracker.service import Tracker
from tracker.settings import TrackerSettings

_PREFIX = "KMQ_TRACKER_"


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_ms").replace("_", "-")


def _settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each setting of a tracker, with the help text of its docstring."""
    texts = _field_texts(TrackerSettings)
    for field in reversed(dataclasses.fields(TrackerSettings)):
        if field.name != "queues":
            kind: dict[str, Any] = {"metavar": "DURATION" if field.name.endswith("_ms") else "VALUE"}
            if field.type == "bool":
                kind = {"is_flag": True, "default": None}
            option = click.option(_flag(field.name), field.name, help=texts[field.name], **kind)
            command = option(command)
    return command


def _field_texts(cls: type[Any]) -> dict[str, str]:
    """The lines `name  text` of a settings class's docstring."""
    texts: dict[str, str] = {}
    lines = (cls.__doc__ or "").splitlines()
    names = {field.name for field in dataclasses.fields(cls)}
    current: list[str] = []
    for line in lines:
        words, _, text = line.strip().partition("  ")
        found = [word.strip() for word in words.split(",") if word.strip() in names]
        if found:
            current = found
            texts.update(dict.fromkeys(found, text.strip()))
        elif current and line.startswith(" " * 10):
            for name in current:
                texts[name] = f"{texts[name]} {line.strip()}".strip()
    return texts


@click.command(epilog="Example:  kmq tracker --bootstrap host:9092 --zookeeper host:2181 --queue orders")
@connected
@click.option("--queue", "queues", multiple=True, help="Serve this queue only; repeatable. Default: all.")
@click.option("--log-level", default="INFO", show_default=True)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@_settings_options
def tracker(cli: Cli, log_level: str, log_format: str, queues: tuple[str, ...], **given: Any) -> None:
    """Redeliver what is not acknowledged in time; run two or more, they share the work.

    Settings come from the config file's table [tracker], then KMQ_TRACKER_… in the environment, then
    the options here. A queue named by --queue that is not registered yet is registered with default
    settings.
    """
    logs.setup(log_level, log_format)
    flags = {key: value for key, value in given.items() if value is not None}
    if queues:
        flags["queues"] = queues
    environment = from_environment(TrackerSettings, os.environ, _PREFIX)
    settings = build(TrackerSettings, cli.table("tracker"), environment, flags)
    _register(cli.connection, settings.queues)
    service = Tracker(cli.connection, settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.request_stop())
    service.run()


def _register(connection: Connection, queues: tuple[str, ...]) -> None:
    """Register the named queues that nobody has; the only time that a tracker adds a queue."""
    if not queues:
        return
    with connect(connection.zookeeper) as zookeeper:
        registry = Registry(zookeeper, connection.root)
        for name in queues:
            try:
                registry.get(name)
            except QueueNotFound:
                settings = QueueSettings(name=name)
                registry.register(settings, Topics(connection).check(settings).partitions)
