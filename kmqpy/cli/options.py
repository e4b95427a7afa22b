"""The options that commands share, and `Cli`: where to connect, and how to print.

These options may stand before or after the command's name; the later one wins.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kmqpy.cli.output import print_json, print_table, print_text, warn
from kmqpy.cli.storage_url import URL_VARIABLE, StorageUrl
from kmqpy.core import logs
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.durations import parse_duration_ms
from kmqpy.core.first_contact import first_contact_within
from kmqpy.core.settings import nearest, read_file
from kmqpy.errors import AccessDenied, ConfigError, KmqError, TopicError, Unavailable
from kmqpy.kafka.settings import (
    OTHER_TABLES,
    KafkaConnection,
    QueueSettings,
    build_connections,
    connections_in_environment,
    is_secret,
    queue_of,
    unknown_in_environment,
)
from kmqpy.queue import Queue
from kmqpy.zookeeper.settings import ZooKeeperConnection

if TYPE_CHECKING:  # at run time, what a command does not need costs it up to a fifth of a second
    from kmqpy.kafka.admin.admin import Admin
    from kmqpy.kafka.admin.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")

_GIVEN = "kmqpy.given"
"""The key under which click's context keeps the shared options that were given."""
_REQUEST_S = 10.0
"""Seconds that a request to ZooKeeper may take."""
_FIRST_CONTACT_S = 2.2
"""A command gives up if a service has not answered within this time, in seconds. With the start of the
process, a command with a wrong address takes less than 3 s."""


class Group(click.Group):
    """A group that suggests the nearest of its commands for an unknown name, or else tells all of them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = self.list_commands(ctx)
            if not args or args[0] in names:
                raise
            group = ctx.command_path
            others = "" if ctx.parent is None else f"; {group} has {', '.join(names)}"
            hint = nearest(args[0], names) or others
            raise click.UsageError(f"{args[0]!r} is not a command{hint}; see {group} --help", ctx) from error


class _DurationType(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """Converts a duration such as `500ms`, `30s`, `5m`, `1h` or `7d` to a timedelta."""

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


class _MomentType(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """Converts a duration (so long ago) or an ISO time (without a zone: UTC) to ms since 1970."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            found = datetime.fromisoformat(str(value))
        except ValueError:
            ago = DURATION.convert(value, param, ctx)
            return max(0, SYSTEM_CLOCK.wall_ms() - milliseconds(ago))
        try:
            return max(0, round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000))
        except (OverflowError, ValueError):
            self.fail(f"{value!r} is out of the range of times", param, ctx)


MOMENT = _MomentType()


def milliseconds(value: timedelta) -> int:
    return value // timedelta(milliseconds=1)


