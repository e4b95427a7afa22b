"""Settings: frozen, checked, read from files, the environment and arguments (the later wins).

Durations are ms in settings whose name ends in `_ms`; a text value may carry a unit there
(`500ms`, `30s`, `5m`, `1h`, `7d`). API arguments are seconds (float) or `timedelta`.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kmqpy.core.durations import INT64_MAX, parse_duration_ms
from kmqpy.errors import ConfigError

T = TypeVar("T")
_ADDRESS = re.compile(
    r"(?:[A-Za-z_]+://)?(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\s:/\[\]@,]+))(?::(?P<port>[0-9]{1,5}))?"
)
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")
_ADDRESSES = ("tcp://", "udp://", "sctp://")

OTHER_TABLES = ("tracker", "gateway")
"""Tables of the config file that are not the connection's."""

_SECRET = re.compile(
    r"pass(word|phrase)|secret|token|sasl\.jaas|\.key$|key\.pem|oauthbearer\.config", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Whether a librdkafka setting of this name must not be printed."""
    return _SECRET.search(name) is not None


def redacted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that can be printed: secrets as `***`."""
    return {key: "***" if is_secret(key) else value for key, value in _flat(settings).items()}


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
                values[key] = convert(key, value, hints[key])
    # Only when they are complete: a user name may stand in a file, the password in the environment.
    values |= {key: convert(key, table, hints[key]) for key, table in tables.items()}
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


def convert(key: str, value: Any, hint: Any) -> Any:
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


def check_count(settings: object, key: str) -> None:
    """Raise ConfigError unless the setting is a whole number from 0 to 2**63 - 1."""
    value = getattr(settings, key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= INT64_MAX:
        raise ConfigError(f"{key}: {value!r} must be a whole number, at least 0 and of 64 bits")


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """TOML reads `sasl.password = …` as a table in a table; librdkafka's names are flat."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat


def _shown(key: str, value: Any) -> str:
    return "***" if is_secret(key) else repr(value)
