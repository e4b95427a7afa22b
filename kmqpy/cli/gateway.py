"""The commands `kmq gateway` and `kmq key`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kmqpy.cli.options import DURATION, log_options
from kmqpy.cli.output import print_json, print_table, print_text, warn
from kmqpy.cli.storage_url import OF_GATEWAYS, URL_VARIABLE, StorageUrl
from kmqpy.core import logs
from kmqpy.errors import ConfigError, MissingExtra, NotSupported, Unavailable
from kmqpy.kafka.settings import build_connections, connections_in_environment, is_secret
from kmqpy.queue import Storage, storage_for
from kmqpy.queue.url import parse_url

if TYPE_CHECKING:
    from kmqpy.gateway.keys.stores import KeyStore

_FILE_NAME = "queues.db"
_AWS_VARIABLE = "KMQ_AWS_KEY"
_READABLE = "world:anyone:r"
_WHERE = "kmqpy.cli.gateway.where"
"""Under this key, click's context has where `kmq key` keeps keys, for people."""


AWS_KEY = click.option(
    "--aws-key",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of your own key, of which secrets for SQS's clients are made [KMQ_AWS_KEY].",
)


def default_url() -> str:
    """The url of a SQLite file in the user's data folder, which is made if it is missing."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    folder = data / "kmqpy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: can't be made: {error.strerror}; give the url of a storage") from None
    return f"sqlite:///{folder / _FILE_NAME}"


@click.command(epilog="\b\nExample:\n  kmq gateway\n  kmq gateway postgresql://db/queues --port 9000")
@click.argument("urls", nargs=-1, metavar="[URL…]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--port", default=8080, show_default=True, type=click.IntRange(0, 65_535), help="0: a free one."
)
@click.option(
    "--admin-port",
    type=click.IntRange(0, 65_535),
    help="For /healthcheck, /metrics, /livez and /readyz [port + 1].",
)
@click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False), help="Certificates, PEM.")
@click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="Their key, PEM.")
@click.option(
    "--keys",
    "keys_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of the keys [in the storage, once kmq key has made one].",
)
@AWS_KEY
@click.option("--discovery", metavar="HOSTS", help="ZooKeeper, where EmoDB's clients look for gateways.")
@click.option("--cluster-name", "cluster", default="", help="Of EmoDB's clients, for --discovery.")
@click.option("--advertise", metavar="HOST", help="The host name to register there [--host].")
@click.option(
    "--graceful/--no-graceful",
    default=True,
    show_default=True,
    help="At SIGTERM, go on for --drain with Connection: close, out of discovery.",
)
@click.option("--drain", type=DURATION, default="2s", show_default=True, help="See --graceful.")
@click.option(
    "--public-url", default="", metavar="URL", help="What SQS's queue URLs begin with [the request's]."
)
@click.option("--region", default="us-east-1", show_default=True, help="In SQS's ARNs.")
@click.option("--account", default="000000000000", show_default=True, help="In SQS's ARNs and queue URLs.")
@click.option(
    "--sqs-rest",
    type=DURATION,
    default="60s",
    show_default=True,
    help="Of SQS: between purges, and until a deleted queue is made again.",
)
@click.option(
    "--sqs-fair",
    multiple=True,
    metavar="PATTERN",
    help="SQS's standard queues of such names are made as fair ones; repeatable.",
)
@click.option("--no-tracker", is_flag=True, help="Start no tracker beside queues on Kafka.")
@click.option("--access-log/--no-access-log", default=True, show_default=True, help="Log each request.")
@click.option(
    "--max-message-bytes",
    type=click.IntRange(min=1),
    default=1024 * 1024,
    show_default=True,
    help="Larger messages are refused.",
)
@log_options("json")
def gateway(
    urls: tuple[str, ...],
    keys_file: Path | None,
    aws_key: Path | None,
    discovery: str | None,
    *,
    graceful: bool,
    drain: timedelta,
    sqs_rest: timedelta,
    no_tracker: bool,
    access_log: bool,
    max_message_bytes: int,
    log_level: str,
    log_format: str,
    **given: Any,
) -> None:
    """Serve queues over HTTP to clients of EmoDB and SQS, until SIGTERM or Ctrl-C.

    URL is a storage, or NAME=URL for further ones, whose queues clients call NAME:queue. Without one, queues
    are in a file in your data folder. URLs with passwords: in KMQ_QUEUE_URL, each in a line of its own.

    \b
    Then, for example:
      curl -d '"hello"' -H 'Content-Type: application/json' localhost:8080/queue/1/jobs/send
      curl localhost:8080/queue/1/jobs/poll
    """
    run, settings_type, limits_type, tracker_type, late = _loaded()
    logs.setup(log_level, log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("kmqpy.gateway.access").setLevel(logging.INFO if access_log else logging.WARNING)
    peers, roots = _peers(_given(urls))

    def opened(url: str) -> Storage:
        storage: Storage = late(lambda: storage_for(url))
        return storage

    settings = settings_type(
        peers=peers,
        roots=roots,
        discovery=None if discovery is None else _zookeeper(discovery),
        drain_s=drain.total_seconds() if graceful else 0.0,
        sqs_rest_s=sqs_rest.total_seconds(),
        aws_key=_operator_key(aws_key),
        limits=limits_type(max_message_bytes=max_message_bytes),
        **given,
    )
    _warn_of_address(settings)
    with _storages(urls, opened) as storages, ExitStack() as opened_trackers:
        trackers = {
            name: opened_trackers.enter_context(tracker_type(url, log_format))
            for name, url in map(_split, () if no_tracker else _given(urls))
            if url.lower().startswith("kafka:")
        }
        keys = _keys(storages[""], keys_file, optional=True)
        if keys_file is not None and not keys_file.exists():
            warn(
                f"there is no file {keys_file}: everybody is refused; "
                f"kmq key --keys {keys_file} create --role queue_standard"
            )
        if keys is None or not _may_have_keys(keys):
            kept, then = f"--storage {_shown(_split(_given(urls)[0])[1])}", ""
            if keys is None:
                kept, then = "--keys FILE", ", then start this gateway with --keys FILE"
            warn(
                "no keys: whoever can connect may do everything; "
                f"kmq key {kept} create --role queue_standard{then}"
            )
        run(settings, storages, keys, trackers=trackers, on_ready=lambda url: print_text(f"gateway at {url}"))


@click.command(epilog="\b\nExample:\n  kmq console\n  kmq console postgresql://db/queues")
@click.argument("urls", nargs=-1, metavar="[URL…]")
@click.option("--port", default=0, type=click.IntRange(0, 65_535), help="Where to listen [a free one].")
def console(urls: tuple[str, ...], port: int) -> None:
    """Show queues of any storage in a browser on this machine, until Ctrl-C.

    URL is a storage as for kmq gateway, or http://HOST, a gateway. You may do what your login to the
    storage may: look at messages, redrive dead letters, send, purge. Nothing is started or registered, and
    no browser opened: the address is printed.

    The address is good once, for one tab; the next one is printed when it was used. Other users of this
    machine, and web pages in your browser, can't get in without it.
    """
    run, settings_type, limits_type, _, late = _loaded()
    from kmqpy.gateway.console import BASE, Entry, OneKey
    from kmqpy.gateway.keys.keyring import new_key

    logs.setup("WARNING", "text")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("kmqpy.gateway.access").setLevel(logging.WARNING)
    address: list[str] = []
    own, secret = new_key("you", ["queue_admin"], [])
    entry = Entry(secret, lambda token: print_text(f"{address[0]}{BASE}/#token={token}"))

    def ready(url: str) -> None:
        address.append(url)
        entry.renew()

    settings = settings_type(port=port, has_admin=False, drain_s=0.0, limits=limits_type())
    with _storages(urls, lambda url: late(lambda: storage_for(url)), gateways=True) as storages:
        run(settings, storages, OneKey(own), entry=entry, on_ready=ready)


@click.group(context_settings={"ignore_unknown_options": False})
@click.option(
    "--storage", "url", metavar="URL", help="The gateway's storage [as kmq gateway; KMQ_QUEUE_URL]."
)
@click.option(
    "--keys",
    "keys_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of the keys [in the storage].",
)
@click.pass_context
def key(ctx: click.Context, url: str | None, keys_file: Path | None) -> None:
    """Make, list, revoke and rotate the keys of a gateway's clients.

    \b
    Example:
      kmq key create --role queue_standard --title "the mailer"
      kmq key create --permission "queue|post|mails-*"
      kmq key list
    """
    _loaded()
    if keys_file is not None:
        ctx.meta[_WHERE] = f"--keys {keys_file}"
        ctx.obj = _keys(None, keys_file)
        return
    urls = () if url is None else (url,)
    storages = ctx.with_resource(_storages(urls))
    ctx.meta[_WHERE] = _shown(_split(_given(urls)[0])[1])
    ctx.obj = _keys(storages[""], None)


@key.command()
@click.option("--role", "roles", multiple=True, help="queue_post, queue_poll, queue_standard or queue_admin.")
@click.option(
    "--permission", "permissions", multiple=True, metavar="CONTEXT|ACTION|QUEUE", help="Repeatable."
)
@click.option(
    "--aws", is_flag=True, help="For SQS's clients: print an access key id and a secret access key."
)
@AWS_KEY
@click.option("--title", default="", help="Whose key it is.")
@click.option("--requests", "requests_per_s", type=float, help="At most so many requests per second.")
@click.option("--bytes", "bytes_per_s", type=float, help="At most so many bytes of bodies per second.")
@click.pass_obj
def create(
    store: KeyStore,
    roles: tuple[str, ...],
    permissions: tuple[str, ...],
    aws_key: Path | None,
    title: str,
    requests_per_s: float | None,
    bytes_per_s: float | None,
    *,
    aws: bool,
) -> None:
    """Make a key and print its secret, which is shown this once and stored nowhere.

    \b
    Example:
      kmq key create --role queue_standard --title "the mailer"
      kmq key create --permission "queue|post|mails-*" --requests 100
      kmq key create --aws --aws-key operator.key --role queue_standard
    """
    from kmqpy.gateway.keys.keyring import new_key

    operator_key = _operator_key(aws_key)
    if aws and operator_key is None:
        raise click.UsageError(
            f"--aws needs --aws-key FILE, or {_AWS_VARIABLE}, as the gateway has it; make one: "
            "openssl rand -base64 32 > FILE"
        )

    if not roles and not permissions:
        raise click.UsageError("give a --role or a --permission: a key without them may do nothing")
    for text in permissions:
        _check_useful(text)
    made, secret = new_key(
        title,
        roles,
        permissions,
        operator_key=operator_key if aws else None,
        requests_per_s=requests_per_s,
        bytes_per_s=bytes_per_s,
    )
    store.put(made)
    where = click.get_current_context().meta[_WHERE]
    if aws:
        warn(f"a key for SQS's clients of gateways over {where}. The secret is not shown again:")
        print_text(f"aws_access_key_id = {made.id}")
        print_text(f"aws_secret_access_key = {secret}")
        return
    warn(
        f"key {made.id} for gateways over {where}; clients send the secret as X-BV-API-Key. "
        "It is not shown again:"
    )
    print_text(secret)


def _check_useful(text: str) -> None:
    """Raise ConfigError for a permission that permits nothing here."""
    from kmqpy.gateway.keys.permissions import ACTIONS, permits_something

    if not permits_something(text):
        raise ConfigError(
            f"permission: {text!r} permits nothing; write it as queue|ACTION|NAME, with one of the actions "
            f"{', '.join(ACTIONS)}, or *"
        )


@key.command(name="list")
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="How to print [text]."
)
@click.pass_obj
def list_keys(store: KeyStore, output: str) -> None:
    """List the keys, without secrets.

    \b
    Example:
      kmq key list
    """
    keys = sorted(store.read() or (), key=lambda one: one.created_ms)
    if output == "json":
        for one in keys:
            shown = asdict(one)
            del shown["digests"], shown["nonces"]
            print_json(shown)
        return
    print_table(
        ("key", "title", "may", "requests/s", "bytes/s"),
        [
            (
                one.id,
                one.title,
                ", ".join((*one.roles, *one.permissions)),
                one.requests_per_s,
                one.bytes_per_s,
            )
            for one in keys
        ],
    )


@key.command()
@click.argument("key_id", metavar="KEY")
@click.pass_obj
def revoke(store: KeyStore, key_id: str) -> None:
    """Remove a key: gateways refuse it within 5 s.

    \b
    Example:
      kmq key revoke 20712e16a509
    """
    if not store.remove(key_id):
        raise ConfigError(f"key: there is none with the id {key_id!r}; kmq key list shows them")


@key.command()
@click.argument("key_id", metavar="KEY")
@AWS_KEY
@click.option("--keep-old", is_flag=True, help="The secret so far stays valid, until the next rotation.")
@click.pass_obj
def rotate(store: KeyStore, key_id: str, aws_key: Path | None, *, keep_old: bool) -> None:
    """Give a key a new secret, and print it.

    \b
    Example:
      kmq key rotate 20712e16a509 --keep-old
    """
    from kmqpy.gateway.keys.keyring import rotated

    found = next((one for one in store.read() or () if one.id == key_id), None)
    if found is not None:
        changed, secret = rotated(found, keep_old=keep_old, operator_key=_operator_key(aws_key))
        if store.replace(changed):
            print_text(secret)
            return
    raise ConfigError(f"key: there is none with the id {key_id!r}; kmq key list shows them")


def _operator_key(file: Path | None) -> bytes | None:
    """The operator's own key, from a file or the environment; None: there is none."""
    from kmqpy.gateway.keys.sigv4 import MIN_OPERATOR_KEY_BYTES

    if file is not None:
        try:
            key = file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--aws-key: {file} can't be read: {error.strerror}") from None
    elif not (key := os.environ.get(_AWS_VARIABLE, "").strip().encode()):
        return None
    if len(key) < MIN_OPERATOR_KEY_BYTES:
        raise ConfigError(
            f"--aws-key: {len(key)} bytes are too few; make {MIN_OPERATOR_KEY_BYTES} or more: "
            "openssl rand -base64 32 > FILE"
        )
    return key


