"""Settings: frozen, checked, read from files, the environment and arguments (the later wins).

Durations are ms in settings whose name ends in `_ms`; a text value may carry a unit there
(`500ms`, `30s`, `5m`, `1h`, `7d`). API arguments are seconds (float) or `timedelta`.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import json
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Self, TypeVar

from kmqpy.errors import ConfigError

T = TypeVar("T")

Duration = float | int | timedelta
"""Seconds, or a timedelta."""

KafkaSettings = Mapping[str, Any]
"""librdkafka settings by their own names; handed on untouched."""

DAY_MS = 86_400_000
CLOCK_LEAD_MS = 5_000
"""How far a clock may be ahead of the broker's before it is not believed (rule R23)."""

MARKERS_SUFFIX = "__markers"
DEAD_LETTERS_SUFFIX = "__undelivered"
"""What the names of a queue's other topics end in, unless they are set."""

MIN_LEASE_MS = 100
"""The shortest lease: within it, a start marker must be confirmed and the message be processed."""
_LEASES = ("redeliver_after_ms", "max_hold_ms")
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": DAY_MS}
_DURATION = re.compile(r"([0-9]{1,999}(?:\.[0-9]{1,999})?)\s*(ms|s|m|h|d)")
_MILLISECOND = timedelta(milliseconds=1)
_INT64_MAX = 2**63 - 1
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_ADDRESS = re.compile(
    r"(?:[A-Za-z_]+://)?(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\s:/\[\]@,]+))(?::(?P<port>[0-9]{1,5}))?"
)
_ACL = re.compile(r"[a-z0-9]+:.+:[cdrwa]+")
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")
_ADDRESSES = ("tcp://", "udp://", "sctp://")
SETTINGS_TOPIC = "kmq.queues"
"""The topic that tells clients the settings of all queues; see kmqpy.settings_mirror."""

OTHER_TABLES = ("tracker", "gateway")
"""Tables of the config file that are not the connection's."""

_SECRET = re.compile(
    r"pass(word|phrase)|secret|token|sasl\.jaas|\.key$|key\.pem|oauthbearer\.config", re.IGNORECASE
)


