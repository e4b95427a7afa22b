"""Options that commands share: connection, output, durations.

Connection and output options may stand before or after the command's name; the later wins.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import click

from kmqpy.cli.output import warn
from kmqpy.cli.storage_url import VARIABLE, StorageUrl
from kmqpy.core import logs
from kmqpy.core.durations import parse_duration_ms
from kmqpy.core.first_contact import first_contact_within
from kmqpy.core.settings import nearest, read_file
from kmqpy.errors import AccessDenied, ConfigError, KmqError, TopicError, Unavailable
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.client.settings_mirror import settings_of
from kmqpy.kafka.queue import KafkaQueue
from kmqpy.kafka.settings import (
    OTHER_TABLES,
    KafkaConnection,
    QueueSettings,
    build_connections,
    connections_in_environment,
    is_secret,
    unknown_in_environment,
)
from kmqpy.queue import Queue
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

F = TypeVar("F", bound=Callable[..., Any])

_META = "kmqpy.given"
_FIRST_CONTACT_S = 2.2
"""How long a command waits for the first answer: with the start of the process it takes less than 3 s."""


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
    url           another storage than Kafka: that of --queue-url or KMQ_QUEUE_URL
    """

    connection: KafkaConnection
    zookeeper: ZooKeeperConnection
    json: bool
    has_registry: bool
    tables: Mapping[str, Any]
    named: frozenset[str] = frozenset()
    url: StorageUrl | None = None

    def table(self, name: str) -> Mapping[str, Any]:
        """A table of the config file; empty when there is none. Raises ConfigError."""
        table = self.tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ConfigError(f"config file: {name} is not a table")
        return table

    def admin(self) -> Admin:
        """Open the administration of the queues on this connection."""
        return Admin(self.connection, self.zookeeper)

    def queue(self, name: str) -> QueueSettings:
        """The settings of queue `name`: from the registry where ZooKeeper was named, else as clients do."""
        if not self.has_registry:
            return settings_of(name, self.connection)
        with self.admin() as admin:
            self.check_root(admin)
            return admin.settings(name)

    def named_queue(self, name: str | None) -> str:
        """The queue's name, from QUEUE or the url; raises click's UsageError where both or neither say it."""
        found, rest = self.named_queue_and(name, ())
        if rest:
            raise click.UsageError(f"QUEUE: --queue-url names queue {found!r} already; leave {name!r} out")
        return found

    def named_queue_and(self, name: str | None, rest: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        """The queue's name and the other arguments. Where the url names it, QUEUE is one of the others."""
        if self.url is not None and self.url.queue:
            return self.url.queue, rest if name is None else (name, *rest)
        if name is None:
            raise click.UsageError("Missing argument 'QUEUE'")
        return name, rest

    @contextmanager
    def opened(self, name: str) -> Iterator[Queue]:
        """The queue of this name, of any storage."""
        if self.url is not None:
            with self.url.opened(name) as queue:
                yield queue
        else:
            with KafkaQueue(self.queue(name), self.connection, self.zookeeper) as queue:
                yield queue

    def kafka_only(self, **options: object) -> None:
        """Raise click's UsageError where an option was given that other storages don't have."""
        for name, value in options.items():
            if self.url is not None and value:
                flag = name.replace("_", "-")
                raise click.UsageError(f"--{flag} is for queues on Kafka only; leave it out, or --queue-url")

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
            help="A setting of [zookeeper_security]; repeatable.",
        ),
        click.option(
            "--queue-url",
            metavar="URL",
            help="Queues of another storage than Kafka (KMQ_QUEUE_URL).",
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


def queue_argument(function: F) -> F:
    """Add the argument QUEUE, which is left out where --queue-url names the queue."""
    return click.argument("queue", required=False, metavar="QUEUE")(function)


def connected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a command take the shared options, and be called with a `Cli` as its first argument.

    It gives up soon where Kafka or ZooKeeper does not answer at all. It is for queues on Kafka only.
    """
    return connection_options(_with_cli(_impatient(function), any_storage=False))


def connected_to_any(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like connected(), for a command that works with queues of any storage."""
    return connection_options(_with_cli(_impatient(function), any_storage=True))


def connected_service(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like connected(), for a service: it waits for servers that are just starting."""
    return connection_options(_with_cli(function, any_storage=False))


def _impatient(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def impatient(*args: Any, **kwargs: Any) -> Any:
        with first_contact_within(_FIRST_CONTACT_S):
            return function(*args, **kwargs)

    return impatient


def _with_cli(function: Callable[..., Any], *, any_storage: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_cli(*args: Any, **kwargs: Any) -> Any:
        context = click.get_current_context()
        cli = _cli(context)
        if cli.url is not None and not any_storage:
            command = context.command_path
            raise click.UsageError(f"{command} is for Kafka only; leave --queue-url and {VARIABLE} out")
        try:
            return function(cli, *args, **kwargs)
        except TopicError as error:
            is_new = context.command.name == "create"  # then no other queue is meant
            hint = "" if is_new else _nearest_queue(cli, kwargs)
            if not hint:
                raise
            raise type(error)(f"{error}{hint}") from error
        except Unavailable as error:
            hint = _unset(cli, str(error))
            if not hint or isinstance(error, AccessDenied):
                raise
            raise Unavailable(f"{error}{hint}") from error

    return with_cli


def _nearest_queue(cli: Cli, arguments: Mapping[str, Any]) -> str:
    """`; did you mean …?` if a registered queue has a name like the given one, which is not registered.

    Nothing if ZooKeeper does not answer.
    """
    name = arguments.get("queue") or arguments.get("name")
    if cli.url is not None or not cli.has_registry or not isinstance(name, str):
        return ""
    try:
        with connect(cli.zookeeper, timeout=2) as zookeeper:
            names = Registry(zookeeper, cli.connection.root).names()
    except KmqError:
        return ""
    return "" if name in names else nearest(name, names)


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
    url = _storage_url(given.pop("queue_url", None))
    config = given.pop("config", None) or os.environ.get("KMQ_CONFIG")
    file = read_file(config) if config else {}
    tables = {table: file.pop(table) for table in OTHER_TABLES if table in file}
    environment = connections_in_environment()
    for name, hint in unknown_in_environment().items():
        warn(f"{name} in the environment is unknown{hint}")
    for table, option in (("kafka", "-X"), ("zookeeper_security", "-Z")):
        if values := given.pop(table, ()):
            given[table] = _public(table, pairs(values, option), option)
    connection, zookeeper = build_connections(file, environment, given)
    named = frozenset({*file, *environment, *given})
    has_registry = "zookeeper" in named and bool(zookeeper.hosts)
    return Cli(connection, zookeeper, as_json, has_registry, tables, named, url)


def _storage_url(option: str | None) -> StorageUrl | None:
    """An empty option, or an empty variable, means Kafka."""
    text = os.environ.get(VARIABLE, "") if option is None else option
    return StorageUrl.of(text, on_command_line=option is not None) if text else None


def _public(table: str, settings: list[tuple[str, str]], option: str) -> dict[str, str]:
    """Return the settings; raises ConfigError for a secret, since whoever lists processes could read it."""
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
