"""The keyword arguments of KmqClient, for code that takes and checks them before it makes a client."""

from __future__ import annotations

from typing import Literal, TypedDict

from kmqpy.core.clock import Clock
from kmqpy.core.settings import check_limit
from kmqpy.errors import ConfigError
from kmqpy.kafka.client.record_message import Acknowledges
from kmqpy.telemetry.base import Telemetry


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of KmqClient, whose docstring explains them."""

    max_in_flight: int
    holder: str | None
    instance_id: str | None
    markers: Literal["jvm", "range"]
    coalesce_ms: float
    acknowledged_by: Acknowledges | None
    telemetry: Telemetry | None
    clock: Clock


def check_options(options: ClientOptions) -> None:
    """Raise ConfigError for values that KmqClient would refuse."""
    check_limit(options.get("max_in_flight", 1), "max_in_flight")
    markers, coalesce_ms = options.get("markers", "jvm"), options.get("coalesce_ms", 0)
    if markers not in ("jvm", "range"):
        raise ConfigError(f"markers: {markers!r} is neither 'jvm' nor 'range'")
    if not 0 <= coalesce_ms <= 1_000:
        raise ConfigError(f"coalesce_ms: {coalesce_ms!r} must be from 0 to 1000")
