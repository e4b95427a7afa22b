"""Options that commands share: connection, output, durations.

Connection and output options may stand before or after the command's name; the later wins.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import click

from kmqpy.cli.output import warn
from kmqpy.core import logs
from kmqpy.core.durations import parse_duration_ms
from kmqpy.core.first_contact import first_contact_within
from kmqpy.core.settings import read_file
from kmqpy.errors import AccessDenied, ConfigError, Unavailable
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.client.settings_mirror import settings_of
from kmqpy.kafka.settings import (
    OTHER_TABLES,
    KafkaConnection,
    QueueSettings,
    build_connections,
    connections_in_environment,
    is_secret,
)
from kmqpy.zookeeper.settings import ZooKeeperConnection

F = TypeVar("F", bound=Callable[..., Any])

_META = "kmqpy.given"
_FIRST_CONTACT_S = 2.2
"""With the start of the process less than 3 s."""


class _DurationType(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """`500ms`, `30s`, `5m`, `1h`, `7d` as a timedelta."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        try:
            return timedelta(milliseconds=parse_duration_ms(str(value), "value"))
        except ConfigError as error:
            hint = "; it must not be negative" if str(value).startswith("-") else ""
            self.fail(str(error).removeprefix("value: ") + hint, param, ctx)
        except OverflowError:
            self.fail(f"{value!r} is too long", param, ctx)


DURATION = _DurationType()


def milliseconds(value: timedelta) -> int:
    """A duration as whole ms."""
    return value // timedelta(milliseconds=1)


@dataclass(frozen=True)
class Cli:
    """The options that all commands share: where to connect, and how to print.

    has_registry  whether a ZooKeeper address was given; then a queue's settings are the registered ones
    tables        what the config file holds for other parts of kmqpy
    named         the settings of the connections that an option, the environment or the file gave
    """

    connection: KafkaConnection
    zookeeper: ZooKeeperConnection
    json: bool
    has_registry: bool
    tables: Mapping[str, Any]
    named: frozenset[str] = frozenset()

    def table(self, name: str) -> Mapping[str, Any]:
        """A table of the config file; empty when there is none. Raises ConfigError."""
        table = self.tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ConfigError(f"config file: {name} is not a table")
        return table

    def admin(self) -> Admin:
        """For administration of the queues there."""
        return Admin(self.connection, self.zookeeper)

    def queue(self, name: str) -> QueueSettings:
        """The settings of queue `name`: from the registry where ZooKeeper was named, else as clients do."""
        if not self.has_registry:
            return settings_of(name, self.connection)
        with self.admin() as admin:
            self.check_root(admin)
            return admin.settings(name)

    def check_root(self, admin: Admin) -> None:
        """Raise ConfigError where a root was named that is not there: nothing would be found under it."""
        if self.zookeeper.hosts and "root" in self.named and not admin.has_root():
            raise ConfigError(
                f"root: there is no znode {self.connection.root!r} in ZooKeeper at "
                f"{self.zookeeper.hosts}; kmq queue create makes it with the first queue"
            )


def connection_options(function: F) -> F:
    """Add the options that say where Kafka and ZooKeeper are, and how to print."""
    options = [
        click.option("--bootstrap", metavar="HOSTS", help="Kafka, host:port[,host:port] (KMQ_BOOTSTRAP)."),
        click.option("--zookeeper", metavar="HOSTS", help="ZooKeeper, the same (KMQ_ZOOKEEPER)."),
        click.option("--root", metavar="ZNODE", help="Where kmqpy's znodes are (KMQ_ROOT) [/kmq]."),
        click.option("--config", metavar="FILE", help="TOML file with these settings (KMQ_CONFIG)."),
        click.option(
            "-X", "kafka", metavar="KEY=VALUE", multiple=True, help="A setting of librdkafka; repeatable."
        ),
        click.option(
            "-Z",
            "zookeeper_security",
            metavar="KEY=VALUE",
            multiple=True,
            help="One of [zookeeper_security]; repeatable.",
        ),
        click.option("-o", "--output", type=click.Choice(["text", "json"]), help="How to print [text]."),
        click.option("-v", "--verbose", is_flag=True, default=None, help="Log to stderr."),
    ]
    for option in reversed(options):
        function = _stored(option)(function)
    return function