def _keys(storage: Storage | None, file: Path | None, *, optional: bool = False) -> KeyStore | None:
    """The store of keys; with `optional`, None if the storage can't keep them."""
    from kmqpy.gateway.keys.stores import FileKeys, StorageKeys

    if file is not None:
        return FileKeys(file)
    assert storage is not None
    try:
        return StorageKeys(storage)
    except NotSupported:
        if not optional:
            raise
        return None


def _warn_of_address(settings: Any) -> None:
    """Tell who registers an address that other machines can't use."""
    from kmqpy.gateway.keys.web_pages import is_loopback

    if settings.discovery is None:
        return
    registered = settings.advertise or settings.host
    if is_loopback(registered):
        warn(f"--discovery: clients are told {registered}, which is each machine itself; give --advertise")
    elif is_loopback(settings.host):
        warn(f"--discovery: clients are told {registered}, but --host {settings.host} lets in this machine")


def _may_have_keys(keys: KeyStore) -> bool:
    try:
        return keys.read() is not None
    except Unavailable:
        return True


@contextmanager
def _storages(
    urls: tuple[str, ...], opened_by: Callable[[str], Storage] = storage_for, *, gateways: bool = False
) -> Iterator[dict[str, Storage]]:
    """Open the storages of urls, by name; closes them at the end. The first without a name is the default."""
    named: dict[str, str] = {}
    for text in _given(urls):
        name, url = _split(text)
        if urls:
            _refuse_secret(url)
        if not gateways and url.lower().startswith(OF_GATEWAYS):
            raise ConfigError(f"{_shown(url)}: is another gateway; give the url of that one's storage")
        if name in named:
            what = f"have the name {name!r}" if name else "have no name"
            raise click.UsageError(f"two storages {what}; write NAME=URL")
        named[name] = url
    if "" not in named:
        named[""] = next(iter(named.values()))
    opened: dict[str, Storage] = {}
    try:
        by_url: dict[str, Storage] = {}
        for name, url in named.items():
            if url not in by_url:
                by_url[url] = opened_by(url)
            opened[name] = by_url[url]
        yield opened
    finally:
        for storage in set(opened.values()):
            storage.close()