def parse_duration_ms(text: str, name: str = "duration") -> int:
    """`500ms`, `30s`, `5m`, `1h` or `7d` as ms, rounded up; raises ConfigError naming both."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{name}: {text!r} is not a duration; write it like 500ms, 30s, 5m, 1h, 7d")
    duration = math.ceil(Decimal(match[1]) * _UNITS_MS[match[2]])
    if duration > _INT64_MAX:
        raise ConfigError(f"{name}: {text!r} is longer than 2**63 - 1 ms")
    return duration


def duration_ms(value: Duration, name: str) -> int:
    """Seconds or a timedelta as ms, rounded up; raises ConfigError when negative or no number."""
    if isinstance(value, timedelta):
        if value < timedelta():
            raise ConfigError(f"{name}: {value!r} must not be negative")
        whole, rest = divmod(value, _MILLISECOND)
        return whole + bool(rest)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}: {value!r} is neither seconds nor a timedelta")
    if not 0 <= value < 2**53:
        raise ConfigError(f"{name}: {value!r} must not be negative, and below 2**53 s")
    # By way of its shortest decimal form: 0.07 * 1000 is 70.00000000000001 to a float.
    return math.ceil(Decimal(repr(float(value))) * 1000)


def lease_duration_ms(value: Duration, name: str = "lease") -> int:
    """A lease in ms, rounded up as by duration_ms; raises ConfigError below the shortest, 100 ms."""
    return _check_lease(duration_ms(value, name), name)


def _check_lease(value_ms: int, name: str) -> int:
    if value_ms < MIN_LEASE_MS:
        raise ConfigError(f"{name}: {value_ms} ms is shorter than the least, {MIN_LEASE_MS} ms")
    return value_ms


def is_secret(name: str) -> bool:
    """Whether a librdkafka setting of this name must not be printed."""
    return _SECRET.search(name) is not None


def redacted(settings: KafkaSettings) -> dict[str, Any]:
    """A copy that can be printed: secrets as `***`."""
    return {key: "***" if is_secret(key) else value for key, value in _flat(settings).items()}


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """A queue: its topics, and how trackers treat its messages.

    Stands in the registry as JSON. Names left empty follow the queue's name: `<queue>__markers`,
    `<queue>__undelivered`, group `kmq-<queue>`.

    redeliver_after_ms   lease of a message when receive() names none; at least 100
    max_redeliveries     redeliveries before a message is dead-lettered; None: no limit
    max_delay_ms         longest delay of send()
    max_hold_ms          longest lease or extension; at least 100

    Clients take what these settings leave open from the queue, which was made with settings of its own; what
    contradicts them is a ConfigError when the client is made. Settings read from where a queue's own are
    stored are taken as they are.
    """

    name: str
    markers_topic: str = ""
    dead_letter_topic: str = ""
    consumer_group: str = ""
    redelivery_count_header: str = "kmq-redelivery-count"
    max_redeliveries: int | None = 3
    redeliver_after_ms: int = 30_000
    max_delay_ms: int = 7 * DAY_MS
    max_hold_ms: int = 7 * DAY_MS

    def __new__(cls, *_: Any, **given: Any) -> Self:  # noqa: D102
        made = super().__new__(cls)
        # Not a field: settings are equal whoever said them.
        object.__setattr__(made, "_said", frozenset(name for name, value in given.items() if value != ""))
        return made

    def __post_init__(self) -> None:
        check_topic_name(self.name, "name")
        derived = {
            "markers_topic": f"{self.name}{MARKERS_SUFFIX}",
            "dead_letter_topic": f"{self.name}{DEAD_LETTERS_SUFFIX}",
            "consumer_group": f"kmq-{self.name}",
        }
        for key, default in derived.items():
            if not getattr(self, key):
                object.__setattr__(self, key, default)
        for key in ("name", "markers_topic", "dead_letter_topic"):
            check_topic_name(getattr(self, key), key)
            if getattr(self, key) == SETTINGS_TOPIC:
                raise ConfigError(
                    f"{key}: {SETTINGS_TOPIC} is the topic of all queues' settings; choose another"
                )
        if len({self.name, self.markers_topic, self.dead_letter_topic}) < 3:
            raise ConfigError(f"queue {self.name!r}: its three topics must have different names")
        if not self.redelivery_count_header:
            raise ConfigError("redelivery_count_header: must not be empty")
        for key in ("consumer_group", "redelivery_count_header"):
            if not getattr(self, key).isprintable():
                raise ConfigError(f"{key}: {getattr(self, key)!r} can't be printed")
        if self.max_redeliveries is not None:
            _check_count(self, "max_redeliveries")
        for key in (*_LEASES, "max_delay_ms"):
            _check_count(self, key)
        for key in _LEASES:
            _check_lease(getattr(self, key), key)

    @property
    def said(self) -> frozenset[str] | None:
        """The fields that were given, and not left to defaults; None in settings that were stored."""
        said: frozenset[str] | None = self.__dict__["_said"]
        return said

    def to_json(self) -> bytes:
        """The registry's form."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes, *, newer: bool = False) -> QueueSettings:
        """The reverse of to_json; raises ConfigError. `newer`: unknown settings are left out."""
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"queue settings: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"queue settings: expected a JSON object, found {type(values).__name__}")
        if newer:
            values = {key: value for key, value in values.items() if key in cls.__dataclass_fields__}
        return cls.stored(values)

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> QueueSettings:
        """Settings as they are stored in the registry; raises ConfigError.

        Leases below 100 ms, which earlier versions allowed, become 100 ms, since registered queues must be
        served.
        """
        leases = {key: _convert(key, values[key], int) for key in _LEASES if key in values}
        least = {key: MIN_LEASE_MS for key, value in leases.items() if 0 <= value < MIN_LEASE_MS}
        read = build(cls, values, least)
        object.__setattr__(read, "_said", None)
        return read