def _stored(option: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        function = option(function)
        parameter = function.__click_params__[-1]  # type: ignore[attr-defined]
        parameter.expose_value = False
        parameter.callback = _store
        return function

    return decorate


def _store(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    given = ctx.meta.setdefault(_META, {})
    if isinstance(value, tuple):
        given[param.name] = given.get(param.name, ()) + value
    elif value is not None:
        given[param.name] = value


def given_defaults(ctx: click.Context) -> dict[str, Any]:
    """The options given so far, by name, as defaults for another package's command."""
    return {key: value for key, value in ctx.meta.get(_META, {}).items() if value}


def connected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a command take the shared options, and be called with a `Cli` as its first argument.

    It gives up soon where Kafka or ZooKeeper does not answer at all.
    """

    @functools.wraps(function)
    def impatient(*args: Any, **kwargs: Any) -> Any:
        with first_contact_within(_FIRST_CONTACT_S):
            return function(*args, **kwargs)

    return connected_service(impatient)


def connected_service(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for what runs on and on: it waits for servers that are just starting."""

    @functools.wraps(function)
    def with_cli(*args: Any, **kwargs: Any) -> Any:
        cli = _cli(click.get_current_context())
        try:
            return function(cli, *args, **kwargs)
        except Unavailable as error:
            hint = _unset(cli, str(error))
            if not hint or isinstance(error, AccessDenied):
                raise
            raise Unavailable(f"{error}{hint}") from error

    return connection_options(with_cli)


def _unset(cli: Cli, error: str) -> str:
    """A hint where a service is away whose address nobody gave."""
    for service, name in (("Kafka", "bootstrap"), ("ZooKeeper", "zookeeper")):
        if f"{service} at " in error and name not in cli.named:
            return f"; KMQ_{name.upper()} is not set; kmq dev up prints it"
    return ""


def _cli(ctx: click.Context) -> Cli:
    given = dict(ctx.meta.get(_META, {}))
    _log(verbose=bool(given.pop("verbose", False)))
    as_json = given.pop("output", None) == "json"
    config = given.pop("config", None) or os.environ.get("KMQ_CONFIG")
    file = read_file(config) if config else {}
    tables = {table: file.pop(table) for table in OTHER_TABLES if table in file}
    environment = connections_in_environment()
    for table, option in (("kafka", "-X"), ("zookeeper_security", "-Z")):
        if values := given.pop(table, ()):
            given[table] = _public(table, pairs(values, option), option)
    connection, zookeeper = build_connections(file, environment, given)
    named = frozenset({*file, *environment, *given})
    has_registry = "zookeeper" in named and bool(zookeeper.hosts)
    return Cli(connection, zookeeper, as_json, has_registry, tables, named)


def _public(table: str, settings: list[tuple[str, str]], option: str) -> dict[str, str]:
    """The settings; raises ConfigError for a secret, which whoever may list processes could read."""
    for key, _ in settings:
        if is_secret(key):
            variable = f"KMQ_{table}_{key}".upper().replace(".", "_")
            raise ConfigError(
                f"{option} {key}: a secret must not stand on a command line; "
                f"give it as {variable}, or in the table [{table}] of a file (--config)"
            )
    return dict(settings)


def pairs(values: tuple[str, ...], option: str, form: str = "key=value") -> list[tuple[str, str]]:
    """`KEY=VALUE` options as pairs; raises ConfigError."""
    found = []
    for value in values:
        key, separator, rest = value.partition("=")
        if not separator or not key:
            shown = "***" if is_secret(value) else repr(value)
            raise ConfigError(f"{option}: {shown}: write it as {form}")
        found.append((key, rest))
    return found


class _Lines(logging.Handler):
    """Prints errors and warnings as one line each on stderr; the clients' own messages only with -v."""

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("kmqpy.librdkafka", "kmqpy.zookeeper.session")):
            shown = "".join(f" {key}={value}" for key, value in logs.fields(record).items())
            warn(f"{record.getMessage()}{shown}")


def _log(*, verbose: bool) -> None:
    logger = logging.getLogger("kmqpy")
    if verbose:
        logs.setup()
    elif not any(isinstance(handler, _Lines) for handler in logger.handlers):
        logger.addHandler(_Lines(logging.ERROR))