def _shown(url: str) -> str:
    """A url without what may be secret."""
    parsed = parse_url(url, names_queue=False)
    return f"{parsed.scheme}://{parsed.address}{parsed.path}"


def _given(urls: tuple[str, ...]) -> tuple[str, ...]:
    """The urls of the command line, else that of the environment, else the default."""
    in_environment = (line.strip() for line in os.environ.get(URL_VARIABLE, "").splitlines())
    return urls or tuple(filter(None, in_environment)) or (default_url(),)


def _split(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if equals and name.replace("-", "").replace("_", "").isalnum() and name.islower():
        return name, url
    return "", text


def _refuse_secret(url: str) -> None:
    parsed = parse_url(url, names_queue=False)
    if parsed.password or any(map(is_secret, parsed.settings)):
        raise ConfigError(f"URL: a secret must not stand on a command line; give it as {URL_VARIABLE}")


def _peers(urls: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
    """ZooKeeper of the first storage on Kafka, None without one; kmqpy's root of each, by its name."""
    zookeepers, roots = [], {}
    for name, url in map(_split, urls):
        in_url = StorageUrl.of(url, on_command_line=False).kafka_connection()
        if in_url is not None:
            environment = connections_in_environment()
            connection, zookeeper = build_connections(environment, in_url)
            if "zookeeper" not in {**environment, **in_url}:
                raise ConfigError(
                    "URL: queues on Kafka are registered in ZooKeeper; write "
                    "kafka://host:9092?zookeeper=host:2181"
                )
            zookeepers.append(zookeeper)
            roots[name] = connection.root
    return next(iter(zookeepers), None), roots


def _zookeeper(hosts: str) -> Any:
    """ZooKeeper for discovery, with the security of the environment; everybody may read what is there."""
    from kmqpy.zookeeper.settings import ZooKeeperConnection

    security = ZooKeeperConnection.from_environment().security
    if security.authenticated:
        security = replace(security, acl=(*security.acl, _READABLE))
    return ZooKeeperConnection(hosts=hosts, security=security)


def _loaded() -> tuple[Any, Any, Any, Any, Any]:
    """What runs a gateway; raises MissingExtra."""
    try:
        from kmqpy.gateway.limits import Limits
        from kmqpy.gateway.run import run
        from kmqpy.gateway.server import GatewaySettings
        from kmqpy.gateway.service.late_storage import opened_or_late
        from kmqpy.gateway.tracker_process import TrackerProcess
    except ImportError as error:  # pragma: no cover
        if (error.name or "").startswith("kmqpy"):
            raise
        raise MissingExtra("gateway", "the gateway") from None
    return run, GatewaySettings, Limits, TrackerProcess, opened_or_late
