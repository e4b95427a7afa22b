"""The keyword arguments of KmqClient, for code that takes and checks them before it makes a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, cast

from kmqpy.core.clock import Clock
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.settings import check_limit
from kmqpy.kafka.topics import MAX_MESSAGE_BYTES
from kmqpy.telemetry.base import Telemetry


class ConsumerOptions(TypedDict, total=False):
    """The keyword arguments of KmqClient that concern taking and finishing messages."""

    max_in_flight: int
    holder: str | None
    instance_id: str | None
    telemetry: Telemetry | None
    clock: Clock


class ClientOptions(ConsumerOptions, total=False):
    """The keyword arguments of KmqClient, whose docstring explains them."""

    delivery_timeout: Duration
    max_message_bytes: int


@dataclass(frozen=True, slots=True)
class SendLimits:
    """How long a send may take, and how large a message (key, body and headers) may be."""

    timeout_ms: int = 30_000
    max_message_bytes: int = MAX_MESSAGE_BYTES


DEFAULT_LIMITS = SendLimits()


def split_options(options: ClientOptions) -> tuple[ConsumerOptions, SendLimits]:
    """Return the options that concern taking, and those that concern sending; raises ConfigError."""
    check_limit(options.get("max_in_flight", 1), "max_in_flight")
    limits = SendLimits(
        duration_ms(options.get("delivery_timeout", 30.0), "delivery_timeout"),
        check_limit(options.get("max_message_bytes", MAX_MESSAGE_BYTES), "max_message_bytes"),
    )
    names = ConsumerOptions.__annotations__
    return cast("ConsumerOptions", {key: value for key, value in options.items() if key in names}), limits
