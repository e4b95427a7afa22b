"""Builds settings objects from files, the environment and arguments, and checks the values.

A settings class is a frozen dataclass. Where several sources give a setting, arguments (options of a
command, for example) win over the environment, and the environment wins over files: callers give build() the
files first, then the environment, then the arguments.

A setting whose name ends in `_ms` is a duration in ms; as text, it may have a unit (`500ms`, `30s`, `5m`,
`1h`, `7d`). Durations in arguments of the API are seconds (float) or `timedelta`.

build() makes the object. read_file() and parse_file() read settings files. keys() returns the names of the
settings. convert() turns text into the type of a field. The functions check_…() check addresses and numbers.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import ipaddress
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kmqpy.core.durations import parse_duration_ms
from kmqpy.core.foreign_names import our_name
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError, shown

T = TypeVar("T")
_ADDRESS = re.compile(
    r"(?i:(?:SASL_)?(?:PLAINTEXT|SSL)://)?(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\s:/\[\]@,]+))(?::(?P<port>[0-9]{1,5}))?"
)
_SECRET_KEY = re.compile(r"pass(word|phrase)|secret|token", re.IGNORECASE)
_KEY_METADATA = "key"
_MOST_COMPARED = 100
"""A setting may have another name in files and the environment than its field: then the field's metadata has
that name under this key. keyed() makes such metadata."""


def check_addresses(text: str, field_name: str, example: str) -> None:
    """Raise ConfigError unless `text` is a list of host names, IPv4 and [IPv6] addresses, port optional."""
    for address in filter(None, map(str.strip, text.split(","))):
        if not _is_address(address):
            shown_address = "***" if "@" in address else repr(address)  # a password may stand before the @
            raise ConfigError(
                f"{field_name}: {shown_address} is not an address; write it as {example}, or "
                "several with commas"
            )


def with_default_port(text: str, port: int) -> str:
    """The addresses in `text`, joined by commas; each address without a port gets `port`."""
    return ",".join(
        _with_default_port(address, port) for address in map(str.strip, text.split(",")) if address
    )


def _with_default_port(address: str, port: int) -> str:
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return f"[{address}]:{port}" if _is_ipv6(address) else address
    return address if found["port"] else f"{address}:{port}"


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
    """A settings object of `cls` from layers of values; a later layer wins, also for each entry of a table.

    The keys of a layer are those of `keys(cls)`. Text is converted to the type of the field, a duration with
    a unit to ms. Raises ConfigError for an unknown key, with the most similar known key, and for a value that
    does not fit its field.
    """
    hints = _type_hints(cls)
    fields = keys(cls)
    tables: dict[str, Mapping[str, Any]] = {}
    values: dict[str, Any] = {}
    for layer in layers:
        refuse_unknown(layer, fields)
        for key, value in layer.items():
            if isinstance(value, Mapping):
                tables[key] = {**tables.get(key, {}), **flat(value)}
            else:
                tables.pop(key, None)
                values[key] = convert(key, value, hints[fields[key]])
    # Tables are converted last: a file may hold the user name, and the environment the password.
    values |= {key: convert(key, table, hints[fields[key]]) for key, table in tables.items()}
    named = {fields[key]: value for key, value in values.items()}
    try:
        return cls(**named)
    except TypeError as error:  # a required setting is missing
        raise ConfigError(f"{cls.__name__}: {error}") from None


_type_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""Cached, since lists of queues build the settings of each."""


def json_object(data: bytes | str, what: str) -> dict[str, Any]:
    """Parse a JSON object; raises ConfigError, in which `what` names the data."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{what}: expected a JSON object, found {type(values).__name__}")
    return values


def read_file(path: str | Path) -> dict[str, Any]:
    """Read and parse a TOML settings file; raises ConfigError that names the file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"config file {str(path)!r}: {error.strerror}; --config or KMQ_CONFIG names it"
        ) from None
    return parse_file(data, str(path))


