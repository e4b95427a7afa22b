"""Settings in the environment of the process: `KMQ_…` variables, and the file that KMQ_CONFIG names."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kmqpy.core.settings import is_table, keys, nearest, read_file

_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")
_ADDRESSES = ("tcp://", "udp://", "sctp://")


def config_file() -> dict[str, Any]:
    """The settings in the file that KMQ_CONFIG names; empty without one. Raises ConfigError."""
    path = os.environ.get("KMQ_CONFIG")
    return read_file(path) if path else {}


def from_environment(cls: type[Any], environ: Mapping[str, str], prefix: str = "KMQ_") -> dict[str, Any]:
    """The values of `cls` in the environment, as `KMQ_<KEY>`, by the keys of `keys(cls)`.

    A table is `KMQ_<KEY>_<NAME>` for each name in it; where names of the table may have dots (a Mapping),
    `_` means a dot.
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
                if entry.startswith(name + "_") and not of_kubernetes(entry, value)
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
    """The `KMQ_…` variables that nothing reads, each with `; did you mean …?` or an empty text.

    Read are the settings of `classes`, the variables `others`, and those that begin with one of `prefixes`.
    """
    known = set(others)
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for key, field in keys(cls).items():
            known.add(f"KMQ_{key.upper()}")
            if is_table(hints[field]):
                prefixes += (f"KMQ_{key.upper()}_",)
    words = [name.removeprefix("KMQ_") for name in known]  # of the common beginning all names are near
    return {
        name: nearest(name.removeprefix("KMQ_"), words).replace("mean ", "mean KMQ_")
        for name, value in environ.items()
        if name.startswith("KMQ_")
        and name not in known
        and not name.startswith(prefixes)
        and not of_kubernetes(name, value)
    }


def of_kubernetes(name: str, value: str) -> bool:
    """Return True if Kubernetes sets such a variable for a service whose name begins like ours."""
    return _OF_KUBERNETES.search(name) is not None or value.startswith(_ADDRESSES)
