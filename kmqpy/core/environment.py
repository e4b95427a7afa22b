"""Reads settings from environment variables `KMQ_…`, and from the file that KMQ_CONFIG names."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kmqpy.core.settings import is_table, keys, nearest, read_file

_KUBERNETES_NAME = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")
_KUBERNETES_VALUE_PREFIXES = ("tcp://", "udp://", "sctp://")
"""For a service named `kmq`, Kubernetes sets variables of such names and values: KMQ_PORT=tcp://…, say."""


def config_file() -> dict[str, Any]:
    """The settings in the file that KMQ_CONFIG names; empty if KMQ_CONFIG is not set. Raises ConfigError."""
    path = os.environ.get("KMQ_CONFIG")
    return read_file(path) if path else {}


def from_environment(cls: type[Any], environ: Mapping[str, str], prefix: str = "KMQ_") -> dict[str, Any]:
    """Return the settings that `environ` holds for the settings class `cls`, by their names in files.

    The variable of a setting is `prefix` and that name (see settings.keys()) in capitals: `KMQ_<KEY>`. A
    setting may be a table: a settings class again, or a Mapping. Then each entry has a variable
    `KMQ_<KEY>_<NAME>`. In a Mapping, each `_` of `<NAME>` stands for a dot: the variable of the entry
    `sasl.password` of the setting `kafka` is `KMQ_KAFKA_SASL_PASSWORD`.
    """
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for key, field in keys(cls).items():
        hint = hints[field]
        name = prefix + key.upper()
        if is_table(hint):
            dot = "_" if dataclasses.is_dataclass(hint) else "."
            table = {
                entry.removeprefix(name + "_").lower().replace("_", dot): value
                for entry, value in environ.items()
                if entry.startswith(name + "_") and not is_set_by_kubernetes(entry, value)
            }
            if table:
                found[key] = table
        elif name in environ:
            found[key] = environ[name]
    return found


def unknown_variables(
    environ: Mapping[str, str],
    classes: Iterable[type[Any]],
    others: Collection[str],
    prefixes: tuple[str, ...],
) -> dict[str, str]:
    """The `KMQ_…` variables that kmqpy does not know, each with `; did you mean …?` or an empty text.

    kmqpy knows the settings of `classes`, the variables `others`, variables that begin with one of
    `prefixes`, and those that Kubernetes sets.
    """
    known = set(others)
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for key, field in keys(cls).items():
            known.add(f"KMQ_{key.upper()}")
            if is_table(hints[field]):
                prefixes += (f"KMQ_{key.upper()}_",)
    # KMQ_ is removed for the comparison: a common beginning makes all names similar.
    words = [name.removeprefix("KMQ_") for name in known]
    return {
        name: nearest(name.removeprefix("KMQ_"), words).replace("mean ", "mean KMQ_")
        for name, value in environ.items()
        if name.startswith("KMQ_")
        and name not in known
        and not name.startswith(prefixes)
        and not is_set_by_kubernetes(name, value)
    }


def is_set_by_kubernetes(name: str, value: str) -> bool:
    """Return True if the variable looks like one that Kubernetes sets for a service (named `kmq…`)."""
    return _KUBERNETES_NAME.search(name) is not None or value.startswith(_KUBERNETES_VALUE_PREFIXES)