@dataclass(frozen=True)
class Cli:
    """The shared options of a command: where to connect, and how to print.

    json          whether to print JSON instead of text
    has_registry  whether a ZooKeeper address was given; then a queue's settings are the registered ones
    tables        tables of the config file for other parts of kmqpy
    named         the names of connection settings that an option, the environment or the config file gave
    url           the storage that --queue-url or KMQ_QUEUE_URL names; None: Kafka
    queue_in_url  the name of the queue in the url, even in one of Kafka; empty if there is none
    """

    connection: KafkaConnection
    zookeeper: ZooKeeperConnection
    json: bool
    has_registry: bool
    tables: Mapping[str, Any]
    named: frozenset[str] = frozenset()
    url: StorageUrl | None = None
    queue_in_url: str = ""

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table of the config file; empty if there is none. Raises ConfigError."""
        table = self.tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ConfigError(f"config file: {name} is not a table")
        return table

    def tell(self, value: Any, text: str) -> None:
        """Print what a command did: `value` as JSON, or else `text`."""
        if self.json:
            print_json(value)
        else:
            print_text(text)

    def show(
        self,
        found: Iterable[Any],
        columns: Sequence[str],
        row: Callable[[Any], Sequence[Any]],
        as_object: Callable[[Any], dict[str, Any]] = asdict,
    ) -> None:
        """Print a list: each `as_object` in JSON, or else as a `row` of a table."""
        if self.json:
            print_json([as_object(one) for one in found])
        else:
            print_table(columns, map(row, found))

    @contextmanager
    def admin(self, *, new_root: bool = False) -> Iterator[Admin]:
        """Open the administration of queues on Kafka; `new_root`: a root that does not exist is made."""
        from kmqpy.kafka.admin.admin import Admin

        with Admin(self.connection, self.zookeeper) as admin:
            if not new_root:
                self.check_root(admin)
            yield admin

    def queue(self, name: str) -> QueueSettings:
        """Return the settings of queue `name`: from the registry, or without ZooKeeper from kmq.queues."""
        if not self.has_registry:
            from kmqpy.kafka.settings_mirror import settings_of

            return settings_of(name, self.connection)
        from kmqpy.kafka.admin.context import AdminContext

        with closing(AdminContext(self.connection, self.zookeeper, _REQUEST_S, SYSTEM_CLOCK)) as context:
            self.check_root(context.registry)
            return context.find(name)[0]

    def queue_with(self, topic: str) -> QueueSettings:
        """Return the settings of the queue with this queue topic, which may be that of one of its lanes."""
        name = queue_of(topic)
        found = self.queue(name)
        return found if name == topic or topic in found.lane_names else self.queue(topic)

    def named_queue(self, name: str | None) -> str:
        """Return the queue's name, which either QUEUE or the url gives; else raises click's UsageError."""
        found, rest = self.named_queue_and(name, ())
        if rest:
            raise self._named_twice(rest[0])
        return found

    def named_queue_and(self, name: str | None, rest: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        """Return the queue's name and the other arguments.

        Where the url names the queue, QUEUE was left out, so `name` is the first of the other arguments. If
        that is the queue's own name, it raises UsageError: `kmq send jobs hi` must not send jobs.
        """
        if self.queue_in_url:
            if name == self.queue_in_url:
                raise self._named_twice(name)
            return self.queue_in_url, rest if name is None else (name, *rest)
        if name is None:
            raise click.UsageError("Missing argument 'QUEUE'")
        return name, rest

    def _named_twice(self, name: str) -> click.UsageError:
        return click.UsageError(
            f"QUEUE: --queue-url names queue {self.queue_in_url!r} already; leave {name!r} out"
        )

    @contextmanager
    def opened(self, name: str) -> Iterator[Queue]:
        if self.url is not None:
            with self.url.opened(name) as queue:
                yield queue
        else:
            from kmqpy.kafka.kmq_client import KmqClient

            with KmqClient(self.queue(name), self.connection, self.zookeeper) as queue:
                yield queue

    def ask_registry(self, question: Callable[[Registry], V], otherwise: V) -> V:
        """Return what the registry says; `otherwise` without one, and if ZooKeeper does not answer soon."""
        if self.url is not None or not self.has_registry:
            return otherwise
        from kmqpy.kafka.admin.registry import Registry
        from kmqpy.zookeeper.session import connect

        try:
            with connect(self.zookeeper, timeout=2) as zookeeper:
                return question(Registry(zookeeper, self.connection.root))
        except KmqError:
            return otherwise

    def kafka_only(self, **options: object) -> None:
        """Raise click's UsageError if one of these options was given together with a url."""
        for name, value in options.items():
            if self.url is not None and value:
                flag = name.replace("_", "-")
                raise click.UsageError(f"--{flag} is for queues on Kafka only; leave it out, or --queue-url")

    def check_root(self, registry: Admin | Registry) -> None:
        """Raise ConfigError if --root (or KMQ_ROOT, or the file) names a znode that does not exist."""
        if self.zookeeper.hosts and "root" in self.named and not registry.has_root():
            raise ConfigError(
                f"root: there is no znode {self.connection.root!r} in ZooKeeper at "
                f"{self.zookeeper.hosts}; kmq queue create makes it with the first queue"
            )


