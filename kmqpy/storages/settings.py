"""The settings of a queue in a storage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kmqpy.core.durations import DAY_MS, check_lease
from kmqpy.core.settings import build, check_count
from kmqpy.errors import ConfigError, NotSupported
from kmqpy.queue import Capabilities

MAX_PRIORITY = 9
_LEASES = ("redeliver_after_ms", "max_hold_ms")
_CHOICES = {
    "requeue_to": ("back", "front"),
    "order": ("fifo", "any"),
    "redelivery": ("automatic", "manual"),
}


@dataclass(frozen=True, kw_only=True)
class StoredQueueSettings:
    """How a storage treats the messages of a queue; the first four are as those of a queue on Kafka.

    redeliver_after_ms  lease of a message when receive() names none; at least 100
    max_redeliveries    redeliveries before a message becomes a dead letter; None: no limit
    max_delay_ms        longest delay of send()
    max_hold_ms         longest lease, extension or delay of nack(); at least 100
    requeue_to          where a message goes that was given back or whose lease ended: `back`, behind all
                        others, or `front`, its own place before those that were sent after it
    order               `fifo`, or `any` where the storage is faster without an order
    redelivery          `automatic` when a lease ends, or `manual`: a taken message stays in flight until
                        the application finishes or gives back what orphans() lists
    ephemeral           whether the storage keeps what was taken until it is acknowledged. False: a message
                        is forgotten when it is taken, at most once
    """

    redeliver_after_ms: int = 30_000
    max_redeliveries: int | None = 3
    max_delay_ms: int = 7 * DAY_MS
    max_hold_ms: int = 7 * DAY_MS
    requeue_to: str = "back"
    order: str = "fifo"
    redelivery: str = "automatic"
    ephemeral: bool = True

    def __post_init__(self) -> None:
        if self.max_redeliveries is not None:
            check_count(self, "max_redeliveries")
        for key in (*_LEASES, "max_delay_ms"):
            check_count(self, key)
        for key in _LEASES:
            check_lease(getattr(self, key), key)
        for key, choices in _CHOICES.items():
            value = getattr(self, key)
            if value not in choices:
                raise ConfigError(f"{key}: {value!r} is neither {choices[0]!r} nor {choices[1]!r}")
        if not isinstance(self.ephemeral, bool):
            raise ConfigError(f"ephemeral: {self.ephemeral!r} is neither True nor False")

    @property
    def to_front(self) -> bool:
        """Whether a redelivered message keeps its place."""
        return self.requeue_to == "front"

    @property
    def is_manual(self) -> bool:
        """Whether a lease that ended changes nothing."""
        return self.redelivery == "manual"

    def check_supported(self, capabilities: Capabilities) -> None:
        """Raise NotSupported for a setting that a storage of these capabilities can't do."""
        wanted: list[tuple[bool, bool, Literal["requeue_to", "redelivery", "ephemeral"]]] = [
            (self.to_front, capabilities.requeue_to_front, "requeue_to"),
            (self.is_manual, capabilities.manual_redelivery, "redelivery"),
            (not self.ephemeral, capabilities.at_most_once, "ephemeral"),
        ]
        for is_wanted, can, key in wanted:
            if is_wanted and not can:
                raise NotSupported(f"{key}: this storage can't do {getattr(self, key)!r}")

    def to_json(self) -> str:
        """The form in which a storage keeps them."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StoredQueueSettings:
        """The reverse of to_json(); settings of a newer kmqpy are left out. Raises ConfigError."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"queue settings: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"queue settings: expected a JSON object, found {type(values).__name__}")
        return build(cls, {key: value for key, value in values.items() if key in SETTING_NAMES})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StoredQueueSettings:
        """Settings of these names; text is converted. Raises ConfigError, with the nearest name."""
        return build(cls, values)


SETTING_NAMES = tuple(field.name for field in dataclasses.fields(StoredQueueSettings))


def check_queue_name(name: object) -> str:
    """`name`; raises ConfigError unless it is text of 1 to 200 printable characters, with no space around."""
    if not isinstance(name, str) or not 1 <= len(name) <= 200 or not name.isprintable():
        raise ConfigError(f"queue: {name!r} is no name; 1 to 200 printable characters are")
    if name != name.strip():
        raise ConfigError(f"queue: {name!r} begins or ends with a space")
    return name
