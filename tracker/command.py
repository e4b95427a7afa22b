"""`kmq tracker`: runs a tracker until SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

import click

from kmqpy.cli.options import Cli, connected_service, log_options
from kmqpy.cli.output import span
from kmqpy.core import logs
from kmqpy.core.durations import parse_duration_ms
from kmqpy.core.environment import from_environment, is_set_by_kubernetes
from kmqpy.core.settings import build, nearest
from kmqpy.errors import ConfigError, QueueNotFound, Unavailable
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.session import connect
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker, relax_garbage_collection

_PREFIX = "KMQ_TRACKER_"
_SHORT_FLAGS = {"use_now_for_redeliver_despite_no_marker_seen_for_ms": "--tick-after"}
_METAVARS = {"int": "N", "str": "TEXT"}
_SHOWN_DEFAULTS = {"tracker_id": "HOST-PID-RANDOM", "transaction_timeout_ms": "0"}


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_ms").replace("_", "-")


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each setting but `queues`; help texts come from TrackerSettings' docstring."""
    texts = _field_texts(TrackerSettings)
    for field in reversed(dataclasses.fields(TrackerSettings)):
        if field.name != "queues":
            text = texts[field.name][:1].upper() + texts[field.name][1:]
            if field.type == "bool":
                kind: dict[str, Any] = {"is_flag": True, "default": None}
            else:
                metavar = "DURATION" if field.name.endswith("_ms") else _METAVARS[str(field.type)]
                kind = {"metavar": metavar}
                text = f"{text} [{_shown_default(field)}]"
            flags = [_SHORT_FLAGS[field.name]] if field.name in _SHORT_FLAGS else []
            option = click.option(*flags, _flag(field.name), field.name, help=text, **kind)
            command = option(command)
    return command


def _shown_default(field: dataclasses.Field[Any]) -> str:
    if field.name in _SHOWN_DEFAULTS:
        return _SHOWN_DEFAULTS[field.name]
    default: Any = field.default
    return span(default) if field.name.endswith("_ms") else str(default)


def _field_texts(cls: type[Any]) -> dict[str, str]:
    """The text of each field, in the docstring of a settings class: those below `Args:`."""
    _, _, below = inspect.getdoc(cls).partition("\nArgs:\n")  # type: ignore[union-attr]
    fields = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", below, re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in fields}


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings in variables KMQ_TRACKER_…; raises ConfigError for a variable that names no setting."""
    found = from_environment(TrackerSettings, environ, _PREFIX)
    names = [_PREFIX + field.name.upper() for field in dataclasses.fields(TrackerSettings)]
    for name, value in environ.items():
        if name.startswith(_PREFIX) and name not in names and not is_set_by_kubernetes(name, value):
            raise ConfigError(f"{name}: unknown setting{nearest(name, names)}")
    return found


@click.command(
    short_help="Redeliver what is not acknowledged in time.",
    epilog="\b\nExample:\n  kmq tracker --bootstrap host:9092 --zookeeper host:2181 --queue orders",
)
@connected_service
@click.option("--queue", "queues", multiple=True, help="Serve this queue only; repeatable. Default: all.")
@log_options("text")
@settings_options
def tracker(cli: Cli, log_level: str, log_format: str, queues: tuple[str, ...], **given: Any) -> None:
    """Redeliver what is not acknowledged in time; run two or more, they share the work.

    Settings come from the config file's table [tracker], then KMQ_TRACKER_… in the environment, then
    the options here. A queue named by --queue that is not registered yet is registered with default
    settings.
    """
    logs.setup(log_level, log_format)
    relax_garbage_collection()
    settings = settings_of(cli, queues, given)
    _check_addresses(cli)
    register(cli, settings.queues)
    service = Tracker(cli.connection, cli.zookeeper, settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.request_stop())
    service.run()


def _check_addresses(cli: Cli) -> None:
    """Raise Unavailable at once if no address was given, and there are no servers at the default ones."""
    if not cli.named.isdisjoint({"bootstrap", "zookeeper"}):
        return
    addresses = {"Kafka": cli.connection.bootstrap, "ZooKeeper": cli.zookeeper.hosts}
    for address in addresses.values():
        host, _, port = address.rpartition(":")
        with contextlib.suppress(OSError, ValueError), socket.create_connection((host, int(port)), 1):
            return
    servers = " and ".join(f"{name} at {address}" for name, address in addresses.items())
    raise Unavailable(f"{servers} do not answer; give the addresses, --bootstrap and --zookeeper")


def settings_of(cli: Cli, queues: tuple[str, ...], given: Mapping[str, Any]) -> TrackerSettings:
    """Merge settings of the config file, the environment and the options; later ones win.

    `queues`: values of --queue. `given`: values of the options that `settings_options` added.
    """
    flags = {
        key: parse_duration_ms(value, _flag(key)) if key.endswith("_ms") else value
        for key, value in given.items()
        if value is not None
    }
    if queues:
        flags["queues"] = queues
    return build(TrackerSettings, cli.table("tracker"), _from_environment(os.environ), flags)


def register(cli: Cli, queues: tuple[str, ...]) -> None:
    """Register those of these queues that are not in the registry. A tracker adds queues nowhere else."""
    if not queues:
        return
    with connect(cli.zookeeper) as zookeeper:
        registry = Registry(zookeeper, cli.connection.root)
        for name in queues:
            try:
                registry.get(name)
            except QueueNotFound:
                settings = QueueSettings(name=name)
                registry.register(settings, Topics(cli.connection).check(settings).partitions)
