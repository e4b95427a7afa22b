"""The keyword arguments of KmqClient, for code that takes and checks them before it makes a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, cast

from kmqpy.core.clock import Clock
from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.settings import check_limit, refuse_unknown
from kmqpy.errors import ConfigError, shown
from kmqpy.kafka.settings import is_topic_name
from kmqpy.kafka.topics import HEADROOM_BYTES, MAX_MESSAGE_BYTES
from kmqpy.telemetry.base import Telemetry

MAX_IN_FLIGHT = 10_000
"""The default of the option `max_in_flight`."""
_MOST_TIMEOUT_MS = 2**31 - 1
_MOST_MESSAGE_BYTES = 1_000_000_000 - HEADROOM_BYTES
"""The largest values that librdkafka takes; larger ones come to it cut to 32 bits."""


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
    refuse_unknown(options, ClientOptions.__annotations__)  # only type checkers know their names
    check_limit(options.get("max_in_flight", 1), "max_in_flight")
    holder, instance_id = options.get("holder"), options.get("instance_id")
    if holder is not None and not isinstance(holder, str):
        raise ConfigError(f"holder: {shown(holder)} is not text")
    if instance_id is not None and not is_topic_name(instance_id):
        raise ConfigError(f"instance_id: {shown(instance_id)} is not 1 to 249 of a-z A-Z 0-9 . _ -")
    limits = SendLimits(
        duration_ms(options.get("delivery_timeout", 30.0), "delivery_timeout"),
        check_limit(options.get("max_message_bytes", MAX_MESSAGE_BYTES), "max_message_bytes"),
    )
    if limits.timeout_ms > _MOST_TIMEOUT_MS:
        raise ConfigError(f"delivery_timeout: {limits.timeout_ms} ms are more than {_MOST_TIMEOUT_MS}")
    if limits.max_message_bytes > _MOST_MESSAGE_BYTES:
        raise ConfigError(
            f"max_message_bytes: {limits.max_message_bytes} bytes are more than {_MOST_MESSAGE_BYTES}"
        )
    names = ConsumerOptions.__annotations__
    return cast("ConsumerOptions", {key: value for key, value in options.items() if key in names}), limits