@dataclass(frozen=True, kw_only=True)
class ZooKeeperSecurity:
    """How ZooKeeper and we make sure of each other; by default neither does.

    username, password  who we are; znodes that we make are then ours alone
    scheme              how that is said: "sasl" (DIGEST-MD5; ZooKeeper checks the password; needs the
                        extra kmqpy[sasl]) or "digest" (goes over the wire as it is, so only with TLS;
                        ZooKeeper takes any password, and the znodes' ACLs decide)
    tls                 encrypt; a matter of course when one of the files is given
    ca                  PEM file of the authorities to trust; default: the system's
    certificate, key    PEM files of our own certificate, where ZooKeeper wants one, and of its key
                        (default: in the same file); znodes that we make are then ours alone
    key_password        of an encrypted key
    check_hostname      whether ZooKeeper's certificate must name the host that was asked for
    acl                 who else may do what with the znodes that we make, as scheme:id:cdrwa, for
                        example sasl:admin:cdrwa or world:anyone:r
    """

    username: str = ""
    password: str = field(default="", repr=False)
    scheme: str = "sasl"
    tls: bool = False
    ca: str = ""
    certificate: str = ""
    key: str = ""
    key_password: str = field(default="", repr=False)
    check_hostname: bool = True
    acl: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.scheme not in ("sasl", "digest"):
            raise ConfigError(f"scheme: {self.scheme!r} is neither sasl nor digest")
        if bool(self.username) != bool(self.password):
            missing = "password" if self.username else "username"
            raise ConfigError(f"{missing}: must not be empty where the other of the two is given")
        if self.key and not self.certificate:
            raise ConfigError("certificate: must not be empty where a key is given")
        for entry in self.acl:
            if not _ACL.fullmatch(entry):  # not shown: of scheme digest it holds a password's hash
                raise ConfigError("acl: write its entries like sasl:admin:cdrwa or world:anyone:r")
        if self.acl and not self.authenticated:
            raise ConfigError("acl: needs a username or a certificate, else everybody may do everything")

    @property
    def authenticated(self) -> bool:
        """Whether we say who we are, so that znodes can be ours."""
        return bool(self.username or self.certificate)

    @property
    def encrypted(self) -> bool:
        """Whether the connection is TLS."""
        return self.tls or bool(self.ca or self.certificate)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Where Kafka and ZooKeeper are.

    bootstrap           Kafka, `host:port[,host:port]`
    zookeeper           ZooKeeper, the same; empty where none is needed
    root                the znode under which everything of kmqpy stands
    kafka               librdkafka settings (security and the like), handed on untouched
    zookeeper_security  who we are to ZooKeeper, and TLS
    """

    bootstrap: str = "127.0.0.1:9092"
    zookeeper: str = "127.0.0.1:2181"
    root: str = "/kmq"
    kafka: KafkaSettings = field(default_factory=dict, repr=False)
    zookeeper_security: ZooKeeperSecurity = field(default_factory=ZooKeeperSecurity)

    def __post_init__(self) -> None:
        if not self.bootstrap:
            raise ConfigError("bootstrap: must not be empty; name a broker, for example host:9092")
        check_addresses(self.bootstrap, "bootstrap", "host:9092")
        check_addresses(self.zookeeper.partition("/")[0], "zookeeper", "host:2181")
        if not self.root.startswith("/") or self.root.endswith("/"):
            raise ConfigError(f"root: {self.root!r} must start with / and not end with it")

    def __repr__(self) -> str:
        return (
            f"Connection(bootstrap={self.bootstrap!r}, zookeeper={self.zookeeper!r}, "
            f"root={self.root!r}, kafka={redacted(self.kafka)!r}, "
            f"zookeeper_security={self.zookeeper_security!r})"
        )

    @classmethod
    def from_environment(cls) -> Connection:
        """What the file KMQ_CONFIG says, and over it the environment.

        That is KMQ_BOOTSTRAP, KMQ_ZOOKEEPER and KMQ_ROOT, as `kmq dev up` prints them;
        KMQ_KAFKA_SASL_PASSWORD and the like for settings of librdkafka, with `_` for each dot;
        KMQ_ZOOKEEPER_SECURITY_PASSWORD and the like. Raises ConfigError.
        """
        return build(cls, *connection_layers())

    def kafka_settings(self, defaults: KafkaSettings) -> dict[str, Any]:
        """Settings for a librdkafka client: `defaults`, under what the user gave."""
        return {**defaults, **self.kafka, "bootstrap.servers": self.bootstrap}


def check_addresses(text: str, field_name: str, example: str) -> None:
    """Raise ConfigError unless each address of `text` can be one: a name, IPv4 or [IPv6] and maybe a port."""
    for address in filter(None, map(str.strip, text.split(","))):
        if not _is_address(address):
            shown = "***" if "@" in address else repr(address)  # it may hold a password
            raise ConfigError(
                f"{field_name}: {shown} is no address; write it as {example}, or several with commas"
            )


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    if found is None:
        return _is_ipv6(text)
    right_host = found["host"].isprintable() if found["host"] else _is_ipv6(found["ipv6"])
    return right_host and (found["port"] is None or 1 <= int(found["port"]) <= 65_535)


def _is_ipv6(text: str) -> bool:
    try:
        return not ipaddress.IPv6Address(text).is_unspecified
    except ValueError:
        return False


def check_connection(value: object) -> Connection:
    """`value`; raises ConfigError when it is no Connection, an address as text for example."""
    if hasattr(value, "bootstrap"):  # so that tests can give one of their own
        return typing.cast("Connection", value)
    shown = repr(value) if isinstance(value, str) else f"an object of type {type(value).__name__}"
    raise ConfigError(
        f"connection: {shown} is not a Connection; "
        "write it as Connection(bootstrap='host:9092'), or Connection.from_environment()"
    )


def is_topic_name(name: object) -> bool:
    """Whether Kafka accepts `name` as the name of a topic."""
    return isinstance(name, str) and _TOPIC.fullmatch(name) is not None and name not in {".", ".."}


def check_topic_name(name: str, field_name: str) -> None:
    """Raise ConfigError unless Kafka takes `name` for a topic."""
    if not is_topic_name(name):
        raise ConfigError(f"{field_name}: {name!r} is no topic name; 1 to 249 of a-z A-Z 0-9 . _ - are")


def check_new_queue_name(name: str) -> None:
    """Raise ConfigError unless a new queue may have this name: those of a queue's other topics are refused.

    Queues that are there already keep such names, so the settings themselves take them.
    """
    for suffix in (MARKERS_SUFFIX, DEAD_LETTERS_SUFFIX):
        if name.endswith(suffix):
            raise ConfigError(
                f"name: {name!r} is that of another topic of queue {name.removesuffix(suffix)!r}; "
                f"choose a name that does not end in {suffix}"
            )


def build(cls: type[T], *layers: Mapping[str, Any]) -> T:
    """A settings object of `cls` from layers of values, the later ones winning, also within tables.

    Text is converted to the field's type, a duration with unit to ms. Raises ConfigError that names
    an unknown key (with the nearest known one), or the field and value that do not fit.
    """
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    tables: dict[str, Mapping[str, Any]] = {}
    values: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if key not in names:
                raise ConfigError(f"{key}: unknown setting{nearest(key, names)}")
            if isinstance(value, Mapping):
                tables[key] = {**tables.get(key, {}), **_flat(value)}
            else:
                tables.pop(key, None)
                values[key] = _convert(key, value, hints[key])
    # Only when they are complete: a user name may stand in a file, the password in the environment.
    values |= {key: _convert(key, table, hints[key]) for key, table in tables.items()}
    try:
        return cls(**values)
    except TypeError as error:  # a required setting is missing
        raise ConfigError(f"{cls.__name__}: {error}") from None


def from_environment(cls: type[Any], environ: Mapping[str, str], prefix: str = "KMQ_") -> dict[str, Any]:
    """The values of `cls` that stand in the environment, as `KMQ_<FIELD>`.

    A field that is a table is `KMQ_<FIELD>_<NAME>` for each name in it; `_` means a dot in names of
    librdkafka.
    """
    found: dict[str, Any] = {}
    for key, hint in typing.get_type_hints(cls).items():
        name = prefix + key.upper()
        if _is_table(hint):
            dot = "_" if dataclasses.is_dataclass(hint) else "."
            table = {
                entry.removeprefix(name + "_").lower().replace("_", dot): value
                for entry, value in environ.items()
                if entry.startswith(name + "_") and not of_kubernetes(entry, value)
            }
            if table:
                found[key] = table
        elif name in environ:
            found[key] = environ[name]
    return found


def connection_layers() -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file KMQ_CONFIG and the environment say of a Connection, for build(); raises ConfigError."""
    path = os.environ.get("KMQ_CONFIG")
    file = read_file(path) if path else {}
    own = {key: value for key, value in file.items() if key not in OTHER_TABLES}
    return own, from_environment(Connection, os.environ)