_CONNECTION_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--bootstrap",), {"metavar": "HOSTS", "help": "Kafka, host:port[,host:port] (KMQ_BOOTSTRAP)."}),
    (("--zookeeper",), {"metavar": "HOSTS", "help": "ZooKeeper, the same (KMQ_ZOOKEEPER)."}),
    (("--root",), {"metavar": "ZNODE", "help": "Where kmqpy's znodes are (KMQ_ROOT) [/kmq]."}),
    (("--config",), {"metavar": "FILE", "help": "TOML file with these settings (KMQ_CONFIG)."}),
    (
        ("-X", "kafka"),
        {"metavar": "KEY=VALUE", "multiple": True, "help": "A setting of librdkafka; repeatable."},
    ),
    (
        ("-Z", "zookeeper_security"),
        {"metavar": "KEY=VALUE", "multiple": True, "help": "A setting of [zookeeper_security]; repeatable."},
    ),
    (
        ("--queue-url",),
        {"metavar": "URL", "help": "The storage of the queues, and perhaps the queue (KMQ_QUEUE_URL)."},
    ),
    (("-o", "--output"), {"type": click.Choice(["text", "json"]), "help": "How to print [text]."}),
    (("-v", "--verbose"), {"is_flag": True, "default": None, "help": "Log to stderr."}),
)


def connection_options(function: F) -> F:
    """Add the options that say where Kafka and ZooKeeper are, and how to print.

    Click's context keeps their values; the command does not get them.
    """
    for names, settings in reversed(_CONNECTION_OPTIONS):
        function = click.option(*names, expose_value=False, callback=_keep, **settings)(function)
    return function


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Keep the value of an option; a repeatable option adds to its earlier values."""
    given = ctx.meta.setdefault(_GIVEN, {})
    if isinstance(value, tuple):
        given[param.name] = given.get(param.name, ()) + value
    elif value is not None:
        given[param.name] = value


def given_defaults(ctx: click.Context) -> dict[str, Any]:
    """Return the shared options given so far, by name, as defaults for a command of another package."""
    return {key: value for key, value in ctx.meta.get(_GIVEN, {}).items() if value}


LIMIT_OPTION = click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Show at most this many."
)


def log_options(form: str) -> Callable[[F], F]:
    """Add the options of a service: `--log-level`, and `--log-format`, which is `form` by default."""
    level = click.option(
        "--log-level",
        type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
        metavar="[DEBUG|INFO|WARNING|ERROR]",
        default="INFO",
        help="The lowest level that is logged, to stderr [INFO].",
    )
    kind = click.Choice(["text", "json"])
    shown = click.option("--log-format", type=kind, default=form, help=f"Format of the log [{form}].")
    return lambda function: level(shown(function))


def queue_argument(function: F) -> F:
    """Add the argument QUEUE, which is left out where --queue-url names the queue."""
    return click.argument("queue", required=False, metavar="QUEUE")(function)


def connected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a command take the shared options, and be called with a `Cli` as its first argument.

    The command gives up soon if Kafka or ZooKeeper does not answer at all. It works with queues on Kafka
    only: click's UsageError refuses a --queue-url.
    """
    return connection_options(_with_cli(function, any_storage=False))


