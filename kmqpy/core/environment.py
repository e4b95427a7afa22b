"""Settings in the environment of the process: `KMQ_…` variables, and the file that KMQ_CONFIG names."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Mapping
from typing import Any

from kmqpy.core.settings import is_table, keys, read_file

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


def of_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes sets such a variable for a service whose name begins like ours."""
    return _OF_KUBERNETES.search(name) is not None or value.startswith(_ADDRESSES)