def parse_file(data: bytes, name: str) -> dict[str, Any]:
    """Parse the content of the TOML settings file `name`; raises ConfigError that names the file."""
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"config file {name!r}: {error}") from None


def keyed(key: str) -> dict[str, str]:
    """Metadata for a field whose name in files and the environment is `key`, not the name of the field."""
    return {_KEY_METADATA: key}


def keys(cls: type[Any]) -> dict[str, str]:
    """Names of settings in files and the environment, mapped to the fields of the settings class."""
    return {field.metadata.get(_KEY_METADATA, field.name): field.name for field in dataclasses.fields(cls)}


def refuse_unknown(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first unknown key of `given`, with the most similar known key."""
    names = list(known)
    for key in given:
        if key not in names:
            raise ConfigError(f"{key}: unknown setting{nearest(key, names)}")


def nearest(key: str, names: Iterable[str]) -> str:
    """`; did you mean …?` with the name for what others call `key`, or the most similar; else empty.

    Empty for more than 100 names, too: to compare takes 0.04 ms each, and there are storages with very many
    queues.
    """
    known = list(names)
    if len(known) > _MOST_COMPARED:
        return ""
    ours = our_name(key, known)
    close = [ours] if ours else difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def convert(key: str, value: Any, hint: Any) -> Any:
    """Convert `value` to the type `hint`; raises ConfigError that names `key`.

    Text is parsed; `none` stands for None. An int becomes a float, and a Mapping a settings object, where the
    hint says so. Any other value must have the type already.
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None or value == "none":
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
        origin = typing.get_origin(hint)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{key}: {_shown_safely(key, value)} is not a list of text")
        return tuple(item.strip() for item in items if item.strip())
    if is_table(hint):
        if dataclasses.is_dataclass(hint) and type(value) is hint:
            return value
        if not isinstance(value, Mapping):
            # The value is not shown: it may be secret, whatever the name of the table.
            raise ConfigError(f"{key}: expected a table of settings, found {type(value).__name__}")
        if origin is not None:  # a Mapping, in which any names are allowed
            return flat(value)
        try:
            return build(hint, value)
        except ConfigError as error:
            raise ConfigError(f"{key}.{error}") from None
    if isinstance(value, str) and hint is not str:
        return _parse(key, value, hint)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{key}: {_shown_safely(key, value)} is not of type {hint.__name__}")
    return value


def is_table(hint: Any) -> bool:
    """Return True if a field of this type is a table of settings: a settings class or a Mapping."""
    return dataclasses.is_dataclass(hint) or typing.get_origin(hint) is Mapping


def _parse(key: str, text: str, hint: Any) -> Any:
    if hint is bool:
        flags = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in flags:
            raise ConfigError(f"{key}: {_shown_safely(key, text)} is neither true nor false")
        return flags[text.lower()]
    text = text.strip()
    if key.endswith("_ms") and not text.lstrip("-").isdigit():
        return parse_duration_ms(text, key)
    try:
        if not text.isascii():  # int() and float() read the digits of every script
            raise ValueError
        return hint(text)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}: {_shown_safely(key, text)} is not of type {hint.__name__}") from None


def check_count(settings: object, key: str) -> None:
    """Raise ConfigError unless the setting `key` of `settings` is a whole number from 0 to 2**63 - 1."""
    value = getattr(settings, key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= INT64_MAX:
        raise ConfigError(f"{key}: {shown(value)} must be a whole number, at least 0 and of 64 bits")


def check_limit(value: object, name: str = "limit") -> int:
    """Return `value`; raise ConfigError unless it is a whole number from 1 to 2**63 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= INT64_MAX:
        raise ConfigError(f"{name}: {shown(value)} must be a whole number, at least 1 and of 64 bits")
    return value


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested tables under names with dots, as the TOML file has them (`a.b = 1`)."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return found


def _shown_safely(key: str, value: Any) -> str:
    return "***" if _SECRET_KEY.search(key) else shown(value)