def connected_to_any(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like connected(), for a command that works with queues of any storage."""
    return connection_options(_with_cli(function, any_storage=True))


def connected_service(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like connected(), for a command that runs as a service: it waits for servers that are just starting."""
    return connection_options(_with_cli(function, any_storage=False, is_service=True))


def _with_cli(
    function: Callable[..., Any], *, any_storage: bool, is_service: bool = False
) -> Callable[..., Any]:
    """Call a command with a `Cli`, and add hints to its errors: a queue's similar name, a missing address."""

    @functools.wraps(function)
    def with_cli(*args: Any, **kwargs: Any) -> Any:
        context = click.get_current_context()
        cli = _cli_of(context)
        if cli.url is not None and not any_storage:
            command = context.command_path
            raise click.UsageError(f"{command} is for Kafka only; leave --queue-url and {URL_VARIABLE} out")
        try:
            with nullcontext() if is_service else first_contact_within(_FIRST_CONTACT_S):
                return function(cli, *args, **kwargs)
        except TopicError as error:
            is_new = context.command.name == "create"  # then no other queue is meant
            hint = "" if is_new else _nearest_queue(cli, kwargs)
            if not hint:
                raise
            raise type(error)(f"{error}{hint}") from error
        except Unavailable as error:
            hint = _address_hint(cli, str(error))
            if not hint or isinstance(error, AccessDenied):
                raise
            raise Unavailable(f"{error}{hint}") from error

    return with_cli


def _nearest_queue(cli: Cli, arguments: Mapping[str, Any]) -> str:
    """Return `; did you mean …?` if the given name is not registered, but a similar one is; else empty."""
    name = arguments.get("queue") or arguments.get("name")
    if not isinstance(name, str):
        return ""
    names: list[str] = cli.ask_registry(lambda registry: registry.names(), otherwise=[])
    return "" if name in names else nearest(name, names)


def _address_hint(cli: Cli, error: str) -> str:
    """Return a hint if the error is about a service whose address nobody gave; empty otherwise."""
    names = [
        f"KMQ_{name.upper()}"
        for service, name in (("Kafka", "bootstrap"), ("ZooKeeper", "zookeeper"))
        if f"{service} at " in error and name not in cli.named
    ]
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return f"; {' and '.join(names)} {verb} not set; kmq dev up prints {them}" if names else ""


def _cli_of(ctx: click.Context) -> Cli:
    """Build the `Cli` from the options that click's context keeps, the environment and the config file."""
    given = dict(ctx.meta.get(_GIVEN, {}))
    _set_up_logs(verbose=bool(given.pop("verbose", False)))
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
            given[table] = _checked_for_secrets(table, pairs(values, option), option)
    in_url = None if url is None else url.kafka_connection()
    on_kafka, in_url = in_url is not None, in_url or {}
    connection, zookeeper = build_connections(file, environment, in_url, given)
    named = frozenset({*file, *environment, *in_url, *given})
    has_registry = "zookeeper" in named and bool(zookeeper.hosts)
    queue_in_url = "" if url is None else url.queue
    return Cli(
        connection, zookeeper, as_json, has_registry, tables, named, None if on_kafka else url, queue_in_url
    )


def _storage_url(option: str | None) -> StorageUrl | None:
    text = os.environ.get(URL_VARIABLE, "") if option is None else option
    return StorageUrl.of(text, on_command_line=option is not None) if text else None


def _checked_for_secrets(table: str, settings: list[tuple[str, str]], option: str) -> dict[str, str]:
    """Return the settings; raises ConfigError for a secret: whoever may list processes could read it."""
    for key, _ in settings:
        if is_secret(key):
            variable = f"KMQ_{table}_{key}".upper().replace(".", "_")
            raise ConfigError(
                f"{option} {key}: a secret must not stand on a command line; "
                f"give it as {variable}, or in the table [{table}] of a file (--config)"
            )
    return dict(settings)


def pairs(values: tuple[str, ...], option: str, form: str = "key=value") -> list[tuple[str, str]]:
    """Return `KEY=VALUE` options as pairs; raises ConfigError for another form."""
    found = []
    for value in values:
        key, separator, rest = value.partition("=")
        if not separator or not key:
            shown = "***" if is_secret(value) else repr(value)
            raise ConfigError(f"{option}: {shown}: write it as {form}")
        found.append((key, rest))
    return found


class _ErrorLines(logging.Handler):
    """Prints each log record as one line on stderr, except those of librdkafka and the ZooKeeper client.

    Of an exception that was logged with its traceback, the line has type and text.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("kmqpy.librdkafka", "kmqpy.zookeeper.session")):
            shown = "".join(f" {key}={value}" for key, value in logs.fields(record).items())
            error = record.exc_info[1] if record.exc_info else None
            why = "" if error is None else f": {type(error).__name__}: {error}"
            warn(f"{record.getMessage()}{shown}{why}")


def _set_up_logs(*, verbose: bool) -> None:
    """Have kmqpy log everything to stderr, or else errors only, as one line each."""
    logger = logging.getLogger("kmqpy")
    if verbose:
        logs.setup()
    elif not any(isinstance(handler, _ErrorLines) for handler in logger.handlers):
        logger.addHandler(_ErrorLines(logging.ERROR))