def of_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes sets such a variable for a service whose name begins like ours."""
    return _OF_KUBERNETES.search(name) is not None or value.startswith(_ADDRESSES)


def read_file(path: str | Path) -> dict[str, Any]:
    """A TOML settings file; raises ConfigError."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r}: {error.strerror}") from None
    return parse_file(data, str(path))


def parse_file(data: bytes, name: str) -> dict[str, Any]:
    """What a TOML settings file says; raises ConfigError naming it."""
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"config file {name!r}: {error}") from None


def nearest(key: str, names: typing.Iterable[str]) -> str:
    """`; did you mean …?`, or nothing when no name is near."""
    close = difflib.get_close_matches(key, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _convert(key: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`; text is parsed, everything else must fit already."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None or value == "none":
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
        origin = typing.get_origin(hint)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{key}: {_shown(key, value)} is not a list of text")
        return tuple(item.strip() for item in items if item.strip())
    if _is_table(hint):
        if dataclasses.is_dataclass(hint) and type(value) is hint:
            return value
        if not isinstance(value, Mapping):
            # Its content may be secret, whatever the name of the table.
            raise ConfigError(f"{key}: expected a table of settings, found {type(value).__name__}")
        if origin is not None:  # settings of librdkafka
            return _flat(value)
        try:
            return build(hint, value)
        except ConfigError as error:
            raise ConfigError(f"{key}.{error}") from None
    if isinstance(value, str) and hint is not str:
        return _parse(key, value, hint)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{key}: {_shown(key, value)} is not of type {hint.__name__}")
    return value


def _is_table(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or typing.get_origin(hint) is Mapping


def _parse(key: str, text: str, hint: Any) -> Any:
    if hint is bool:
        flags = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in flags:
            raise ConfigError(f"{key}: {_shown(key, text)} is neither true nor false")
        return flags[text.lower()]
    text = text.strip()
    if key.endswith("_ms") and not text.lstrip("-").isdigit():
        return parse_duration_ms(text, key)
    try:
        return hint(text)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}: {_shown(key, text)} is not of type {hint.__name__}") from None


def _check_count(settings: object, key: str) -> None:
    value = getattr(settings, key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _INT64_MAX:
        raise ConfigError(f"{key}: {value!r} must be a whole number, at least 0 and of 64 bits")


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """TOML reads `sasl.password = …` as a table in a table; librdkafka's names are flat."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat


def _shown(key: str, value: Any) -> str:
    return "***" if is_secret(key) else repr(value)
